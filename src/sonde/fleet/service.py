# SPDX-License-Identifier: Apache-2.0
"""The aggregators as HTTPS services, in the manner of DAP (draft-ietf-ppm-dap).

```
POST /tasks/{task}/reports         node → leader    a report; 201, or a status and a reason
POST /tasks/{task}/reports/batch   relay → leader   reports, length-prefixed; a reason each
POST /tasks/{task}/jobs            leader → helper  a batch of proof checks (token)
POST /tasks/{task}/releases        collector → leader → helper   noised aggregate shares (token)
GET  /tasks/{task}/status          operator         exact counts and refusals (token)
```

The sockets are here, the protocol is in `aggregator`.
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
from sonde.fleet.aggregator import Aggregator, Helper, HelperAway, Leader, Refused
from sonde.fleet.clock import PartyClock
from sonde.fleet.connections import Connections
from sonde.fleet.helper_client import HelperClient
from sonde.fleet.places import NoPlace, Place, Places
from sonde.fleet.provision import Bundle
from sonde.fleet.roster import Roster
from sonde.fleet.task import Task
from sonde.fleet.wire import Malformed, first_lp, first_lp_bytes, lp, split_lp

_log = logging.getLogger(__name__)
_COMMIT_LIMIT = 256
_BACKLOG = 2048  # reports waiting for the proof check; above it uploads wait for their answer
_BATCH_BYTES = 8 << 20
_SINGLES = 1024
_BODY_S = 30  # for the body of an upload: who sends slower holds a place that others need
_FIRST_BYTES = 64 << 10  # of a batch, or all of it, before it gets a place
_PACE_BYTES = 64 << 10  # at least so much of a batch comes in each _PACE_S, or its place is lost
_PACE_S = 2.0
_FIRST_REPORT_BYTES = 256 << 10  # or as much as that of it, if its first report is larger
_BATCHES = 24  # read at a time: what uploads may hold of memory
_PLACES_BYTES = 192 << 20  # of all batches that are being read, and of all single reports
_FEWEST = 8  # places, however large a report is
_DRIVERS = 4  # one waits for the helper, others check, store, count
_MOST_JOB_BYTES = 256 << 20
_JOBS = _DRIVERS  # whose bodies are held at a time: a leader has no more under way
_JOB_S = 120.0  # for the body of a job, from the leader alone
_RELEASE_BYTES = 256  # a request is 56 bytes
_IDLE_S = 30  # of a connection that asks nothing, or is not done with asking
_TOGETHER = 1024  # reports in one request
_SWEEP_S = 60  # between two looks at what has expired
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_T = TypeVar("_T")
_Upload = tuple[Sequence[bytes | memoryview], asyncio.Future[list[str]]]


class Service:
    """One aggregator behind its sockets."""

    def __init__(self, aggregator: Aggregator, bundle: Bundle) -> None:
        self._aggregator = aggregator
        self._bundle = bundle
        self._task = aggregator.task
        self._uploads: asyncio.Queue[_Upload] = asyncio.Queue(4096)
        self._batches = Places(_fitting(_BATCHES, self._batch_bytes))
        self._work_came = asyncio.Event()
        self._work_went = asyncio.Event()
        self._singles = Places(_fitting(_SINGLES, self._task.max_report_bytes))
        self._jobs = asyncio.Semaphore(_JOBS)
        # Of each its own threads: what waits for the other party must not stop what takes reports.
        self._working = ThreadPoolExecutor(1, "sonde-working")  # uploads, or jobs
        self._driving = ThreadPoolExecutor(_DRIVERS, "sonde-driving")
        self._releasing = ThreadPoolExecutor(1, "sonde-releasing")

    def app(self) -> web.Application:
        limit = self._job_bytes if isinstance(self._aggregator, Helper) else self._batch_bytes

        @web.middleware
        async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        app = web.Application(client_max_size=limit, middlewares=[refusals])
        app.on_response_prepare.append(_say_little)
        prefix = f"/tasks/{self._task.id.hex()}"
        app.router.add_post(
            f"{prefix}/releases", self._authorised(self._release, self._bundle.token)
        )
        app.router.add_get(
            f"{prefix}/status", self._authorised(self._status, self._bundle.operator_token)
        )
        if isinstance(self._aggregator, Leader):
            app.router.add_post(f"{prefix}/reports", self._upload)
            app.router.add_post(f"{prefix}/reports/batch", self._upload_batch)
        else:
            app.router.add_post(f"{prefix}/jobs", self._authorised(self._job, self._bundle.token))
        app.cleanup_ctx.append(self._pumps)
        return app

    # --- requests ----------------------------------------------------------------------------

    async def _upload(self, request: web.Request) -> web.Response:
        async with self._singles.take() as place:
            body = await _read(request, self._task.max_report_bytes, place=place)
            (reason,) = await self._admit([body])
        if reason:
            raise Refused(reason)
        return web.Response(status=201)

    @property
    def _batch_bytes(self) -> int:
        return max(_BATCH_BYTES, self._task.max_report_bytes + 4)

    async def _upload_batch(self, request: web.Request) -> web.Response:
        """Many nodes' reports from one relay, each judged for itself."""
        assert isinstance(self._aggregator, Leader)
        first = await _first(request)  # a client that sends nothing takes no place from others
        is_known = self._aggregator.is_of_a_node(first_lp(first))
        async with self._batches.take(is_known) as place:
            body = await _read(
                request, self._batch_bytes, first=first, pace_bytes=_PACE_BYTES, place=place
            )
            bodies = split_lp(body, _TOGETHER)
            if not bodies:
                raise Malformed("no report")
            return web.Response(text="\n".join(await self._admit(bodies)))

    async def _admit(self, bodies: Sequence[bytes | memoryview]) -> list[str]:
        done: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        await self._uploads.put((bodies, done))
        return await done

    @property
    def _job_bytes(self) -> int:
        return min(_MOST_JOB_BYTES, self._task.max_job_bytes)

    async def _job(self, request: web.Request) -> web.Response:
        assert isinstance(self._aggregator, Helper)
        async with self._jobs:
            body = await _read(request, self._job_bytes, _JOB_S)
            return web.Response(body=await _in(self._working, self._aggregator.job, body))

    async def _release(self, request: web.Request) -> web.Response:
        body = await _read(request, _RELEASE_BYTES)
        aggregator = self._aggregator
        if isinstance(aggregator, Helper):
            return web.Response(body=await _in(self._releasing, aggregator.release, body))
        assert isinstance(aggregator, Leader)
        if len(body) != 16:
            raise Refused("malformed")
        start_s, duration_s = int.from_bytes(body[:8], "big"), int.from_bytes(body[8:], "big")
        own, theirs = await _in(self._releasing, aggregator.release, start_s, duration_s)
        return web.Response(body=lp(own) + lp(theirs))

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(status_of, self._aggregator))

    @staticmethod
    def _authorised(handler: Handler, token: str) -> Handler:
        expected = f"Bearer {token}"

        async def guarded(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "")
            told = given.encode("utf-8", "surrogateescape")
            if not token or not hmac.compare_digest(told, expected.encode()):
                raise web.HTTPUnauthorized(text="unknown token")
            return await handler(request)

        return guarded

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every refusal becomes a status, a reason and a count."""
        try:
            return await handler(request)
        except Refused as refused:
            detail = str(refused)
            text = refused.reason if detail == refused.reason else f"{refused.reason}: {detail}"
            return web.Response(status=refused.status, text=text)
        except Malformed:
            return web.Response(status=400, text="malformed")
        except NoPlace:
            return self._turn_away("busy", 503)
        except HelperAway:
            return web.Response(status=503, text="the helper is away, try again")
        except (ConnectionError, web.RequestPayloadError):  # gone in the middle of its body
            return self._turn_away("hung up", 400)
        except web.HTTPNotFound:
            return web.Response(status=404, text="unknown task")
        except web.HTTPUnauthorized as stranger:
            return self._turn_away("unauthorised", stranger.status)
        except web.HTTPRequestEntityTooLarge as large:
            return self._turn_away("oversized", large.status)
        except web.HTTPRequestTimeout as slow:
            return self._turn_away("too slow", slow.status)

    def _turn_away(self, reason: str, status: int) -> web.Response:
        self._aggregator.store.note_refusals(Counter({reason: 1}))
        response = web.Response(status=status, text=reason)
        response.force_close()  # the rest of the body is not read
        return response

    def http_log(self) -> logging.Logger:
        """For the HTTP library: requests that are none are counted, not logged with a traceback
        each, or a stranger could fill the disk and hide what the operator should read.
        """
        log = logging.Logger("sonde.fleet.http")
        log.parent = _log

        def is_worth_it(record: logging.LogRecord) -> bool:
            cause = record.exc_info[1] if record.exc_info else None
            if isinstance(cause, HttpProcessingError):
                self._aggregator.store.note_refusals(Counter({"bad request": 1}))
            return not isinstance(cause, HttpProcessingError)

        log.addFilter(is_worth_it)
        return log

    # --- the pumps -----------------------------------------------------------------------

    async def _pumps(self, _: web.Application) -> Any:
        pumps = [asyncio.create_task(self._sweep())]
        if isinstance(self._aggregator, Leader):
            pumps.append(asyncio.create_task(self._commit()))
            pumps += [asyncio.create_task(self._drive()) for _ in range(_DRIVERS)]
        yield
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for pool in (self._working, self._driving, self._releasing):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)

    async def _sweep(self) -> None:
        """Lets batches expire that nobody has collected in time, and goes of the memory that rush
        hours took."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._task.keep_s))
            if not self._aggregator.store.waiting:
                await asyncio.to_thread(release_memory)
            try:
                lost = await asyncio.to_thread(self._aggregator.expire)
            except Exception:  # the disk; tried again
                _log.exception("nothing could expire")
            else:
                if lost:
                    _log.warning("%d reports have expired: nobody collected them in time", lost)

    async def _commit(self) -> None:
        """Admits uploads in groups: one sync to disk serves all that wait for it."""
        assert isinstance(self._aggregator, Leader)
        while True:
            group = [await self._uploads.get()]
            bodies = list(group[0][0])
            while len(bodies) < _COMMIT_LIMIT and not self._uploads.empty():
                group.append(self._uploads.get_nowait())
                bodies += group[-1][0]
            while self._aggregator.store.waiting > _BACKLOG:
                self._work_went.clear()
                await self._work_went.wait()
            try:
                reasons = await _in(self._working, self._aggregator.admit, bodies)
            except Exception:
                _log.exception("admission failed")
                for _, done in group:
                    if not done.done():
                        done.set_exception(web.HTTPServiceUnavailable(text="try again later"))
                continue
            given = iter(reasons)
            for part, done in group:
                answer = list(islice(given, len(part)))
                if not done.done():
                    done.set_result(answer)
            self._work_came.set()

    async def _drive(self) -> None:
        """Takes jobs through while there are any; waits longer while the helper is away."""
        assert isinstance(self._aggregator, Leader)
        pause_s = 0.1
        while True:
            try:
                count = await _in(self._driving, self._aggregator.step)
                self._work_went.set()
                pause_s = 0.1
            except Exception as error:  # the helper, or this party's disk: the job is still there
                if isinstance(error, HelperAway):
                    _log.warning("the helper did not answer: %s", error)
                else:
                    _log.exception("a job failed")
                await asyncio.sleep(pause_s)
                pause_s = min(5.0, pause_s * 2)
                continue
            if count == 0:
                self._work_came.clear()
                try:
                    await asyncio.wait_for(self._work_came.wait(), 1.0)
                    await asyncio.sleep(0.05)  # let a group gather
                except TimeoutError:
                    pass


