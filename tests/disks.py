# SPDX-License-Identifier: Apache-2.0
"""Block devices as /sys shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sonde.procfs import devices

DISK = os.makedev(8, 1)
"""The first partition of a machine's own disk."""


def add(
    root: Path,
    name: str,
    number: str,
    *,
    on: tuple[str, ...] = (),
    parts: tuple[tuple[str, str], ...] = (),
    removable: bool = False,
    diskseq: int = 1,
    bus: str = "virtual",
) -> Path:
    """A disk of this name, MAJOR:MINOR, mapped to the devices `on`, with parts (name, number)."""
    folder = root / "devices" / bus / "block" / name
    (folder / "slaves").mkdir(parents=True)
    for below in on:
        (folder / "slaves" / below).symlink_to(root / "class/block" / below)
    (folder / "removable").write_text(f"{removable:d}\n")
    (folder / "diskseq").write_text(f"{diskseq}\n")
    entries = [(name, number, folder)]
    for part, its_number in parts:
        (folder / part).mkdir()
        (folder / part / "partition").write_text("1\n")
        entries.append((part, its_number, folder / part))
    for place, by in (("dev/block", 1), ("class/block", 0)):
        (root / place).mkdir(parents=True, exist_ok=True)
        for entry in entries:
            (root / place / str(entry[by])).symlink_to(entry[2])
    return folder


def use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this folder looked at in the place of /sys, with DISK in it."""
    add(root, "sda", "8:0", parts=(("sda1", "8:1"), ("sda2", "8:2")), bus="pci0000:00")
    monkeypatch.setattr(devices, "_DEVICES", str(root / "dev/block"))
    monkeypatch.setattr(devices, "_BY_NAME", str(root / "class/block"))
