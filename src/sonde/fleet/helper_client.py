# SPDX-License-Identifier: Apache-2.0
"""The leader's client for the helper."""

from __future__ import annotations

import queue
import ssl
from urllib.parse import urlsplit

from sonde.fleet.aggregator import HelperUnavailable, Refused
from sonde.fleet.aggregator_request import max_answer_bytes, post_request
from sonde.fleet.refusals import FINAL_FOR_JOB, FINAL_FOR_RELEASE, STATUS_OF_REASON, STILL_OPEN
from sonde.fleet.task import Task
from sonde.http_client import Connection

_CONNECTIONS = 2
"""While the helper works on one request, the next is already on its way."""
_HELPER_S = 180.0
"""Deadline of a request: a job of some 20 MB there, an answer back."""
_MAX_REASON_BYTES = 500  # of a refusal; the rest of a longer text is left out
_PASSED_ON = {"jobs": FINAL_FOR_JOB, "releases": FINAL_FOR_RELEASE | {STILL_OPEN}}
"""By path: the reasons that are raised as Refused; with another, the helper is unavailable. A batch
that is still open is for the collector to know.
"""


class HelperClient:
    """Persistent connections to the helper. Thread-safe."""

    def __init__(
        self, task: Task, token: str, tls: ssl.SSLContext, timeout_s: float = _HELPER_S
    ) -> None:
        url = urlsplit(task.helper_url)
        self._task, self._token, self._timeout_s = task, token, timeout_s
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for _ in range(_CONNECTIONS):
            self._idle.put(Connection(url.hostname or "", url.port, tls))

    def post(self, path: str, body: bytes) -> bytes:
        """As `aggregator.Post`."""
        connection = self._idle.get()
        try:
            status, answer = self._post(connection, path, body)
        finally:
            self._idle.put(connection)
        if status == 200:
            return answer
        reason, _, detail = answer[:_MAX_REASON_BYTES].decode("utf-8", "replace").partition(": ")
        if not 400 <= status < 500 or reason not in _PASSED_ON[path]:
            known = f" ({reason})" if reason in STATUS_OF_REASON else ""
            raise HelperUnavailable(f"status {status}{known}")
        raise Refused(reason, detail)

    def _post(self, connection: Connection, path: str, body: bytes) -> tuple[int, bytes]:
        """(status, answer). A persistent connection may have been closed by the helper; the request
        is then repeated on a new one, which is safe: the helper does no job twice.
        """
        while True:
            was_open = connection.is_open
            try:
                return post_request(
                    connection,
                    self._task,
                    self._token,
                    path,
                    body,
                    deadline_s=self._timeout_s,
                    max_bytes=max_answer_bytes(self._task, body),
                )
            except OSError as error:
                if not (was_open and isinstance(error, (ConnectionError, ssl.SSLEOFError))):
                    raise HelperUnavailable(str(error)) from error
