# SPDX-License-Identifier: Apache-2.0
"""What a step on another kernel showed, held to what its program reports of itself.

A cell is `ok`, `refused` (Sonde reported why and what to do, and changed nothing) or `failed`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonde.model.profile import ProfileKind
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.memory import memory as memory_of
from sonde.query.session import Session

OK, REFUSED, FAILED = "ok", "refused", "failed"
TOLERANCE = 0.05
"""What an emulated machine's figures may differ from the truth."""
WHOLE, RIGHT = 0.95, 0.99
"""Of the stacks, once a program has run for so long:"""
WARM_S = 4
"""Until its tables are made, once, frame pointers lead, and an emulated machine takes seconds."""

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One feature on one kernel."""

    status: str
    detail: str


class WrongError(Exception):
    """It differs from the truth."""


def hold(condition: object, text: str) -> None:
    if not condition:
        raise WrongError(text)


def close(what: str, seen: float, truth: float, tolerance: float = TOLERANCE) -> str:
    """Both figures; raises `WrongError` where they differ by more than the tolerance."""
    text = f"{what} {seen:.3g} of {truth:.3g}"
    hold(truth and abs(seen - truth) <= tolerance * truth, text)
    return text


STACKS_AND_THEIR_LIKE = frozenset({"stacks", "python", "dump", "device_time"})


def limit_of(name: str, doctor: Step | None) -> str:
    """What a step needs and this machine's processors lack, by `sonde doctor`; '' for nothing."""
    if doctor is None or name not in STACKS_AND_THEIR_LIKE:
        return ""
    findings = json.loads(doctor["out"])["findings"]
    lacking = [it for it in findings if it["name"] == "processors" and it["status"] == "warn"]
    return f"doctor: {lacking[0]['detail']}. Remedy: {lacking[0]['remedy']}" if lacking else ""


def judge(name: str, step: Step | None, folder: Path, limit: str = "") -> Cell:
    """The cell of one step, with its capture in `folder`, if it left one.

    `limit`: what doctor reported that it cannot do here; a step that falls short is then refused.
    """
    if step is None:
        return Cell(FAILED, "not reached: the machine hung or ended before")
    if step.get("kernel"):
        return Cell(FAILED, f"the kernel logged: {step['kernel'][0]}")
    if step["code"] != 0 and name != "doctor":
        return _without(step)
    try:
        return Cell(OK, JUDGES[name](step, folder))
    except WrongError as wrong:
        return Cell(REFUSED, f"{limit} Seen: {wrong}.") if limit else Cell(FAILED, str(wrong))
    except Exception as error:
        return Cell(FAILED, f"{type(error).__name__}: {error}")


def _without(step: Step) -> Cell:
    """A command that did not do it: a refusal has its remedy."""
    text = step["err"].strip()
    found = re.search(r"sonde: (.*)\n\s+remedy: (.*)", text)
    if found is None or "Traceback" in text or "a bug in Sonde" in text:
        last = text.splitlines()[-1:] or ["nothing"]
        return Cell(FAILED, f"exit code {step['code']}: {last[0]}")
    return Cell(REFUSED, f"{found[1]}. Remedy: {found[2]}")


def doctor(step: Step, folder: Path) -> str:
    outcome = json.loads(step["out"])
    lacking = [it for it in outcome["findings"] if it["status"] in ("warn", "fail")]
    names = ", ".join(it["name"] for it in lacking) or "nothing"
    verb = "can record" if outcome["can_record"] else "cannot record"
    return f"{verb}; lacking: {names}"


def _cpu(session: Session, pid: int) -> tuple[int, float]:
    rows = session.rows(
        "SELECT coalesce(sum(weight_count), 0), coalesce(sum(weight_ns), 0) / 1e9 FROM sample"
        " WHERE kind = 'cpu' AND pid = ?",
        [pid],
    )
    return int(rows[0][0]), float(rows[0][1])


def _chance(count: int) -> float:
    """What a figure of N samples may differ from the truth: three standard deviations."""
    return max(TOLERANCE, 3 / math.sqrt(max(count, 1)))


def _share(step: Step) -> tuple[int, float, float]:
    program = step["program"]
    truth = json.loads(program["out"])
    return program["pid"], truth["three_quarters"], truth["one_quarter"]


