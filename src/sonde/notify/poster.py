# SPDX-License-Identifier: Apache-2.0
"""Posts small JSON bodies to one URL, in a separate thread.

Whatever the endpoint does, callers do not wait for it: the queue is bounded, a whole request has
one deadline and its answer a size limit, no redirect is followed. What cannot be delivered is
counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from sonde.errors import UsageError

MAX_QUEUED: Final = 64
"""Bodies that wait; more are not taken, and counted."""
MAX_BYTES: Final = 64 << 10
"""Of one body."""
REQUEST_S: Final = 5.0
"""From the name lookup to the last byte of the answer."""
ANSWER_BYTES: Final = 16 << 10
"""Limit of an answer; only its status is used."""
PAUSES_S: Final = (0.5, 2.0, 8.0)
"""Before each retry; after the last one the body is given up."""
CLOSE_S: Final = 3.0
"""How long `close` waits for the thread."""


class Poster:
    """Posts bodies to one URL, in the order in which they are given."""

    def __init__(
        self, url: str, path: str = "", log: Callable[[str], None] = lambda _: None
    ) -> None:
        """`path`: appended to a URL without a path. `log` is called with the first of several
        failures in a row. Raises UsageError for an invalid URL."""
        # Imported only where a URL is given: TLS takes a few MB.
        from sonde import http_client

        try:
            parts = http_client.split_url(url)
        except ValueError as error:
            raise UsageError(
                f"cannot post to {http_client.origin(url)}: {error}",
                "write http://HOST:PORT/PATH or https://…",
            ) from error
        self._url = url if parts.path.strip("/") or not path else url.rstrip("/") + path
        self._shown = http_client.origin(self._url)
        self._log = log
        self._queue: deque[tuple[bytes, Callable[[bool], None]]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self.posted = 0
        self.left_out = 0
        """Bodies that were not delivered: no room, too large, refused, or no answer in time."""
        self.error = ""
        """Why the last request failed; '' after a successful one."""
        self._thread = threading.Thread(target=self._run, name="sonde-post", daemon=True)
        self._thread.start()

    def post(self, body: bytes, done: Callable[[bool], None] = lambda _: None) -> None:
        """Hand a body over; returns at once. `done` is called with whether it was delivered: by the
        thread of the poster, or by the caller's where the body is not accepted. A body that waits
        when `close` gives up is counted, and its `done` is not called."""
        with self._changed:
            accepted = len(self._queue) < MAX_QUEUED and len(body) <= MAX_BYTES and not self._ended
            if accepted:
                self._queue.append((body, done))
                self._changed.notify()
            else:
                self.left_out += 1
        if not accepted:
            done(False)

    @property
    def has_room(self) -> bool:
        """Whether the queue takes a body now; where a single thread posts, it does so until that
        thread posts the next one."""
        with self._changed:
            return len(self._queue) < MAX_QUEUED and not self._ended

    def close(self) -> None:
        """Try to deliver what there is for `CLOSE_S`; the rest is lost, and counted."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        with self._changed:
            self.left_out += len(self._queue)
            self._queue.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._ended):
                    self._changed.wait()
                if not self._queue:
                    return
                body, done = self._queue.popleft()
            done(self._deliver(body))

    def _deliver(self, body: bytes) -> bool:
        """Send a body, with retries; True where it was taken."""
        for pause_s in (*PAUSES_S, None):
            is_refused = self._request(body)
            if is_refused is None:
                self.posted += 1
                return True
            if is_refused or pause_s is None or self._ended:
                break
            with self._changed:
                self._changed.wait_for(lambda: self._ended, pause_s)
        self.left_out += 1
        return False

    def _request(self, body: bytes) -> bool | None:
        """Send a body once. None: it was taken; True: another try would fail, too; False: it may be
        sent again."""
        from sonde import http_client

        try:
            answer = http_client.request(
                "POST",
                self._url,
                body=body,
                headers={"Content-Type": "application/json"},
                deadline_s=REQUEST_S,
                max_bytes=ANSWER_BYTES,
            )
        except (OSError, ValueError) as error:
            self._failed(str(error))
            return isinstance(error, ValueError)
        if 200 <= answer.status < 300:
            self.error = ""
            return None
        self._failed(f"HTTP status {answer.status}")
        return 300 <= answer.status < 500 and answer.status not in (408, 429)

    def _failed(self, error: str) -> None:
        if not self.error:
            self._log(f"{self._shown} does not take what is posted: {error}")
        self.error = error


def wall_offset_ns() -> int:
    """What to add to CLOCK_MONOTONIC for ns since 1970."""
    return time.time_ns() - time.monotonic_ns()
