# SPDX-License-Identifier: Apache-2.0
"""Without a free file descriptor a collector goes on: what it could not read comes later."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sonde import _native
from sonde.collect.kernel import Iterators
from sonde.query.queries import LOSS_TEXT


class Object(SimpleNamespace):
    """A BPF object whose iterator fails with a number, or runs."""

    def walk(self, link: int) -> None:
        self.runs.append(link)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def losses(self) -> list[int]:
        return []


def made(error: int) -> tuple[Iterators, Any]:
    bpf = Object(error=error, runs=[])
    return Iterators(cast(_native.Bpf, bpf)), bpf


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_run_without_a_descriptor_or_memory_is_skipped_and_counted(error: int) -> None:
    iterators, bpf = made(error)

    iterators.run(7)
    iterators.run(7)
    assert iterators.losses() == {"walks_skipped": 2}

    bpf.error = 0
    iterators.run(7)
    assert iterators.losses() == {"walks_skipped": 2}
    assert bpf.runs == [7, 7, 7]
    assert "walks_skipped" in LOSS_TEXT


def test_other_errors_are_not_hidden() -> None:
    iterators, _ = made(errno.EPERM)

    with pytest.raises(PermissionError):
        iterators.run(7)


@pytest.mark.bpf
@pytest.mark.machine
def test_a_recording_process_that_runs_out_of_descriptors_goes_on() -> None:
    import resource

    from sonde.collect.kernel import Kernel
    from sonde.collect.tasks import TaskCollector

    collector = TaskCollector(Kernel([os.getpid()]))
    collector.start()
    collector.drain(0, False)
    assert collector.losses() == {}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        collector.drain(0, False)
        assert collector.losses() == {"walks_skipped": 1}
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        rows = collector.drain(0, True).rows["usage"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        collector.stop()
    assert os.getpid() in {row[1] for row in rows}
    assert collector.losses() == {"walks_skipped": 1}


@pytest.mark.bpf
@pytest.mark.machine
def test_a_program_that_cannot_be_loaded_for_want_of_a_descriptor_reports_that() -> None:
    import resource

    from sonde.collect.cpu import CpuSampler
    from sonde.collect.kernel import Kernel
    from sonde.errors import HostError

    kernel = Kernel([os.getpid()])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
    try:
        with pytest.raises(HostError, match="no file descriptor is left"):
            CpuSampler(kernel, 99)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
