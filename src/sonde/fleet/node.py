# SPDX-License-Identifier: Apache-2.0
"""The node's side: bucket indices in, one sealed and signed report out.

Nothing of a sample but its index leaves the node, and neither aggregator can open the other's
share.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from sonde.errors import SinkError, UsageError
from sonde.fleet import hpke
from sonde.fleet.refusals import FINAL_FOR_REPORT
from sonde.fleet.roster import Identity
from sonde.fleet.task import Task
from sonde.fleet.wire import Report
from sonde.http_client import Connection

_ANSWER_BYTES = 1 << 20
"""Upper bound of the leader's answer: a reason of some 20 bytes for each of up to 1,024 reports."""


@dataclass(frozen=True)
class Receipt:
    """The leader's answer to one report: accepted, or the reason of refusal."""

    accepted: bool
    reason: str


def make_reports(
    task: Task,
    nodes: Sequence[Identity],
    samples: Sequence[Sequence[int]],
    time_s: int,
    threads: int = 1,
) -> list[Report]:
    """One report per node; `samples[i]` are the bucket indices of node i, `time_s` the time of all,
    in seconds since 1970. Raises UsageError.
    """
    ids = [os.urandom(16) for _ in nodes]
    try:
        shares = task.aggregation().shard(ids, [list(s) for s in samples], threads)
    except ValueError as error:
        raise UsageError(f"these samples do not fit a report of this task: {error}") from error
    reports = []
    for node, id_, (public, leader, helper) in zip(nodes, ids, shares, strict=True):
        blank = Report(task.id, id_, time_s, node.public, public, b"", b"")
        reports.append(
            sign(
                node,
                replace(
                    blank,
                    leader=hpke.seal(leader, task.leader_key, blank.binding(hpke.LEADER)),
                    helper=hpke.seal(helper, task.helper_key, blank.binding(hpke.HELPER)),
                ),
            )
        )
    return reports


def sign(node: Identity, report: Report) -> Report:
    """The report with the node's signature."""
    return replace(report, signature=node.sign(report.signed()))


def make_report(task: Task, node: Identity, samples: Sequence[int], time_s: int) -> Report:
    """The report of one node; `samples` are bucket indices. Raises UsageError."""
    return make_reports(task, [node], [samples], time_s)[0]


class UploadConnection:
    """A persistent connection to the leader, for a node or for a relay of many nodes.

    A relay holds no key: each report is sealed and signed by its own node. `timeout_s` bounds a
    request including its answer.
    """

    def __init__(self, task: Task, tls: ssl.SSLContext, timeout_s: float = 30) -> None:
        url = urlsplit(task.leader_url)
        self._path = f"/tasks/{task.id.hex()}/reports"
        self._connection = Connection(url.hostname or "", url.port, tls)
        self._timeout_s = timeout_s

    def __enter__(self) -> UploadConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, body: bytes | memoryview) -> list[Receipt]:
        """Uploads length-prefixed reports. Returns one receipt per report, in their order.

        Raises SinkError if the leader cannot be reached; the whole body may then be sent again.
        """
        status, answer = self._post("/batch", body)
        if status != 200:
            raise SinkError(f"the leader refuses the whole request: {answer}")
        return [Receipt(not reason, reason) for reason in answer.split("\n")]

    def send_one(self, report: bytes) -> Receipt:
        """Uploads one report. Raises SinkError if the leader fails, cannot be reached or refuses
        for a reason that is not final (`refusals`); then retry.
        """
        status, reason = self._post("", report)
        if status == 201:
            return Receipt(True, reason)
        if not 400 <= status < 500 or reason not in FINAL_FOR_REPORT:
            raise SinkError(f"the leader failed: {reason[:100]}", "try again later")
        return Receipt(False, reason)

    def _post(self, path: str, body: bytes | memoryview) -> tuple[int, str]:
        try:
            answer = self._connection.request(
                "POST",
                self._path + path,
                body,
                {"Content-Type": "application/octet-stream"},
                deadline_s=self._timeout_s,
                max_bytes=_ANSWER_BYTES,
            )
        except OSError as error:
            raise SinkError(f"the leader cannot be reached: {error}", "try again later") from error
        return answer.status, answer.body.decode("utf-8", "replace")


def upload(task: Task, report: bytes, tls: ssl.SSLContext, timeout_s: float = 30) -> Receipt:
    """Uploads a report on a new connection. Safe to repeat: a second copy is refused as a
    replay.
    """
    with UploadConnection(task, tls, timeout_s) as uplink:
        return uplink.send_one(report)


def upload_with_retry(task: Task, report: bytes, tls: ssl.SSLContext, deadline_s: float) -> Receipt:
    """Uploads a report, with retries and increasing delays while the leader fails, cannot be
    reached or refuses for a reason that is not final.

    No attempt begins later than `deadline_s` from now; the last failure is raised (SinkError). A
    replay after a failed attempt means that the first copy had arrived.
    """
    wait_s, tried = 0.1, False
    end_s = time.monotonic() + deadline_s
    while True:
        try:
            receipt = upload(task, report, tls)
        except SinkError:
            if time.monotonic() + wait_s > end_s:
                raise
        else:
            arrived = tried and receipt.reason == "replayed"
            return Receipt(True, "accepted before") if arrived else receipt
        tried = True
        time.sleep(wait_s)
        wait_s = min(2.0, wait_s * 1.7)
