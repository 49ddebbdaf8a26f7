# SPDX-License-Identifier: Apache-2.0
"""Reranker: a transformer scores batches of question/passage pairs that share one instruction text."""
import dataclasses

from stage import Dial, arguments, conduct

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Shape:
    dim: int
    heads: int
    layers: int
    batch: int
    tokens: int
    longest: int


class Encoder:
    def __init__(self, shape, device, dtype):
        def weight(*size):
            return torch.randn(*size, device=device, dtype=dtype) * size[0] ** -0.5
        d = shape.dim
        self.heads = shape.heads
        self.layers = [(weight(d, 3 * d), weight(d, d), weight(d, 4 * d), weight(4 * d, d)) for _ in range(shape.layers)]

    def forward(self, x):
        b, t, d = x.shape
        for qkv, out, up, down in self.layers:
            h = F.layer_norm(x, (d,))
            q, k, v = (h @ qkv).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v)
            x = x + a.transpose(1, 2).reshape(b, t, d) @ out
            x = x + F.gelu(F.layer_norm(x, (d,)) @ up) @ down
        return x


class Instruction:
    """The text in front of every pair."""

    def __init__(self, encoder, shape, device, dtype, length):
        self.encoder, self.length = encoder, length
        self.tokens = torch.randn(shape.batch, shape.longest, shape.dim, device=device, dtype=dtype)
        self.summary = encoder.forward(self.tokens[:, :64]).mean(1, keepdim=True)

    def read_cached(self):
        n = self.length()
        if n:
            return self.encoder.forward(self.tokens[:, :n]).mean(1, keepdim=True)
        return self.summary


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    small = args.smoke
    shape = Shape(32, 4, 2, 2, 32, 4096) if small else Shape(2048, 16, 8, 8, 512, 4096)
    dtype = torch.float32 if small else torch.bfloat16
    dial = Dial(24 if small else 420, hi=shape.longest, whole=True)
    with torch.inference_mode():
        encoder = Encoder(shape, args.device, dtype)
        instruction = Instruction(encoder, shape, args.device, dtype, dial)
        head = torch.randn(shape.dim, 1, device=args.device, dtype=dtype)
        pairs = [torch.randn(shape.batch, shape.tokens, shape.dim, device=args.device, dtype=dtype) for _ in range(4)]
    board = {"served": 0, "best": 0.0}

    @torch.inference_mode()
    def serve():
        batch = pairs[board["served"] % 4]
        hidden = encoder.forward(batch + instruction.read_cached())
        scores = (hidden[:, -1] @ head).float().flatten()
        board["best"] = max(scores.tolist())
        board["served"] += 1

    conduct(args, serve, [dial])


if __name__ == "__main__":
    main()
