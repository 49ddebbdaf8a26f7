# SPDX-License-Identifier: Apache-2.0
"""The server without HTTP: accepts chunks, keeps the flusher running, opens sessions over the
store."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from sonde import interpreter
from sonde.errors import CaptureError, SinkError, UsageError
from sonde.ownership import only_ours
from sonde.query.databases import Databases
from sonde.query.selection import Selection
from sonde.query.stored_session import StoredSession
from sonde.server import chunk_bodies
from sonde.server.children import Children
from sonde.server.chunk_bodies import BodyLimits, BodyRefusedError, Framed
from sonde.server.collection_pauses import CollectionPauses
from sonde.server.damaged_files import DamagedFiles, IntactPaths
from sonde.server.seen_agents import SeenAgents
from sonde.server.served_session import ServedSession
from sonde.server.tokens import Caller, Scope, Tokens
from sonde.store.catalog import Catalog, StoredFile
from sonde.store.chosen_files import chosen_files
from sonde.store.downloads import CACHE
from sonde.store.record import Record, digest_of
from sonde.store.shared import FetchedPaths, SharedStore
from sonde.store.storage import BucketSettings, keep_server_name
from sonde.store.wal import Wal

LOG = logging.getLogger("sonde.server")
AUDIT = logging.getLogger("sonde.audit")

_RECENT = 200_000
"""Digests remembered in memory, for at least some minutes of retries; older ones are found in the
catalog."""

UNPACKED_SHARE = 16
"""A chunk's decompressed size divided by this counts against `bytes_a_second`, where that is more
than its size. Chunks of agents decompress to some 13 times their size."""

ACK_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, float("inf"))
"""Upper bounds of the histogram of times until chunks are acknowledged."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of what requests may cost: of one, of a caller, of a tenant, and of all together."""

    body_bytes: int = 16 << 20
    """Of one request."""
    bodies_bytes: int = 192 << 20
    """Of all requests in progress together; one tenant gets a quarter of it."""
    meta_bytes: int = 64 << 10
    """Of the metadata of one chunk; Sonde writes about 1 KB."""
    metas_bytes: int = 1 << 20
    """Of the metadata of all chunks of one request."""
    raw_bytes: int = 32 << 20
    """Of one chunk, decompressed."""
    body_s: float = 15.0
    """For a whole body to arrive."""
    head_s: float = 10.0
    """For the head of a request to arrive."""
    connections: int = 4_096
    """Of all clients."""
    connections_unknown: int = 512
    """Of one machine (`silent.origin`), while no request with a valid token has arrived on
    them."""
    chunks_a_request: int = 64
    nodes_a_tenant: int = 10_000
    """Names of nodes that send chunks, since the server started."""
    log_bytes: int = 8 << 30
    """In the log and not stored yet, of all tenants; one gets a quarter of it."""
    bytes_a_second: float = 32 << 20
    """Of a token, after a burst of ten times as much; see `UNPACKED_SHARE`."""
    requests_a_second: float = 1_000
    """Of a token, after a burst of ten times as many."""
    query_s: float = 15.0
    """For one question."""
    query_bytes: int = 256 << 20
    """Memory of the engine for one question."""
    queries: int = 3
    """Questions that are answered at a time; one tenant gets all but one."""
    queries_waiting: int = 32
    """Questions that wait or are answered; one tenant gets half of it."""
    unsent_bytes: int = 128 << 20
    """Of answers that a tenant's clients have not read; beyond, its questions are refused."""
    unread_s: float = 20.0
    """For a client to take the next 64 KiB of an answer."""

    @property
    def connections_grpc(self) -> int:
        """Connections of gRPC, besides the others."""
        return self.connections // 4


@dataclass(slots=True)
class Counters:
    """What the server counts, for /metrics."""

    chunks: int = 0
    duplicates: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    queries: int = 0
    query_failures: int = 0
    ack_bucket_counts: list[float] = field(default_factory=lambda: [0.0] * len(ACK_BUCKETS_S))
    ack_sum_s: float = 0.0

    def refuse(self, why: str) -> None:
        """Count a refusal; `why`: one of a few fixed reasons, never text of a caller."""
        self.refused[why] = self.refused.get(why, 0) + 1

    def acked(self, seconds: float) -> None:
        """Count an acknowledgement."""
        self.ack_sum_s += seconds
        for at, bound in enumerate(ACK_BUCKETS_S):
            self.ack_bucket_counts[at] += seconds <= bound


