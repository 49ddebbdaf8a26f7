# SPDX-License-Identifier: Apache-2.0
"""Scores of trials: delays, causes, offenders, false alarms; by cause, macro-averaged."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LATE_S = 1.5
"""After the end of a fault an alarm is still about it."""
WARM_S = 0.6
"""After the next trial's processes are warm an alarm is still about that."""
SHARED = ("device-contention", "dram-contention", "pcie-contention")
HURT = 0.9
"""Pace by what it was, below which a fault has had an effect: others are reported apart."""

Line = dict[str, Any]


def is_fault(incident: Line) -> bool:
    """Whether it is an alarm."""
    return incident["verdict"].get("change") is None


def alarm_of(trial: Line) -> Line | None:
    """The first alarm on the victim in the time of the fault."""
    for incident in trial["incidents"]:
        if (
            is_fault(incident)
            and incident["victim"] in trial["victim_pids"]
            and incident["noticed_ns"] >= trial["onset_ns"]
            and incident["noticed_ns"] <= trial["end_ns"] + LATE_S * 1e9
        ):
            return dict(incident)
    return None


def false_alarms(trial: Line) -> list[Line]:
    """Alarms on the victim before the onset, or at any time of a benign trial; without those
    that name another user of its device while the next trial's processes were one."""
    benign = trial["fault"].startswith("benign")
    return [
        it
        for it in trial["incidents"]
        if is_fault(it)
        and it["victim"] in trial["victim_pids"]
        and (benign or it["noticed_ns"] < trial["onset_ns"])
        and not _is_of_next(trial, it)
    ]


def _is_of_next(trial: Line, alarm: Line) -> bool:
    """Whether an alarm is right about the processes of the next trial on the device."""
    until_ns = trial.get("quiet_ns", 0) + WARM_S * 1e9
    is_shared = trial.get("ready_ns", 0) <= alarm["noticed_ns"] <= until_ns
    return is_shared and causes_of(alarm)[0] in SHARED


def causes_of(alarm: Line) -> list[str]:
    """Named ones, likeliest first."""
    return [candidate["cause"] for candidate in alarm["verdict"]["candidates"]]


def truth_of(trial: Line) -> list[str]:
    """The causes that are right."""
    return trial.get("truth") or [trial["fault"]]


def offender_of(alarm: Line) -> int | None:
    """The pid named for the likeliest cause."""
    candidates = alarm["verdict"]["candidates"]
    who = candidates[0].get("offender") if candidates else None
    return who["pid"] if who else None


def slowdown(trial: Line) -> float:
    """By the victim's own steps."""
    before, during = trial["pace_before"], trial["pace_during"]
    return float(before / max(during, 0.01 * before)) if before else math.nan


def one_line(trial: Line) -> str:
    """For the user who watches a run."""
    alarm = alarm_of(trial)
    text = f"{trial['fault']:20} {trial['victim']:15} {trial['level']} ×{slowdown(trial):6.2f}"
    if trial["trouble"]:
        return f"{text} trouble: {trial['trouble']}"
    if alarm is None:
        text += " no alarm"
    else:
        found_s = (alarm["noticed_ns"] - trial["onset_ns"]) / 1e9
        more_s = (alarm["explained_ns"] - alarm["noticed_ns"]) / 1e9
        right = "ok" if causes_of(alarm)[0] in truth_of(trial) else "WRONG"
        text += f" {found_s:5.2f}+{more_s:4.2f} s {causes_of(alarm)[:3]} {right}"
        if trial["culprits"]:
            text += f" offender {'ok' if offender_of(alarm) in trial['culprits'] else 'none' if offender_of(alarm) is None else 'WRONG'}"  # noqa: E501
    false = [causes_of(it)[0] for it in false_alarms(trial)]
    return f"{text} others {trial['others_cpu']:.2f}" + (f" FALSE {false}" if false else "")


def usable(trial: Line) -> bool:
    """Whether it was done as meant."""
    return not trial["trouble"] and trial["pace_before"] > 0


