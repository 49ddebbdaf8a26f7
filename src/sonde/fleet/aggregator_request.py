# SPDX-License-Identifier: Apache-2.0
"""An authorized request to an aggregator, by the leader or the collector, with bounds on the
answer.
"""

from __future__ import annotations

from sonde.fleet.task import Task
from sonde.http_client import Connection

_MIN_ANSWER_BYTES = 4096
"""A refusal may always be this long."""


def max_answer_bytes(task: Task, body: bytes) -> int:
    """Upper bound of an honest helper's answer to `body`, in bytes. A reply is shorter than the
    item of the job that it answers, so a job's answer is shorter than the job; that to a release is
    one sealed share.
    """
    return max(_MIN_ANSWER_BYTES, len(body), task.max_sealed_bytes)


def max_release_bytes(task: Task) -> int:
    """Upper bound of the leader's answer to the collector, in bytes: two sealed shares."""
    return _MIN_ANSWER_BYTES + 2 * task.max_sealed_bytes


def post_request(
    connection: Connection,
    task: Task,
    token: str,
    path: str,
    body: bytes,
    *,
    deadline_s: float,
    max_bytes: int,
) -> tuple[int, bytes]:
    """POSTs a body and returns (status, answer). Raises OSError, also for an answer above
    `max_bytes`; the connection is then closed.
    """
    answer = connection.request(
        "POST",
        f"/tasks/{task.id.hex()}/{path}",
        body,
        {"Authorization": f"Bearer {token}"},
        deadline_s=deadline_s,
        max_bytes=max_bytes,
    )
    return answer.status, answer.body
