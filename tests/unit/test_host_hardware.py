# SPDX-License-Identifier: Apache-2.0
"""Hardware counters: why there are none is reported as the first CPU has it."""

from __future__ import annotations

import errno

import pytest

from sonde.collect.host import hardware
from sonde.collect.polling import SourceUnavailable


def test_the_reason_is_that_of_the_first_cpu(monkeypatch):
    monkeypatch.setattr(hardware.os, "sysconf", lambda name: 2)
    why = {0: -errno.ENOENT, 1: -errno.ENODEV}  # the last CPU is offline
    monkeypatch.setattr(hardware, "_open", lambda number, cpu: why[cpu])
    with pytest.raises(SourceUnavailable, match=r"no counters \(ENOENT\)"):
        hardware.Hardware().open()


def test_a_machine_whose_call_is_not_known_has_a_reason_too(monkeypatch):
    monkeypatch.setattr(hardware, "_SYSCALL", {})
    with pytest.raises(SourceUnavailable, match=r"no counters \(ENOSYS\)"):
        hardware.Hardware().open()


def test_a_refusal_of_the_kernel_is_its_errno():
    assert hardware._open(0, 1 << 20) == -errno.EINVAL or hardware._open(0, 1 << 20) < -1
