# SPDX-License-Identifier: Apache-2.0
"""A socket whose connection is refused counts from 0 again, as does one that is given up: what it
moved is no number next to 2^64."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from sonde.collect.flows import FlowCollector
from sonde.collect.kernel import Kernel

pytestmark = pytest.mark.bpf

LARGEST = 1 << 40
PATIENCE_S = 20.0


def refused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_connection_that_is_refused_moved_nothing_impossible():
    flows = FlowCollector(Kernel(None))
    flows.start()
    try:
        refused = [socket.socket() for _ in range(8)]
        port = refused_port()
        for one in refused:
            with pytest.raises(ConnectionRefusedError):
                one.connect(("127.0.0.1", port))
        # One that worked, and is given up: connect() to an address of no family.
        server = socket.create_server(("127.0.0.1", 0))
        given_up = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        given_up.sendall(b"x" * 4096)
        rows = flows.drain(time.monotonic_ns(), to_the_end=True).rows.get("activity", [])
        given_up.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        _disconnect(given_up)
        for _ in range(2):  # both are still open, and looked at
            batch = flows.drain(time.monotonic_ns(), to_the_end=True)
            rows = [*rows, *batch.rows.get("activity", [])]
        sent = [row for row in rows if row[4] == "send"]
        assert sent  # the connection attempts were seen
        for row in rows:
            assert row[10] < LARGEST and row[12] < LARGEST, row
    finally:
        flows.stop()
        for one in (*refused, given_up, accepted, server):
            one.close()


def _disconnect(one: socket.socket) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    nobody = struct.pack("=H14x", socket.AF_UNSPEC)
    assert libc.connect(one.fileno(), nobody, len(nobody)) == 0
