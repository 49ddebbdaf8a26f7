# SPDX-License-Identifier: Apache-2.0
"""Processes known by the kernel's own events: too short for /proc, forked, replaced, pids again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde import _native, procfs
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.model.code import Frame
from sonde.resolve import Resolver
from sonde.resolve.tracked_process import TrackedProcess
from symbol_programs import Talking, build

pytestmark = pytest.mark.bpf

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


class Watch:
    """A resolver with the stream of events of the machine."""

    def __init__(self) -> None:
        self.events = _native.ProcessEvents()
        self.resolver = Resolver()
        self.resolver.start()

    def take(self) -> None:
        self.resolver.on_process_events(self.events.drain())

    def named(self, comm: str) -> list[TrackedProcess]:
        """Processes of that name, as events have them, dead or alive."""
        table = self.resolver.processes
        dead = [process for same_pid in table._dead.values() for process in same_pid]
        return [it for it in [*dead, *table._live.values()] if it.comm == comm]

    def frame(self, process: TrackedProcess, address: int) -> Frame:
        (known,) = self.resolver.resolve(process, [], [address])
        return known.frame


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.resolver.close()


def _run(*command: str | Path) -> int:
    """Run to the end. Returns the address that it printed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, check=True, text=True)
    return int(done.stdout.split()[1], 16)


def test_a_process_of_50_ms_is_named_after_its_death(watch: Watch, tmp_path: Path) -> None:
    address = _run(build("brief.c", tmp_path / "brief"))
    watch.take()
    (process,) = watch.named("brief")
    assert not process.is_alive
    frame = watch.frame(process, address + 1)
    assert (frame.function, frame.binary) == ("brief_work", "brief")
    record = process.record()
    assert (record.comm, record.exe, record.ppid) == ("brief", "brief", os.getpid())


def test_its_start_is_the_one_that_proc_would_have_shown(watch: Watch, tmp_path: Path) -> None:
    with Talking(build("named.c", tmp_path / "named")) as talking:
        watch.take()
        (process,) = watch.named("named")
        stat = procfs.read_stat(talking.pid)
        assert stat
        assert abs(process.start_ns - stat.start_ns) <= procfs.START_UNIT_NS
        assert watch.resolver.processes.find(talking.pid, stat.start_ns) is process


