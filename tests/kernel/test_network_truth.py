# SPDX-License-Identifier: Apache-2.0
"""What the host's network does against a truth that the test reads for itself."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from host_counters import grown_beside, read_beside, settle
from truths import TRUTH, agrees

pytestmark = pytest.mark.bpf


@contextmanager
def pair(*, rate: str = "") -> Iterator[tuple[str, str]]:
    """Two network namespaces and a cable; from the first one no faster than `rate`."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc")
    names = (f"sonde-a{os.getpid()}", f"sonde-b{os.getpid()}")
    made: list[str] = []

    def do(command: str) -> None:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{command}: {done.stderr.strip()}")

    try:
        for name in names:
            do(f"ip netns add {name}")
            made.append(name)
        do(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
        for end, name in enumerate(names, 1):
            do(f"ip -n {name} addr add 10.123.0.{end}/24 dev veth0")
            do(f"ip -n {name} link set veth0 up")
            do(f"ip -n {name} link set lo up")
        if rate:
            do(f"tc -n {names[0]} qdisc add dev veth0 root tbf {rate}")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def inside(name: str, source: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def counters(name: str, file: str) -> dict[str, int]:
    """Protocol counters of a namespace."""
    raw = subprocess.run(
        ["ip", "netns", "exec", name, "cat", f"/proc/net/{file}"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return {
        f"{heads.split()[0]}{key}": int(value)
        for heads, values in zip(raw[::2], raw[1::2], strict=True)
        for key, value in zip(heads.split()[1:], values.split()[1:], strict=True)
    }


def soft_interrupts() -> dict[str, int]:
    lines = Path("/proc/softirqs").read_text().splitlines()[1:]
    return {
        line.split(":")[0].strip().lower(): sum(map(int, line.split(":")[1].split()))
        for line in lines
    }


def test_soft_interrupts_of_a_flood(record):
    flood = (
        "import socket, time\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "e = time.time() + 1.5\n"
        "while time.time() < e:\n"
        "    for _ in range(100): s.sendto(b'x' * 64, ('10.123.0.2', 9))\n"
    )
    read = lambda: soft_interrupts()["net_rx"]  # noqa: E731
    with pair() as (first, second), read_beside(read) as seen:
        with record("--host") as recorder:
            settle()
            packets_before = counters(second, "snmp").get("Udp:NoPorts", 0)
            inside(first, flood).communicate(timeout=60)
            arrived = counters(second, "snmp")["Udp:NoPorts"] - packets_before
            settle()
        time.sleep(0.1)
    kind = {"sonde.interrupt": "net_rx"}
    recorded, truth = grown_beside(recorder, seen, "sonde.host.softirqs", **kind)
    assert arrived > 10_000
    assert truth > 1_000
    agrees("NET_RX in a flood, by /proc/softirqs", recorded, truth)


def test_what_is_sent_again_through_a_narrow_queue(record):
    server = (
        "import socket, sys\n"
        "s = socket.socket(); s.bind(('10.123.0.2', 5001)); s.listen()\n"
        "print('ready', flush=True)\n"
        "c, _ = s.accept()\n"
        "n = 0\n"
        "while b := c.recv(1 << 16): n += len(b)\n"
        "print(n, flush=True); sys.stdin.readline()\n"
    )
    client = (
        "import socket, sys, time\n"
        "sys.stdin.readline()\n"
        "s = socket.create_connection(('10.123.0.2', 5001))\n"
        "s.sendall(bytes(4 << 20)); s.shutdown(socket.SHUT_WR)\n"
        "print('sent', flush=True); sys.stdin.readline()\n"
    )
    with (
        pair(rate="rate 20mbit burst 10kb limit 20kb") as (first, second),
        record("--host") as recorder,
    ):
        receiver = inside(second, server)
        assert receiver.stdout.readline() == "ready\n"
        sender = inside(first, client)
        time.sleep(1)
        sender.stdin.write("go\n")
        sender.stdin.flush()
        assert sender.stdout.readline() == "sent\n"
        received = int(receiver.stdout.readline())
        settle()
        truth, ending = counters(first, "snmp"), counters(first, "netstat")
        for end in (sender, receiver):
            end.communicate("end\n", timeout=30)
        settle()

    def flow(pid: int, op: str) -> tuple[int, int]:
        ((count, size),) = recorder.rows(
            'SELECT coalesce(sum("count"), 0), coalesce(sum(bytes), 0) FROM activity'
            " WHERE pid = ? AND kind = 'tcp' AND op = ?",
            pid,
            op,
        )
        return int(count), int(size)

    again, again_bytes = flow(sender.pid, "retransmit")
    segments, sent = flow(sender.pid, "send")
    assert received == 4 << 20
    assert truth["Tcp:RetransSegs"] > 20
    agrees("segments sent again, by /proc/net/snmp", again, truth["Tcp:RetransSegs"], 1)
    # netstat counts reasons and buffers, not segments; but its bytes are those of all packets, each
    # with its headers: IP, and TCP with time stamps.
    payload = ending["IpExt:OutOctets"] - truth["Ip:OutRequests"] * (20 + 32)
    agrees("bytes sent, by /proc/net/netstat", sent, payload)
    # What the queue refuses at once is handed to it again: the kernel counts it as sent twice, but
    # not as sent again.
    assert sent - again_bytes >= received
    all_sent = truth["Tcp:OutSegs"] + truth["Tcp:RetransSegs"]
    agrees("segments sent, by /proc/net/snmp", segments, all_sent)
    agrees("bytes received, by the receiver", flow(receiver.pid, "receive")[1], received)
    ((peer,),) = recorder.rows(
        "SELECT DISTINCT name FROM activity WHERE pid = ? AND kind = 'tcp'", sender.pid
    )
    assert peer == "10.123.0.2:5001"


def test_connections_too_short_for_any_walk_have_their_owner(record):
    talk = (
        "import socket, sys\n"
        "for _ in range(30):\n"
        "    s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "    s.sendall(bytes(1000)); s.recv(1); s.close()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, record("--host") as recorder:
        port = listener.getsockname()[1]
        client = subprocess.Popen([sys.executable, "-c", talk, str(port)])
        for _ in range(30):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000, socket.MSG_WAITALL)
                connection.sendall(b".")
        assert client.wait(30) == 0
        settle()
    ((sent,),) = recorder.rows(
        "SELECT sum(bytes) FROM activity WHERE pid = ? AND kind = 'tcp' AND op = 'send'", client.pid
    )
    assert sent == pytest.approx(30_000, rel=TRUTH)
