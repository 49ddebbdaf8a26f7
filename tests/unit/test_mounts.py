# SPDX-License-Identifier: Apache-2.0
"""Which file systems are mounted, as lists of mounts show it that others can add to."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

import pytest

from sonde.procfs import opening
from sonde.procfs.broker import Broker
from sonde.procfs.opening import Mounts, mounts_in

OVERLAY = b"900 30 0:77 / /run/merged rw,relatime shared:9 - overlay overlay rw,lowerdir=/l\n"
ROOT = b"30 1 254:0 / / rw - ext4 /dev/root rw\n"


def fuse(number: int, name: bytes) -> bytes:
    return b"%d 30 0:%d / %s rw,nosuid - fuse x rw,user_id=1001\n" % (number, number, name)


class Poll:
    """Reports a change each time while it is `changed`."""

    def __init__(self) -> None:
        self.changed = False

    def poll(self, _: int) -> list[tuple[int, int]]:
        return [(0, 0)] if self.changed else []


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    found = Mounts()
    assert found.file is not None
    os.close(found.file)
    found.file = os.memfd_create("mountinfo")
    found.poll = Poll()  # type: ignore[assignment]
    yield found
    os.close(found.file)


def write(mounts: Mounts, content: bytes) -> None:
    assert mounts.file is not None
    os.ftruncate(mounts.file, 0)
    os.pwrite(mounts.file, content, 0)


def test_a_container_is_found_behind_any_number_of_a_users_mounts(mounts) -> None:
    """320 with names of 14 KB each make 4.5 MB."""
    write(mounts, ROOT + b"".join(fuse(it, b"\\040" * 3500) for it in range(100, 500)) + OVERLAY)
    began_s = time.thread_time()
    assert mounts.type_of(b"0:77") == b"overlay"
    assert time.thread_time() - began_s < 0.2
    assert mounts.type_of(b"0:100") == b"fuse"
    assert mounts.type_of(b"254:0") == b"ext4"
    assert mounts.type_of(b"254:1") == b""


@pytest.mark.parametrize(
    "name", [b"/x\r-\rext4", b"/x\t-\text4", b"/x\x0b-\x0cext4", b"/\xa0-\x85"]
)
def test_no_name_of_a_folder_makes_another_type(mounts, name) -> None:
    write(mounts, ROOT + fuse(55, name))
    assert mounts.type_of(b"0:55") == b"fuse"


def test_of_a_line_of_any_length_device_and_type_are_known(mounts) -> None:
    for length in range(opening.MAX_MOUNT_LINE - 64, opening.MAX_MOUNT_LINE + 5, 1):
        write(mounts, fuse(55, b"/" + b"-" * length) + OVERLAY)
        mounts.known = None
        assert mounts.type_of(b"0:55") == b"fuse"
        assert mounts.type_of(b"0:77") == b"overlay"
    write(
        mounts, fuse(55, b"/" + b"- " * 8 + b"-" * (1 << 20)).replace(b"- -", b"-\\040-") + OVERLAY
    )
    mounts.known = None
    assert mounts.type_of(b"0:77") == b"overlay"
    source = b"5 1 0:5 / /x rw - tmpfs " + b"y" * (1 << 20) + b" rw,a - ext4 b\n"
    write(mounts, source + OVERLAY)
    mounts.known = None
    assert mounts.type_of(b"0:5") == b"tmpfs"
    assert mounts.type_of(b"0:77") == b"overlay"


def test_the_list_of_a_process_that_is_looked_at_is_cut(mounts) -> None:
    write(mounts, ROOT * 1000 + OVERLAY)
    assert len(list(mounts_in(mounts.file))) == 1001
    assert len(list(mounts_in(mounts.file, 10 * len(ROOT)))) == 10
    assert len(list(mounts_in(mounts.file, 10 * len(ROOT) + 5))) == 10


def test_a_list_that_takes_long_is_read_seldom_and_never_believed_meanwhile(
    mounts, monkeypatch
) -> None:
    now_s, cpu_s = [100.0], [0.0]
    monkeypatch.setattr(opening.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(
        opening.time, "thread_time", lambda: cpu_s.__setitem__(0, cpu_s[0] + 0.4) or cpu_s[0]
    )
    write(mounts, OVERLAY)
    assert mounts.type_of(b"0:77") == b"overlay"
    assert mounts.type_of(b"0:77") == b"overlay"
    write(mounts, fuse(77, b"/x"))
    mounts.poll.changed = True
    with pytest.raises(OSError) as caught:
        mounts.type_of(b"0:77")
    assert caught.value.errno == errno.EBUSY
    mounts.poll.changed = False  # it reports a change once
    now_s[0] += 3.5
    with pytest.raises(OSError):
        mounts.type_of(b"0:77")
    now_s[0] += 0.2
    assert mounts.type_of(b"0:77") == b"fuse"


def test_a_file_that_is_not_looked_at_as_mounts_change_too_often_is_counted(monkeypatch) -> None:
    broker = Broker()
    monkeypatch.setattr(broker, "_send", lambda *_: None)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "mounts change too often")

    monkeypatch.setattr(broker, "_next", refuse)
    with pytest.raises(OSError):
        broker.open(None, ("open",))
    assert broker.patience.files_hung == 1