def test_a_brief_process_from_another_root_is_named_through_its_parents(
    watch: Watch, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    build("brief.c", root / "bin" / "brief", "-static")
    # busybox-like: a parent that stays in the root while its child comes and goes
    script = (
        "import os, sys, subprocess; os.chroot(sys.argv[1]); os.chdir('/');"
        "pid = os.fork() or os.execv('/bin/brief', ['brief']);"
        "os.waitpid(pid, 0); print('ready 0', flush=True); sys.stdin.readline()"
    )
    with Talking(sys.executable, "-c", script, root) as talking:
        watch.take()
        (process,) = watch.named("brief")
        assert not process.is_alive
        frame = watch.frame(process, talking.addresses["brief_work"] + 1)
        assert (frame.function, frame.binary) == ("brief_work", "brief")


def test_a_brief_process_whose_file_is_gone_keeps_file_name_and_offset(
    watch: Watch, tmp_path: Path
) -> None:
    program = build("brief.c", tmp_path / "brief")
    (site,) = _native.find_functions(str(program), ["brief_work"])
    address = _run(program)
    program.unlink()
    watch.take()
    frame = watch.frame(watch.named("brief")[0], address + 1)
    assert frame == Frame("user", "", "brief", offset=site.offset + 1, origin="program")
    assert watch.resolver.counters.files_unopened >= 1


def test_a_file_is_held_from_the_moment_it_is_mapped(watch: Watch, tmp_path: Path) -> None:
    program = build("named.c", tmp_path / "named")
    with Talking(program) as talking:
        watch.take()  # the agent is woken by events, so this is soon
        program.unlink()
        addresses = talking.addresses
    watch.take()
    (process,) = watch.named("named")
    assert not process.is_alive
    assert watch.frame(process, addresses["hidden_work"] + 1).function == "hidden_work"


def test_a_forked_child_shares_its_parents_code(watch: Watch, tmp_path: Path) -> None:
    script = "import os; p = os.fork(); os._exit(0) if not p else os.waitpid(p, 0)"
    forker = tmp_path / "forker"  # a name that no other process has
    forker.symlink_to(Path(sys.executable).resolve())
    subprocess.run([forker, "-c", script], check=True)
    watch.take()
    parent, child = sorted(watch.named("forker"), key=lambda it: it.ppid != os.getpid())
    assert child.ppid == parent.pid
    assert child.exe == parent.exe != ""
    libc = next(it for it in parent.space().mappings if it.name.startswith("libc.so"))
    assert watch.frame(child, libc.start + 1) == watch.frame(parent, libc.start + 1)
    assert child.space().find(libc.start + 1) is not None


def test_an_exec_changes_names_and_code(watch: Watch, tmp_path: Path) -> None:
    program = build("named.c", tmp_path / "named")
    script = f"read go; exec {program}"
    shell = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert shell.stdin and shell.stdout
    try:
        time.sleep(0.1)
        watch.take()
        stat = procfs.read_stat(shell.pid)
        assert stat
        process = watch.resolver.processes.find(shell.pid, stat.start_ns)
        assert (process.comm, process.exe) == ("sh", os.path.basename(os.path.realpath("/bin/sh")))  # noqa: PTH119
        shell_code = next(it for it in process.space().mappings if it.has_file)
        before = watch.frame(process, shell_code.start + 1)
        shell.stdin.write(b"\n")
        shell.stdin.flush()
        address = int(shell.stdout.readline().split()[1], 16)
        watch.take()
        assert watch.resolver.processes.find(shell.pid, stat.start_ns) is process
        assert (process.comm, process.exe) == ("named", "named")
        assert watch.frame(process, address + 1).function == "hidden_work"
        # Samples of the same interval from before the exec still find their code.
        assert watch.frame(process, shell_code.start + 1) == before
    finally:
        shell.kill()
        shell.communicate()


def test_a_script_is_run_by_its_interpreter(watch: Watch, tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_text("#!/bin/sh\ntrue\n")
    script.chmod(0o755)
    subprocess.run([script], check=True)
    watch.take()
    (process,) = watch.named("job")
    assert process.exe == os.path.basename(os.path.realpath("/bin/sh"))  # noqa: PTH119


def test_a_pid_that_is_used_again_is_another_process(watch: Watch, tmp_path: Path) -> None:
    if not LAST_PID.exists():
        pytest.skip("the kernel does not let the next pid be chosen")
    first = build("brief.c", tmp_path / "first")
    second = build("named.c", tmp_path / "second")
    for _ in range(20):
        old = subprocess.Popen([first], stdout=subprocess.PIPE)
        address = int(old.communicate()[0].split()[1], 16)
        LAST_PID.write_text(str(old.pid - 1))
        with Talking(second) as talking:
            if talking.pid != old.pid:
                continue  # somebody else was faster
            watch.take()
            (dead,), (alive,) = watch.named("first"), watch.named("second")
            assert dead.pid == alive.pid
            assert dead.start_ns < alive.start_ns
            assert watch.frame(dead, address + 1).function == "brief_work"
            frame = watch.frame(alive, talking.addresses["hidden_work"] + 1)
            assert frame.function == "hidden_work"
            for process in (dead, alive):
                assert watch.resolver.processes.find(*process.key) is process
            return
        watch = Watch()
    pytest.skip("the pid was never free")


def test_threads_are_named_when_they_are_gone(watch: Watch) -> None:
    script = (
        "import threading, ctypes, time\n"
        "def work():\n"
        "    ctypes.CDLL(None).prctl(15, b'loader', 0, 0, 0)\n"
        "    print('tid', '%x' % threading.get_native_id(), flush=True)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    )
    tid = _run(sys.executable, "-c", script)
    watch.take()
    table = watch.resolver.processes
    owner = next(
        process
        for same_pid in table._dead.values()
        for process in same_pid
        if process.threads and tid in process.threads
    )
    assert table.thread_name(owner, tid) == "loader"


def test_a_storm_of_short_processes_leaves_little_behind(watch: Watch) -> None:
    storm = subprocess.Popen(["sh", "-c", "for i in $(seq 500); do /bin/true; done"])
    spent = 0.0
    while storm.poll() is None:
        watch.events.wait(20)
        events = watch.events.drain()
        start = time.process_time()
        watch.resolver.on_process_events(events)
        spent += time.process_time() - start
    watch.take()
    assert watch.events.lost == 0
    assert len(watch.named("true")) == 500
    assert spent / 500 < 500e-6
    watch.resolver.tick(time.monotonic_ns() + 20_000_000_000)
    assert watch.named("true") == []


def mapped_by_true(events: _native.ProcessEvents) -> dict[str, tuple[int, int, int]]:
    """Files that a run of true(1) mapped, as the events have them."""
    events.drain()
    true = subprocess.Popen(["/bin/true"])
    true.wait()
    came = [it for it in events.drain() if isinstance(it, MmapEvent) and it.pid == true.pid]
    return {it.path: it.file for it in came if it.file[2]}


def test_mappings_that_nobody_wants_are_not_reported_but_the_program_is() -> None:
    events = _native.ProcessEvents()
    all_of_them = mapped_by_true(events)
    program = next(path for path in all_of_them if path.endswith("/true"))
    assert len(all_of_them) > 1
    for path, file in all_of_them.items():
        events.ignore_mappings(file, path, 60.0)
    assert mapped_by_true(events) == {program: all_of_them[program]}

    other = next(path for path in all_of_them if path != program)
    events.ignore_mappings(
        all_of_them[other], other + ".new", 60.0
    )  # known by another path from now on
    assert mapped_by_true(events).keys() == {program, other}
    for path, file in all_of_them.items():
        events.ignore_mappings(file, path, 0.0)
    assert mapped_by_true(events) == all_of_them


def passed_over(events: _native.ProcessEvents) -> list[ProcessEvent]:
    """What came; nothing of what was mapped is to be reported again."""
    came = events.drain()
    for event in came:
        if isinstance(event, MmapEvent) and event.file[2]:
            events.ignore_mappings(event.file, event.path, 60.0)
    return came


def test_what_bears_a_delay_wakes_nobody_and_is_kept() -> None:
    events = _native.ProcessEvents()
    mapped_by_true(events)
    for _ in range(100):  # others map new files, too
        true = subprocess.Popen(["/bin/true"])
        true.wait()
        woken = events.wait(100, [], 10)
        came = [type(event) for event in passed_over(events) if event.pid == true.pid]
        if not woken:
            break
    assert not woken
    assert {ForkEvent, CommEvent, MmapEvent, ExitEvent} == set(came)


def test_a_file_that_nobody_mapped_before_is_reported_at_once(tmp_path: Path) -> None:
    events = _native.ProcessEvents()
    mapped_by_true(events)
    passed_over(events)
    new = tmp_path / "true"
    new.write_bytes(Path("/bin/true").read_bytes())
    new.chmod(0o755)
    true = subprocess.Popen([new])
    paths: set[str] = set()
    while str(new) not in paths:
        assert events.wait(20_000, [], 10)
        paths |= {event.path for event in passed_over(events) if isinstance(event, MmapEvent)}
    true.wait()


def test_descriptors_wake_the_wait_while_events_are_kept() -> None:
    events = _native.ProcessEvents()
    events.ignore_mappings((0, 0, 1), "/none", 60.0)
    ready = os.eventfd(1)
    for _ in range(3):
        subprocess.run(["/bin/true"], check=True)
        assert events.wait(20_000, [ready], 5_000)
    os.close(ready)


def test_of_chosen_processes_and_their_children_alone_mappings_are_reported(tmp_path: Path) -> None:
    brief = build("brief.c", tmp_path / "brief")
    shell = subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert shell.stdin and shell.stdout
    try:
        shell.stdin.write("echo\n")
        shell.stdin.flush()
        shell.stdout.readline()  # it has mapped what it needs
        events = _native.ProcessEvents()
        events.follow([shell.pid])
        with subprocess.Popen([brief], stdout=subprocess.DEVNULL) as stranger:
            stranger.wait()
        began_s = time.monotonic()
        assert not events.wait(200, (), 5), "strangers wake nobody"
        assert time.monotonic() - began_s > 0.15
        came = events.drain()
        kinds = {type(event) for event in came if event.pid == stranger.pid}
        assert kinds == {ForkEvent, CommEvent, ExitEvent}
        shell.stdin.write(f"({brief}); echo\n")  # by a child of a child
        shell.stdin.flush()
        assert events.wait(20_000, (), 5)
        shell.stdout.readline()
        shell.stdout.readline()
        time.sleep(0.05)
        came = events.drain()
        mapped = {event.pid for event in came if isinstance(event, MmapEvent)}
        named = [event for event in came if isinstance(event, CommEvent)]
        (child,) = {event.pid for event in named if event.comm == "brief"}
        assert child in mapped
        born = {event.pid for event in came if isinstance(event, ForkEvent)}
        assert mapped <= born | {shell.pid}
    finally:
        shell.kill()
        shell.communicate()
