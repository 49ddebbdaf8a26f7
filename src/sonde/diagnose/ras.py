# SPDX-License-Identifier: Apache-2.0
"""Answers of NCCL RAS (2.24 and later), which may hold anything: text, and JSON since 2.28.7.

What is malformed, or beyond the bounds below, is left out; nothing here raises but ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from sonde.diagnose.job import RasComm, RasRank, RasReport

COMMUNICATORS: Final = 256
RANKS: Final = 4_096
"""Of one communicator; larger ones are cut."""
ALL_RANKS: Final = 16_384
"""Of all communicators together."""
LINES: Final = 32_768
"""Of an answer in text."""
FUNCTIONS: Final = 32
"""Collectives that are counted of a rank."""
LARGEST: Final = (1 << 53) - 1
"""The largest number; larger ones become this."""
TEXT: Final = 64
"""Characters of a name."""

_VERSION = re.compile(r"^NCCL version (\S{1,64})")
_HEAD = re.compile(r"^#(\d{1,9})-(\d{1,9}) \(([0-9a-f]{1,16})\) (\w{1,20})$")
_COUNTS = re.compile(
    r"^  Communicator ranks have different (\w{1,40}|collective) operation counts$"
)
_GROUP = re.compile(
    r"^  (\d{1,9}) ranks? ha(?:s|ve) (?:launched up to operation (\d{1,18})|not launched any)"
)
_ONE = re.compile(
    r"^  Rank (\d{1,9})"
    r"(?: has (?:launched up to operation (\d{1,18})|(not launched any operations)))?"
    r" -- (?:GPU .{1,80} managed by process (\d{1,9}) on node|\[process information not found\])"
)
_COMMA_MISSES = re.compile(rb'("nvml_dev": -?\d{1,10})(\s{1,40}"status")')
"""NCCL 2.28.7 to 2.28.9 leave out a comma here, of ranks that do not answer."""
_MISSING_LIST = re.compile(r"^  The missing ranks?: ([\d,\- ]{1,400})$")
_PROCESS = re.compile(r"^  Process (\d{1,9}) on node")


def parse(raw: bytes) -> RasReport:
    """The report of an answer in either format. Raises ValueError for what is neither."""
    text = raw.decode("utf-8", "replace")
    if text.lstrip().startswith("{"):
        return _json(raw)
    if not _VERSION.match(text):
        raise ValueError("it is no answer of NCCL RAS")
    return _text(text)


def _json(raw: bytes) -> RasReport:
    try:
        whole = msgspec.json.decode(_COMMA_MISSES.sub(rb"\1,\2", raw))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    comms = _list(_map(whole).get("communicators"))[:COMMUNICATORS]
    version = str(_map(whole).get("nccl_version", ""))[:TEXT]
    whole, left = [], ALL_RANKS
    for it in comms:
        whole.append(_comm(_map(it), left))
        left -= len(whole[-1].ranks)
    return RasReport(version, tuple(whole))


def _comm(one: Mapping[str, Any], most: int) -> RasComm:
    """A communicator of an answer in JSON, with at most this many ranks."""
    ranks = []
    for it in map(_map, _list(one.get("ranks"))[: min(RANKS, most)]):
        counts = list(_map(it.get("collective_counts")).items())[:FUNCTIONS]
        named = {str(name)[:TEXT]: _number(count) for name, count in counts}
        ranks.append(RasRank(_number(it.get("rank")), _number(it.get("pid")), named))
    for it in map(_map, _list(one.get("missing_ranks"))[: min(RANKS, most - len(ranks))]):
        is_dead = _map(it.get("status")).get("considered_dead") is True
        ranks.append(RasRank(_number(it.get("rank")), _number(it.get("pid")), {}, True, is_dead))
    return RasComm(str(one.get("hash", ""))[:TEXT], _number(one.get("size")), tuple(ranks))


def _text(text: str) -> RasReport:
    """The report of an answer in text, which lists only ranks that are behind or missing."""
    found = _VERSION.match(text)
    version = found[1] if found else ""
    comms: dict[str, dict[int, RasRank]] = {}
    dead: set[int] = set()
    ranks: dict[int, RasRank] = {}
    function, count, section = "", 0, ""
    most: dict[tuple[int, str], int] = {}
    left = ALL_RANKS
    for line in text.split("\n", LINES)[:LINES]:
        if head := _HEAD.match(line):
            if head[3] not in comms and len(comms) >= COMMUNICATORS:
                break
            ranks, section, function = comms.setdefault(head[3], {}), head[4], ""
        elif line in ("DEAD", "INCOMPLETE"):
            section, ranks = line, {}
        elif (process := _PROCESS.match(line)) and section == "DEAD":
            dead.add(int(process[1]))
        elif which := _COUNTS.match(line):
            function = which[1]
        elif function and (group := _GROUP.match(line)):
            count = int(group[2] or 0)
            most[id(ranks), function] = max(most.get((id(ranks), function), 0), count)
        elif one := _ONE.match(line):
            number, pid = int(one[1]), int(one[4] or 0)
            known = ranks.get(number) or RasRank(number, pid)
            if number not in ranks:
                if len(ranks) >= RANKS or left <= 0:
                    continue
                left -= 1
            if section == "INCOMPLETE":
                ranks[number] = RasRank(number, pid, known.counts, True, pid in dead)
            elif (
                section == "MISMATCH" and function
                and (function in known.counts or len(known.counts) < FUNCTIONS)
            ):  # fmt: skip
                its = 0 if one[3] else int(one[2]) if one[2] else count
                counts = {**known.counts, function: its}
                ranks[number] = RasRank(number, pid, counts, known.is_missing, known.is_dead)
        elif section == "INCOMPLETE" and (listed := _MISSING_LIST.match(line)):
            for number in _numbers(listed[1])[: min(RANKS, left)]:
                left -= 1  # also for one that is known: a short line names thousands
                if len(ranks) < RANKS or number in ranks:
                    ranks[number] = RasRank(number, 0, {}, True)
    whole = []
    for name, members in comms.items():
        # The largest group is counted and not listed: it is kept as a rank without a number.
        largest = {what: value for (whose, what), value in most.items() if whose == id(members)}
        others = (RasRank(-1, 0, largest),) if largest else ()
        whole.append(RasComm(name, 0, (*members.values(), *others)))
    return RasReport(version, tuple(whole))


def behind(comm: RasComm) -> dict[int, str]:
    """Ranks that launched less than others, or did not answer: what is known of each."""
    found: dict[int, str] = {}
    most: dict[str, int] = {}
    for one in comm.ranks:
        for name, count in one.counts.items():
            most[name] = max(most.get(name, 0), count)
    for one in comm.ranks:
        if one.rank < 0:
            continue
        if one.is_missing:
            found[one.rank] = "considered dead" if one.is_dead else "does not answer"
            continue
        less = [
            f"{name} {one.counts[name]:,} of {count:,}"
            for name, count in most.items() if one.counts.get(name, count) < count
        ]  # fmt: skip
        if less:
            found[one.rank] = f"launched {', '.join(less[:4])}"
    return found


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and len(first) < 10 and len(found) < RANKS:
            end = int(last) if last.isdecimal() else int(first)
            found += range(int(first), min(end, int(first) + RANKS) + 1)
    return found


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return min(max(value, 0), LARGEST)
