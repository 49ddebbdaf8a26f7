# SPDX-License-Identifier: Apache-2.0
"""docs/reference/kernels.md shows what was seen; and how a step on another kernel is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.distro_kernels import judge, page


def test_the_page_is_that_of_the_committed_results() -> None:
    assert page.DOCUMENT.read_text() == page.render(page.load())


def step(err: str, **more: object) -> dict[str, object]:
    return {"code": 3, "out": "", "err": err, "kernel": [], **more}


REFUSAL = "sonde: task storage: refused\n  remedy: Boot Linux 5.15 or newer.\n"


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (step(REFUSAL), judge.REFUSED),
        (step("Traceback (most recent call last):\n" + REFUSAL), judge.FAILED),
        (step("Segmentation fault\n"), judge.FAILED),
        (step(REFUSAL, kernel=["WARNING: CPU: 0 PID: 1 at kernel/bpf"]), judge.FAILED),
        (None, judge.FAILED),
    ],
)
def test_only_a_refusal_with_its_remedy_is_no_failure(
    seen: dict[str, object] | None, status: str, tmp_path: Path
) -> None:
    assert judge.judge("waits", seen, tmp_path).status == status


def test_a_step_without_its_capture_has_failed(tmp_path: Path) -> None:
    assert judge.judge("waits", step("", code=0), tmp_path).status == judge.FAILED
