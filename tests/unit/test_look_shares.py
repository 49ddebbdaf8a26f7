# SPDX-License-Identifier: Apache-2.0
"""Whose suspicions are looked at, and whose processes are looked at closely: one user must not use
up what all share."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from sonde import procfs
from sonde.agent import trends
from sonde.agent.explainer import MAX_OF_PARTY, MAX_WAITING, Explainer
from sonde.agent.slowdown_watcher import Watcher
from sonde.agent.trends import MAX_PROCESSES, Trends
from sonde.diagnose.detector import Suspicion
from sonde.diagnose.moments import Facts, Moment, ProcessMoment, Usage, Window
from sonde.diagnose.selection import MOST, STACKS_AT_ONCE, Selection
from sonde.diagnose.series import Series
from sonde.model.process import Process

VICTIM, FIRST = 1, 100
TICK_NS = 250_000_000
REST_S = 12


class MadeUp:
    """A detector whose suspicions are made up, until they are opened."""

    def __init__(self, lost_of):
        self._lost_of = lost_of
        self._rests = {}

    def add(self, moment, *_):
        now_s = moment.end_ns / 1e9
        found = []
        for pid, lost in self._lost_of(now_s):
            if self._rests.get(pid, 0) <= now_s:
                self._rests[pid] = now_s + REST_S
                found.append(Suspicion(pid, moment.start_ns, moment.end_ns, (Series.LOCK,), lost))
        return found

    def forget_rest(self, pid):
        del self._rests[pid]


def looked_at(monkeypatch, lost_of, party_of, seconds=40):
    """(pid, second) of the first look at each suspicion, and the watcher."""
    monkeypatch.setattr(procfs, "party_of", party_of)
    watcher = Watcher(lambda *_: None, lambda _: (), Process, lambda pid: Process(pid, 0), 19)
    found = []
    watcher._detector = MadeUp(lost_of)
    watcher._facts = SimpleNamespace(
        read=lambda *_, **__: Facts(), cut=0, connections_cut=0, groups_left_out=0
    )
    watcher._trends = SimpleNamespace(left_out=0)

    def ask(window, *, is_last_look, **_):
        if not is_last_look:
            found.append((window.victim, watcher._kept[-1].end_ns / 1e9))

    watcher._explainer = SimpleNamespace(ask=ask, pids=set(), left_out=0)
    for tick in range(1, int(seconds * 1e9 / TICK_NS)):
        watcher.on_tick((tick - 1) * TICK_NS, tick * TICK_NS, ())
    return found, watcher


def user(pid):
    return 1001 if pid == VICTIM else 1000


@pytest.mark.parametrize("stalling", [0, 10, 20, 30, 40, 60, 250])
@pytest.mark.parametrize("lost", [0.5, 0.1])
def test_a_victim_is_looked_at_whatever_another_user_s_processes_lose(monkeypatch, stalling, lost):
    def lost_of(now_s):
        for number in range(stalling):  # each stalls for 2.7 s in every 12 s
            if (now_s - REST_S * number / stalling) % REST_S > 9.3:
                yield FIRST + number, 6.0
        if 20 <= now_s < 24:
            yield VICTIM, lost

    found, watcher = looked_at(monkeypatch, lost_of, user)
    (at_s,) = [at_s for pid, at_s in found if pid == VICTIM]
    assert 20.6 <= at_s <= 21.5
    others = len(found) - 1
    assert others >= min(stalling, 1.2 * 36)  # nothing is kept unused
    assert watcher.losses["diagnose.suspicions"] == watcher.left_out
    assert bool(watcher.left_out) == (stalling >= 20)


def test_looks_are_bounded_for_all_parties_together(monkeypatch):
    parties = itertools.count()
    found, _ = looked_at(
        monkeypatch, lambda _: ((pid, 6.0) for pid in range(1, 200)), lambda _: next(parties)
    )
    assert 40 <= len(found) <= 16 + 1.5 * 40


def test_several_users_beside_each_other_all_have_their_turns(monkeypatch):
    found, _ = looked_at(
        monkeypatch,
        lambda _: ((pid, 6.0 - pid / 200) for pid in range(8 * 20)),
        lambda pid: pid % 8,
    )
    by_user = Counter(pid % 8 for pid, _ in found)
    assert len(by_user) == 8
    assert max(by_user.values()) - min(by_user.values()) <= 4


def test_of_one_user_what_lost_most_is_looked_at_first(monkeypatch):
    def lost_of(_):
        return ((pid, float(pid)) for pid in range(FIRST, FIRST + 40))

    found, _ = looked_at(monkeypatch, lost_of, user, 1.3)
    assert sorted(pid for pid, _ in found)[-12:] == list(range(FIRST + 28, FIRST + 40))


def test_windows_that_wait_are_not_one_user_s_alone():
    explainer = Explainer()
    window = Window(VICTIM, 1, [], [], {}, [], [], [])
    for _ in range(2 * MAX_WAITING):
        explainer.ask(window, is_last_look=True, answer=lambda _: None, party=1000)
    assert len(explainer._waiting) == MAX_OF_PARTY
    explainer.ask(window, is_last_look=True, answer=lambda _: None, party=1001)
    explainer.ask(window, is_last_look=True, answer=lambda _: None)
    assert len(explainer._waiting) == MAX_OF_PARTY + 2
    assert explainer.left_out == 2 * MAX_WAITING - MAX_OF_PARTY


def busy(selection, ticks, cpu_of):
    for tick in ticks:
        processes = {pid: ProcessMoment(usage=Usage(cpu_ns=ns)) for pid, ns in cpu_of.items()}
        start_ns = 10**10 + tick * TICK_NS
        selection.take(Moment(start_ns, start_ns + TICK_NS, processes), {}, set())


def test_a_user_with_many_busy_processes_leaves_others_among_the_chosen():
    selection = Selection(user)
    many = dict.fromkeys(range(FIRST, FIRST + 2 * MOST), TICK_NS)
    busy(selection, range(12), {**many, VICTIM: TICK_NS // 10})
    assert VICTIM in selection.pids
    assert len(selection.pids) == MOST
    assert selection.left_out > 0


def test_a_user_s_queue_for_stacks_is_its_own():
    selection = Selection(user)
    many = dict.fromkeys(range(FIRST, FIRST + MOST // 2), TICK_NS)
    busy(selection, range(8), many)
    assert sum(selection.pids.values()) >= STACKS_AT_ONCE
    busy(selection, range(8, 18), {**many, VICTIM: TICK_NS})  # more than 2 s
    assert selection.pids[VICTIM]


def test_control_groups_of_many_low_pids_hide_nobody_else_s(monkeypatch):
    nested = [f"/deep/{depth}" for depth in range(100)]
    groups = {pid: [f"/own/{pid}", *nested] for pid in range(1, 201)}
    groups[900] = ["/victim", "/"]
    monkeypatch.setattr(trends.procfs, "mounts_by_controller", lambda: {"v2": "/"})
    monkeypatch.setattr(trends.procfs, "groups_of", lambda pid, _: groups[pid])
    found = procfs.GroupFolder(0, 0, [], 0, {"memory.max": b"2", "memory.current": b"1"})
    look = lambda asked, *_, **__: ([found] * len(asked), 0)  # noqa: E731
    monkeypatch.setattr(trends.procfs.GROUPS, "look", look)
    looked = Trends()._groups(groups, lambda pid: 1001 if pid == 900 else 1000)
    read = [it[1] for it in looked]
    assert "/victim" in read
    assert len(read) == trends.MAX_GROUPS
    assert sum(it.startswith("/own/") for it in read) == MAX_PROCESSES - 1