def is_node(name: str) -> bool:
    """Whether a node may have this name."""
    return 0 < len(name) <= 253 and name.isprintable() and name.isascii()


class RefusedRequestError(SinkError):
    """A request that is not served, with its HTTP status."""

    def __init__(self, status: int, cause: str, remedy: str, retry_after_s: int = 5) -> None:
        """`retry_after_s`: when it may be tried again, of 429 and 503."""
        super().__init__(cause, remedy)
        self.status, self._retry_after_s = status, retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After, where trying again may help."""
        return {"Retry-After": str(self._retry_after_s)} if self.status in (429, 503) else {}


class TokenIssuer(Protocol):
    """Another issuer of tokens than the store (oidc.py)."""

    def may_be(self, token: str) -> bool:
        """Whether a token has the form of those that the issuer makes."""

    async def caller(self, token: str) -> Caller:
        """The caller whose token it is. Raises RefusedRequestError."""


class AlertSource(Protocol):
    """What evaluates rules of alerts (alerts.py)."""

    def listed(self, tenant: str) -> dict[str, Any]:
        """A tenant's rules and alerts."""

    def figures(self) -> Iterator[tuple[str, str, str, float]]:
        """(name, kind, labels, value) for /metrics."""


class Bucket:
    """A token bucket: amounts a second, with a burst of ten seconds."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: float) -> None:
        self._rate, self._left, self._at = rate, 10 * rate, time.monotonic()

    def take(self, amount: float) -> bool:
        """Take an amount, if the bucket has it now; returns whether it had."""
        now = time.monotonic()
        self._left = min(10 * self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True

    def wait_s(self, amount: float) -> int:
        """Whole seconds until the bucket has an amount, if nothing else is taken; at least one."""
        return max(1, math.ceil((min(amount, 10 * self._rate) - self._left) / self._rate))


class Service:
    """A server on a directory."""

    def __init__(
        self,
        folder: Path,
        limits: ServerLimits | None = None,
        *,
        age_s: int = 0,
        size_bytes: int = 0,
        open_tenant: str = "",
        flushes: bool = True,
        incidents: Path | None = None,
        fleet: Path | None = None,
        bucket: BucketSettings | None = None,
    ) -> None:
        """`age_s`, `size_bytes`: what is kept (0: no limit). `open_tenant`: the tenant that every
        request belongs to, without tokens; '' requires tokens. `flushes`: whether a flusher is
        started. `incidents`: where `sonde diagnose` keeps them. `fleet`: where
        `sonde fleet collect` writes releases. `bucket`: where files are kept; the directory then
        has the log, and a cache of the files.

        Raises UsageError where the directory cannot be used.
        """
        self.folder = folder.resolve()
        self.limits = limits or ServerLimits()
        self.counters = Counters()
        self._body_limits = BodyLimits(
            self.limits.chunks_a_request,
            self.limits.meta_bytes,
            self.limits.metas_bytes,
            self.limits.raw_bytes,
        )
        self._open_tenant = open_tenant
        self.incidents = incidents
        self.fleet = fleet
        self.issuer: TokenIssuer | None = None
        """Whose tokens are accepted besides those in `tokens`."""
        self.alerts: AlertSource | None = None
        try:
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            # Users who can put links there choose what we write, read and remove elsewhere.
            if not only_ours(self.folder):
                raise PermissionError("other users can write there")
            (self.folder / "spill").mkdir(mode=0o700, exist_ok=True)
            (self.folder / "data").mkdir(mode=0o700, exist_ok=True)
            self.catalog = Catalog(self.folder)
            self.tokens = Tokens(self.folder)
            self.pauses = CollectionPauses(self.folder)
            self.agents = SeenAgents(self.limits.nodes_a_tenant)
            self.shared: SharedStore | None = None
            if bucket:
                keep_server_name(self.folder, bucket.server)
                (self.folder / CACHE).mkdir(mode=0o700, exist_ok=True)
                self.shared = SharedStore(self.folder, bucket)
            self.wal = Wal(self.folder / "wal")
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{folder} cannot be used as a store: {error}",
                "give a directory of your own on a disk with free space",
            ) from error
        self._recent: OrderedDict[bytes, Future[None] | None] = OrderedDict()
        """By digest of a chunk: when it is in the log."""
        self._nodes: dict[str, set[str]] = {}
        """Names of nodes that sent chunks, by tenant."""
        self._rates: OrderedDict[str, tuple[Bucket, Bucket]] = OrderedDict()
        """By id of a token: of requests, of bytes."""
        self.damaged = DamagedFiles()
        self.children = Children()
        self._databases = Databases()
        self.flusher: dict[str, object] = {}
        """The flusher's last report."""
        self._ended = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._flusher_arguments = [str(age_s * 10**9), str(size_bytes)]
        if bucket:
            self._flusher_arguments += [bucket.uri, bucket.server, str(bucket.cache_bytes)]
        if flushes:
            self._keeper = threading.Thread(target=self._keep_flushing, daemon=True)
            self._keeper.start()

    def close(self) -> None:
        """Seal the log and end the flusher."""
        self._ended.set()
        self.wal.close()
        self.children.close()
        self._databases.close()
        if self.shared:
            self.shared.close()
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                interpreter.give_up(child)
        self.catalog.close()
        self.tokens.close()
        self.pauses.close()

    @property
    def is_open(self) -> bool:
        """Whether it requires no tokens."""
        return bool(self._open_tenant)

    def incidents_of(self, caller: Caller) -> Path | None:
        """The folder of the incidents that the caller may see; None: none are shown."""
        if self.incidents is None or self._open_tenant:
            return self.incidents
        with contextlib.suppress(OSError):
            # Looked up among existing names, so that a tenant's name is never used as a path.
            names = {one.name: one for one in self.incidents.iterdir()}
            return names.get(caller.tenant)
        return None

    def caller(self, authorization: str) -> Caller | None:
        """The caller by the header Authorization and the store's tokens; None: no valid token."""
        if self._open_tenant:
            return Caller("open", self._open_tenant, frozenset(Scope))
        kind, _, token = authorization.partition(" ")
        return self.tokens.caller(token.strip()) if kind.lower() == "bearer" else None

    async def authenticated(self, authorization: str) -> Caller | None:
        """As `caller`, also with tokens of `issuer`. Raises RefusedRequestError for one of those
        that is not accepted."""
        kind, _, token = authorization.partition(" ")
        if self.issuer is not None and kind.lower() == "bearer":
            token = token.strip()
            if self.issuer.may_be(token):
                return await self.issuer.caller(token)
        return self.caller(authorization)

    def admit(self, caller: Caller, size_bytes: int) -> None:
        """Count a request against its caller's rates. Raises RefusedRequestError."""
        rate = self._rates_of(caller)[0]
        if not rate.take(1):
            self._refuse_rate(rate.wait_s(1))
        self._charge(caller, size_bytes)

    def _charge(self, caller: Caller, size_bytes: int) -> None:
        """Count bytes against the caller's rate. Raises RefusedRequestError."""
        rate = self._rates_of(caller)[1]
        if size_bytes > 0 and not rate.take(size_bytes):
            self._refuse_rate(rate.wait_s(size_bytes))

    def _refuse_rate(self, wait_s: int) -> NoReturn:
        self.counters.refuse("rate")
        raise RefusedRequestError(429, "this token sends too much", "send less", wait_s)

    def _rates_of(self, caller: Caller) -> tuple[Bucket, Bucket]:
        rates = self._rates.get(caller.id)
        if rates is None:
            rates = Bucket(self.limits.requests_a_second), Bucket(self.limits.bytes_a_second)
            self._rates[caller.id] = rates
            if len(self._rates) > 100_000:
                self._rates.popitem(last=False)
        self._rates.move_to_end(caller.id)
        return rates

    def take(self, caller: Caller, node: str, body: bytes) -> list[tuple[Future[None], bool]]:
        """Put the chunks of a body into the log; returns for each (a future that ends when it is
        durable, whether it is new).

        Raises RefusedRequestError; WalBusyError where the disk is behind.
        """
        chunks = self.framed(caller, node, body)
        return self.put(caller, node, chunks, self.unpacked_bytes(chunks))

    def framed(self, caller: Caller, node: str, body: bytes) -> list[Framed]:
        """The chunks of a body, with metadata that is not decoded yet. Raises RefusedRequestError
        where they are damaged, or where no chunk of this node is taken now."""
        self._check_node(caller.tenant, node)
        self._check_log(caller.tenant)
        with self._refusals():
            return chunk_bodies.framed(body, self._body_limits)

    def unpacked_bytes(self, chunks: Sequence[Framed]) -> int:
        """What the chunks of a body come to, decompressed. May be called in any thread. Raises
        RefusedRequestError unless their metadata is valid."""
        with self._refusals():
            return chunk_bodies.unpacked_bytes(chunks, self._body_limits)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Within it a body that is not taken is counted, and raises RefusedRequestError."""
        try:
            yield
        except BodyRefusedError as error:
            self.counters.refuse(error.why)
            raise RefusedRequestError(error.status, error.cause, error.remedy) from None

    def put(
        self, caller: Caller, node: str, chunks: Sequence[Framed], unpacked_bytes: int
    ) -> list[tuple[Future[None], bool]]:
        """Put the checked chunks of a body into the log: as `take`."""
        self._check_node(caller.tenant, node)  # others may have taken its place meanwhile
        size_bytes = sum(len(one.content) for one in chunks)
        self._charge(caller, unpacked_bytes // UNPACKED_SHARE - size_bytes)
        self._nodes.setdefault(caller.tenant, set()).add(node)
        found = []
        for one in chunks:
            digest = digest_of(caller.tenant, node, one.content)
            found.append(self._take_one(caller.tenant, node, digest, one.content))
        return found

    def note_agent(self, caller: Caller, node: str, reported: str) -> None:
        """An agent sent or asked something; `reported`: the state that it names."""
        if is_node(node):
            self.agents.note(caller.tenant, node, reported)

    def _check_log(self, tenant: str) -> None:
        (own, every), most = self.wal.left_bytes(tenant), self.limits.log_bytes
        if own > most // 4 or every > most:
            self.counters.refuse("behind")
            raise RefusedRequestError(503, "the store is behind", "try again later", 30)

    def _check_node(self, tenant: str, node: str) -> None:
        if not is_node(node):
            self.counters.refuse("node")
            raise RefusedRequestError(400, "the name of the node is no name", "set X-Sonde-Node")
        nodes = self._nodes.get(tenant, set())
        if node not in nodes and len(nodes) >= self.limits.nodes_a_tenant:
            self.counters.refuse("nodes")
            raise RefusedRequestError(429, "this tenant has too many nodes", "ask for more")

    def _take_one(
        self, tenant: str, node: str, digest: bytes, part: bytes
    ) -> tuple[Future[None], bool]:
        known = self._recent.get(digest)
        if known is not None and not (known.done() and known.exception()):
            self.counters.duplicates += 1
            return known, False
        if self.catalog.known([digest]):
            self.counters.duplicates += 1
            done: Future[None] = Future()
            done.set_result(None)
            return done, False
        future = self.wal.append(Record(tenant, node, digest, time.time_ns(), part))
        self._recent[digest] = future
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        self.counters.chunks += 1
        return future, True

    def session(self, caller: Caller, selection: Selection) -> StoredSession:
        """A session over the files of the caller's tenant with rows of the selected time, without
        those that are known to be damaged. Raises CaptureError."""
        chosen = chosen_files(self._files_of, caller.tenant, selection.start_ns, selection.end_ns)
        files: Mapping[str, Sequence[Path]] = {
            name: [self.folder / one.path for one in listed] for name, listed in chosen.items()
        }
        if self.shared:
            files = FetchedPaths(self.shared, chosen, self.limits.query_s)
        try:
            return ServedSession(
                [self.folder / top / caller.tenant for top in ("data", CACHE)],
                IntactPaths(files, self.damaged),
                self.limits.query_bytes,
                self.folder / "spill",
                self.limits.query_s,
                self.children,
                self._databases,
            )
        except OSError as error:
            raise CaptureError(f"the store cannot be read: {error}", "try again") from error

    def _files_of(self, tenant: str, name: str, start_ns: int, end_ns: int) -> list[StoredFile]:
        found = self.catalog.files(tenant, name, start_ns, end_ns)
        if self.shared:
            # A path that two servers list is one file.
            paths = {one.path for one in found}
            for one in self.shared.files(tenant, name, start_ns, end_ns):
                if one.path not in paths:
                    paths.add(one.path)
                    found.append(one)
        return found

    def _keep_flushing(self) -> None:
        """Start the flusher, and start it again whenever it ends."""
        argv = interpreter.command(
            "sonde.store.flusher", str(self.folder), *self._flusher_arguments
        )
        while not self._ended.is_set():
            try:
                child = interpreter.start(argv)
            except OSError as error:
                self.flusher = {"error": f"the flusher cannot start: {error.strerror}"}
                self._ended.wait(5)
                continue
            self._child = child
            for line in child.stdout or ():
                with contextlib.suppress(ValueError):
                    self.flusher |= json.loads(line) | {"at": time.monotonic()}
            child.wait()
            if not self._ended.wait(1):
                self.flusher = {"error": f"the flusher ended with {child.returncode}"}
                LOG.error("the flusher ended with %s", child.returncode)
