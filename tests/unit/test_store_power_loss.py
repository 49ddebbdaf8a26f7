# SPDX-License-Identifier: Apache-2.0
"""What was acknowledged outlives a loss of power, a full disk and a failing one."""

from __future__ import annotations

import errno
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import disk_faults

LOSSES = 10
"""Times of a power loss that are tried, each with and without names that were not synced."""
TRIES = 8
"""Calls that are refused, of some hundreds."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: a real disk would be waited for at each of many syncs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = disk_faults.library(tmp_path_factory.mktemp("shim"))
    if made is None:
        pytest.skip("needs gcc")
    return made


def test_a_power_loss_costs_nothing_that_was_acknowledged(folder: Path, shim: Path) -> None:
    acknowledged: Any = disk_faults.run(shim, "losses", folder / "store")
    disk = disk_faults.KeptDisk(folder / "store", folder / "store.kept")
    assert len(acknowledged) == disk_faults.ROUNDS * disk_faults.CHUNKS_A_ROUND

    at_acks = {syncs for _, syncs in acknowledged}
    between = range(1, disk.syncs + 1, max(1, disk.syncs // LOSSES))
    for syncs in sorted(at_acks | set(between)):
        expected = {digest for digest, then in acknowledged if then <= syncs}
        for keeps_names in (False, True):
            after = folder / f"after-{syncs}-{keeps_names}"
            disk.after_power_loss(syncs, after, keeps_names=keeps_names)
            assert disk_faults.wrong_in(after, expected) == [], (syncs, keeps_names)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_whatever_call_the_disk_refuses_nothing_acknowledged_is_lost(
    folder: Path, shim: Path, error: int
) -> None:
    found: Any = disk_faults.run(shim, "refusals", folder / "stores", str(error), str(TRIES))

    every = disk_faults.ROUNDS * disk_faults.CHUNKS_A_ROUND
    assert found["wrong"] == []
    assert found["calls"] > 100
    assert found["acknowledged"][0] == every
    assert min(found["acknowledged"]) < every


def test_the_disk_of_the_tests_forgets_what_was_not_synced(tmp_path: Path, shim: Path) -> None:
    """Otherwise the tests above would show nothing."""
    program = (
        "import os, sys; d = sys.argv[1]; os.mkdir(d + '/f')\n"
        "one = os.open(d + '/one', os.O_CREAT | os.O_WRONLY); os.write(one, b'synced')\n"
        "os.fsync(one); os.write(one, b' lost')\n"
        "open(d + '/two', 'w').close(); f = os.open(d, os.O_RDONLY); os.fsync(f)\n"
        "open(d + '/three', 'w').close(); os.rename(d + '/two', d + '/four'); os.fsync(one)\n"
    )
    folder, kept = tmp_path / "disk", tmp_path / "kept"
    folder.mkdir()
    kept.mkdir()
    environment = {
        "LD_PRELOAD": str(shim),
        "DISK_FAULTS_DIR": str(folder),
        "DISK_FAULTS_KEPT": str(kept),
    }
    subprocess.run(["/usr/bin/python3", "-c", program, str(folder)], env=environment, check=True)
    disk = disk_faults.KeptDisk(folder, kept)
    assert disk.syncs == 3
    seen = []
    for syncs, keeps_names in ((1, False), (2, False), (2, True), (3, False)):
        after = tmp_path / f"{syncs}-{keeps_names}"
        disk.after_power_loss(syncs, after, keeps_names=keeps_names)
        seen.append({one.name: one.read_bytes() for one in after.iterdir() if one.is_file()})

    assert seen == [
        {},
        {"one": b"synced", "two": b""},
        {"one": b"synced", "three": b"", "four": b""},
        {"one": b"synced lost", "two": b""},
    ]