def samples(step: Step, folder: Path) -> str:
    session = _session(folder, "samples")
    pid, much, little = _share(step)
    count, seconds = _cpu(session, pid)
    where = queries.Where(pids=[pid])
    used = {
        it.function: it.total_count
        for it in queries.top_functions(session, ProfileKind.ON_CPU, where)
    }
    ours = used.get("three_quarters", 0) + used.get("one_quarter", 0)
    hold(ours, "its functions are not in it")
    share = used["three_quarters"] / ours
    return (
        f"{close('CPU seconds', seconds, much + little, _chance(count))}; "
        f"{close('share of a function', share, much / (much + little), _chance(count))}"
    )


def default(step: Step, folder: Path) -> str:
    session = _session(folder, "default")
    pid, much, little = _share(step)
    count, seconds = _cpu(session, pid)
    waited = session.rows("SELECT count(DISTINCT pid) FROM activity WHERE kind = 'blocked'")[0][0]
    hold(waited, "no waits")
    text = close("CPU seconds", seconds, much + little, _chance(count))
    return f"{text}, waits of {waited} processes"


def _walked(folder: Path, name: str) -> list[tuple[list[Mapping[str, Any]], bool, int]]:
    """(user frames from the entry on, whole, samples) of the busiest process."""
    tables = read(folder / f"{name}.sonde").tables
    rows = [row for row in tables["sample"].to_pylist() if row["kind"] == "cpu"]
    by_pid: Counter[int] = Counter()
    for row in rows:
        by_pid[row["pid"]] += row["weight_count"]
    hold(by_pid, "no samples")
    ((pid, _),) = by_pid.most_common(1)
    weight: Counter[int] = Counter()
    began_ns = min(row["time_ns"] for row in rows if row["pid"] == pid)
    for row in rows:
        if row["pid"] == pid and row["time_ns"] > began_ns + WARM_S * 1e9:
            weight[row["stack_id"]] += row["weight_count"]
    frames = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    stacks_ = {row["stack_id"]: row for row in tables["stack"].to_pylist()}
    found = []
    for stack, count in weight.items():
        row = stacks_.get(stack, {"frame_ids": [], "complete": False})
        path = [frames[it] for it in reversed(row["frame_ids"])]
        found.append(([it for it in path if it["kind"] != "kernel"], row["complete"], count))
    return found


def _whole(
    found: list[tuple[list[Mapping[str, Any]], bool, int]], kind: str, leaf: str, callers: set[str]
) -> str:
    """Whole stacks, and of those that end in `leaf`, those whose caller is one that the program
    has."""
    total = sum(count for _, _, count in found)
    whole = sum(count for _, is_whole, count in found if is_whole)
    right = ended = 0
    for frames, is_whole, count in found:
        names = [
            it["function"].removesuffix(".cold").rpartition(".")[2]
            for it in frames
            if it["kind"] == kind
        ]
        if is_whole and names[-1:] == [leaf]:
            ended += count
            right += count * (len(names) > 1 and names[-2] in callers)
    hold(total, f"no samples after its first {WARM_S} s")
    hold(ended, f"no whole stack ends in {leaf} ({whole} of {total} whole)")
    text = f"{whole / total:.1%} of {total} whole, {right / ended:.1%} of these right"
    hold(whole / total >= WHOLE and right / ended >= RIGHT, text)
    return text


def stacks(step: Step, folder: Path) -> str:
    callers = {
        "recurse", "catcher", "thrower", "variable_frame", "realigned", "compare", "handler_work",
    }  # fmt: skip
    return _whole(_walked(folder, "stacks"), "user", "spin", callers)


def python(step: Step, folder: Path) -> str:
    callers = {
        "key", "generate", "__init__", "__eq__", "add", "recurse", "coroutine",
    }  # fmt: skip
    return _whole(_walked(folder, "python"), "python", "leaf", callers)


