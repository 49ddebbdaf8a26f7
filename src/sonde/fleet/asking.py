# SPDX-License-Identifier: Apache-2.0
"""One authorised request to an aggregator, by the leader or the collector."""

from __future__ import annotations

import http.client

from sonde.fleet.task import Task

MOST_BYTES = 64 << 20
"""Of an answer."""


def ask(
    connection: http.client.HTTPSConnection, task: Task, token: str, path: str, body: bytes
) -> tuple[int, bytes]:
    """(status, answer). Raises OSError or HTTPException; then the connection is of no more use."""
    connection.request(
        "POST", f"/tasks/{task.id.hex()}/{path}", body, {"Authorization": f"Bearer {token}"}
    )
    response = connection.getresponse()
    answer = response.read(MOST_BYTES)
    if not response.isclosed():
        raise http.client.HTTPException("an answer too long")
    return response.status, answer
