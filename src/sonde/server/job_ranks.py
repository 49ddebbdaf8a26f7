# SPDX-License-Identifier: Apache-2.0
"""Which rank of a job the others wait for, and what the data of its node shows of the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sonde.analyze import rank_tables
from sonde.analyze.slow_ranks import (
    LEAST_SLOTS,
    MAX_LONG,
    MAX_PAIRS,
    Pieces,
    RankTimes,
    SlowLink,
    SlowRanks,
    slow_ranks,
)
from sonde.analyze.stragglers import LEAST, Straggle
from sonde.errors import CaptureError
from sonde.query import stored_objects, stored_pieces
from sonde.query.selection import Selection
from sonde.query.stored_ranks import TimeBin
from sonde.query.stored_session import QueryTimedOutError, StoredSession
from sonde.server import timeline_answers

WINDOW_NS = 60 * 10**9
"""The time that is read: before the last timed run of the job."""
MAX_RANKS = 4_096
"""Ranks that are compared, those with most device time."""
SLOTS = 60
"""Parts of the time, where steps are not known."""
LISTED = 16
"""Slow ranks that are listed; `count` has how many there are."""
_INCIDENTS = 8
"""Incidents of the slow rank's node that are listed, the latest."""
_MAX_TEXT = 1 << 16
"""Characters of an incident that is read."""
_TITLES = {
    Straggle.WORKER: "slow worker",
    Straggle.STAGE: "slow stage",
    Straggle.SEQUENCES: "unequal sequences",
}
UNEQUAL_WORK = "unequal-work"
_ONE_JOB = ("job", "pod")
"""Owners whose processes belong to one job."""
_Key = rank_tables.Key
"""(node, pid, start_ns, device): a rank."""


def waiting(session: StoredSession, selection: Selection) -> dict[str, Any]:
    """`kind` (slow-worker, slow-stage, slow-link, unequal-sequences, unequal-work, nothing,
    unknown), `text`, `ranks` (the slow ones, at most `LISTED`), `count`, `lost_s` of each step or,
    where steps are not known, of each second (`per`), `evidence`, `node` (what the data of the
    first one's node shows), `missing` (what is not known or left out), `compared` (how many ranks
    were), `start_ns` and `end_ns` (since 1970). Raises CaptureError."""
    last = stored_pieces.last_run_ns(session, selection)
    end = min(selection.end_ns, last + 10**9) if last else selection.end_ns
    one = replace(selection, start_ns=max(selection.start_ns, end - WINDOW_NS), end_ns=end)
    found = _no_finding(one)
    by = next(iter(selection.owners or {}), "")
    if by not in _ONE_JOB:
        return _unknown(found, f"a {by} may have several jobs, whose ranks do not wait for one "
                               "another: ask about one job, or one pod")  # fmt: skip
    if not last:
        return _unknown(found, "no run of it on a device was timed in this time; the losses "
                               "of its nodes have why")  # fmt: skip
    answer = timeline_answers.ranks(session, one, SLOTS, MAX_RANKS)
    ranks = answer["ranks"]
    found["per"] = "step" if answer["by"] == "steps" else "second"
    if answer["left_out"]:
        found["missing"].append(f"{answer['left_out']:,} ranks with less device time are left out")
    if len(ranks) < 2:
        return _unknown(found, "one rank alone was timed: there is no other to compare it with")
    if not answer["collectives"]:
        return _unknown(found, "no kernel of a collective library was timed: what the ranks wait "
                               "for, and whether they do, is not known")  # fmt: skip
    times = rank_tables.times_of(answer)
    apart = rank_tables.leave_out_alone(times)
    if apart:
        found["missing"].append(
            f"{apart:,} of {len(ranks):,} processes ran no collective: not compared"
        )
    thin = rank_tables.leave_out_thin(times)
    rare = thin - apart
    if rare:
        found["missing"].append(
            f"{rare:,} of {len(ranks):,} ranks were timed in fewer than {LEAST_SLOTS} parts of the "
            "time in which another one was, and are not compared"
        )
    if len(ranks) - thin < 2:
        return _unknown(found, "too few ranks were timed at the same time: choose a longer time")
    found["compared"] = len(ranks) - thin
    keys = {_key(rank): number for number, rank in enumerate(ranks)}
    pieces = None
    if times.are_steps:
        pieces = _pieces(session, one, answer, keys)
        if pieces is None:
            found["missing"].append(
                f"no work between collectives, or more than {stored_pieces.MAX_PIECES:,} pieces "
                "of it: unequal sequences would not be seen"
            )
    else:
        found["missing"].append(
            "steps are not known (that needs every run of a node timed, in up to 120 s): unequal "
            "sequences would not be seen"
        )
    exchanges = stored_pieces.exchanges(session, one)
    links = None
    if 0 < exchanges.num_rows <= stored_pieces.MAX_EXCHANGES:
        links = rank_tables.links_of(
            stored_objects.lists(exchanges, session.check), keys, session.check
        )
    slow = slow_ranks(times, pieces, session.check)
    if not slow.is_known:
        return _unknown(found, "who stands out was timed in too few of the same parts of the time "
                               "as the rest: choose a longer time")  # fmt: skip
    if links is None and exchanges.num_rows:
        why = (
            f"more than {stored_pieces.MAX_EXCHANGES:,} exchanges, {MAX_LONG:,} long ones, or "
            f"{MAX_PAIRS:,} pairs of these"
        )
        if slow.kind == Straggle.NOTHING:
            return _unknown(found, f"no rank is slow, and whether a link is: there are {why}, "
                                   "choose a shorter time")  # fmt: skip
        found["missing"].append(f"there are {why}: a slow link would not be seen")
    elif links is None:
        found["missing"].append(
            "no exchange between two ranks was timed with its begin on the device: a slow link "
            "would not be seen"
        )
    scale = rank_tables.slot_s(times)[0] if times.are_steps else 1.0
    if links and (slow.kind == Straggle.NOTHING or not slow.others_wait):
        _name_link(found, ranks, links[0], times, scale)
    else:
        _name_ranks(found, ranks, slow, times, scale)
    if found["ranks"]:
        found["node"] = _on_node(session, one, found["ranks"][0])
    return found


