# SPDX-License-Identifier: Apache-2.0
"""Real control groups of an unprivileged user: hundreds of them, with any bytes as names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from control_groups import group

from sonde import _native
from sonde.collect.host.groups import MAX_GROUPS, MAX_KEPT_OF_PARTY, Groups
from sonde.collect.polling import Points

ATTACKER = 12_345
pytestmark = [
    pytest.mark.bpf,
    pytest.mark.skipif(os.geteuid() != 0, reason="gives a control group to another user"),
]
MAKES = """
import os, sys
top, count, limit = os.fsencode(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for n in range(count):
    group = b"%s/g%d" % (top, n)
    os.mkdir(group)
    with open(group + b"/" + limit.encode(), "w") as file:
        file.write("50000000")
"""
NAMES = (b"job\xff", b"job\xfe")
WORKS = """
import ctypes, os, sys, time
group, name = os.fsencode(sys.argv[1]), bytes.fromhex(sys.argv[2])
os.mkdir(group + b"/" + name)
with open(group + b"/" + name + b"/cgroup.procs", "w") as file:
    file.write("0")
ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
end_s = time.monotonic() + 0.3
while time.monotonic() < end_s:
    pass
print(os.getpid(), flush=True)
"""


@contextmanager
def given_away(name: str) -> Iterator[tuple[Path, str]]:
    """A group that belongs to a user, with the file of its memory limit."""
    with group("memory", name) as own:
        limit = "memory.limit_in_bytes"
        if not (own / limit).exists():
            limit = "memory.max"
            (own / "cgroup.subtree_control").write_text("+memory")
        if not (own / limit).exists():
            pytest.skip("no memory controller")
        for path in (own, own / "cgroup.procs", own / "cgroup.subtree_control"):
            if path.exists():
                os.chown(path, ATTACKER, ATTACKER)
        try:
            yield own, limit
        finally:
            for below in os.listdir(os.fsencode(own)):  # noqa: PTH208
                folder = os.fsencode(own) + b"/" + below
                if os.path.isdir(folder):  # noqa: PTH112
                    os.rmdir(folder)  # noqa: PTH106


def as_attacker(code: str, *arguments: str) -> str:
    return subprocess.run(
        ["/usr/bin/python3", "-I", "-c", code, *arguments],
        user=ATTACKER, group=ATTACKER, extra_groups=[], cwd="/",
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def test_limited_groups_of_one_user_hide_nobody_elses() -> None:
    victims = "sonde-test-victim/slurmstepd.scope/job_7/step_0/user/task_0"
    with ExitStack() as stack:
        own, limit = stack.enter_context(given_away("sonde-test-own"))
        as_attacker(MAKES, str(own), str(MAX_GROUPS + 44), limit)
        victim = stack.enter_context(group("memory", victims))
        if not (victim / limit).exists():
            pytest.skip("the memory controller is not given to groups so far down")
        (victim / limit).write_text("60000000")
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        watched = Groups()
        watched.open()
        stack.callback(watched.close)
        looks = []
        for _ in range(2):
            points = Points()
            watched._look(points)
            watched._read(points)
            looks.append({series: value for _, series, _, value in points.metrics})
        taken = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
        shown = set(watched._files._paths)
    assert f"/{victims}" in shown
    assert len(shown) <= MAX_GROUPS
    assert all(look["sonde.cgroup.left_out"] >= 45 for look in looks)
    assert taken < 7 * (MAX_KEPT_OF_PARTY + MAX_GROUPS // 4)


def test_names_that_are_no_text_are_recorded_apart(record) -> None:  # type: ignore[no-untyped-def]
    with given_away("sonde-test-names") as (own, _):
        with record("--host") as recorder:
            for name in NAMES:
                enters = f"echo $$ > {own}/cgroup.procs; exec setpriv --reuid={ATTACKER} "
                enters += f'--regid={ATTACKER} --clear-groups {sys.executable} -I -c "$0" "$@"'
                subprocess.run(["sh", "-c", enters, WORKS, str(own), name.hex()], check=True)
        processes = recorder.session.processes
    for name in NAMES:
        shown = f"/sonde-test-names/job\\x{name[-1]:02x}"
        found = [it for it in processes if it.owner.cgroup == shown]
        assert [it.comm for it in found] == [shown.rpartition("/")[2]]


def test_an_event_has_a_name_as_it_is() -> None:
    events = _native.ProcessEvents()
    events.drain()
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'job\\xff', 0, 0, 0)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
    names = {event.comm for event in events.drain() if isinstance(event, _native.CommEvent)}
    assert "job\udcff" in names
