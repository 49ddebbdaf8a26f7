# SPDX-License-Identifier: Apache-2.0
"""Sends incidents of `sonde diagnose` to the URLs that were given, each in a separate thread."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sonde.export.layout import one_line
from sonde.model.rows import EventRow

if TYPE_CHECKING:
    from sonde.diagnose.incident import Incident
    from sonde.notify.poster import Poster
    from sonde.sinks.incidents import IncidentUploader

LOGS_PATH: Final = "/v1/logs"
"""OTLP's default path for log records."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name where incidents go."""
    add = parser.add_argument
    add("--webhook", metavar="URL", default="", help="post each incident there, as JSON")
    add("--alertmanager", metavar="URL", default="", help="raise an alert for each incident there")
    add("--otlp", metavar="URL", default="",
        help="push each incident as a log record to an OpenTelemetry collector")  # fmt: skip
    add("--server", metavar="URL", default="", help="store incidents at a Sonde server")
    add("--token-file", type=Path, metavar="FILE", help="the server's token")
    add("--node", metavar="NAME", default="", help="this machine's name at the server")


class IncidentExporters:
    """The exporters that the flags name."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises UsageError for an invalid URL, SinkError for a token that cannot be read."""
        self._host = args.node or platform.node()
        self._posters: list[tuple[Poster, Callable[[Incident, int], object]]] = []
        """With the function that makes the body: of an incident and what to add to its times for
        ns since 1970."""
        self._server: IncidentUploader | None = None
        if args.webhook:
            self._add(args.webhook, "", self._plain)
        if args.alertmanager:
            from sonde.notify import alertmanager

            self._add(args.alertmanager, alertmanager.PATH, self._alerts)
        if args.otlp:
            self._add(args.otlp, LOGS_PATH, self._log)
        if args.server:
            from sonde.cli.state_folder import state_folder
            from sonde.sinks.incidents import IncidentUploader

            spool = state_folder() / "incident-spool"
            self._server = IncidentUploader(args.server, self._host, spool, args.token_file)

    def _add(self, url: str, path: str, body: Callable[[Incident, int], object]) -> None:
        from sonde.notify.poster import Poster

        def log(text: str) -> None:
            print(f"sonde: {one_line(text)}", file=sys.stderr, flush=True)

        self._posters.append((Poster(url, path, log), body))

    def _plain(self, incident: Incident, offset_ns: int) -> object:
        from sonde.diagnose import outgoing

        return outgoing.document(incident, self._host, offset_ns)

    def _alerts(self, incident: Incident, offset_ns: int) -> object:
        from sonde.diagnose import outgoing

        return outgoing.alerts(incident, self._host, offset_ns)

    def _log(self, incident: Incident, offset_ns: int) -> object:
        from sonde import _native
        from sonde.diagnose import outgoing

        about = {"service.name": "sonde", "service.version": _native.VERSION}
        return outgoing.otlp_log(incident, self._host, offset_ns, about)

    def take(self, incident: Incident) -> None:
        """Hand an incident to all exporters; a change that is no fault is not sent. Returns at
        once."""
        if not incident.verdict.is_fault:
            return
        from sonde.notify.poster import wall_offset_ns
        from sonde.notify.texts import encoded

        offset_ns = wall_offset_ns()
        for poster, body in self._posters:
            poster.post(encoded(body(incident, offset_ns)))
        if self._server is not None:
            row = row_of(incident, self._host, offset_ns)
            end_ns = max(incident.explained_ns, incident.began_ns + 1)
            self._server.take(row, incident.began_ns, end_ns, offset_ns)

    def close(self) -> None:
        """Try for some seconds to deliver what is left."""
        for poster, _ in self._posters:
            poster.close()
        if self._server is not None:
            self._server.close()

    @property
    def losses(self) -> Mapping[str, int]:
        """Incidents that were not delivered, by the name of the loss."""
        left_out = sum(poster.left_out for poster, _ in self._posters)
        return {"incidents.posts": left_out, **(self._server.losses if self._server else {})}


def row_of(incident: Incident, host: str, offset_ns: int) -> EventRow:
    """An incident as a row of `event`, whose text is the incident as JSON."""
    from sonde.diagnose import outgoing
    from sonde.notify.texts import encoded

    text = encoded(outgoing.document(incident, host, offset_ns)).decode()
    value = float(incident.verdict.slowdown)
    return EventRow(incident.noticed_ns, "notice", "incident", incident.victim, 0, value, text)
