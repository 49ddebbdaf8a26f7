# SPDX-License-Identifier: Apache-2.0
"""Chat decoding with a paged key/value store: one token a step for every conversation of the batch."""
from dataclasses import dataclass, field

from stage import Dial, arguments, conduct

import torch
import torch.nn.functional as F


@dataclass
class Layer:
    keys: torch.Tensor
    values: torch.Tensor
    wide: torch.Tensor
    back: torch.Tensor
    query: torch.Tensor


@dataclass
class Chat:
    batch: int
    heads: int
    size: int
    context: int
    depth: int
    device: str
    dtype: torch.dtype
    amount: Dial
    layers: list = field(default_factory=list)
    at: int = 0

    def __post_init__(self):
        dim = self.heads * self.size
        make = lambda *shape: torch.randn(*shape, device=self.device, dtype=self.dtype) * 0.03
        for _ in range(self.depth):
            cache = (self.context, self.batch, self.heads, self.size)
            self.layers.append(Layer(make(*cache), make(*cache), make(dim, 4 * dim), make(4 * dim, dim), make(dim, 3 * dim)))
        self.state = make(self.batch, dim)

    def find_kernels(self, layer, rows):
        while rows > 0:
            part = min(rows, self.context)
            keys, values = layer.keys[:part].clone(), layer.values[:part].clone()
            layer.keys[:part] = keys
            layer.values[:part] = values
            rows -= part

    def attend(self, layer, x):
        q, k, v = (x @ layer.query).view(self.batch, 3, self.heads, self.size).unbind(1)
        layer.keys[self.at], layer.values[self.at] = k, v
        keys, values = layer.keys.permute(1, 2, 0, 3), layer.values.permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(q[:, :, None], keys, values)
        return x + out.reshape(self.batch, -1) * 0.1

    def token(self):
        x = self.state
        for layer in self.layers:
            rows = self.amount()
            if rows:
                self.find_kernels(layer, rows)
            x = self.attend(layer, F.layer_norm(x, x.shape[1:]))
            x = x + F.silu(x @ layer.wide) @ layer.back
        self.state = x / x.norm(dim=1, keepdim=True)
        self.at = (self.at + 1) % self.context
        return self.state.argmax(1).tolist()


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    with torch.inference_mode():
        if args.smoke:
            dial = Dial(16, hi=4096, whole=True)
            chat = Chat(4, 4, 16, 64, 2, args.device, torch.float32, dial)
        else:
            dial = Dial(1500, hi=100_000, whole=True)
            chat = Chat(32, 16, 128, 2048, 12, args.device, torch.bfloat16, dial)
        conduct(args, chat.token, [dial])


if __name__ == "__main__":
    main()
