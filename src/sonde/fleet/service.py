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
import http.client
import logging
import queue
import signal
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from sonde._native import keep_memory, release_memory
from sonde.errors import UsageError
from sonde.fleet.aggregator import Aggregator, Helper, HelperAway, Leader, Refused
from sonde.fleet.asking import ask
from sonde.fleet.provision import Bundle
from sonde.fleet.roster import Roster
from sonde.fleet.task import Task
from sonde.fleet.wire import Malformed, lp, split_lp

_log = logging.getLogger(__name__)
_COMMIT_LIMIT = 256
_BACKLOG = 2048  # reports waiting for the proof check; above it uploads wait for their answer
_BATCH_BYTES = 8 << 20
_SINGLES = 1024
_BODY_S = 30  # for the body of an upload: who sends slower holds a place that others need
_BATCHES = 24  # read at a time: what uploads may hold of memory
_CONNECTIONS = 2
_DRIVERS = 4  # one waits for the helper, others check, store, count
_JOB_BYTES = 256 << 20
_WORDS_BYTES = 500  # of a refusal
_IDLE_S = 30  # of a connection that asks nothing, or is not done with asking
_TOGETHER = 1024  # reports in one request
_SWEEP_S = 60  # between two looks at what has expired
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Upload = tuple[Sequence[bytes | memoryview], asyncio.Future[list[str]]]


class HelperClient:
    """The leader's connections to the helper, kept open: while it works on one request, the next
    is on its way, so that it need not wait for the leader.
    """

    def __init__(self, task: Task, token: str, tls: ssl.SSLContext, timeout_s: float = 60) -> None:
        url = urlsplit(task.helper_url)
        self._task, self._token = task, token
        self._idle: queue.SimpleQueue[http.client.HTTPSConnection] = queue.SimpleQueue()
        for _ in range(_CONNECTIONS):
            self._idle.put(
                http.client.HTTPSConnection(
                    url.hostname or "", url.port, context=tls, timeout=timeout_s
                )
            )

    def post(self, path: str, body: bytes) -> bytes:
        connection = self._idle.get()
        try:
            status, answer = self._ask(connection, path, body)
        finally:
            self._idle.put(connection)
        if status == 200:
            return answer
        if status >= 500 or status in (401, 404):  # to be mended, not dropped
            raise HelperAway(f"status {status}")
        reason, _, detail = answer[:_WORDS_BYTES].decode("utf-8", "replace").partition(": ")
        raise Refused(reason, detail)

    def _ask(
        self, connection: http.client.HTTPSConnection, path: str, body: bytes
    ) -> tuple[int, bytes]:
        """(status, answer). A connection that was open may be none any more: who idles is hung up
        on. Then it is asked again on a new one; the helper does nothing twice.
        """
        while True:
            kept = connection.sock is not None
            try:
                return ask(connection, self._task, self._token, path, body)
            except (OSError, http.client.HTTPException) as error:
                connection.close()  # the next request opens it anew
                if not (kept and isinstance(error, (ConnectionError, ssl.SSLEOFError))):
                    raise HelperAway(str(error)) from error


class Service:
    """One aggregator behind its sockets."""

    def __init__(self, aggregator: Aggregator, bundle: Bundle) -> None:
        self._aggregator = aggregator
        self._bundle = bundle
        self._task = aggregator.task
        self._uploads: asyncio.Queue[_Upload] = asyncio.Queue(4096)
        self._batches = asyncio.Semaphore(_BATCHES)
        self._work_came = asyncio.Event()
        self._work_went = asyncio.Event()
        self._singles = asyncio.Semaphore(_SINGLES)

    def app(self) -> web.Application:
        limit = _JOB_BYTES if isinstance(self._aggregator, Helper) else self._batch_bytes

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
        async with self._singles:
            body = await _read(request, self._task.max_report_bytes)
            (reason,) = await self._admit([body])
        if reason:
            raise Refused(reason)
        return web.Response(status=201)

    @property
    def _batch_bytes(self) -> int:
        return max(_BATCH_BYTES, self._task.max_report_bytes + 4)

    async def _upload_batch(self, request: web.Request) -> web.Response:
        """Many nodes' reports from one relay, each judged for itself."""
        async with self._batches:
            bodies = split_lp(await _read(request, self._batch_bytes), _TOGETHER)
            if not bodies:
                raise Malformed("no report")
            return web.Response(text="\n".join(await self._admit(bodies)))

    async def _admit(self, bodies: Sequence[bytes | memoryview]) -> list[str]:
        done: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        await self._uploads.put((bodies, done))
        return await done

    async def _job(self, request: web.Request) -> web.Response:
        body = await request.read()
        assert isinstance(self._aggregator, Helper)
        return web.Response(body=await asyncio.to_thread(self._aggregator.job, body))

    async def _release(self, request: web.Request) -> web.Response:
        body = await request.read()
        aggregator = self._aggregator
        if isinstance(aggregator, Helper):
            return web.Response(body=await asyncio.to_thread(aggregator.release, body))
        assert isinstance(aggregator, Leader)
        if len(body) != 16:
            raise Refused("malformed")
        start_s, duration_s = int.from_bytes(body[:8], "big"), int.from_bytes(body[8:], "big")
        own, theirs = await asyncio.to_thread(aggregator.release, start_s, duration_s)
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
        except HelperAway:
            return web.Response(status=503, text="the helper is away, try again")
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
                reasons = await asyncio.to_thread(self._aggregator.admit, bodies)
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
                count = await asyncio.to_thread(self._aggregator.step)
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


async def _read(request: web.Request, limit_bytes: int) -> bytes:
    """A body of at most so many bytes, whatever its header says of it, in good time."""
    if (request.content_length or 0) > limit_bytes:
        raise web.HTTPRequestEntityTooLarge(limit_bytes, request.content_length or 0)
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.content.iter_any():
                size += len(part)
                if size > limit_bytes:
                    raise web.HTTPRequestEntityTooLarge(limit_bytes, size)
                parts.append(part)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
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
    path = state / "state.sqlite"
    if bundle.role == "helper":
        return Helper(task, bundle.keys, roster, path, threads), bundle
    client = HelperClient(task, bundle.helper_token, bundle.client_tls())
    return Leader(task, bundle.keys, roster, path, client.post, threads), bundle


def runner_of(service: Service) -> web.AppRunner:
    """What strangers send is unpacked for nobody, and who asks nothing is hung up on."""
    return web.AppRunner(
        service.app(), access_log=None, keepalive_timeout=_IDLE_S, auto_decompress=False
    )


def serve(state: Path, threads: int = 2, ready: Callable[[str], None] = lambda url: None) -> None:
    """Runs the aggregator of a state directory until SIGINT or SIGTERM."""
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
        site = web.TCPSite(
            front, parts.hostname, parts.port, ssl_context=bundle.server_tls(), backlog=1024
        )
        await site.start()
        ready(url)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
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