def not_known(selection: Selection, why: str) -> dict[str, Any]:
    """As `waiting`, where it raised an error."""
    return _unknown(_no_finding(selection), why)


def _no_finding(selection: Selection) -> dict[str, Any]:
    """The answer before anything is found."""
    return {
        "kind": "unknown", "text": "", "ranks": [], "count": 0, "lost_s": 0.0, "per": "second",
        "evidence": [], "node": None, "missing": [],
        "start_ns": selection.start_ns, "end_ns": selection.end_ns, "compared": 0,
    }  # fmt: skip


def _unknown(found: dict[str, Any], why: str) -> dict[str, Any]:
    found["text"] = f"not known: {why}"
    found["missing"].append(why)
    return found


def _key(row: Mapping[str, Any]) -> _Key:
    return row["node"], row["pid"], row["start_ns"], row["device"]


def _pieces(
    session: StoredSession,
    selection: Selection,
    answer: Mapping[str, Any],
    keys: Mapping[_Key, int],
) -> Pieces | None:
    """The work between exchanges; None where there is none, or too much."""
    slots = [TimeBin(*pair) for pair in zip(*answer["slots"].values(), strict=True)]
    columns = stored_pieces.pieces(session, selection, slots)
    if columns.num_rows > stored_pieces.MAX_PIECES:
        return None
    return rank_tables.pieces_of(stored_objects.lists(columns, session.check), keys)


def _name(rank: Mapping[str, Any]) -> str:
    program = rank["command"] or rank["comm"] or "?"
    return f"{program} ({rank['pid']}) on GPU {rank['device']} of {rank['node']}"


def _listed(
    ranks: Sequence[Mapping[str, Any]], numbers: Sequence[int], times: RankTimes
) -> list[dict[str, Any]]:
    """Ranks by their numbers, with their shares of the time at work and in collectives."""
    listed = []
    for one in numbers[:LISTED]:
        work, waits = rank_tables.shares(times, one)
        who = {name: ranks[one][name] for name in ("node", "pid", "device", "comm", "command")}
        listed.append(who | {"number": one, "work": work, "collective": waits})
    return listed


