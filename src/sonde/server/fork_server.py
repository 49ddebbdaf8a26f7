# SPDX-License-Identifier: Apache-2.0
"""The process that a server's children are forks of: `python -m sonde.server.fork_server`.

To import what a child needs takes a second of CPU time. This process has it imported, and forks a
child for each question. It gets the name of a child and its limits; what is asked goes from the
server to the child, so that it keeps nothing of a tenant for the next one.

Standard input: a Unix socket of sequenced packets. A packet has JSON (`module`, one of `CHILDREN`,
and `arguments`) and two descriptors, which become the child's standard input and output. The output
is a stream socket: its first byte brings a pidfd of the child, then follows what the child writes,
then `WHOLE` where it came to its end.

It ends when the other end of the socket is closed, as by the death of the server, and kills its
children then; and after `IDLE_S` without a child.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sonde import interpreter
from sonde.server import open_recording, question_child
from sonde.server.children import limit_libraries
from sonde.server.forked_children import PACKET_BYTES, STARTED, WHOLE
from sonde.without_pandas import keep_pandas_out

CHILDREN = {one.__name__: one.main for one in (question_child, open_recording)}
"""What children run by the name of its module: each sets its limits first."""
IDLE_S = 300.0
"""Without a child and without a question."""
_USED_LATER = (
    *("importlib.readers", "importlib.resources.readers", "numpy.ma"),
    *("pyarrow.acero", "pyarrow.dataset"),
    *("sonde.analyze.bound", "sonde.analyze.merge", "sonde.export.packed"),
    *("sonde.export.stack_frames", "sonde.export.timeline_columns", "sonde.export.verdict"),
    *("sonde.query.capture", "sonde.query.queries", "sonde.query.run_columns"),
    *("sonde.query.session", "sonde.query.stored_session", "sonde.query.timeline"),
    *("sonde.readers.kineto", "sonde.readers.nsys_sqlite", "sonde.readers.otlp_profiles"),
    *("sonde.readers.perf_script", "sonde.recording.timelines", "sonde.server.answers"),
    "sonde.server.served_session",
)
"""What children import in functions, and with it all that takes long."""


class Child(NamedTuple):
    """What a fork is to do."""

    packet: bytes
    fds: Sequence[int]


def main() -> None:
    """Serve the socket until it ends."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 (a device)
        os.dup2(nothing.fileno(), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A terminal sends it to all processes; the server ends by it, and that ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload()
    child = serve(control)
    if child is not None:
        answer(*child)


def preload() -> None:
    """Import what children need. Raises RuntimeError where that started a thread: a fork has none
    of them, and may have a lock that one held."""
    # A thread of a pool of memory that Arrow is not to use.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    limit_libraries()
    keep_pandas_out()
    for name in _USED_LATER:
        importlib.import_module(name)
    if len([*Path("/proc/self/task").iterdir()]) != 1:
        raise RuntimeError("an import has started a thread")
    gc.collect()
    gc.freeze()  # or each child would copy the pages of all objects at its first collection


def serve(control: socket.socket) -> Child | None:
    """Fork a child for each packet until the socket ends, or there was none for `IDLE_S`.

    Returns in each child, too: what it is to do; None in this process.
    """
    children: dict[int, int] = {}
    """Process id by pidfd."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        ready = poll.poll(IDLE_S * 1000)
        if not ready and not children:
            return None
        for fd, _ in ready:
            if fd in children:
                poll.unregister(fd)
                os.waitpid(children.pop(fd), 0)
                os.close(fd)
                continue
            packet, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, 2)
            if not packet:
                for pidfd in children:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return None
            try:
                pid = os.fork()
            except OSError:  # the server sees that there is no child, and has another way
                pid = -1
            if pid == 0:
                control.close()
                for pidfd in children:
                    os.close(pidfd)
                return Child(packet, fds)
            for one in fds:
                os.close(one)
            if pid > 0:
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid
                poll.register(pidfd, select.POLLIN)


def answer(packet: bytes, fds: Sequence[int]) -> None:
    """In a child: become what the packet names. Nobody else has the other end of its output, so the
    server sees its end however it dies."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in {*fds}:
        os.close(fd)
    asked = json.loads(packet)
    with socket.socket(fileno=os.dup(1)) as output:
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(output, [STARTED], [pidfd])  # fails where nobody waits for it any more
        os.close(pidfd)
        sys.argv = [asked["module"], *asked["arguments"]]
        CHILDREN[asked["module"]]()
        sys.stdout.flush()
        output.sendall(WHOLE)
    interpreter.leave_fork()


if __name__ == "__main__":
    main()
