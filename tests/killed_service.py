# SPDX-License-Identifier: Apache-2.0
"""Kills a server, an agent's sender, or both, again and again, and recounts what is stored.

The sender is what an agent has (`ServerSink` over a `Spool`), in a process that replays recorded
chunks. It notes each chunk that is in its spool in a file, so what must arrive is known, whichever
is killed and when: everything noted, once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from served import Server
from sonde.sinks.server import ServerSink
from sonde.sinks.spool import Spool
from sonde.store.catalog import Catalog
from stored_chunks import as_of, meta_of, recorded, rows_of

CHUNKS = recorded()
PERIOD_S = 0.02
VICTIMS = ("server", "agent", "both")


class NotedSpool(Spool):
    """A spool that appends the number of each chunk it has taken to a file."""

    def __init__(self, path: Path, note: Path) -> None:
        super().__init__(path)
        self._note_fd = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, chunk: bytes) -> None:
        """As always, and then the note."""
        super().add(chunk)
        os.write(self._note_fd, b"%d\n" % meta_of(chunk)["seq"])


def feed(url: str, folder: Path, seconds: float) -> None:
    """Send chunks for so long, then until the spool is empty."""
    note = folder / "noted"
    spool = NotedSpool(folder / "spool", note)
    sink = ServerSink(url, "one", spool)
    started = folder / "started"
    number = int(started.read_text()) if started.exists() else 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        number += 1
        draft = folder / "started.new"
        draft.write_text(str(number))
        draft.rename(started)
        body = as_of(CHUNKS[number % len(CHUNKS)], "replayed", number, time.time_ns())
        sink.write(body)
        time.sleep(PERIOD_S)
    while len(spool):
        time.sleep(0.05)
    sink.close()


@dataclass(slots=True)
class Recount:
    """What came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    noted: int = 0
    stored: int = 0
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    sample_rows_expected: int = 0
    sample_rows_stored: int = 0
    accepting_s: list[float] = field(default_factory=list)
    """From each start of the server to its first answer."""
    queryable_s: float = 0.0
    """From the last acknowledgement until everything could be asked for."""
    server_rss_bytes: int = 0


def run(folder: Path, kills: int, seed: int) -> Recount:
    """Kill so often, let everything arrive, and recount."""
    draw = random.Random(seed)
    found = Recount()
    (folder / "agent").mkdir(mode=0o700)
    server = Server(folder / "store", keeps_port=True)
    found.accepting_s.append(server.start())
    sender = _sender(server, folder, 3_600)
    try:
        for _ in range(kills):
            time.sleep(draw.uniform(0.1, 1.0))
            victim = draw.choice(VICTIMS)
            found.kills[victim] += 1
            if victim != "server":
                sender.kill()
                sender.wait()
            if victim != "agent":
                server.kill()
                found.accepting_s.append(server.start())
            if victim != "server":
                sender = _sender(server, folder, 3_600)
        time.sleep(1)
        sender.kill()
        sender.wait()
        sender = _sender(server, folder, 0)
        assert sender.wait(120) == 0
        started = time.monotonic()
        noted = [int(line) for line in (folder / "agent" / "noted").read_text().split()]
        server.wait_for(len(set(noted)))
        found.queryable_s = time.monotonic() - started
        assert server.process
        found.server_rss_bytes = _rss_bytes(server.process.pid)
    finally:
        sender.kill()
        sender.wait()
        server.stop()
    _recount(found, folder / "store", noted)
    return found


def _sender(server: Server, folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    url = f"http://127.0.0.1:{server.port}"
    return subprocess.Popen(
        [sys.executable, __file__, url, str(folder / "agent"), str(seconds)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )


def _rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _recount(found: Recount, store: Path, noted: list[int]) -> None:
    catalog = Catalog(store)
    rows = [
        row
        for one in catalog.files("default", "chunk")
        for row in pq.read_table(store / one.path, columns=["seq", "sample_rows"]).to_pylist()
    ]
    samples = [store / one.path for one in catalog.files("default", "sample")]
    catalog.close()
    stored = Counter(row["seq"] for row in rows)
    found.noted, found.stored = len(set(noted)), len(stored)
    found.lost = sorted(set(noted) - set(stored))
    found.doubled = sorted(number for number, count in stored.items() if count > 1)
    found.sample_rows_expected = sum(
        rows_of(CHUNKS[number % len(CHUNKS)], "sample") for number in stored
    )
    found.sample_rows_stored = sum(pq.read_metadata(path).num_rows for path in samples)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    feed(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
