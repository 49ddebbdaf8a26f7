# SPDX-License-Identifier: Apache-2.0
"""The aggregators as HTTPS services, with the roles of DAP (draft-ietf-ppm-dap).

```
POST /tasks/{task}/reports         node → leader    a report; 201, or a status and a reason
POST /tasks/{task}/reports/batch   relay → leader   reports, length-prefixed; a line each: empty
                                                    if it is admitted, else the reason
POST /tasks/{task}/jobs            leader → helper  a job of proof checks (token)
POST /tasks/{task}/releases        collector → leader → helper   noised aggregate shares (token)
GET  /tasks/{task}/status          operator         exact counts and refusals (token)
```

`{task}` is the task's id in hexadecimal. This module handles sockets; `aggregator` implements the
protocol.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sonde._native import keep_memory, release_memory
from sonde.errors import UsageError
from sonde.fleet.aggregator import Aggregator, Helper, HelperUnavailable, Leader, Refused
from sonde.fleet.clock import PartyClock
from sonde.fleet.connections import ConnectionLimiter
from sonde.fleet.first_reads import FirstReads
from sonde.fleet.helper_client import HelperClient
from sonde.fleet.provision import Credentials
from sonde.fleet.refusals import BUSY, HUNG_UP, TOO_SLOW, UNAUTHORISED
from sonde.fleet.request_body import PROGRESS_BYTES, read_body, read_first
from sonde.fleet.roster import Roster
from sonde.fleet.task import Task
from sonde.fleet.upload_slots import NoFreeSlot, UploadSlots
from sonde.fleet.wire import (
    Malformed,
    first_length_prefixed,
    length_prefixed,
    split_length_prefixed,
)

_log = logging.getLogger(__name__)
_GROUP_REPORTS = 256  # waiting uploads are admitted together, until they hold this many reports
_QUEUED_UPLOADS = 4096  # read and not admitted yet; more than there are slots
_BACKLOG = 2048  # unverified reports; above it, answers to uploads are delayed
_BATCH_BYTES = 8 << 20  # of an upload of several reports, or one report if that is longer
_REPORT_SLOTS = 1024  # uploads of one report that are read at the same time
_BATCH_SLOTS = 24  # uploads of several reports that are read at the same time
_SLOT_MEMORY_BYTES = 192 << 20  # of the bodies in all slots of each kind
_MIN_SLOTS = 8  # of each kind, however long a report is
_CONCURRENT_JOBS = 4  # one waits for the helper, the others verify and store
_MAX_JOB_BYTES = 256 << 20
_JOB_SLOTS = _CONCURRENT_JOBS  # whose bodies are held at a time: a leader sends no more
_JOB_S = 120.0  # for the body of a job, from the leader alone
_RELEASE_BYTES = 256  # at most; the leader's request to the helper has 56, the collector's 16
_LINGER_S = 3.0  # for the rest of a refused body: a client that still sends then reads its answer
_IDLE_S = 30  # of a connection without a complete request
_MAX_REPORTS_PER_REQUEST = 1024
_STRANGER_DELAY_S = 0.25  # before the answer to a request all of whose reports a stranger can make
_STRANGERS_REASONS = frozenset(
    {"malformed", "oversized", "unknown task", "late", "early", "forged", "unknown node"}
)  # what is refused without a signature of an enrolled node
_EXPIRE_INTERVAL_S = 60  # between two checks for expired batches
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_T = TypeVar("_T")
_Upload = tuple[Sequence[bytes | memoryview], asyncio.Future[list[str]]]
"""Encoded reports, and the future of their reasons of refusal (`Leader.admit`)."""


class Service:
    """An aggregator as an HTTP application with background tasks."""

    def __init__(self, aggregator: Aggregator, credentials: Credentials) -> None:
        self._aggregator = aggregator
        self._credentials = credentials
        self._task = aggregator.task
        self._uploads: asyncio.Queue[_Upload] = asyncio.Queue(_QUEUED_UPLOADS)
        self._first_reads = FirstReads()
        self._batch_slots = UploadSlots(_slots_within_memory(_BATCH_SLOTS, self._batch_bytes))
        self._work_available = asyncio.Event()
        self._work_done = asyncio.Event()
        self._report_slots = UploadSlots(
            _slots_within_memory(_REPORT_SLOTS, self._task.max_report_bytes)
        )
        self._job_slots = asyncio.Semaphore(_JOB_SLOTS)
        # Separate threads: waiting for the other party must not block uploads.
        # Admission at the leader, jobs at the helper.
        self._work_pool = ThreadPoolExecutor(1, "sonde-work")
        self._job_pool = ThreadPoolExecutor(_CONCURRENT_JOBS, "sonde-jobs")
        self._release_pool = ThreadPoolExecutor(1, "sonde-releases")

    def app(self) -> web.Application:
        """The routes of this party, with its background tasks."""
        limit = self._job_bytes if isinstance(self._aggregator, Helper) else self._batch_bytes

        @web.middleware
        async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._with_refusals(request, handler)

        app = web.Application(client_max_size=limit, middlewares=[refusals])
        app.on_response_prepare.append(_hide_server_version)
        prefix = f"/tasks/{self._task.id.hex()}"
        app.router.add_post(
            f"{prefix}/releases", self._authorised(self._release, self._credentials.token)
        )
        app.router.add_get(
            f"{prefix}/status", self._authorised(self._status, self._credentials.operator_token)
        )
        if isinstance(self._aggregator, Leader):
            app.router.add_post(f"{prefix}/reports", self._upload)
            app.router.add_post(f"{prefix}/reports/batch", self._upload_batch)
        else:
            app.router.add_post(
                f"{prefix}/jobs", self._authorised(self._job, self._credentials.token)
            )
        app.cleanup_ctx.append(self._background_tasks)
        return app

    # --- requests ----------------------------------------------------------------------------

    async def _upload(self, request: web.Request) -> web.Response:
        async with self._report_slots.acquire() as slot:
            body = await read_body(request, self._task.max_report_bytes, slot=slot)
            (reason,) = await self._admit([body])
        if reason:
            await _delay_stranger([reason])
            raise Refused(reason)
        return web.Response(status=201)

    @property
    def _batch_bytes(self) -> int:
        return max(_BATCH_BYTES, self._task.max_report_bytes + 4)

    async def _upload_batch(self, request: web.Request) -> web.Response:
        """Admits reports of many nodes from one relay; each is accepted or refused by itself."""
        assert isinstance(self._aggregator, Leader)
        with self._first_reads.place() as read:
            first = await read_first(request, read)  # a client that sends nothing gets no slot
        is_from_node = self._aggregator.is_from_enrolled_node(first_length_prefixed(first))
        async with self._batch_slots.acquire(is_from_node) as slot:
            body = await read_body(
                request, self._batch_bytes, first=first, progress_bytes=PROGRESS_BYTES, slot=slot
            )
            bodies = split_length_prefixed(body, _MAX_REPORTS_PER_REQUEST)
            if not bodies:
                raise Malformed("no report")
            reasons = await self._admit(bodies)
        await _delay_stranger(reasons)
        return web.Response(text="\n".join(reasons))

    async def _admit(self, bodies: Sequence[bytes | memoryview]) -> list[str]:
        """The reasons of refusal (`Leader.admit`), once `_admit_groups` has handled the reports."""
        done: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        await self._uploads.put((bodies, done))
        return await done

    @property
    def _job_bytes(self) -> int:
        return min(_MAX_JOB_BYTES, self._task.max_job_bytes)

    async def _job(self, request: web.Request) -> web.Response:
        assert isinstance(self._aggregator, Helper)
        async with self._job_slots:
            body = await read_body(request, self._job_bytes, _JOB_S)
            return web.Response(
                body=await _run_in(self._work_pool, self._aggregator.process_job, body)
            )

    async def _release(self, request: web.Request) -> web.Response:
        body = await read_body(request, _RELEASE_BYTES)
        aggregator = self._aggregator
        if isinstance(aggregator, Helper):
            return web.Response(body=await _run_in(self._release_pool, aggregator.release, body))
        assert isinstance(aggregator, Leader)
        if len(body) != 16:
            raise Refused("malformed")
        start_s, duration_s = int.from_bytes(body[:8], "big"), int.from_bytes(body[8:], "big")
        own, theirs = await _run_in(self._release_pool, aggregator.release, start_s, duration_s)
        _log.info("released the batch that begins at %d", start_s)
        return web.Response(body=length_prefixed(own) + length_prefixed(theirs))

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(status_of, self._aggregator))

    @staticmethod
    def _authorised(handler: Handler, token: str) -> Handler:
        expected = f"Bearer {token}"

        async def guarded(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "")
            presented = given.encode("utf-8", "surrogateescape")
            if not token or not hmac.compare_digest(presented, expected.encode()):
                raise web.HTTPUnauthorized(text="unknown token")
            return await handler(request)

        return guarded

    async def _with_refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns each refusal into a status and a reason. Here are counted those that close the
        connection; refused reports are counted by the aggregator, other requests are not.
        """
        try:
            return await handler(request)
        except Refused as refused:
            _log.debug("refused %s: %s", request.path, refused.reason)
            detail = str(refused)
            text = refused.reason if detail == refused.reason else f"{refused.reason}: {detail}"
            return web.Response(status=refused.status, text=text)
        except Malformed:
            return web.Response(status=400, text="malformed")
        except NoFreeSlot:
            return self._refuse_and_close(BUSY, 503)
        except HelperUnavailable:
            return web.Response(status=503, text="the helper is unavailable, try again")
        except (ConnectionError, web.RequestPayloadError):  # closed in the middle of its body
            return self._refuse_and_close(HUNG_UP, 408)
        except web.HTTPNotFound:
            return web.Response(status=404, text="unknown task")
        except web.HTTPUnauthorized as error:
            return self._refuse_and_close(UNAUTHORISED, error.status)
        except web.HTTPRequestEntityTooLarge as error:
            return self._refuse_and_close("oversized", error.status)
        except web.HTTPRequestTimeout as error:
            return self._refuse_and_close(TOO_SLOW, error.status)

    def _refuse_and_close(self, reason: str, status: int) -> web.Response:
        self._aggregator.store.note_refusals(Counter({reason: 1}))
        response = web.Response(status=status, text=reason)
        response.force_close()  # the rest of the body is not read
        return response

    def http_log(self) -> logging.Logger:
        """The logger of the HTTP library. Invalid HTTP requests are counted, not logged with a
        traceback each: otherwise a stranger could fill the disk and hide important messages.
        """
        log = logging.Logger("sonde.fleet.http")
        log.parent = _log

        def is_wanted(record: logging.LogRecord) -> bool:
            cause = record.exc_info[1] if record.exc_info else None
            if isinstance(cause, HttpProcessingError):
                self._aggregator.store.note_refusals(Counter({"bad request": 1}))
            return not isinstance(cause, HttpProcessingError)

        log.addFilter(is_wanted)
        return log

    # --- background tasks --------------------------------------------------------------------

    async def _background_tasks(self, _: web.Application) -> Any:
        tasks = [asyncio.create_task(self._expire_batches())]
        if isinstance(self._aggregator, Leader):
            tasks.append(asyncio.create_task(self._admit_groups()))
            tasks += [asyncio.create_task(self._process_jobs()) for _ in range(_CONCURRENT_JOBS)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in (self._work_pool, self._job_pool, self._release_pool):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)

    async def _expire_batches(self) -> None:
        """Periodically expires uncollected batches, and, while no report waits, returns unused
        memory to the kernel.
        """
        while True:
            await asyncio.sleep(min(_EXPIRE_INTERVAL_S, self._task.keep_s))
            if not self._aggregator.store.waiting:
                await asyncio.to_thread(release_memory)
            try:
                lost = await asyncio.to_thread(self._aggregator.expire)
            except Exception:  # a disk error; retried
                _log.exception("expiring batches failed; retrying in %d s", _EXPIRE_INTERVAL_S)
            else:
                if lost:
                    _log.warning(
                        "%d reports expired: their batches were not collected in time", lost
                    )

    async def _admit_groups(self) -> None:
        """Admits uploads in groups, with a disk sync each; waits while the backlog is too long."""
        assert isinstance(self._aggregator, Leader)
        while True:
            group = [await self._uploads.get()]
            bodies = list(group[0][0])
            while len(bodies) < _GROUP_REPORTS and not self._uploads.empty():
                group.append(self._uploads.get_nowait())
                bodies += group[-1][0]
            while self._aggregator.store.waiting > _BACKLOG:
                self._work_done.clear()
                await self._work_done.wait()
            try:
                reasons = await _run_in(self._work_pool, self._aggregator.admit, bodies)
            except Exception:
                _log.exception(
                    "admission of %d reports failed; the nodes are asked to retry", len(bodies)
                )
                for _, done in group:
                    if not done.done():
                        done.set_exception(web.HTTPServiceUnavailable(text="try again later"))
                continue
            remaining = iter(reasons)
            for upload, done in group:
                answer = list(islice(remaining, len(upload)))
                if not done.done():
                    done.set_result(answer)
            if not all(reasons):
                self._work_available.set()

    async def _process_jobs(self) -> None:
        """Processes jobs while there are any; backs off while the helper is unavailable."""
        assert isinstance(self._aggregator, Leader)
        pause_s = 0.1
        while True:
            try:
                count = await _run_in(self._job_pool, self._aggregator.process_job)
                self._work_done.set()
                pause_s = 0.1
            except Exception as error:  # the helper, or this party's disk: the job is kept
                if isinstance(error, HelperUnavailable):
                    _log.warning(
                        "the helper is unavailable: %s; retrying in %.1f s", error, pause_s
                    )
                else:
                    _log.exception("a job failed; retrying in %.1f s", pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(5.0, pause_s * 2)
                continue
            if count == 0:
                self._work_available.clear()
                try:
                    await asyncio.wait_for(self._work_available.wait(), 1.0)
                    await asyncio.sleep(0.05)  # so that a job has more than one report
                except TimeoutError:
                    pass


async def _run_in(pool: Executor, do: Callable[..., _T], *args: Any) -> _T:
    return await asyncio.get_running_loop().run_in_executor(pool, do, *args)


async def _delay_stranger(reasons: Sequence[str]) -> None:
    """Delays the answer if all reports were refused for reasons that a stranger can cause, so that
    a connection costs at most four such checks a second. Call it without a slot.
    """
    if _STRANGERS_REASONS.issuperset(reasons):
        await asyncio.sleep(_STRANGER_DELAY_S)


def _slots_within_memory(count: int, each_bytes: int) -> int:
    """`count` slots, or fewer if all of them would hold too much memory."""
    return max(_MIN_SLOTS, min(count, _SLOT_MEMORY_BYTES // each_bytes))


async def _hide_server_version(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "sonde"  # no versions


def status_of(aggregator: Aggregator) -> dict[str, Any]:
    """Counts for the operator, without any report's content."""
    store = aggregator.store
    return {
        "task": aggregator.task.name,
        "waiting": store.waiting,
        "verified": {str(start): count for start, count in store.counts().items()},
        "refused": store.refusals(),
        "latency_s": store.latencies(),
        "clock_step_s": getattr(aggregator.clock, "step_s", 0.0),
    }


def open_aggregator(state: Path, threads: int) -> tuple[Aggregator, Credentials]:
    """The aggregator of a state directory, and its credentials. Raises UsageError, SinkError,
    ClockNotTrusted.
    """
    credentials = Credentials.load(state)
    if credentials.role not in ("leader", "helper"):
        raise UsageError(
            f"{state} belongs to a {credentials.role}, not to an aggregator",
            "name the leader's or the helper's directory",
        )
    task, roster = Task.load(state / "task.json"), Roster.load(state / "roster.json")
    clock = PartyClock(state)  # before the state is opened, which expires old batches
    path = state / "state.sqlite"
    if credentials.role == "helper":
        return Helper(task, credentials.keys, roster, path, threads, clock), credentials
    client = HelperClient(task, credentials.helper_token, credentials.client_tls())
    return Leader(task, credentials.keys, roster, path, client.post, threads, clock), credentials


def runner_of(service: Service) -> web.AppRunner:
    """The HTTP server without its sockets. It decompresses no body and closes idle connections."""
    return web.AppRunner(
        service.app(),
        access_log=None,
        logger=service.http_log(),
        keepalive_timeout=_IDLE_S,
        lingering_time=_LINGER_S,
        auto_decompress=False,
    )


def serve(state: Path, threads: int = 2, ready: Callable[[str], None] = lambda url: None) -> None:
    """Runs the aggregator of a state directory until SIGINT or SIGTERM; SIGHUP is ignored. `ready`
    receives the URL when it listens.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keep_memory()  # else the pages of six 70 kB buffers per report are returned, and zeroed again
    aggregator, credentials = open_aggregator(state, threads)
    url = aggregator.task.leader_url if credentials.role == "leader" else aggregator.task.helper_url
    parts = urlsplit(url)

    gc.freeze()  # a large roster must not be traversed at each collection
    gc.set_threshold(20_000, 20, 50)

    async def run() -> None:
        service = Service(aggregator, credentials)
        http = runner_of(service)
        await http.setup()
        assert http.server is not None
        listeners = [
            socket.create_server(address[:2], family=family, backlog=1024)
            for family, _, _, _, address in socket.getaddrinfo(
                parts.hostname, parts.port or 443, type=socket.SOCK_STREAM
            )
        ]
        connections = ConnectionLimiter(
            http.server, credentials.server_tls(), aggregator.store.note_refusals
        )
        accepting = [asyncio.create_task(connections.accept(one)) for one in listeners]
        ready(url)
        _log.info("task %s: serving as %s", aggregator.task.name, credentials.role)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        _log.info("stopping")
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        await http.cleanup()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())
    aggregator.store.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop if it is installed (half the CPU for TLS bodies); None: asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
