# SPDX-License-Identifier: Apache-2.0
"""How much the kernel's verifier has to follow before a recording may start."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sonde.collect.kernel import BpfObject, Kernel

MOST = 30_000
"""Instructions that the verifier follows in one program. While the parts of a walk were static
functions, these were 37,000 and more, and all programs took 0.9 s of CPU time at each start."""


def verified() -> dict[str, int]:
    """Instructions that the verifier followed, by descriptor of this process's programs."""
    found = {}
    for fd in os.listdir("/proc/self/fdinfo"):  # noqa: PTH208
        try:
            text = Path("/proc/self/fdinfo", fd).read_text()
        except OSError:
            continue
        if match := re.search(r"^verified_insns:\s*(\d+)", text, re.MULTILINE):
            found[fd] = int(match[1])
    return found


@pytest.mark.parametrize("name", ["cpu", "waits", "launch_sites"])
def test_the_parts_of_a_walk_are_verified_once_in_each_program(name):
    kernel = Kernel(None)
    before = verified()
    bpf = kernel.load(BpfObject(name))
    new = [count for fd, count in verified().items() if fd not in before]
    if not new:
        pytest.skip("the kernel does not show it (before Linux 5.16)")
    assert 5_000 < max(new) < MOST
    del bpf
