# SPDX-License-Identifier: Apache-2.0
"""The collector: requests a batch and combines the two noised shares. It sees nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

from sonde.errors import SinkError, UsageError
from sonde.fleet import hpke
from sonde.fleet.aggregator import Refused
from sonde.fleet.aggregator_request import max_release_bytes, post_request
from sonde.fleet.budget import entry_for, epsilon
from sonde.fleet.party_files import read_text
from sonde.fleet.provision import Credentials
from sonde.fleet.refusals import (
    BUSY,
    FINAL_FOR_RELEASE,
    HUNG_UP,
    STILL_OPEN,
    TOO_SLOW,
    UNAUTHORISED,
)
from sonde.fleet.result import Result, make_result
from sonde.fleet.task import Task
from sonde.fleet.wire import Malformed, Reader, aggregate_binding
from sonde.http_client import Connection
from sonde.private_files import replacing

_COLLECTED = "releases.json"
"""In a collector's directory: the starts of the batches that it has collected."""
_COLLECTED_BYTES = 16 << 20  # at most: hourly releases of more than a hundred years
ANSWER_S = 120.0
"""Deadline of a whole release: the leader asks the helper meanwhile."""
_MAX_REASON_BYTES = 500  # of a refusal; the rest of a longer text is not shown
_MAX_PLAUSIBLE_SUM = 1 << 53
"""Upper bound of an honest sum. Two shares that do not belong together almost always exceed it:
their sum is like a random element of a field of 2^128. Those of a `plain` task never do, as its
sums are modulo 2^32: there it is not noticed.
"""

_REMEDIES = {
    STILL_OPEN: "see 'sonde fleet collect --schedule' for when it is due",
    "too few": "have more nodes report; a batch of so few is never released",
    "expired": "collect sooner; 'sonde fleet collect --follow' does",
    "budget spent": "wait until older releases are more than a year old",
    "mismatch": "ask both operators: they hold different reports of this batch",
    "unknown task": "let leader and collector use the same task.json",
    "misaligned": "let leader and collector use the same task.json",
    UNAUTHORISED: "let leader and collector agree on the collector's token",
    **dict.fromkeys((TOO_SLOW, HUNG_UP, BUSY), "try again later"),
}


class ReleaseDenied(UsageError):
    """The aggregators refuse the release; `reason` is one of theirs. `is_final`: a later request
    for the batch would be refused, too.
    """

    def __init__(self, reason: str, detail: str) -> None:
        why = f" ({detail})" if detail and detail != reason else ""
        super().__init__(f"the aggregators refuse: {reason}{why}", _REMEDIES.get(reason, ""))
        self.reason = reason
        self.is_final = reason in FINAL_FOR_RELEASE


def collect(directory: Path, start_s: int) -> Result:
    """The release of the batch that begins at `start_s`.

    Raises ReleaseDenied with the aggregators' reason if they refuse, and SinkError if they cannot
    be reached or their answer is invalid; UsageError where the directory is no collector's.
    """
    credentials, task = Credentials.load(directory), Task.load(directory / "task.json")
    if credentials.role != "collector":
        raise UsageError(
            f"{directory} belongs to a {credentials.role}, not to a collector",
            "name the collector's directory",
        )
    sealed = _request(task, credentials, start_s)
    opener = hpke.Opener(credentials.hpke_private)
    try:
        shares = [
            opener.open(share, aggregate_binding(role, task.id, start_s, task.release_s))
            for role, share in zip((hpke.LEADER, hpke.HELPER), sealed, strict=True)
        ]
    except hpke.DecryptionError as error:
        raise SinkError("an aggregate share does not open with this collector's key") from error
    # First: the aggregators have spent the batch's budget, also where the shares do not fit.
    _record_collected(directory, start_s)
    return combine_shares(task, start_s, shares)


def collected_batches(directory: Path) -> list[int]:
    """Starts of the batches that this collector has collected, in seconds. Raises UsageError."""
    try:
        return sorted(map(int, json.loads(read_text(directory / _COLLECTED, _COLLECTED_BYTES))))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"not a list of releases: {directory / _COLLECTED}: {error}") from error


def _record_collected(directory: Path, start_s: int) -> None:
    known = set(collected_batches(directory))
    if start_s in known:
        return
    with replacing(directory / _COLLECTED, for_folders_owner=True) as out:
        out.write(json.dumps(sorted({*known, start_s})).encode())


def combine_shares(task: Task, start_s: int, shares: list[bytes]) -> Result:
    """Adds the two noised aggregate shares of a batch. Raises SinkError if they do not fit
    together.
    """
    try:
        sums = task.aggregation().unshard(shares)
    except ValueError as error:
        raise SinkError(f"the aggregators' shares fit no sum of this task: {error}") from error
    if max(map(abs, sums)) >= _MAX_PLAUSIBLE_SUM:
        raise SinkError(
            "the two aggregators' shares do not belong together",
            "ask both operators: one of the two is damaged, or dishonest",
        )
    entry = entry_for(task, start_s)
    losses = {
        "gpu": epsilon([entry], "gpu", task.privacy.delta),
        "tenant": epsilon([entry], "tenant", task.privacy.delta),
    }
    return make_result(task, start_s, sums, losses)


def _request(task: Task, credentials: Credentials, start_s: int) -> tuple[bytes, bytes]:
    url = urlsplit(task.leader_url)
    body = start_s.to_bytes(8, "big") + task.release_s.to_bytes(8, "big")
    try:
        answer = post(task, credentials, url.hostname or "", url.port, "releases", body)
        reader = Reader(answer)
        return reader.length_prefixed(), reader.length_prefixed()
    except Refused as refused:
        raise ReleaseDenied(refused.reason, str(refused)) from refused
    except Malformed as error:
        raise SinkError("the leader's answer is malformed") from error


def post(
    task: Task, credentials: Credentials, host: str, port: int | None, path: str, body: bytes
) -> bytes:
    """One authorized request to the leader. Raises Refused or SinkError."""
    connection = Connection(host, port, credentials.client_tls())
    try:
        status, answer = post_request(
            connection,
            task,
            credentials.token,
            path,
            body,
            deadline_s=ANSWER_S,
            max_bytes=max_release_bytes(task),
        )
    except OSError as error:
        raise SinkError(f"the leader cannot be reached: {error}", "try again later") from error
    finally:
        connection.close()
    if status == 200:
        return answer
    reason, _, detail = answer[:_MAX_REASON_BYTES].decode("utf-8", "replace").partition(": ")
    if status >= 500:
        raise SinkError(f"the leader failed: {reason}", "try again later")
    raise Refused(reason, detail)
