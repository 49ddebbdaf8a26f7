# SPDX-License-Identifier: Apache-2.0
"""Why a process got no tables to be walked by: no room is one cause, an error another."""

from __future__ import annotations

import errno
import os
from collections import Counter

import pytest

from sonde import _native
from sonde.agent.unwinding import Unwinding
from sonde.query.queries import LOSS_TEXT
from sonde.resolve import Resolver
from sonde.unwind.unwinder import Unwinder


class Maps:
    """The kernel's maps, which have room for nothing, or refuse."""

    def __init__(self, code: int) -> None:
        self._code = code

    def set_process(self, *_: object) -> None:
        raise OSError(self._code, os.strerror(self._code))

    def load_pages(self) -> int:
        return 0

    def usage(self) -> tuple[int, ...]:
        return 0, 0, 0, 0, 0

    def wanted(self) -> list[tuple[int, int]]:
        return []

    def walks(self) -> dict[int, int]:
        return {}

    def stops(self) -> list[int]:
        return []


class Cache:
    is_busy = has_queue = False
    built = failed = put_off = 0

    def poll(self) -> list[str]:
        return []

    def find(self, _: str) -> None:
        return None

    def has_failed(self, _: str) -> bool:
        return True

    def awaits(self, _: str) -> bool:
        return False

    def warm_up(self) -> None:
        pass


def refused_with(code: int, monkeypatch: pytest.MonkeyPatch) -> Unwinder:
    """After one try to prepare this process. The real maps need the kernel."""
    monkeypatch.setattr(_native, "UnwindMaps", lambda _owner: Maps(code))
    it = Unwinder(None, Resolver(), Cache())  # type: ignore[arg-type]
    it.expect([os.getpid()])
    while it.is_busy:  # as long as it takes to look up its files
        it.update()
    return it


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.E2BIG, errno.ENOMEM])
def test_want_of_room_is_called_so(code: int, monkeypatch: pytest.MonkeyPatch):
    it = refused_with(code, monkeypatch)

    assert it.losses() == {"no_room": 1}
    assert it.usage()["put_off"] == 1


def test_memory_of_runtimes_that_was_given_back_is_a_loss(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_native, "UnwindMaps", lambda _owner: Maps(0))
    it = Unwinder(None, Resolver(), Cache())  # type: ignore[arg-type]
    assert it.losses() == {}
    it._runtimes.emptied = 3  # names of some JVMs, for instance
    assert it.losses() == {"caches_emptied": 3}


@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO, errno.EINVAL])
def test_an_error_is_not_called_want_of_room(code: int, monkeypatch: pytest.MonkeyPatch):
    it = refused_with(code, monkeypatch)
    unwinding = Unwinding(None, Resolver())
    unwinding._unwinder = it
    name = errno.errorcode[code]

    assert it.refused == Counter({name: 1})
    assert unwinding.losses() == {f"{name.lower()}.refused": 1}
    assert it.usage()["left_out"] == 0
    assert it.usage()["put_off"] == 1
    row = next(row for row in unwinding.metrics(0) if row[1] == "sonde.unwind.refused")
    assert (name in row[2], row[3]) == (True, 1.0)


def test_both_causes_have_their_text():
    assert {"no_room", "refused"} <= set(LOSS_TEXT)
