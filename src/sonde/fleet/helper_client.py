# SPDX-License-Identifier: Apache-2.0
"""The leader's way to the helper."""

from __future__ import annotations

import queue
import ssl
from urllib.parse import urlsplit

from sonde.fleet.aggregator import HelperAway, Refused
from sonde.fleet.asking import ask, most_of_answer
from sonde.fleet.task import Task
from sonde.http_client import Connection

_CONNECTIONS = 2
_HELPER_S = 180.0  # for a whole job: some 20 MB there, an answer back
_WORDS_BYTES = 500  # of a refusal


class HelperClient:
    """The leader's connections to the helper, kept open: while it works on one request, the next
    is on its way, so that it need not wait for the leader.
    """

    def __init__(
        self, task: Task, token: str, tls: ssl.SSLContext, timeout_s: float = _HELPER_S
    ) -> None:
        url = urlsplit(task.helper_url)
        self._task, self._token, self._timeout_s = task, token, timeout_s
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for _ in range(_CONNECTIONS):
            self._idle.put(Connection(url.hostname or "", url.port, tls))

    def post(self, path: str, body: bytes) -> bytes:
        connection = self._idle.get()
        try:
            status, answer = self._ask(connection, path, body)
        finally:
            self._idle.put(connection)
        if status == 200:
            return answer
        if status >= 500 or status in (401, 404):  # can be repaired: not dropped
            raise HelperAway(f"status {status}")
        reason, _, detail = answer[:_WORDS_BYTES].decode("utf-8", "replace").partition(": ")
        raise Refused(reason, detail)

    def _ask(self, connection: Connection, path: str, body: bytes) -> tuple[int, bytes]:
        """(status, answer). A connection that was open may be none any more: who idles is hung up
        on. Then it is asked again on a new one; the helper does nothing twice.
        """
        while True:
            kept = connection.is_open
            try:
                return ask(
                    connection,
                    self._task,
                    self._token,
                    path,
                    body,
                    deadline_s=self._timeout_s,
                    most_bytes=most_of_answer(self._task, body),
                )
            except OSError as error:
                if not (kept and isinstance(error, (ConnectionError, ssl.SSLEOFError))):
                    raise HelperAway(str(error)) from error
