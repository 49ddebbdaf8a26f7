# SPDX-License-Identifier: Apache-2.0
"""A PyTorch loop that keeps when its steps began: traced_steps.py eager|graph|decode|train.

Lines on standard input, answers in JSON: `steps` (how many so far, and now in ns), `between A B`
(steps begun between two times, with their parts), `begins A B`, `profile S` (what torch.profiler
sees in S seconds), `digest N` (after N steps, a digest of what was computed), `state N` (the same;
ends).
"""

from __future__ import annotations

import hashlib
import json
import select
import sys
import time
from array import array
from bisect import bisect_left
from collections import Counter

import torch
from torch_steps import DEVICE, make

BLOCK = {"eager": 20, "graph": 50, "decode": 50, "train": 1}
"""Steps between two looks at standard input."""


class Loop:
    """The steps, and when each began."""

    def __init__(self, mode: str) -> None:
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        self.step, self.state = make(mode)
        self.block = BLOCK[mode]
        self.began = array("q")

    def run(self, steps: int) -> None:
        """`steps` of them."""
        step, began, clock = self.step, self.began, time.monotonic_ns
        for _ in range(steps):
            began.append(clock())
            step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def between(self, first_ns: int, last_ns: int) -> float:
        """Steps begun between two times, parts of steps too."""
        return self._at(last_ns) - self._at(first_ns)

    def begins(self, first_ns: int, last_ns: int) -> tuple[int, int, int]:
        """The first and the last begin of a step between two times, and how many steps that is."""
        first, last = bisect_left(self.began, first_ns), bisect_left(self.began, last_ns) - 1
        return self.began[first], self.began[last], last - first

    def _at(self, time_ns: int) -> float:
        index = bisect_left(self.began, time_ns)
        if not 0 < index < len(self.began):
            return float(index)
        before, after = self.began[index - 1], self.began[index]
        return index - 1 + (time_ns - before) / max(1, after - before)

    def profile(self, seconds: float) -> dict[str, float]:
        """What torch.profiler sees."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if DEVICE == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profiler:
            first, until = len(self.began), time.monotonic() + seconds
            while time.monotonic() < until:
                self.run(self.block)
            steps = len(self.began) - first
        seen: Counter[str] = Counter(steps=steps)
        results = profiler.profiler.kineto_results if profiler.profiler else None
        for event in results.events() if results else []:
            name = event.name()
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                kind = "copies" if name.startswith("Memcpy") else "kernels"
                seen["sets" if name.startswith("Memset") else kind] += 1
                seen["ns"] += event.duration_ns()
            elif name.startswith(("cuda", "cu")) and not name.startswith(("cudnn", "cublas")):
                seen[f"call {name}"] += 1
        return dict(seen)


def main() -> None:
    """Step until asked for the state."""
    loop = Loop(sys.argv[1])
    loop.run(3 * loop.block)
    print(json.dumps({"ready": loop.block}), flush=True)
    while True:
        loop.run(loop.block)
        while select.select([sys.stdin], [], [], 0)[0]:
            word, *rest = sys.stdin.readline().split() or ["state", "0"]
            answer: object
            if word == "steps":
                answer = [len(loop.began), time.monotonic_ns()]
            elif word == "between":
                answer = loop.between(int(rest[0]), int(rest[1]))
            elif word == "begins":
                answer = loop.begins(int(rest[0]), int(rest[1]))
            elif word == "profile":
                answer = loop.profile(float(rest[0]))
            else:
                wanted = max(int(rest[0]), len(loop.began))
                while len(loop.began) < wanted:
                    loop.run(min(loop.block, wanted - len(loop.began)))
                answer = [len(loop.began), hashlib.sha256(loop.state()).hexdigest()[:16]]
                if word != "digest":
                    print(json.dumps(answer), flush=True)
                    return
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
