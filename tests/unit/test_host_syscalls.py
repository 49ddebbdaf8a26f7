# SPDX-License-Identifier: Apache-2.0
"""The probes that make real system calls, on this kernel."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from sonde.host import syscalls

PROBES: list[Callable[[], int]] = [
    syscalls.create_array_map,
    syscalls.create_ring_buffer,
    syscalls.create_task_storage,
    syscalls.load_perf_event_program,
    syscalls.load_task_reader,
    syscalls.load_cookie_reader,
    syscalls.load_loop,
    syscalls.link_uprobe_multi,
    lambda: syscalls.open_cpu_event(syscalls.PERF_TYPE_SOFTWARE, 0),
]


@pytest.mark.bpf
def test_probes_answer_yes_on_a_kernel_that_has_everything() -> None:
    assert [probe() for probe in PROBES] == [0] * len(PROBES)


@pytest.mark.bpf
def test_an_attach_type_that_no_kernel_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "ATTACH_UPROBE_MULTI", 9999)

    assert syscalls.link_uprobe_multi() == errno.EINVAL


@pytest.mark.bpf
def test_a_map_type_that_no_kernel_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "MAP_RINGBUF", 9999)

    assert syscalls.create_ring_buffer() == errno.EINVAL


def open_files() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_probes_leave_nothing_open() -> None:
    before = open_files()

    for probe in PROBES:
        probe()

    assert open_files() == before


def test_an_unknown_machine_has_no_system_call_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_numbers", lambda: None)

    assert syscalls.create_array_map() == errno.ENOSYS
    assert syscalls.open_cpu_event(1, 0) == errno.ENOSYS


@pytest.mark.bpf
@pytest.mark.parametrize(
    ("helper", "probe"),
    [
        ("TASK_PT_REGS", syscalls.load_task_reader),
        ("GET_ATTACH_COOKIE", syscalls.load_cookie_reader),
        ("LOOP", syscalls.load_loop),
    ],
)
def test_a_helper_that_no_kernel_knows_is_refused(
    helper: str, probe: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, helper, 99999)

    assert probe() == errno.EINVAL
