# SPDX-License-Identifier: Apache-2.0
"""On which devices the identity of a file is that of its content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import disks
from sonde.procfs.devices import disk_number, keeps_identity


@pytest.fixture
def sys_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    disks.use(tmp_path, monkeypatch)
    return tmp_path


def test_a_machines_own_disk_keeps_identities(sys_folder: Path) -> None:
    disks.add(sys_folder, "nvme0n1", "259:0", parts=(("nvme0n1p1", "259:1"),))
    disks.add(sys_folder, "dm-2", "253:2", on=("sda2", "nvme0n1p1"))
    for device in ((8, 0), (8, 1), (259, 0), (259, 1), (253, 2)):
        assert keeps_identity(os.makedev(*device)), device


def test_images_and_media_keep_none_nor_what_is_in_or_on_them(sys_folder: Path) -> None:
    disks.add(sys_folder, "loop4", "7:4", parts=(("loop4p1", "259:7"),))
    disks.add(sys_folder, "ublkb0", "259:8")
    disks.add(sys_folder, "sdb", "8:16", parts=(("sdb1", "8:17"),), removable=True)
    usb = "pci0000:00/0000:00:14.0/usb2/2-1"
    disks.add(sys_folder, "sdc", "8:32", parts=(("sdc1", "8:33"),), bus=usb)
    disks.add(sys_folder, "dm-0", "253:0", on=("loop4p1",))
    disks.add(sys_folder, "dm-1", "253:1", on=("dm-0", "sda2"))
    disks.add(sys_folder, "dm-3", "253:3", on=("sdc1",))
    for device in (
        *((7, 4), (259, 7), (259, 8), (8, 16), (8, 17), (8, 33)),
        *((253, 0), (253, 1), (253, 3)),
    ):
        assert not keeps_identity(os.makedev(*device)), device


@pytest.mark.parametrize("device", [(0, 40), (7, 3), (11, 0), (43, 0), (8, 99)])
def test_file_systems_without_a_disk_and_disks_that_are_gone_keep_none(
    sys_folder: Path, device: tuple[int, int]
) -> None:
    assert not keeps_identity(os.makedev(*device))
    assert disk_number(os.makedev(*device)) == 0


def test_a_disk_in_a_circle_keeps_none(sys_folder: Path) -> None:
    folder = disks.add(sys_folder, "dm-5", "253:5", on=("dm-6",))
    disks.add(sys_folder, "dm-6", "253:6", on=("dm-5",))
    assert not keeps_identity(os.makedev(253, 5))
    (folder / "slaves/dm-6").unlink()
    assert keeps_identity(os.makedev(253, 5))


def test_a_part_has_the_number_of_its_disk(sys_folder: Path) -> None:
    folder = disks.add(sys_folder, "loop4", "7:4", parts=(("loop4p1", "259:7"),), diskseq=12)
    assert disk_number(os.makedev(7, 4)) == disk_number(os.makedev(259, 7)) == 12
    (folder / "diskseq").write_text("13\n")
    assert disk_number(os.makedev(259, 7)) == 13
    (folder / "diskseq").unlink()  # before Linux 5.15
    assert disk_number(os.makedev(259, 7)) == 0
