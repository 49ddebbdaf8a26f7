# SPDX-License-Identifier: Apache-2.0
"""PyTorch programs that count the steps that the device has done."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from bench.end_to_end.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "loads"))
_STEPS = importlib.import_module("torch_steps")  # its folder's programs import one another
DEVICE: Final[str] = _STEPS.DEVICE

STEPS: Final = {"train": 2, "eager": 20, "graph": 100, "decode": 100}
"""In a unit, which ends as the device is done: some 0.1 s of training, 15 ms of the others."""
WORKERS: Final = 4


class _Pictures:
    """Made by the loader's processes, as decoding would."""

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = torch.rand(3, 160, 160, generator=torch.Generator().manual_seed(index))
        return torch.nn.functional.interpolate(picture[None], scale_factor=1.4, mode="bilinear")[0]

    def __len__(self) -> int:
        return 1 << 30


def loader() -> Callable[[], None]:
    """A batch by a DataLoader's processes, then a step on it."""
    loaded = torch.utils.data.DataLoader(_Pictures(), 32, num_workers=WORKERS, pin_memory=True)
    batches: Iterator[torch.Tensor] = iter(loaded)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 7, 2), torch.nn.ReLU(), torch.nn.Conv2d(64, 128, 3, 2),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(128, 10),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(next(batches).to(DEVICE, non_blocking=True)).square().mean().backward()
        optimizer.step()

    return step


def work(name: str, progress: Progress) -> None:
    """Step until killed; from the command on under torch.profiler, as a job that leaves it on."""
    step = loader() if name == "loader" else _STEPS.make(name)[0]

    def unit() -> None:
        for _ in range(STEPS.get(name, 1)):
            step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        progress.count()

    while not progress.is_profiled:
        unit()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in itertools.count():
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.profiler.profile(activities=activities))
            for _ in range(50):
                unit()
