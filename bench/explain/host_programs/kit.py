# SPDX-License-Identifier: Apache-2.0
"""Harness of programs without a device: phases with and without the cause, and the truth line."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Kit:
    """Runs steps with the cause, then without it, and prints what the cause took of a step."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--seconds", type=float, default=8.0)
        parser.add_argument("--smoke", action="store_true")
        self.args = parser.parse_args()
        self.random = random.Random(self.args.seed)
        self.on = True
        self.children: list[int] = []
        self._cause: dict[str, Any] = {}

    def cause(self, kind: str, function: Callable[..., Any]) -> None:
        """What takes the time, in the words of `bench.explain.exam_score`, and where."""
        code = inspect.unwrap(function).__code__
        place = f"{function.__name__} {Path(code.co_filename).name}:{code.co_firstlineno}"
        self._cause = {"class": kind, "place": place}

    def child(self, pid: int) -> None:
        """A process that ends with this one."""
        self.children.append(pid)

    def steps(self) -> Iterator[int]:
        """The steps of both phases."""
        whole_s = 0.5 if self.args.smoke else self.args.seconds
        number = 0
        for _ in range(3):
            yield number
        print("READY " + json.dumps({"pid": os.getpid()}), flush=True)
        rates = []
        for self.on, length_s in ((True, whole_s), (False, whole_s / 4)):
            if not self.on:
                print("PHASE2", flush=True)
            count, began_s = 0, time.perf_counter()
            while time.perf_counter() - began_s < length_s or count < 2:
                yield number
                number, count = number + 1, count + 1
            rates.append((time.perf_counter() - began_s) / count)
        lost = max(0.0, 1 - rates[1] / rates[0])
        print("TRUTH " + json.dumps({"lost_share": lost, "causes": [self._cause]}), flush=True)
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def work(rounds: int) -> int:
    """The work of a step that is not the cause."""
    total = 0
    for number in range(rounds):
        total = (total * 31 + number) & 0xFFFFFFFF
    return total
