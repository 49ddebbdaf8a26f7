# SPDX-License-Identifier: Apache-2.0
"""The child that takes the stacks of ranks answers for each process that it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

from sonde.agent import rank_dump
from sonde.agent.rank_dump import MAX_PIDS, RankDump


class Dumper:
    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def take(self, pid: int) -> SimpleNamespace:
        return SimpleNamespace(threads=[])

    def close(self) -> None:
        pass


def test_each_process_has_an_answer_and_those_beyond_the_bound_a_reason(monkeypatch):
    monkeypatch.setattr(rank_dump, "Dumper", Dumper)
    pids = range(1, MAX_PIDS + 4)

    found = {one.pid: one.failed for one in RankDump().take(pids)}

    assert found.keys() == set(pids)
    assert [pid for pid, failed in found.items() if failed] == [*pids[MAX_PIDS:]]
