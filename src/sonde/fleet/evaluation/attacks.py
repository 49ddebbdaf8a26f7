# SPDX-License-Identifier: Apache-2.0
"""Attacks on the protocol: each is carried out, and its success measured.

`limit` is the guarantee: chance if nothing may leak, the stated epsilon if the leak is bounded.
Attacks on properties that are *not* guaranteed are carried out too and marked. Controls are the
same attacks on deliberately broken targets: there they must succeed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sonde.fleet.aggregator import Aggregator, Helper, Leader, Refused, release_request
from sonde.fleet.evaluation.attack_results import CONFIDENCE, AttackResult
from sonde.fleet.evaluation.local_deployment import HOUR_S, START_S, LocalDeployment, small_task
from sonde.fleet.evaluation.population import Floats, Ints
from sonde.fleet.evaluation.privacy_audit import audit_canaries, canary_counts, membership_inference
from sonde.fleet.evaluation.simulated_nodes import overstated_report
from sonde.fleet.roster import Identity
from sonde.fleet.task import Task
from sonde.fleet.wire import Item, Report, encode_job
from sonde.model.confidence import clopper_pearson

_WORD_BYTES = 6  # of a share that become one number: a float has them exactly
_CLASSES = 8  # buckets of the tasks in which an aggregator guesses


def run_all(seed: int = 1, confidence: float = CONFIDENCE) -> list[AttackResult]:
    """Runs all attacks and controls; takes some seconds. `confidence`: that of each interval."""
    rng = np.random.default_rng(seed)
    table = reconstruction(rng, confidence)
    table.append(collusion(rng))
    honest = [canary_counts(kind, e, rng) for kind, e in (("laplace", 0.5), ("laplace", 1.0))]
    honest.append(canary_counts("gaussian", 1.0, rng))
    table += [audit_canaries(seen, confidence) for seen in honest]
    table.append(membership_inference(honest[1], confidence))
    weak = [canary_counts(kind, 1.0, rng, weaken=0.5) for kind in ("laplace", "gaussian")]
    table += [audit_canaries(seen, confidence, "control: half the noise") for seen in weak]
    table.append(membership_inference(weak[0], confidence, "control: membership, half the noise"))
    return table + poisoning() + intersection()


# --- what one aggregator sees --------------------------------------------------------------------


def _aggregator_views(reports: int, rng: np.random.Generator) -> tuple[Ints, Floats, Floats]:
    """(labels, the leader's view, the helper's view) of each report, as numbers in [0, 1).

    A view has the high and low digits of each element of the output share (the party's share of the
    report's counts), the public share, and the other party's message about the report.
    """
    aggregation = small_task(_CLASSES).aggregation()
    labels = rng.integers(_CLASSES, size=reports)
    ids = [os.urandom(16) for _ in labels]
    made = aggregation.shard(ids, [[int(b)] for b in labels], 2)
    key = os.urandom(32)
    views: tuple[list[list[float]], list[list[float]]] = ([], [])
    for id_, (public, leader, helper) in zip(ids, made, strict=True):
        pending = aggregation.begin(key, [id_], [public], [leader], 1)
        message = pending.messages[0]
        assert message is not None
        replies, _, helper_sum = aggregation.check(key, [id_], [public], [helper], [message], 1)
        _, leader_sum = pending.finish(replies, 1)
        views[0].append(_digits(leader_sum) + _words(public + (replies[0] or b"")))
        views[1].append(_digits(helper_sum) + _words(public + message))
    return labels, np.array(views[0]), np.array(views[1])


def _digits(share: bytes) -> list[float]:
    """High digits of all elements, then the low ones."""
    width = len(share) // _CLASSES
    elements = [share[at : at + width] for at in range(0, len(share), width)]
    return [_number(e[-_WORD_BYTES:]) for e in elements] + [
        _number(e[:_WORD_BYTES]) for e in elements
    ]


def _words(text: bytes) -> list[float]:
    """Bytes as numbers, `_WORD_BYTES` each."""
    return [_number(text[at : at + _WORD_BYTES]) for at in range(0, len(text), _WORD_BYTES)]


def _number(word: bytes) -> float:
    """In [0, 1)."""
    return int.from_bytes(word, "little") / 256.0**_WORD_BYTES


def reconstruction(
    rng: np.random.Generator, confidence: float = CONFIDENCE, reports: int = 2000
) -> list[AttackResult]:
    """One aggregator guesses the bucket of a report from its whole view; and, as a control, from
    shares with the same mask in each report.
    """
    labels, leader, helper = _aggregator_views(reports, rng)
    repeated = np.tile(rng.random(2 * _CLASSES), (reports, 1))
    repeated[np.arange(reports), _CLASSES + labels] += 256.0**-_WORD_BYTES
    return [
        _guess("reconstruction by the leader", labels, leader, confidence),
        _guess("reconstruction by the helper", labels, helper, confidence),
        _guess("control: a mask that repeats", labels, repeated, confidence, control=True),
    ]


def _guess(
    name: str, labels: Ints, view: Floats, confidence: float, control: bool = False
) -> AttackResult:
    """The best of several guesses: the extreme elements, and class means learned from half of the
    reports with their labels.
    """
    half = len(labels) // 2
    known, unknown, shares = view[:half], view[half:], view[half:, :_CLASSES]
    means = np.stack([known[labels[:half] == b].mean(axis=0) for b in range(_CLASSES)])
    distance = ((unknown[:, None, :] - means[None]) ** 2).sum(axis=2)
    guesses = {
        "largest": shares.argmax(axis=1),
        "smallest": shares.argmin(axis=1),
        "learned": distance.argmin(axis=1),
    }
    hits = max(int((guess == labels[half:]).sum()) for guess in guesses.values())
    # three guesses were tried: each gets a third of the error
    low = clopper_pearson(hits, len(unknown), 1 - (1 - confidence) / len(guesses))[0]
    return AttackResult(
        name,
        f"{hits / len(unknown):.1%} right",
        f"chance {1 / _CLASSES:.1%}",
        low <= 1 / _CLASSES,
        f"{len(unknown)} reports, best of {len(guesses)} guesses; at least {low:.1%} "
        f"with {confidence:.1%} confidence",
        control,
    )


def collusion(rng: np.random.Generator) -> AttackResult:
    """Both aggregators together: they add their shares."""
    labels = rng.integers(_CLASSES, size=50)
    aggregation = small_task(_CLASSES).aggregation()
    hits = 0
    for label in labels:
        id_, key = os.urandom(16), os.urandom(32)
        public, leader, helper = aggregation.shard([id_], [[int(label)]], 1)[0]
        pending = aggregation.begin(key, [id_], [public], [leader], 1)
        replies, _, helper_sum = aggregation.check(
            key, [id_], [public], [helper], [pending.messages[0] or b""], 1
        )
        leader_sum = pending.finish(replies, 1)[1]
        hits += aggregation.unshard([leader_sum, helper_sum]).index(1) == int(label)
    return AttackResult(
        "reconstruction by both together",
        f"{hits / len(labels):.1%} right",
        "-",
        None,
        "two colluding aggregators see every report; run them by different parties",
    )


# --- what a node or an aggregator can do ---------------------------------------------------------


def poisoning() -> list[AttackResult]:
    """Nodes that try to change the sums by more than one sample."""
    table = []

    def attempt(
        name: str,
        note: str,
        act: Callable[[LocalDeployment], object],
        limit: int,
        task: Task | None = None,
    ) -> None:
        """Measures by how many counts `act` moves the sums; it may by `limit`. A `task` makes it a
        control.
        """
        with tempfile.TemporaryDirectory() as directory:
            fleet = LocalDeployment(Path(directory), task or small_task(), ["a"] * 4)
            fleet.send(fleet.report(0, [3]), fleet.report(1, [3]))
            before = fleet.exact_sums()
            act(fleet)
            moved = sum(abs(a - b) for a, b in zip(fleet.exact_sums(), before, strict=True))
            refused = {**fleet.leader.store.refusals(), **fleet.helper.store.refusals()}
            fleet.close()
        reasons = ", ".join(sorted(refused)) or "accepted"
        table.append(
            AttackResult(
                f"{'control' if task else 'poisoning'}: {name}",
                f"moved {moved} ({reasons})",
                f"{limit} sample{'s' * (limit != 1)}",
                moved <= limit,
                note,
                control=task is not None,
            )
        )

    def overweight(fleet: LocalDeployment) -> None:
        fleet.send(overstated_report(fleet.task, fleet.nodes[2], fleet.report(2, [0])))

    def swapped(fleet: LocalDeployment) -> None:
        good, other = fleet.report(2, [1]), fleet.report(3, [2])
        body = replace(other, public=good.public)
        fleet.send(replace(body, signature=fleet.nodes[3].sign(body.signed())))

    def stuffed(fleet: LocalDeployment) -> None:
        fleet.send(*(fleet.report(2, [0]) for _ in range(50)))

    def replayed(fleet: LocalDeployment) -> None:
        report = fleet.report(2, [0])
        fleet.send(*[report] * 50)

    def sybils(fleet: LocalDeployment) -> None:
        for _ in range(50):
            fleet.nodes[2] = Identity()
            fleet.send(fleet.report(2, [0]))

    def impostor(fleet: LocalDeployment) -> None:
        report: Report = fleet.report(2, [0])
        fleet.send(replace(report, node=fleet.nodes[3].public))

    def invented(fleet: LocalDeployment) -> None:  # a leader without a node's key
        report = replace(fleet.report(2, [0]), signature=bytes(64))
        fleet.helper.process_job(encode_job(os.urandom(16), [Item.of(report, b"")]))

    def repeated(fleet: LocalDeployment) -> None:  # a leader that sends one report again
        report = fleet.report(2, [0])
        fleet.send(report)
        for _ in range(20):
            fleet.helper.process_job(encode_job(os.urandom(16), [Item.of(report, b"")]))

    def expired(fleet: LocalDeployment) -> None:  # sent when ids of its age are deleted
        report = fleet.report(2, [0])
        fleet.now_s = fleet.task.expires_s(START_S) + 1.0
        fleet.leader.expire()
        fleet.helper.expire()
        fleet.send(report)
        fleet.helper.process_job(encode_job(os.urandom(16), [Item.of(report, b"")]))

    attempt("a share that claims 1,000", "the proof does not hold", overweight, 0)
    attempt("another report's proof", "proofs are bound to their report", swapped, 0)
    attempt("50 reports in a period", "one report a node and period", stuffed, 1)
    attempt("one report 50 times", "report ids are remembered", replayed, 1)
    attempt("50 nodes not enrolled", "the roster decides", sybils, 0)
    attempt("another node's name", "reports are signed", impostor, 0)
    attempt("a leader that invents a node", "the helper checks signatures itself", invented, 0)
    attempt("a leader that asks 20 times", "the helper remembers report ids too", repeated, 1)
    attempt(
        "a report whose batch has expired",
        "its age alone refuses it; the two samples that expire were never released",
        expired,
        2,
    )
    attempt(
        "a share that claims 1,000, no proofs",
        "a task without proofs, whose sums any node can move",
        lambda fleet: fleet.send(fleet.report(2, [0] * 1000)),
        1,
        small_task(kind="plain"),
    )
    attempt(
        "a false but valid sample",
        "truth cannot be proved: one sample a period is the price",
        lambda fleet: fleet.send(fleet.report(2, [9])),
        1,
    )
    return table


def intersection() -> list[AttackResult]:
    """Collectors that compare releases, or request small ones."""
    with tempfile.TemporaryDirectory() as directory:
        fleet = LocalDeployment(Path(directory), small_task(min_batch=3), ["a"] * 6)
        fleet.send(*(fleet.report(n, [n]) for n in range(4)))
        fleet.close_batch()
        first = fleet.collect()
        again = all(fleet.collect().rows == first.rows for _ in range(20))
        spent = len(fleet.leader.store.ledger()), len(fleet.helper.store.ledger())
        intervals = [
            (START_S, 2 * HOUR_S),
            (START_S - HOUR_S, 2 * HOUR_S),
            (START_S + 1, HOUR_S),
            (START_S, HOUR_S - 1),
            (START_S + HOUR_S // 2, HOUR_S // 2),
        ]
        overlaps = sum(_granted(fleet, *interval) for interval in intervals)
        granted_without_grid = _granted_without_grid(intervals[0])
        fleet.now_s = START_S + HOUR_S + 60.0
        fleet.send(fleet.report(5, [1]))
        open_ = _granted(fleet, START_S + HOUR_S, HOUR_S)
        fleet.close_batch()
        small = _granted(fleet, START_S + HOUR_S, HOUR_S)
        fleet.close()
    return [
        AttackResult(
            "batch intersection",
            f"{overlaps} of {len(intervals)} granted",
            "0",
            not overlaps,
            "releases lie on one grid; overlapping intervals do not exist, nor at the helper alone",
        ),
        AttackResult(
            "control: no grid of releases",
            "granted" if granted_without_grid else "refused",
            "refused",
            not granted_without_grid,
            "the same question to aggregators that release any interval",
            control=True,
        ),
        AttackResult(
            "averaging the noise away",
            "same answer" if again else "new noise",
            "one draw a batch",
            again and spent == (1, 1),
            "20 repeated collections: noise is drawn, and paid for, once",
        ),
        AttackResult(
            "a batch of one report",
            "granted" if small else "refused",
            "refused",
            not small,
            "fewer reports than the minimum are never released",
        ),
        AttackResult(
            "a batch that is still open",
            "granted" if open_ else "refused",
            "refused",
            not open_,
            "releases wait for the end of the batch and its grace",
        ),
    ]


def _granted(fleet: LocalDeployment, start_s: int, duration_s: int) -> bool:
    """Whether the release is granted: by both, or by the helper alone to a leader that checks
    nothing.
    """
    batch = fleet.helper.store.batch(start_s)
    for ask in (
        lambda: fleet.leader.release(start_s, duration_s),
        lambda: fleet.helper.release(release_request(start_s, duration_s, batch)),
    ):
        try:
            ask()
        except Refused:
            continue
        return True
    return False


class _WithoutGrid(Aggregator):
    """Grants any interval."""

    def check_release(self, start_s: int, duration_s: int) -> None:
        """Nothing is refused."""


class _LeaderWithoutGrid(_WithoutGrid, Leader):
    pass


class _HelperWithoutGrid(_WithoutGrid, Helper):
    pass


def _granted_without_grid(interval: tuple[int, int]) -> bool:
    """Whether a deployment without the grid check grants the interval."""
    with tempfile.TemporaryDirectory() as directory:
        parties = (_LeaderWithoutGrid, _HelperWithoutGrid)
        fleet = LocalDeployment(Path(directory), small_task(), ["a"] * 2, party_types=parties)
        fleet.send(*(fleet.report(n, [n]) for n in range(2)))
        fleet.close_batch()
        granted = _granted(fleet, *interval)
        fleet.close()
    return granted
