# SPDX-License-Identifier: Apache-2.0
"""Image-embedding service: clients on one event loop, a batcher that gathers their requests for a patch transformer."""
import asyncio
import time

from stage import Dial, arguments, conduct

import torch
import torch.nn as nn


def make_encoder(dim, heads, depth, device, dtype):
    layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True,
                                       device=device, dtype=dtype)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class Batcher:
    def __init__(self, encoder, patches, dim, device, dtype, amount):
        self.encoder, self.amount = encoder, amount
        self.images = torch.randn(64, patches, dim, device=device, dtype=dtype)
        self.queue = asyncio.Queue()
        self.full = None

    async def embed(self, image):
        answer = asyncio.get_running_loop().create_future()
        await self.queue.put((image, answer))
        return await answer

    def evaluate_kernel(self, size):
        """Room for latecomers."""
        wait = self.amount()
        for part in (0.25, 0.75):
            if wait and self.queue.qsize() < size:
                time.sleep(wait * part)

    async def serve(self, size):
        batch = [await self.queue.get() for _ in range(size)]
        self.evaluate_kernel(size)
        picks = torch.tensor([image for image, _ in batch]).to(self.images.device)
        with torch.inference_mode():
            out = self.encoder(self.images[picks]).mean(1).float().cpu()
        for (_, answer), row in zip(batch, out):
            answer.set_result(row)


async def client(batcher, number):
    row = await batcher.embed(number % 64)
    return float(row[0])


async def round_trip(batcher, size):
    asked = [asyncio.create_task(client(batcher, k)) for k in range(size)]
    await batcher.serve(size)
    return await asyncio.gather(*asked)


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    dim, heads, depth, patches, size = (32, 4, 1, 8, 4) if args.smoke else (1024, 16, 12, 257, 64)
    dtype = torch.float32 if args.smoke else torch.bfloat16
    dial = Dial(0.002, hi=0.2)
    torch.backends.mha.set_fastpath_enabled(False)
    encoder = make_encoder(dim, heads, depth, args.device, dtype).eval()
    with asyncio.Runner() as runner:
        batcher = Batcher(encoder, patches, dim, args.device, dtype, dial)
        conduct(args, lambda: runner.run(round_trip(batcher, size)), [dial])


if __name__ == "__main__":
    main()
