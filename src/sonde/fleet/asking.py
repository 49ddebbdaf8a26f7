# SPDX-License-Identifier: Apache-2.0
"""One authorised request to an aggregator, by the leader or the collector."""

from __future__ import annotations

from sonde.fleet.task import Task
from sonde.http_client import Connection

_WORDS_BYTES = 4096
"""Of a refusal: an answer may always be as long."""


def most_of_answer(task: Task, body: bytes) -> int:
    """Bytes of an honest answer by the helper, at most: a reply is shorter than the item of the
    job that it answers, and a release is one sealed share.
    """
    return max(_WORDS_BYTES, len(body), task.max_sealed_bytes)


def most_of_release(task: Task) -> int:
    """Bytes of the leader's answer to the collector, at most: two sealed shares."""
    return _WORDS_BYTES + 2 * task.max_sealed_bytes


def ask(
    connection: Connection,
    task: Task,
    token: str,
    path: str,
    body: bytes,
    *,
    deadline_s: float,
    most_bytes: int,
) -> tuple[int, bytes]:
    """(status, answer). Raises OSError, also for an answer beyond `most_bytes`; then the connection
    is closed.
    """
    answer = connection.request(
        "POST",
        f"/tasks/{task.id.hex()}/{path}",
        body,
        {"Authorization": f"Bearer {token}"},
        deadline_s=deadline_s,
        max_bytes=most_bytes,
    )
    return answer.status, answer.body
