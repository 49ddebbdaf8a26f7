# SPDX-License-Identifier: Apache-2.0
"""A member of a control group keeps its folder locked (folder_locks.py): all others are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from folder_locks import group_mount, groups, locked

from sonde.resolve.cgroup_index import CgroupIndex

LIMIT_S = 20
TOP = f"sonde_locked_{os.getpid()}"
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="makes control groups, locks one of them"),
    pytest.mark.skipif(not group_mount().is_dir(), reason="no control groups are mounted"),
]


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    """A group, two groups below it, and one below the first of these."""
    with groups(TOP, f"{TOP}/held", f"{TOP}/free", f"{TOP}/held/below") as made:
        yield made


def in_time(program: str, *arguments: str, limit_s: float = LIMIT_S) -> tuple[str, float]:
    """The output of a program, and what it took in s; one that hangs is left behind, not waited
    for: it ends once nothing is locked any more."""
    began_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        pytest.fail(f"it hangs:\n{Path(f'/proc/{child.pid}/stack').read_text()}")
    assert child.returncode == 0
    return output, time.monotonic() - began_s


SCAN = """
import sys, time
from sonde import procfs
from sonde.resolve.cgroup_index import CgroupIndex
index = CgroupIndex()
began_s = time.monotonic()
index.scan()
known = {index._get((int(sys.argv[1]), int(inode))) for inode in sys.argv[2:]}
took_s = time.monotonic() - began_s
hung = procfs.GROUPS.hung if hasattr(procfs, "GROUPS") else 0
print(took_s, hung, *sorted(known - {None}))
"""


def test_a_scan_ends_and_knows_the_other_groups(folders: list[Path]) -> None:
    mounts = {mount: number for number, mount in CgroupIndex().mounts()}
    hierarchy = mounts[str(group_mount())]
    inodes = [str(folder.stat().st_ino) for folder in folders]
    with locked(folders[1]):
        output, _ = in_time(SCAN, str(hierarchy), *inodes)
    took_s, hung, *known = output.split()
    assert known == [f"/{TOP}", f"/{TOP}/free", f"/{TOP}/held"]
    assert int(hung) == 1
    assert float(took_s) < 2


TREE = """
import sys
from sonde.collect.host.groups import GroupTree
tree = GroupTree(sys.argv[1], ["cgroup.procs"])
there = [it.path for it in tree.groups() if "cgroup.procs" in it.contents]
print(tree.unvisited, *there)
"""


def test_the_other_groups_are_looked_at_for_limits(folders: list[Path]) -> None:
    with locked(folders[1]):
        output, took_s = in_time(TREE, str(group_mount()))
    unvisited, *there = output.split()
    assert unvisited == "1"
    assert {f"/{TOP}", f"/{TOP}/free"} <= set(there)
    assert f"/{TOP}/held" not in there
    assert took_s < 5


FILES = """
import sys, time
from sonde.collect.host.group_files import GroupFiles, WantedGroup
held, free = sys.argv[1:]
files = GroupFiles(16)
wanted = [WantedGroup(it, it, "", {"x": "cgroup.procs"}) for it in (held, free)]
files.put(wanted)
print(*[group.path for group, _, _ in files.read()], flush=True)
input()
files.put([WantedGroup(it.path, it.folder, "", {"x": "cgroup.procs", "y": "cgroup.threads"})
           for it in wanted])
print(*[(group.path, what) for group, what, _ in files.read()], sep="|", flush=True)
"""


def test_files_that_are_open_go_on_being_read(folders: list[Path]) -> None:
    _, held, free, _ = map(str, folders)
    child = subprocess.Popen(
        [sys.executable, "-c", FILES, held, free],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline().split() == [held, free]
        with locked(folders[1]):
            output, _ = child.communicate("\n", timeout=LIMIT_S)
    finally:
        child.kill()
    found = output.strip().split("|")
    assert set(found) == {str((held, "x")), str((free, "x")), str((free, "y"))}


LATER = """
import sys, time
from pathlib import Path
from sonde import procfs
folders = procfs.GroupFolders()
for name in sys.argv[1:]:
    began_s = time.monotonic()
    (found,), _ = folders.look([name], lambda it: "party", [["cgroup.procs"]])
    print(int(found is not None), int(time.monotonic() - began_s < 1), len(folders.abandoned))
"""


def test_a_locked_group_costs_one_wait_and_no_child_that_stays(folders: list[Path]) -> None:
    """A look begins with a listing, whose wait SIGKILL ends."""
    _, held, free, below = map(str, folders)
    with locked(folders[1]):
        output, took_s = in_time(LATER, held, free, held, below, free)
    rows = [line.split() for line in output.splitlines()]
    assert [row[0] for row in rows] == ["0", "1", "0", "0", "1"]
    assert {row[1] for row in rows} == {"1"}
    assert rows[-1][2] == "0"
    assert took_s < 3


def _sonde(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sonde", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _ends(child: subprocess.Popen[str], limit_s: float = LIMIT_S) -> int:
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        pytest.fail(f"it hangs:\n{Path(f'/proc/{child.pid}/stack').read_text()}")


def test_another_process_is_recorded(folders: list[Path], tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            with locked(folders[1]):
                path = tmp_path / "x.sonde"
                assert (
                    _ends(_sonde("record", "-p", str(other.pid), "-d", "1", "-o", str(path))) == 0
                )
        finally:
            other.kill()


def test_an_agent_goes_on_and_ends_when_it_is_asked_to(folders: list[Path], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        agent = subprocess.Popen(
            [sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0", "--no-device"],
            stdout=subprocess.DEVNULL, stderr=output,
        )  # fmt: skip
    try:
        _until(lambda: "metrics at" in log.read_text())
        with locked(folders[1]):
            time.sleep(12)  # groups are looked for every 10 s
            asleep = [_state(task) for task in Path(f"/proc/{agent.pid}/task").iterdir()]
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(LIMIT_S) == 0
        assert "D" not in asleep
    finally:
        agent.kill()
        agent.wait(LIMIT_S)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(") ")[2][0]


def _until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)