def _name_link(
    found: dict[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    link: SlowLink,
    times: RankTimes,
    scale: float,
) -> None:
    """Write a slow link into the answer; `scale`: seconds that `lost_s` is per."""
    found["kind"], found["count"] = "slow-link", 2
    found["ranks"] = _listed(ranks, link.ranks, times)
    spent_s = link.exchanges * (link.seconds - link.usual_s)
    found["lost_s"] = spent_s / rank_tables.slot_s(times)[1] * scale
    one, other = (_name(ranks[at]) for at in link.ranks)
    found["text"] = f"slow link: between {one} and {other}"
    found["evidence"] = [
        f"both were in {link.exchanges:,} exchanges together for {1e3 * link.seconds:.1f} ms each; "
        f"others take {1e3 * link.usual_s:.1f} ms",
        "no rank works so much longer than the rest that the others wait for it",
    ]


def _name_ranks(
    found: dict[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    slow: SlowRanks,
    times: RankTimes,
    scale: float,
) -> None:
    """Write slow ranks, or that there are none, into the answer; `scale`: as of `_name_link`."""
    usual_work, usual_wait = rank_tables.usual_shares(times, slow.ranks)
    found["kind"], found["count"] = str(slow.kind), len(slow.ranks)
    found["ranks"] = _listed(ranks, slow.ranks, times)
    found["lost_s"] = slow.lost * scale
    if slow.kind == Straggle.NOTHING:
        found["text"] = (
            f"no rank is slow: of {found['compared']:,} ranks none works {100 * LEAST:.0f} % "
            "longer than the others, or waits that much less in collectives"
        )
        found["evidence"] = [
            f"the usual rank is in collectives for {100 * usual_wait:.0f} % of the time: where "
            "that is much, exchanging itself takes it"
        ]
        return
    title = _TITLES[slow.kind]
    excess = 100 * slow.excess[slow.kind]
    if slow.kind == Straggle.SEQUENCES:
        found["text"] = f"{title}: from piece to piece another rank has most to do"
        found["evidence"] = [
            f"of the pieces that are worked on at a time the longest takes {excess:.0f} % longer "
            "than their mean, and no rank always has it"
        ]
        return
    first = found["ranks"][0]
    whom = _name(ranks[slow.ranks[0]])
    more = f" and {len(slow.ranks) - 1:,} more" if len(slow.ranks) > 1 else ""
    found["text"] = f"{title}: the others wait for {whom}{more}"
    if not slow.others_wait:
        found["kind"] = UNEQUAL_WORK
        found["text"] = (
            f"unequal work: {whom}{more} works longer, and the others are not longer in "
            "collectives for it"
        )
    found["evidence"] = [
        f"at work on its device for {100 * first['work']:.0f} % of the time in which it was timed; "
        f"the usual rank {100 * usual_work:.0f} %",
        f"in collectives for {100 * first['collective']:.0f} % of it; the usual rank "
        f"{100 * usual_wait:.0f} %",
    ]
    if slow.by_host:
        found["evidence"].append("its device has no more work: its host is late to launch it")
    if slow.kind == Straggle.STAGE:
        found["evidence"].append(
            f"{len(slow.ranks):,} of {found['compared']:,} ranks are slow alike, as a stage of a "
            "pipeline is, or ranks that share something; which stage a rank has is not stored"
        )


def _on_node(
    session: StoredSession, selection: Selection, rank: Mapping[str, Any]
) -> dict[str, Any]:
    """`node`, `bound` (what the rank's work is limited by, '' not known), `evidence`, `next` (what
    to do), `incidents` (that the node sent in that time)."""
    here = replace(selection, nodes=[rank["node"]])
    about: dict[str, Any] = {"node": rank["node"], "bound": "", "evidence": [], "next": ""}
    try:
        verdicts = timeline_answers.explained(session, here)["verdicts"]
    except QueryTimedOutError:
        raise
    except CaptureError:
        verdicts = []
    for one in verdicts:
        if one["device_name"].endswith(f"({rank['pid']})") and one["bounds"]:
            about["bound"] = one["bounds"][0]["key"]
            about["evidence"] = one["evidence"][1:4]
            about["next"] = one["advice"][0]["text"] if one["advice"] else ""
            break
    clause, parameters = replace(here, owners=None).sql(kind=False, process=False)
    rows = session.arrow(
        f"SELECT time_ns, text FROM event {clause} AND kind = 'notice' AND name = 'incident'"
        f" AND length(text) <= {_MAX_TEXT} ORDER BY time_ns DESC LIMIT {_INCIDENTS}",
        parameters,
    ).to_pylist()
    causes = [(row["time_ns"], _cause(row["text"])) for row in rows]
    about["incidents"] = [{"time_ns": at, "cause": cause} for at, cause in causes if cause]
    return about


def _cause(text: str) -> str:
    """The cause of an incident that a node sent as JSON; '' where the text is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    cause = found.get("cause") if isinstance(found, dict) else None
    return cause[:64] if isinstance(cause, str) else ""