async def _in(pool: Executor, do: Callable[..., _T], *args: Any) -> _T:
    return await asyncio.get_running_loop().run_in_executor(pool, do, *args)


async def _first(request: web.Request) -> bytes:
    """The beginning of a batch with its first report, or all of it; in good time."""
    parts, wanted = bytearray(), _FIRST_BYTES
    try:
        async with asyncio.timeout(_BODY_S):
            while len(parts) < wanted and (part := await request.content.readany()):
                parts += part
                wanted = max(_FIRST_BYTES, min(_FIRST_REPORT_BYTES, first_lp_bytes(parts)))
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    return bytes(parts)


def _fitting(count: int, each_bytes: int) -> int:
    """So many places, or fewer where all of them would hold too much."""
    return max(_FEWEST, min(count, _PLACES_BYTES // each_bytes))


async def _read(
    request: web.Request,
    limit_bytes: int,
    limit_s: float = _BODY_S,
    *,
    first: bytes = b"",
    pace_bytes: int = 0,
    place: Place | None = None,
) -> bytes:
    """A body of at most so many bytes, whatever its header says of it, in good time.

    `first`: what was read of it before; `pace_bytes`: who sends less in _PACE_S is turned away;
    `place`: what it is read in, and turned away with when that is lost.
    """
    if (request.content_length or 0) > limit_bytes:
        raise web.HTTPRequestEntityTooLarge(limit_bytes, request.content_length or 0)
    parts, size = [first], len(first)
    now_s = asyncio.get_running_loop().time
    ends_s, due_bytes = now_s() + limit_s, size + pace_bytes
    try:
        async with asyncio.timeout_at(min(ends_s, now_s() + _PACE_S) if pace_bytes else ends_s) as (
            deadline
        ):
            if place is not None:
                place.until(deadline)
            async for part in request.content.iter_any():
                size += len(part)
                if place is not None:
                    place.size += len(part)
                    if place.is_lost:
                        raise TimeoutError
                if pace_bytes and size >= due_bytes:
                    due_bytes = size + pace_bytes
                    deadline.reschedule(min(ends_s, now_s() + _PACE_S))
                if size > limit_bytes:
                    raise web.HTTPRequestEntityTooLarge(limit_bytes, size)
                parts.append(part)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    if place is not None:
        place.whole()
    return b"".join(parts)


async def _say_little(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "sonde"  # no versions


def status_of(aggregator: Aggregator) -> dict[str, Any]:
    """Counts for the operator; nothing of any report's content."""
    store = aggregator.store
    return {
        "task": aggregator.task.name,
        "waiting": store.waiting,
        "verified": {str(start): count for start, count in store.counts().items()},
        "refused": store.refusals(),
        "latency_s": store.latencies(),
        "clock_step_s": getattr(aggregator.clock, "step_s", 0.0),
    }


def open_aggregator(state: Path, threads: int) -> tuple[Aggregator, Bundle]:
    """The aggregator whose files lie in `state`."""
    bundle = Bundle.load(state)
    if bundle.role not in ("leader", "helper"):
        raise UsageError(
            f"{state} belongs to a {bundle.role}, not to an aggregator",
            "name the leader's or the helper's directory",
        )
    task, roster = Task.load(state / "task.json"), Roster.load(state / "roster.json")
    clock = PartyClock(state)  # before the state is opened, which lets expire what is old
    path = state / "state.sqlite"
    if bundle.role == "helper":
        return Helper(task, bundle.keys, roster, path, threads, clock), bundle
    client = HelperClient(task, bundle.helper_token, bundle.client_tls())
    return Leader(task, bundle.keys, roster, path, client.post, threads, clock), bundle


def runner_of(service: Service) -> web.AppRunner:
    """What strangers send is unpacked for nobody, and who asks nothing is hung up on."""
    return web.AppRunner(
        service.app(),
        access_log=None,
        logger=service.http_log(),
        keepalive_timeout=_IDLE_S,
        auto_decompress=False,
    )


def serve(state: Path, threads: int = 2, ready: Callable[[str], None] = lambda url: None) -> None:
    """Runs the aggregator of a state directory until SIGINT or SIGTERM; SIGHUP is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keep_memory()  # a report's 70 kB are taken and freed some six times: each page zeroed anew
    aggregator, bundle = open_aggregator(state, threads)
    url = aggregator.task.leader_url if bundle.role == "leader" else aggregator.task.helper_url
    parts = urlsplit(url)

    gc.freeze()  # a roster of a fleet is not worth a walk at every collection
    gc.set_threshold(20_000, 20, 50)

    async def run() -> None:
        service = Service(aggregator, bundle)
        front = runner_of(service)
        await front.setup()
        assert front.server is not None
        listeners = [
            socket.create_server(address[:2], family=family, backlog=1024)
            for family, _, _, _, address in socket.getaddrinfo(
                parts.hostname, parts.port or 443, type=socket.SOCK_STREAM
            )
        ]
        connections = Connections(front.server, bundle.server_tls(), aggregator.store.note_refusals)
        accepting = [asyncio.create_task(connections.accept(one)) for one in listeners]
        ready(url)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        await front.cleanup()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())
    aggregator.store.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: it moves TLS bodies at half the cost."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
