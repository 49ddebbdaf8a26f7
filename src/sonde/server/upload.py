# SPDX-License-Identifier: Apache-2.0
"""Sends the chunks of a capture file to a server, each again until it is acknowledged."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sonde import http_client
from sonde.errors import SinkError, UsageError
from sonde.input_files import open_input
from sonde.query import framing

REQUEST_S = 30.0
ANSWER_BYTES = 64 << 10
FIRST_WAIT_S = 0.5
"""Half of the longest wait before the first retry; it doubles with each."""
LONGEST_WAIT_S = 30.0
MOST_PAYLOAD_BYTES = 64 << 20
"""A longer one counts as damaged and is not read: it may be a hole in the file. No server takes a
quarter of it."""
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses after which a chunk is sent again."""


@dataclass(slots=True)
class Sent:
    """Numbers of chunks of a file: stored, stored before, damaged and not sent."""

    accepted: int = 0
    duplicates: int = 0
    damaged: int = 0


def waits(attempt: int, draw: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds before attempt `attempt` (1: the first retry): exponential, with full jitter."""
    return draw(0, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempt, 20)))


def upload(path: Path, url: str, node: str, token: str = "", give_up_s: float = 300.0) -> Sent:
    """Send a capture; `give_up_s`: how long each chunk is tried. Raises UsageError; SinkError where
    the server refuses or cannot be reached."""
    try:
        http_client.split_url(url)
    except ValueError as error:
        raise UsageError(f"no server's URL: {error}", "write http://HOST:PORT") from error
    headers = {"Content-Type": "application/octet-stream", "X-Sonde-Node": node}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    sent = Sent()
    with open_input(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        framing.check_file_header(file.read(framing.FILE_HEADER.size), str(path))
        for chunk in framing.chunks(file, size, lambda _, length: length <= MOST_PAYLOAD_BYTES):
            if isinstance(chunk, framing.BadChunk):
                sent.damaged += 1
                continue
            length = framing.CHUNK_HEADER.size + len(chunk.meta) + len(chunk.payload)
            position = file.tell()
            file.seek(chunk.end - length)
            body = file.read(length)
            file.seek(position)
            _send(url.rstrip("/") + "/v1/chunks", headers, body, give_up_s, sent)
    return sent


def _send(url: str, headers: dict[str, str], body: bytes, give_up_s: float, sent: Sent) -> None:
    ends = time.monotonic() + give_up_s
    attempt = 0
    while True:
        try:
            answer = http_client.request(
                "POST", url, deadline_s=REQUEST_S, max_bytes=ANSWER_BYTES, body=body,
                headers=headers, ours=True,
            )  # fmt: skip
        except ValueError as error:
            raise UsageError(f"no server's URL: {error}", "write http://HOST:PORT") from error
        except OSError as error:
            problem, again, after_s = str(error), True, 0.0
        else:
            if answer.status == 200:
                accepted, duplicates = _counts(answer.body)
                sent.accepted += accepted
                sent.duplicates += duplicates
                return
            problem = f"HTTP status {answer.status}: {answer.body[:200].decode(errors='replace')}"
            again, after_s = answer.status in _AGAIN, answer.retry_after_s
        attempt += 1
        wait = after_s + waits(attempt)
        if not again or time.monotonic() + wait > ends:
            raise SinkError(f"the server did not take a chunk: {problem}", "see the server's log")
        time.sleep(wait)


def _counts(body: bytes) -> tuple[int, int]:
    """(chunks accepted, duplicates) of an answer. Raises SinkError for an invalid answer."""
    try:
        found = json.loads(body)
        counts = found["accepted"], found["duplicates"]
    except (ValueError, KeyError, TypeError, RecursionError):
        counts = (-1, -1)
    if not all(type(count) is int and 0 <= count < 1 << 31 for count in counts):
        raise SinkError("the server's answer is no answer to chunks", "check the URL")
    return counts
