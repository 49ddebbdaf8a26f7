# SPDX-License-Identifier: Apache-2.0
"""Control groups that tests make and take away again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def group(controller: str, name: str) -> Iterator[Path]:
    """A control group of version 1, or of version 2 where there is no such hierarchy."""
    mount = ROOT / controller if (ROOT / controller).is_dir() else ROOT
    path = mount / name
    try:
        path.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        yield path
    finally:
        deadline = time.monotonic() + 5
        while path != mount and time.monotonic() < deadline:
            try:
                path.rmdir()
            except OSError:
                time.sleep(0.05)
            else:
                path = path.parent
