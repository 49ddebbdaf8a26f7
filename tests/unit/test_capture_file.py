# SPDX-License-Identifier: Apache-2.0
"""The file sink: what it wrote whole stays readable, whatever happens to the disk or to it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde.errors import SinkError
from sonde.query.capture import read
from sonde.sinks.capture import CaptureFile
from sonde.sinks.chunk import ChunkBuilder


def chunk(seq, events=1, last=False):
    """A chunk with that many events, which do not compress to nothing."""
    builder = ChunkBuilder(seq * 10**9)
    noise = [int.from_bytes(os.urandom(6), "little") for _ in range(events)]
    builder.add("event", [(seq * 10**9, "notice", "n", n % 2**32, n, 1.0, "") for n in noise])
    meta = {
        "seq": seq,
        "start_ns": seq * 10**9,
        "end_ns": (seq + 1) * 10**9,
        "wall_offset_ns": 0,
        "last": last,
        "capture": {"id": "x", "version": "0", "host": {}},
    }
    return builder.encode(meta)


@contextlib.contextmanager
def file_size_limit(size_bytes):
    """No file of this process may grow larger: the disk is full, as far as it can see."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def events_in(path):
    return read(path).tables["event"].num_rows


def test_chunks_come_back(tmp_path):
    path = tmp_path / "a.sonde"
    sink = CaptureFile(path)
    sink.write(chunk(0, 10))
    sink.write(chunk(1, 20, last=True))
    sink.close()
    sink.close()
    capture = read(path)
    assert capture.tables["event"].num_rows == 30
    assert capture.info.clean_end
    assert sink.written_bytes == path.stat().st_size


def test_an_existing_file_is_kept(tmp_path):
    path = tmp_path / "a.sonde"
    path.write_text("precious")
    with pytest.raises(SinkError, match=r"a\.sonde exists") as refused:
        CaptureFile(path)
    assert "--force" in refused.value.remedy
    assert path.read_text() == "precious"


def test_force_overwrites(tmp_path):
    path = tmp_path / "a.sonde"
    path.write_text("old " * 10_000)
    sink = CaptureFile(path, force=True)
    sink.write(chunk(0))
    sink.close()
    assert events_in(path) == 1


@pytest.mark.parametrize("name", ["missing/a.sonde", ""])
def test_a_path_that_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(SinkError) as refused:
        CaptureFile(tmp_path / name)
    assert refused.value.remedy


def test_a_link_into_nowhere_is_not_followed(tmp_path):
    """A recorder runs as root: a link that someone else left must not become a file elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "a.sonde").symlink_to(elsewhere)
    with pytest.raises(SinkError):
        CaptureFile(tmp_path / "a.sonde")
    assert not elsewhere.exists()


def test_a_chunk_that_does_not_fit_is_taken_back(tmp_path):
    path = tmp_path / "a.sonde"
    sink = CaptureFile(path)
    sink.write(chunk(0, 100))
    whole = path.stat().st_size
    with file_size_limit(whole + 1000), pytest.raises(SinkError) as refused:
        sink.write(chunk(1, 10_000))
    assert "space" in refused.value.remedy
    assert path.stat().st_size == whole
    sink.write(chunk(2, 5, last=True))  # there is room again
    sink.close()
    capture = read(path)
    assert capture.tables["event"].num_rows == 105
    assert capture.info.chunks_missing == 1
    assert capture.info.tail_bytes == 0


@pytest.mark.bpf
def test_a_full_disk_keeps_what_was_written(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    try:
        sink = CaptureFile(disk / "a.sonde")
        written = 0
        with pytest.raises(SinkError, match="No space left"):
            while True:
                sink.write(chunk(written, 500))
                written += 1
        sink.close()
        assert written > 1
        assert events_in(disk / "a.sonde") == 500 * written
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_writer_killed_at_any_byte_leaves_a_readable_file(tmp_path):
    path = tmp_path / "a.sonde"
    sink = CaptureFile(path)
    sink.write(chunk(0, 7))
    kept = sink.written_bytes
    sink.write(chunk(1, 9))
    sink.close()
    whole = path.read_bytes()
    for size in range(kept, len(whole)):
        path.write_bytes(whole[:size])
        capture = read(path)
        assert capture.tables["event"].num_rows == 7
        assert capture.info.tail_bytes == size - kept
        assert not capture.info.clean_end


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_capture_file import chunk
from sonde.sinks.capture import CaptureFile
sink, seq = CaptureFile(Path(sys.argv[1])), 0
while True:
    sink.write(chunk(seq, 2000))
    seq += 1
    print(seq, flush=True)
"""


def test_a_killed_writer_leaves_every_chunk_it_had_finished(tmp_path):
    path = tmp_path / "a.sonde"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(5):
        writer.stdout.readline()
    time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    sizes = [int(line) for line in writer.communicate()[0].split()]
    finished = max(sizes, default=5)
    capture = read(path)
    assert capture.info.chunks >= finished
    assert capture.tables["event"].num_rows == 2000 * capture.info.chunks
    assert capture.info.chunks_missing == capture.info.chunks_damaged == 0
