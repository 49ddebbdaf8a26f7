# SPDX-License-Identifier: Apache-2.0
"""What a user names its threads and control groups does not show whose they are.

The kernel lets such names hold every character but a line feed, those included at which Python's
splitlines() and files opened as text begin a new line.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sonde import procfs
from sonde.attach.policy import Policy, ProcessFacts
from sonde.attach.process import read_status
from sonde.resolve.cgroup_index import CgroupIndex
from sonde.resolve.owners import OwnerResolver
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.tracked_process import TrackedProcess

NOBODY = 65534
LINE_ENDS = ("\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)
print("named", flush=True)
sys.stdin.read()
"""


@contextmanager
def nobody_named(comm: str) -> Iterator[int]:
    """A process of an unprivileged user whose first thread has this name."""
    with subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", NAMED, comm.encode().hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
    ) as it:  # fmt: skip
        assert it.stdout is not None
        assert it.stdout.readline() == b"named\n"
        yield it.pid
        it.communicate(b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
@pytest.mark.parametrize("end", LINE_ENDS, ids=ascii)
def test_a_name_of_a_thread_makes_nobody_another_user(end: str):
    with nobody_named(f"{end}Uid:\t1\t1") as pid:
        facts = ProcessFacts.of(pid)
        status = read_status(pid)

    assert facts.user == ProcessFacts(user="nobody").user
    assert not Policy("allow-list", ["user:daemon", "opted-in:daemon"]).allows(facts)
    assert status is not None
    assert status.uid == NOBODY


@pytest.mark.parametrize("end", LINE_ENDS, ids=ascii)
def test_a_name_of_a_control_group_makes_nobody_another_unit_or_job(tmp_path: Path, end: str):
    own = "/user.slice/user-1001.slice/user@1001.service"
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_bytes(
        f"0::{own}/x{end}0::/system.slice/train-1.service{end}0::/slurm/uid_5/job_4711\n".encode()
    )
    facts = ProcessFacts.of(7, tmp_path)

    assert facts.units == ("user.slice", "user-1001.slice", "user@1001.service")
    assert facts.job == ""


def test_a_place_named_with_a_carriage_return_hides_no_hierarchy(tmp_path: Path):
    (tmp_path / "cgroup").write_bytes(b"0::/x\r9:memory:/\n")
    (tmp_path / "mountinfo").write_bytes(
        b"1 1 0:1 / /mnt/a\r\xff rw - tmpfs none rw\n2 1 0:2 / /sys/fs/cgroup rw - cgroup2 c rw\n"
    )
    assert list(CgroupIndex(proc=tmp_path).mounts()) == [(0, "/sys/fs/cgroup")]


POSED = (
    "kubepods/burstable/pod99999999-2222-3333-4444-555555555555/" + "e1" * 32,
    "slurm/uid_0/job_4711/step_7",
    "train-1.service",
    "docker/" + "e1" * 32,
)
POSE = """
import os, sys
group = sys.argv[1]
os.makedirs(group)
with open(group + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
print("posed", flush=True)
sys.stdin.read()
"""


@contextmanager
def delegated() -> Iterator[Path]:
    """A control group like that of a user's manager, given to nobody."""
    mount = next((Path(mount) for _, mount in CgroupIndex().mounts()), Path("/nowhere"))
    made = [mount / "user.slice"]
    for name in (f"user-{NOBODY}.slice", f"user@{NOBODY}.service"):
        made.append(made[-1] / name)
    try:
        for group in made:
            group.mkdir(exist_ok=True)
        for path in (made[-1], made[-1] / "cgroup.procs"):
            os.chown(path, NOBODY, NOBODY)
        yield made[-1]
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    finally:
        below = [Path(folder) for folder, _, _ in os.walk(made[-1], topdown=False)]
        for group in (*below, *made[-2::-1]):
            with suppress(OSError):  # a group of the machine's own
                group.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a control group to another user")
@pytest.mark.parametrize("name", POSED, ids=("pod", "job", "unit", "container"))
def test_a_user_who_makes_groups_in_a_delegated_one_stays_the_owner(name: str):
    with delegated() as own, subprocess.Popen(
        ["/bin/sh", "-c", 'read _; exec /usr/bin/python3 -I -c "$0" "$1"', POSE, str(own / name)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
    ) as it:  # fmt: skip
        (own / "cgroup.procs").write_text(str(it.pid))
        assert it.stdin is not None
        assert it.stdout is not None
        it.stdin.write(b"go\n")
        it.stdin.flush()
        assert it.stdout.readline() == b"posed\n"
        stat = procfs.read_stat(it.pid)
        assert stat is not None
        process = TrackedProcess(it.pid, stat.start_ns, 1, "python3", ProcessImage(it.pid, "exec"))
        facts = ProcessFacts.of(it.pid)
        owner = OwnerResolver().of(process, lambda _: None, time.monotonic_ns())
        it.communicate()

    assert owner.cgroup.endswith(name)
    assert (owner.pod_uid, owner.job, owner.container) == ("", "", "")
    assert owner.unit == f"user@{NOBODY}.service"
    assert (facts.pod, facts.job, facts.units[-1]) == ("", "", f"user@{NOBODY}.service")
