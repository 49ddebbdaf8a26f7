# SPDX-License-Identifier: Apache-2.0
"""What the kernel's refusal of a program is reported as."""

from __future__ import annotations

import errno

import pytest

from sonde import _native
from sonde.collect.kernel import refusal
from sonde.errors import KernelUnsupported

pytestmark = pytest.mark.bpf


def test_a_program_that_the_verifier_rejects_is_no_lack_of_rights() -> None:
    """The verifier returns EACCES, too: here for a map with values too short for the program."""
    syscalls = _native.Bpf("syscalls", {})

    with pytest.raises(OSError, match=r"program on_\w+: .*out(side)? of") as refused:
        _native.Bpf("waits", {}, {"threads": syscalls})

    assert refused.value.errno == errno.EINVAL
    assert type(refusal(refused.value)) is KernelUnsupported
    assert "on_" in str(refusal(refused.value))
