# SPDX-License-Identifier: Apache-2.0
"""The spool: oldest first, bounded, counted, there after a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.errors import SinkError, UsageError
from sonde.sinks.spool import Spool

CHUNK = bytes(1_000)


def contents(spool: Spool) -> list[bytes]:
    return [one.content for one in spool.oldest(1 << 30, 1_000)]


def test_chunks_come_back_in_order_after_a_restart(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for number in range(5):
        spool.add(b"%d" % number)
    spool.remove(spool.oldest(1, 1)[0].number)
    spool.close()

    again = Spool(tmp_path / "spool")

    assert contents(again) == [b"1", b"2", b"3", b"4"]
    again.add(b"5")
    assert contents(again)[-1] == b"5"
    again.close()


def test_a_killed_agent_leaves_whole_chunks(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from sonde.sinks.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1]))\n"
        "for number in range(10**9):\n"
        "    spool.add(b'%08d' % number * 5000); print(number, flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "spool")], stdout=subprocess.PIPE
    )
    assert child.stdout
    for _ in range(20):
        last = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    rest = child.communicate()[0].split()
    last = int(rest[-1]) if rest else last

    found = contents(Spool(tmp_path / "spool"))

    assert len(found) - 1 in (last, last + 1)
    assert found == [b"%08d" % number * 5000 for number in range(len(found))]
    assert not list((tmp_path / "spool").glob("*.draft"))


def test_beyond_its_bound_the_oldest_goes_and_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", most_bytes=3_500)
    for _ in range(10):
        spool.add(CHUNK)
    assert (len(spool), spool.dropped, spool.size_bytes) == (3, 7, 3_000)
    spool.close()

    assert Spool(tmp_path / "spool").dropped == 7


def test_the_stored_count_goes_on_after_a_write_of_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool", most_bytes=2_500)
    write = os.write

    def full(fd: int, content: bytes) -> int:
        if len(content) < len(CHUNK):
            raise OSError(errno.ENOSPC, "no space")
        return write(fd, content)

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        spool.add(CHUNK)
    assert spool.dropped == 1
    monkeypatch.setattr(os, "write", write)
    spool.add(CHUNK)
    spool.close()

    assert Spool(tmp_path / "spool").dropped == 2


def test_two_agents_do_not_share_a_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with pytest.raises(UsageError, match="another agent"):
        Spool(tmp_path / "spool")
    spool.close()
    Spool(tmp_path / "spool").close()


def test_a_spool_that_cannot_be_read_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int) -> list[str]:
        raise OSError(errno.EIO, "input/output error")

    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as broken:
        broken.setattr(os, "listdir", fails)
        with pytest.raises(SinkError, match="cannot use the spool"):
            Spool(tmp_path / "spool")

    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    Spool(tmp_path / "spool").close()


def test_a_file_system_without_locks_is_no_other_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(SinkError, match=r"cannot lock the spool .*: No locks available"):
        Spool(tmp_path / "spool")


def test_what_the_disk_did_not_take_is_written_again_by_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool")
    spool.add(b"first")
    spool.add(b"second")
    first = tmp_path / "spool" / "0000000000000001.chunk"
    written = first.stat().st_ino
    really, synced, failing = os.fdatasync, [], [written]

    def fdatasync(fd: int) -> None:
        inode = os.fstat(fd).st_ino
        if inode in failing:
            raise OSError(errno.EIO, "input/output error")
        really(fd)
        synced.append(inode)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    spool.sync()
    second = (tmp_path / "spool" / "0000000000000002.chunk").stat().st_ino
    assert synced == [second]

    spool.sync()

    assert first.stat().st_ino != written  # pages that failed once count as clean
    assert synced == [second, first.stat().st_ino]
    assert contents(spool) == [b"first", b"second"]
    spool.sync()
    assert len(synced) == 2


def test_a_folder_that_cannot_be_synced_leaves_all_for_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool")
    spool.add(CHUNK)
    calls = []

    def fails(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    spool.sync()
    spool.sync()
    assert len(calls) == 2


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="changed by other users"):
        Spool(folder)


def test_a_batch_is_bounded_but_never_empty(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for _ in range(5):
        spool.add(CHUNK)

    assert len(spool.oldest(10, 5)) == 1
    assert len(spool.oldest(2_500, 5)) == 2
    assert len(spool.oldest(1 << 20, 3)) == 3


def test_what_is_gone_from_the_disk_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.add(CHUNK)
    spool.add(b"second")
    min((tmp_path / "spool").glob("*.chunk")).unlink()

    assert contents(spool) == [b"second"]
    assert spool.dropped == 1


def test_a_file_of_another_name_is_no_chunk(tmp_path: Path) -> None:
    Spool(tmp_path / "spool").close()
    other = tmp_path / "spool" / "7.chunk"
    other.write_bytes(CHUNK)

    spool = Spool(tmp_path / "spool")

    assert (len(spool), spool.size_bytes, spool.dropped) == (0, 0, 0)
    assert (contents(spool), spool.dropped) == ([], 0)
    spool.close()
    assert other.exists()
