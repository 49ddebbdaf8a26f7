# SPDX-License-Identifier: Apache-2.0
"""How often everything is looked at again while events of processes are lost."""

from __future__ import annotations

import itertools

from sonde.agent.event_loop import MAX_RESYNC_S, RESYNC_RESET_S, Resyncs


def looks_of(resyncs: Resyncs, since_s: float, until_s: float, cost_s: float) -> list[float]:
    """When looks happen if events are lost every 20 ms."""
    looks, now_s = [], since_s
    while now_s < until_s:
        resyncs.lost()
        if resyncs.is_due(now_s):
            looks.append(now_s)
            resyncs.done(now_s, cost_s)
        now_s += 0.02
    return looks


def test_a_loss_is_looked_into_at_once() -> None:
    resyncs = Resyncs()
    assert not resyncs.is_due(100.0)
    assert looks_of(resyncs, 100.0, 100.1, 0.01) == [100.0]


def test_looks_become_rare_while_losses_go_on_and_never_cease() -> None:
    looks = looks_of(Resyncs(), 0.0, 300.0, 0.2)
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert all(b > a - 0.05 for a, b in itertools.pairwise(gaps))
    assert MAX_RESYNC_S - 0.1 <= gaps[-1] <= MAX_RESYNC_S + 0.1
    assert 8 <= len(looks) <= 20


def test_after_a_calm_time_the_next_loss_is_looked_into_at_once() -> None:
    resyncs = Resyncs()
    last_s = looks_of(resyncs, 0.0, 100.0, 0.2)[-1]
    calm_s = last_s + MAX_RESYNC_S + RESYNC_RESET_S + 1
    looks = looks_of(resyncs, calm_s, calm_s + 5, 0.01)
    assert looks[0] == calm_s
    assert looks[1] - looks[0] < 1
