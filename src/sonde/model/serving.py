# SPDX-License-Identifier: Apache-2.0
"""Code in which a thread waits for the next connection, request or task: it is idle there, whatever
the reason of the wait.

By functions of the standard library and of servers, never by names that a program chose.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ServingRole(IntEnum):
    """What a frame is in a stack that may wait for the next thing to do."""

    NONE = 0
    OTHER_PYTHON = 1
    """Python code that is neither of the next two: it waits for itself."""
    WAITS = 2
    """Python code that waits on behalf of its caller: sockets, selectors, queues, conditions."""
    LOOP = 3
    """Python code that takes the next connection, request or task."""
    ACCEPT = 4
    """Machine code that waits for a connection."""
    EVENTS = 5
    """Machine code that waits for any of many events. Python programs use it for other waits, too:
    there the Python code decides."""
    HANDLES = 6
    """Python code that answers a request: what it waits for, the request waits for."""


TASK_LOOP: Final = "concurrent/futures/thread.py"
"""The file of a loop whose tasks are requests only in a program that takes requests."""
EVENT_LOOPS: Final = frozenset(
    ("asyncio/base_events.py", "tornado/ioloop.py", "trio/_core/_run.py")
)
"""Files of loops that serve many connections in one thread: what blocks it holds up all of them."""
CONNECTION_LOOPS: Final = frozenset(("socketserver.py", TASK_LOOP))
"""Files of loops that hand a connection to the program, which reads the requests itself."""
ACCEPTS: Final = "accept"
"""In place of a file: the program itself waits for connections."""
ACCEPT_CALLS: Final = frozenset(("accept", "accept4"))
"""System calls that wait for a connection: the recorder has them also where no stack was taken."""
WAITING_FILES: Final = frozenset(
    ("socket.py", "selectors.py", "ssl.py", "threading.py", "queue.py", "multiprocessing/queues.py")
)
"""Files of the standard library that wait on behalf of their callers."""
LOOPS: Final = {
    "socketserver.py": ("serve_forever", "handle_request", "get_request"),
    "http/server.py": ("handle_one_request",),
    "wsgiref/simple_server.py": ("handle",),
    "asyncio/base_events.py": ("_run_once",),
    "concurrent/futures/thread.py": ("_worker",),
    "concurrent/futures/process.py": ("_process_worker",),
    "multiprocessing/pool.py": ("worker",),
    "multiprocessing/managers.py": ("serve_forever", "accepter"),
    "gunicorn/workers/sync.py": ("wait", "accept"),
    "gunicorn/workers/gthread.py": ("run",),
    "waitress/task.py": ("handler_thread",),
    "waitress/wasyncore.py": ("poll", "poll2"),
    "cheroot/workers/threadpool.py": ("run",),
    "cheroot/connections.py": ("_run", "run"),
}
"""By file: functions that take the next connection, request or task."""
_HANDLERS: Final = {
    "socketserver.py": ("process_request_thread", "finish_request"),
    "grpc/_server.py": ("_unary_response_in_pool", "_stream_response_in_pool"),
    "flask/app.py": ("wsgi_app",),
    "django/core/handlers/wsgi.py": ("__call__",),
    "starlette/concurrency.py": ("run_in_threadpool",),
}
_BATCHES: Final = frozenset(("multiprocessing/pool.py", "concurrent/futures/process.py"))
"""Loops of processes that work for another one of the program: it asks, and no customer."""
_ACCEPTS: Final = frozenset(("accept", "accept4", "__libc_accept", "__libc_accept4"))
_EVENTS: Final = frozenset(
    ("epoll_wait", "epoll_pwait", "epoll_pwait2", "uv__io_poll", "event_base_loop", "ev_run")
)


def python_role(file: str, function: str) -> ServingRole:
    """Of a frame of Python: its file below the library's folder, and its qualified name."""
    name = function.rpartition(".")[2]
    if name in LOOPS.get(file, ()):
        return ServingRole.LOOP
    if name in _HANDLERS.get(file, ()):
        return ServingRole.HANDLES
    return ServingRole.WAITS if file in WAITING_FILES else ServingRole.OTHER_PYTHON


def takes_requests(file: str) -> bool:
    """Whether what a loop or a handler in this file takes may be requests."""
    return file not in _BATCHES


def native_role(function: str) -> ServingRole:
    """Of a frame of machine code."""
    if function in _ACCEPTS:
        return ServingRole.ACCEPT
    return ServingRole.EVENTS if function in _EVENTS else ServingRole.NONE
