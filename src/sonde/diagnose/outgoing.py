# SPDX-License-Identifier: Apache-2.0
"""An incident for other systems: an OTLP log record, an alert of Alertmanager, plain JSON.

Names of processes and files are others' to choose: what goes out is printable and bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sonde.diagnose.incident import Candidate, Incident, Offender, RankReport
from sonde.notify import alertmanager
from sonde.notify.texts import iso as _iso
from sonde.notify.texts import number as _number
from sonde.notify.texts import plain as _text

CANDIDATES: Final = 3
"""Causes that are sent, the likeliest."""
EVIDENCE: Final = 6
"""Sentences of each."""
RANKS: Final = 16
"""Of a stalled job, those that are missing first."""
FRAMES: Final = 32
"""Of a missing rank's stack."""
WARN: Final = 13
"""Severity of OpenTelemetry's log data model."""
FIRES_S: Final = 300
"""An alert ends this many seconds after its incident was explained, unless another incident with
the same labels prolongs it before."""


def document(incident: Incident, host: str, wall_offset_ns: int) -> dict[str, Any]:
    """The JSON of a webhook. `wall_offset_ns`: added to CLOCK_MONOTONIC it gives nanoseconds since
    1970."""
    verdict = incident.verdict
    return {
        "version": 1,
        "kind": "incident" if verdict.is_fault else "change",
        "host": _text(host),
        "began": _iso(incident.began_ns + wall_offset_ns),
        "noticed": _iso(incident.noticed_ns + wall_offset_ns),
        "explained": _iso(incident.explained_ns + wall_offset_ns),
        "pid": incident.victim,
        "process": _text(incident.victim_name),
        "owner": _text(incident.victim_owner),
        "noticed_by": [_text(it) for it in incident.noticed_by[:EVIDENCE]],
        "cause": str(verdict.cause),
        "slowdown": _number(verdict.slowdown),
        "lost": {_text(part): _number(share) for part, share in list(verdict.lost.items())[:32]},
        "change": str(verdict.change) if verdict.change is not None else None,
        "candidates": [_candidate(it) for it in verdict.candidates[:CANDIDATES]],
        "ranks": [_rank(it) for it in _missing_first(verdict.ranks)[:RANKS]],
    }


def otlp_log(
    incident: Incident, host: str, wall_offset_ns: int, resource: Mapping[str, str]
) -> dict[str, Any]:
    """An ExportLogsServiceRequest (OTLP 1.x, JSON encoding) with one record."""
    first = incident.verdict.candidates[0] if incident.verdict.candidates else None
    values: dict[str, str | int | float] = {
        "sonde.incident.cause": str(incident.verdict.cause),
        "sonde.incident.slowdown": _number(incident.verdict.slowdown),
        "process.pid": incident.victim,
        "process.executable.name": _text(incident.victim_name),
        "sonde.owner": _text(incident.victim_owner),
    }
    if first is not None and (who := first.offender) is not None:
        values |= {
            "sonde.incident.offender.pid": who.pid,
            "sonde.incident.offender.name": _text(who.name),
            "sonde.incident.offender.owner": _text(who.owner),
        }
    record = {
        "timeUnixNano": str(incident.began_ns + wall_offset_ns),
        "observedTimeUnixNano": str(incident.explained_ns + wall_offset_ns),
        "severityNumber": WARN,
        "severityText": "WARN",
        "eventName": "sonde.incident",
        "body": {"stringValue": summary(incident)},
        "attributes": _attributes(values),
    }
    about = {"host.name": _text(host), **resource}
    return {
        "resourceLogs": [
            {
                "resource": {"attributes": _attributes(about)},
                "scopeLogs": [{"scope": {"name": "sonde.diagnose"}, "logRecords": [record]}],
            }
        ]
    }


def alerts(incident: Incident, host: str, wall_offset_ns: int) -> list[dict[str, Any]]:
    """PostableAlerts of Alertmanager's API version 2."""
    verdict = incident.verdict
    labels = {
        "alertname": "SondeIncident",
        "severity": "warning",
        "instance": _text(host),
        "cause": str(verdict.cause),
        "process": _text(incident.victim_name),
        "pid": str(incident.victim),
    }
    if incident.victim_owner:
        labels["owner"] = _text(incident.victim_owner)
    evidence = verdict.candidates[0].evidence if verdict.candidates else ()
    annotations = {
        "summary": summary(incident),
        "description": "; ".join(_text(it) for it in evidence[:EVIDENCE]),
    }
    ends_ns = incident.explained_ns + wall_offset_ns + FIRES_S * 1_000_000_000
    return [alertmanager.postable(labels, annotations, incident.began_ns + wall_offset_ns, ends_ns)]


def summary(incident: Incident) -> str:
    """One line. A verdict has `ranks` only where a job has stalled."""
    verdict = incident.verdict
    state = "makes no progress with its job" if verdict.ranks else "is slower"
    text = f"{incident.victim_name} ({incident.victim}) {state}: {verdict.cause}"
    first = verdict.candidates[0] if verdict.candidates else None
    if first is not None and first.offender is not None:
        text += f", by {first.offender.name} ({first.offender.pid})"
    return _text(text)


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "cause": str(one.cause),
        "share": _number(one.share),
        "evidence": [_text(it) for it in one.evidence[:EVIDENCE]],
        "against": [_text(it) for it in one.against[:EVIDENCE]],
        "offender": _offender(one.offender) if one.offender is not None else None,
        "next_step": _text(one.next_step),
    }


def _missing_first(ranks: Iterable[RankReport]) -> list[RankReport]:
    return sorted(ranks, key=lambda it: not it.is_missing)


def _rank(one: RankReport) -> dict[str, Any]:
    stack = one.stack[:FRAMES] if one.is_missing else ()
    return {
        "rank": one.rank,
        "pid": one.pid,
        "missing": one.is_missing,
        "doing": _text(one.doing),
        "line": _text(one.line),
        "stack": [_text(it) for it in stack],
    }


def _offender(who: Offender) -> dict[str, Any]:
    return {
        "pid": who.pid,
        "process": _text(who.name),
        "owner": _text(who.owner),
        "evidence": _text(who.evidence),
        "share": _number(who.share),
    }


def _attributes(values: Mapping[str, str | int | float]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in _filled(values)]


def _filled(values: Mapping[str, str | int | float]) -> Iterable[tuple[str, str | int | float]]:
    return ((name, value) for name, value in values.items() if value != "")


def _value(value: str | int | float) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}