def scores(trials: Sequence[Line]) -> dict[str, Any]:
    """All figures."""
    good = [trial for trial in trials if usable(trial)]
    faults = [trial for trial in good if not trial["fault"].startswith("benign")]
    hurt = [trial for trial in faults if slowdown(trial) * HURT >= 1]
    by_cause: dict[str, list[Line]] = defaultdict(list)
    by_victim: dict[str, list[Line]] = defaultdict(list)
    for trial in hurt:
        by_cause[trial["fault"]].append(trial)
        by_victim[trial["victim"]].append(trial)
    table = {cause: _of_cause(found) for cause, found in sorted(by_cause.items())}
    rows = list(table.values())
    hours = sum(trial["onset_ns"] - trial["start_ns"] for trial in good) / 3.6e12
    false = sum(len(false_alarms(trial)) for trial in good)
    with_culprit = [trial for trial in hurt if trial["culprits"]]
    found = [alarm for trial in hurt if (alarm := alarm_of(trial)) is not None]
    delays = [_delay(trial) for trial in hurt if alarm_of(trial) is not None]
    explained = [(it["explained_ns"] - it["noticed_ns"]) / 1e9 for it in found]
    return {
        "trials": len(trials),
        "usable": len(good),
        "without_effect": len(faults) - len(hurt),
        "faults": len(hurt),
        "benign": len(good) - len(faults),
        "detected": _mean([row["detected"] for row in rows]),
        "top1": _mean([row["top1"] for row in rows]),
        "top3": _mean([row["top3"] for row in rows]),
        "detection_s": _quantiles(delays),
        "explanation_s": _quantiles(explained),
        "offender_right": sum(_offender(it) == "right" for it in with_culprit),
        "offender_wrong": sum(_offender(it) == "wrong" for it in hurt),
        "offender_of": len(with_culprit),
        "as_part": sum(bool(it.get("part_of")) for it in found),
        "false_alarms": false,
        "false_alarms_as_part": sum(
            bool(it.get("part_of")) for trial in good for it in false_alarms(trial)
        ),
        "quiet_hours": round(hours, 3),
        "benign_alarmed": sum(bool(false_alarms(it)) for it in good if it not in faults),
        "agent_cpu_median": _median([it["agent_cpu"] for it in good if it["agent_cpu"] >= 0]),
        "others_cpu_median": _median([it["others_cpu"] for it in good]),
        "causes": table,
        "victims": {name: _of_cause(its) for name, its in sorted(by_victim.items())},
    }  # fmt: skip


def _of_cause(trials: list[Line]) -> dict[str, Any]:
    alarms = [(trial, alarm_of(trial)) for trial in trials]
    found = [(trial, alarm) for trial, alarm in alarms if alarm is not None]
    named: dict[str, int] = defaultdict(int)
    for _, alarm in alarms:
        named[causes_of(alarm)[0] if alarm is not None else "no alarm"] += 1
    return {
        "trials": len(trials),
        "detected": len(found) / len(trials),
        "top1": sum(causes_of(it)[0] in truth_of(trial) for trial, it in found) / len(trials),
        "top3": sum(bool({*truth_of(trial)} & {*causes_of(it)[:3]}) for trial, it in found)
        / len(trials),
        "detection_s": _quantiles([_delay(trial) for trial, _ in found]),
        "named": dict(sorted(named.items(), key=lambda it: -it[1])),
    }


def _delay(trial: Line) -> float:
    alarm = alarm_of(trial)
    assert alarm is not None
    return float(alarm["noticed_ns"] - trial["onset_ns"]) / 1e9


def _offender(trial: Line) -> str:
    alarm = alarm_of(trial)
    who = offender_of(alarm) if alarm is not None else None
    if who is None:
        return "none"
    return "right" if who in trial["culprits"] else "wrong"


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 4) if values else 0.0


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4) if values else 0.0


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ranked = sorted(values)
    last = ranked[min(len(ranked) - 1, math.ceil(0.95 * len(ranked)) - 1)]
    return {"median": round(statistics.median(ranked), 3), "p95": round(last, 3)}


def brief(trial: Line) -> Line:
    """A trial without its rows: what was done, and what was reported."""
    alarm = alarm_of(trial)
    found: Line = {
        "trial": f"{trial['fault']}/{trial['victim']}/{trial['level']}/{trial['seed']}",
        "slowdown": round(slowdown(trial), 2),
        "others_cpu": trial["others_cpu"],
        "agent_cpu": trial["agent_cpu"],
        "false_alarms": [causes_of(it)[0] for it in false_alarms(trial)],
    }
    if trial["trouble"]:
        found["trouble"] = trial["trouble"]
    if alarm is not None:
        found |= {
            "detection_s": round(_delay(trial), 3),
            "explanation_s": round((alarm["explained_ns"] - alarm["noticed_ns"]) / 1e9, 3),
            "causes": causes_of(alarm),
            "offender": _offender(trial),
            "as_part": bool(alarm.get("part_of")),
        }
    return found


def table(found: Line) -> list[str]:
    """Rows of a page: cause, trials, detected, named right, delays, what else was named."""
    rows = []
    for cause, its in found["causes"].items():
        delays = its["detection_s"]
        delay = f"{delays['median']:.2f}" if delays else "–"
        named = ", ".join(
            f"{name} {count}" for name, count in its["named"].items() if name != cause
        )
        rows.append(
            f"| {cause} | {its['trials']} | {its['detected']:.0%} | {its['top1']:.0%} | {delay} | "
            f"{named or '–'} |"
        )
    return rows


def main(files: Sequence[Path], to: Path | None) -> None:
    """Print the scores of files of trials."""
    trials = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = scores(trials)
    found["each"] = [brief(trial) for trial in trials]
    if to is not None:
        to.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))
    print(json.dumps({name: it for name, it in found.items() if not isinstance(it, list)}))
