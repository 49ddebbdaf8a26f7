# SPDX-License-Identifier: Apache-2.0
"""Sends chunks to a Sonde server, in a separate thread, through a spool on disk.

The agent's main thread hands chunks over and never waits for the server: `MAX_QUEUED` chunks at
most are between the two threads, and beyond that the oldest is dropped and counted. A chunk leaves
the spool when the server has acknowledged it. It may be sent twice; the server stores it once.

The server's answers state whether this agent is to collect. While there are none, because the
server is busy (Retry-After) or collection is paused, the agent asks each `SWITCH_S`. So an order
reaches it in any case, and the server knows that a paused agent lives.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import CaptureError, SinkError, UsageError
from sonde.input_files import open_input
from sonde.sinks.spool import Spool, SpooledChunk

if TYPE_CHECKING:
    from sonde.http_client import Response

LOG = logging.getLogger("sonde.agent")
PATH = "/v1/chunks"
SWITCH = "/v1/collection"
"""Path at which the server answers whether this agent is to collect."""
SWITCH_S = 10.0
"""Without another answer for about this long (20 % more or less), the agent asks there."""
SWITCH_REQUEST_S = 5.0
"""Deadline of that request."""
STATE = "X-Sonde-State"
"""Header of requests: `collecting` or `paused`."""
MAX_QUEUED = 16
"""Chunks that wait for the sending thread to put them into the spool."""
BATCH_BYTES = 1 << 20
BATCH_CHUNKS = 32
"""Limits of the chunks in one request."""
MAX_CHUNK_BYTES = 16 << 20
"""What a server takes in a request (`ServerLimits.body_bytes`, unless it is configured otherwise).
A larger chunk is not sent, since no server's answer to it need arrive, and the chunks behind it
would wait for ever. What makes chunks large, names of code, the agent bounds (`frame_texts`)."""
REQUEST_S = 30.0
"""Deadline of a request with chunks."""
CLOSE_S = 5.0
"""How long `close` waits for the last chunks to be acknowledged; the rest waits in the spool."""
ANSWER_BYTES = 64 << 10
"""Limit of an answer."""
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
"""Before retries: see `backoff_s`."""
_TOKEN_BYTES = 4_096
"""Read of the file with the token."""
_REFUSALS = frozenset({400, 413, 415, 422})
"""Statuses that mean that a chunk of the request will never be taken."""


class Outcome(Enum):
    """What became of a request."""

    TAKEN = "taken"
    REFUSED = "refused"
    """For good: a chunk in it is damaged or too large."""
    AGAIN = "again"
    """Not taken now: to be sent again."""


def backoff_s(attempt: int, draw: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds before attempt `attempt` (1: the first retry): exponential, with full jitter.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    return draw(0, min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(attempt, 20)))


def quiet_s(retry_after_s: float, draw: Callable[[float, float], float] = random.uniform) -> float:
    """How long no chunks are sent after an answer with Retry-After: between that time and 1.5 times
    that, by chance, so that agents that were refused together do not come back together."""
    return draw(retry_after_s, 1.5 * retry_after_s)


class ServerSink:
    """Takes chunks, and sends each until the server has acknowledged or refused it."""

    def __init__(self, url: str, node: str, spool: Spool, token_file: Path | None = None) -> None:
        """`node`: name of this machine, printable ASCII. Raises UsageError for a bad URL or name,
        SinkError where the token cannot be read."""
        # Imported only where a URL is configured: TLS takes a few MB.
        from sonde import http_client

        try:
            parts = http_client.split_url(url)
        except ValueError as error:
            raise UsageError(
                f"{http_client.shown(url)!r} is no server's URL: {error}", "write http://HOST:PORT"
            ) from error
        if not 0 < len(node) <= 253 or not node.isprintable() or not node.isascii():
            raise UsageError(f"{node!r} cannot be the name of a node", "give --node NAME")
        if token_file and http_client.is_in_the_clear(parts):
            raise UsageError("the token would cross the network in the clear", "write https://…")
        tls = None
        if parts.scheme == "https":
            import ssl

            tls = ssl.create_default_context()
        self._connection = http_client.Connection(parts.hostname or "", parts.port, tls, ours=True)
        self._base = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/octet-stream", "X-Sonde-Node": node}
        self._token_file = token_file
        self._read_token()
        self._spool = spool
        self._dropped_before = spool.dropped
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._one_by_one = 0
        """This many of the oldest chunks are sent one by one: one of them was refused in a request
        with several."""
        self.written_bytes = 0
        self.sent = self.refused = self.failures = 0
        """Chunks that the server took, and refused for good; requests that failed."""
        self._overrun = 0
        """Chunks that were dropped outside of the spool."""
        self.error = ""
        """Why the last request failed; '' after a successful one."""
        self.collects = True
        """What the server ordered last: whether this agent is to observe."""
        self._on_switch: Callable[[bool], None] = lambda _collects: None
        self._quiet_until_s = self._next_ask_s = 0.0
        """Times (CLOCK_MONOTONIC): until when no chunks are sent (Retry-After); when to ask whether
        to collect."""
        self._thread = threading.Thread(target=self._run, name="sonde-server", daemon=True)
        self._thread.start()

    def write(self, chunk: bytes) -> None:
        """Hand a chunk over; returns at once."""
        with self._changed:
            self.written_bytes += len(chunk)
            self._queue.append(chunk)
            if len(self._queue) > MAX_QUEUED:
                self._queue.popleft()
                self._overrun += 1
            self._changed.notify()

    def on_switch(self, call: Callable[[bool], None]) -> None:
        """Call this, in the sending thread, when the server wants collection to pause (False) or
        to go on (True)."""
        self._on_switch = call
        if not self.collects:
            call(False)

    def reconfigure(self, token_file: Path | None, spool_bytes: int) -> None:
        """Use another file with the token, and another bound of the spool. Raises SinkError where
        the token cannot be read; then nothing changes."""
        with self._changed:
            former, self._token_file = self._token_file, token_file
            try:
                self._read_token()
            except SinkError:
                self._token_file = former
                raise
            self._spool.most_bytes = spool_bytes

    def close(self) -> None:
        """Try to send what there is for `CLOSE_S`; the rest waits for the next start."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def losses(self) -> Mapping[str, int]:
        """Chunks that the server will not get since this object was made, by name of the loss."""
        return {
            "server.chunks_dropped": self._spool.dropped - self._dropped_before + self._overrun,
            "server.chunks_refused": self.refused,
        }

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the sending, by the names of the catalogue."""
        return {
            "sonde.agent.chunks_sent": float(self.sent),
            "sonde.agent.send_failures": float(self.failures),
            "sonde.agent.spool_bytes": float(self._spool.size_bytes),
            "sonde.agent.spool_chunks": float(len(self._spool)),
            "sonde.agent.paused": float(not self.collects),
        }

    def _run(self) -> None:
        attempt = 0
        due_s = 0.0
        while True:
            with self._changed:
                while not (self._queue or self._ended):
                    retry_s = [max(due_s, self._quiet_until_s)] * bool(self._spool)
                    left_s = min([self._next_ask_s, *retry_s]) - time.monotonic()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
                queued, ended = list(self._queue), self._ended
                self._queue.clear()
            unspooled = self._to_spool(queued)
            if attempt:
                self._spool.sync()
            now_s = time.monotonic()
            if now_s < self._quiet_until_s:
                self._overrun += len(unspooled)
            elif ended or now_s >= due_s or unspooled:
                attempt = 0 if self._send_all(unspooled) else attempt + 1
                due_s = time.monotonic() + backoff_s(attempt) if attempt else 0.0
            if not ended and time.monotonic() >= self._next_ask_s:
                self._ask_switch()
            if ended:
                self._spool.sync()
                self._connection.close()
                self._spool.close()
                return

    def _to_spool(self, chunks: list[bytes]) -> list[bytes]:
        """Put chunks into the spool. Returns those that the disk did not take."""
        left = []
        for chunk in chunks:
            try:
                self._spool.add(chunk)
            except SinkError as error:
                self.error = error.cause
                left.append(chunk)
        return left

    def _send_all(self, unspooled: list[bytes]) -> bool:
        """Send what is in the spool, and chunks that are not. True where nothing is left; chunks
        outside of the spool are dropped where that fails."""
        while chunks := self._spool.oldest(BATCH_BYTES, 1 if self._one_by_one else BATCH_CHUNKS):
            outcome = self._post_chunks(b"".join(one.content for one in chunks))
            if outcome is Outcome.AGAIN:
                self._overrun += len(unspooled)
                return False
            self._settle(chunks, outcome)
        for number, chunk in enumerate(unspooled):
            outcome = self._post_chunks(chunk)
            if outcome is Outcome.AGAIN:
                self._overrun += len(unspooled) - number
                return False
            self.refused += outcome is Outcome.REFUSED
            self.sent += outcome is Outcome.TAKEN
        return True

    def _settle(self, chunks: list[SpooledChunk], outcome: Outcome) -> None:
        """Remove chunks that were taken or refused; of several that were refused together, have
        each sent by itself."""
        if outcome is Outcome.REFUSED and len(chunks) > 1:
            self._one_by_one = len(chunks)
            return
        self._one_by_one = max(0, self._one_by_one - len(chunks))
        for one in chunks:
            self._spool.remove(one.number)
        if outcome is Outcome.TAKEN:
            self.sent += len(chunks)
        else:
            self.refused += 1

    def _post_chunks(self, body: bytes) -> Outcome:
        if len(body) > MAX_CHUNK_BYTES:
            self.error = f"a chunk of {len(body):,} bytes is more than a server takes"
            return Outcome.REFUSED
        try:
            answer = self._request("POST", PATH, body, REQUEST_S)
        except OSError as error:
            self.failures += 1
            self._note(error)
            return Outcome.AGAIN
        if answer.retry_after_s:
            self._quiet_until_s = time.monotonic() + quiet_s(answer.retry_after_s)
        if answer.status == 200:
            self.error = ""
            self._obey(answer.body)
            return Outcome.TAKEN
        self.failures += 1
        self.error = f"HTTP status {answer.status}"
        if answer.status in (401, 403):
            self._read_token_again()
        return Outcome.REFUSED if answer.status in _REFUSALS else Outcome.AGAIN

    def _ask_switch(self) -> None:
        """Ask whether to collect."""
        self._ask_later()
        try:
            answer = self._request("GET", SWITCH, b"", SWITCH_REQUEST_S)
        except OSError as error:
            self._note(error)
            return
        if answer.status == 200:
            self._obey(answer.body)
        elif answer.status in (401, 403):
            self._read_token_again()

    def _ask_later(self) -> None:
        self._next_ask_s = time.monotonic() + random.uniform(0.8, 1.2) * SWITCH_S

    def _request(self, method: str, path: str, body: bytes, deadline_s: float) -> Response:
        state = "collecting" if self.collects else "paused"
        return self._connection.request(
            method,
            self._base + path,
            body,
            self._headers | {STATE: state},
            deadline_s=deadline_s,
            max_bytes=ANSWER_BYTES,
        )

    def _note(self, error: OSError) -> None:
        """Remember why a request failed. Where a process of another user listens on the port, that
        is logged, once."""
        from sonde.http_client import StrangerListensError

        if isinstance(error, StrangerListensError) and self.error != str(error):
            LOG.warning("nothing is sent to the server: %s", error)
        self.error = str(error)

    def _obey(self, body: bytes) -> None:
        """Turn collection on or off as the server orders; a server whose answer has no order wants
        it on."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return
        if not isinstance(document, dict):
            return
        self._ask_later()
        collects = document.get("collect") is not False
        if collects != self.collects:
            self.collects = collects
            self._on_switch(collects)

    def _read_token_again(self) -> None:
        """Read the token again: it may have been replaced since."""
        try:
            self._read_token()
        except SinkError as error:
            self.error = error.cause

    def _read_token(self) -> None:
        if self._token_file is None:
            return
        try:
            with open_input(self._token_file) as file:
                token = file.read(_TOKEN_BYTES).decode("ascii", "replace").strip()
        except (OSError, CaptureError) as error:
            raise SinkError(
                f"the token in {self._token_file} cannot be read: {error}",
                "write it there: sonde token make --scope ingest",
            ) from error
        self._headers["Authorization"] = f"Bearer {token}"