def waits(step: Step, folder: Path) -> str:
    session = _session(folder, "waits")
    truth = json.loads(step["program"]["out"])
    outcome = []
    for thread, reason in (("sleeper", "sleep"), ("futex_waiter", "futex"),
                           ("pipe_reader", "read"), ("starved", "preempted")):  # fmt: skip
        tid, seconds, _ = truth[thread]
        kinds = "('runqueue')" if thread == "starved" else "('blocked', 'runqueue')"
        rows = session.rows(
            "SELECT coalesce(sum(ns), 0) / 1e9 FROM activity"
            f" WHERE tid = ? AND name = ? AND kind IN {kinds}",
            [tid, reason],
        )
        if thread == "futex_waiter":
            # It waits for the others to be there, too; and its own clock runs on while it works.
            hold(rows[0][0] >= 0.85 * seconds, f"futex {rows[0][0]:.3g} of {seconds:.3g}")
        else:
            # Before and after its work, too, a thread may be pushed aside.
            tolerance = 3 * TOLERANCE if thread == "starved" else TOLERANCE
            outcome.append(close(reason, rows[0][0], seconds, tolerance))
    return ", ".join(outcome) + " s"


def device_calls(step: Step, folder: Path) -> str:
    session = _session(folder, "device_calls")
    lines = [line.split() for line in step["program"]["out"].splitlines() if " " in line]
    truth = {name: (int(count), int(size)) for name, count, size in lines}
    hold(truth, f"the program did nothing: {step['program']['err']}")
    rows = session.rows(
        'SELECT name, CAST(sum("count") AS BIGINT), CAST(sum(bytes) AS BIGINT) FROM activity'
        " WHERE kind = 'device' AND pid = ? GROUP BY name",
        [step["program"]["pid"]],
    )
    seen = {name: (count, size) for name, count, size in rows}
    for name, expected in truth.items():
        hold(seen.get(name) == expected, f"{name}: {seen.get(name)}, not {expected}")
    calls = sum(count for count, _ in truth.values())
    return f"all of {calls} calls of {len(truth)} functions, to the byte"


def device_time(step: Step, folder: Path) -> str:
    session = _session(folder, "device_time")
    rows = session.rows("SELECT name, count(*), sum(weight) FROM device_run GROUP BY name")
    names = {name for name, _, _ in rows}
    hold({"longer"} <= names, f"seen: {sorted(names)}")
    return f"{sum(count for _, count, _ in rows)} launches timed, of {', '.join(sorted(names))}"


def attach(step: Step, folder: Path) -> str:
    outcome = json.loads(step["out"])
    hold(step["alive"], "the program is dead")
    hold(step["loaded"], "the library is not mapped")
    hold(step["left"]["code"] == 0, f"detach: {step['left']['err']}")
    return f"loaded, {outcome['state']}; left again; the program lives on"


def dump(step: Step, folder: Path) -> str:
    threads = json.loads(step["out"])["threads"]
    hold(threads, "no threads")
    names = [it["function"] for it in threads[0]["frames"]]
    hold(all(it["is_whole"] for it in threads), f"not whole: {names}")
    hold("<module>" in names, f"no Python frame: {names}")
    return f"{len(threads)} thread, {len(names)} frames, Python's among them"


def usage(step: Step, folder: Path) -> str:
    session = _session(folder, "usage")
    pid, much, little = _share(step)
    rows = queries.usage(session, queries.Where(pids=[pid]))
    hold(rows, "no usage")
    return close("CPU seconds", rows[0].cpu_ns / 1e9, much + little)


def syscalls(step: Step, folder: Path) -> str:
    session = _session(folder, "syscalls")
    rows = session.rows(
        'SELECT name, CAST(sum("count") AS BIGINT) FROM activity'
        " WHERE kind = 'syscall' AND pid = ? AND name IN ('read', 'write') GROUP BY name",
        [step["program"]["pid"]],
    )
    seen = dict(rows)
    hold(all(20000 <= seen.get(it, 0) < 20100 for it in ("read", "write")), str(seen))
    return f"{seen['read']} reads, {seen['write']} writes, of 20000 each"


def memory(step: Step, folder: Path) -> str:
    session = _session(folder, "memory")
    rows = memory_of(session, queries.Where(pids=[step["program"]["pid"]]))
    hold(rows, "no rows")
    return close("MiB mapped", rows[0].mapped_bytes / 2**20, 100.0)


def _session(folder: Path, name: str) -> Session:
    return Session(read(folder / f"{name}.sonde"))


JUDGES: dict[str, Callable[[Step, Path], str]] = {
    "doctor": doctor,
    "default": default,
    "samples": samples,
    "stacks": stacks,
    "python": python,
    "waits": waits,
    "device_calls": device_calls,
    "device_time": device_time,
    "attach": attach,
    "dump": dump,
    "usage": usage,
    "syscalls": syscalls,
    "memory": memory,
}
