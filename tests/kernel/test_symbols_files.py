# SPDX-License-Identifier: Apache-2.0
"""Real processes and their code: loaded late, deleted, elsewhere, generated, of the kernel."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde import _native, procfs
from sonde.model.code import Frame
from sonde.resolve import Resolver
from sonde.resolve.tracked_process import TrackedProcess
from symbol_programs import Talking, build, plugin

pytestmark = pytest.mark.bpf


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    resolver = Resolver()
    yield resolver
    resolver.close()


def _process(resolver: Resolver, pid: int) -> TrackedProcess:
    found = procfs.read_stat(pid)
    assert found
    return resolver.processes.find(pid, found.start_ns)


def _frame(resolver: Resolver, pid: int, address: int) -> Frame:
    (known,) = resolver.resolve(_process(resolver, pid), [], [address])
    return known.frame


def _function(resolver: Resolver, talking: Talking, name: str) -> str:
    return _frame(resolver, talking.pid, talking.addresses[name] + 1).function


@pytest.mark.parametrize("flags", [["-pie"], ["-no-pie", "-fno-pie"], ["-static-pie"]])
def test_a_running_program_is_named_wherever_it_was_loaded(
    resolver: Resolver, tmp_path: Path, flags: list[str]
) -> None:
    program = build("named.c", tmp_path / "named", *flags)
    with Talking(program) as talking:
        frame = _frame(resolver, talking.pid, talking.addresses["hidden_work"] + 1)
        assert (frame.kind, frame.function, frame.binary) == ("user", "hidden_work", "named")
        assert frame.build_id == _native.build_id(str(program))
        (site,) = _native.find_functions(str(program), ["hidden_work"])
        assert frame.offset == site.offset + 1


def test_return_addresses_stand_for_the_call_before_them(
    resolver: Resolver, tmp_path: Path
) -> None:
    with Talking(build("named.c", tmp_path / "named")) as talking:
        process = _process(resolver, talking.pid)
        start, after = talking.addresses["visible_work"], talking.addresses["main"]
        stack = resolver.resolve(process, [], [start, start, after])
        # The first is where the code was; as a return address the same one belongs to what lies
        # before it in memory, whose last instruction was the call.
        assert stack[0].frame.function == "visible_work"
        assert stack[1].frame.function != "visible_work"
        assert stack[1].frame.offset == stack[0].frame.offset - 1


def test_where_a_walk_went_astray_is_one_frame_and_what_follows_is_kept(
    resolver: Resolver, tmp_path: Path
) -> None:
    with Talking(build("named.c", tmp_path / "named")) as talking:
        work = talking.addresses["visible_work"] + 2
        stack = [5, 6, work, 0, 1 << 50, 7, work, 8]
        frames = resolver.resolve(_process(resolver, talking.pid), [], stack)
        shown = [known.frame.function or known.frame.binary for known in frames]
        astray = "[unknown]"
        assert shown == [astray, "visible_work", astray, "visible_work", astray]
        assert resolver.counters.frames_unmapped == 6


def test_cpp_and_rust_programs_are_named_as_in_their_source(
    resolver: Resolver, tmp_path: Path
) -> None:
    with Talking(build("named.cpp", tmp_path / "cpp")) as talking:
        assert _function(resolver, talking, "step") == "train::step(int, double)"
        assert "train::Loader<int>::next" in _function(resolver, talking, "Loader")
    with Talking(build("named.rs", tmp_path / "rust")) as talking:
        assert _function(resolver, talking, "feed").endswith("pipeline::feed")
        assert _function(resolver, talking, "run").endswith("pipeline::Runs>::run")


def test_a_library_that_is_loaded_late_is_found(resolver: Resolver, tmp_path: Path) -> None:
    late = plugin(tmp_path / "libplugin.so")
    with Talking(build("loader.c", tmp_path / "loader"), late) as talking:
        events = _native.ProcessEvents()
        resolver.on_process_events(events.drain())
        assert _process(resolver, talking.pid).space()  # read before the library is there
        talking.go_on()
        talking.listen()
        resolver.on_process_events(events.drain())
        frame = _frame(resolver, talking.pid, talking.addresses["plugin_work"] + 1)
        assert (frame.function, frame.binary) == ("plugin_work", "libplugin.so")


def test_an_address_seen_before_its_mapping_is_looked_up_again(
    resolver: Resolver, tmp_path: Path
) -> None:
    late = plugin(tmp_path / "libplugin.so")
    with Talking(build("loader.c", tmp_path / "loader"), late) as talking:
        events = _native.ProcessEvents()
        _process(resolver, talking.pid).space()
        talking.go_on()
        talking.listen()
        address = talking.addresses["plugin_work"] + 1
        assert _frame(resolver, talking.pid, address).binary == "[unknown]"
        resolver.on_process_events(events.drain())
        assert _frame(resolver, talking.pid, address).function == "plugin_work"


def test_a_deleted_program_is_named(resolver: Resolver, tmp_path: Path) -> None:
    program = build("named.c", tmp_path / "named")
    with Talking(program) as talking:
        program.unlink()
        frame = _frame(resolver, talking.pid, talking.addresses["hidden_work"] + 1)
        assert (frame.function, frame.binary) == ("hidden_work", "named")


def test_a_program_replaced_on_disk_is_named_by_what_runs(
    resolver: Resolver, tmp_path: Path
) -> None:
    program = build("named.c", tmp_path / "named")
    with Talking(program) as old:
        program.unlink()
        build("loader.c", program)  # at the same path, and it may well get the same inode
        frame = _frame(resolver, old.pid, old.addresses["hidden_work"] + 1)
        assert frame.function == "hidden_work"
        with Talking(program, "waits") as new:
            code = next(iter(_process(resolver, new.pid).space().mappings))
            other = _frame(resolver, new.pid, code.start + 1)
            assert (other.binary, other.build_id != frame.build_id) == ("named", True)


def test_a_deleted_program_stays_known_when_its_process_ends(
    resolver: Resolver, tmp_path: Path
) -> None:
    program = build("named.c", tmp_path / "named")
    with Talking(program) as talking:
        program.unlink()
        process = _process(resolver, talking.pid)
        assert _function(resolver, talking, "hidden_work") == "hidden_work"
    process.dead_ns = time.monotonic_ns()
    (known,) = resolver.resolve(process, [], [talking.addresses["visible_work"] + 1])
    assert known.frame.function == "visible_work"  # never asked about while it lived


def test_an_inode_that_is_used_again_is_not_taken_for_the_old_file(
    resolver: Resolver, tmp_path: Path
) -> None:
    for source in ("named.c", "loader.c") * 3:
        program = build(source, tmp_path / "program")
        with Talking(program, "waits") as talking:
            space = _process(resolver, talking.pid).space()
            mapping = next(it for it in space.mappings if it.name == "program")
            offset = _native.find_functions(str(program), ["main"])[0].offset
            address = mapping.start + offset - mapping.offset + 1
            frame = _frame(resolver, talking.pid, address)
            assert (frame.function, frame.build_id) == ("main", _native.build_id(str(program)))
        program.unlink()
        resolver.tick(time.monotonic_ns() + 10**12)  # everything idle is let go


def test_a_program_in_another_mount_namespace_is_named(resolver: Resolver, tmp_path: Path) -> None:
    """Where the same path leads to another file for us."""
    program = build("named.c", tmp_path / "named")
    (tmp_path / "here").mkdir()
    shutil.copy(build("loader.c", tmp_path / "loader"), tmp_path / "here" / "named")
    script = f"mount --bind {tmp_path}/inner {tmp_path}/here && exec {tmp_path}/here/named"
    (tmp_path / "inner").mkdir()
    program.rename(tmp_path / "inner" / "named")
    with Talking("unshare", "-m", "sh", "-c", script) as talking:
        for name in ("hidden_work", "visible_work"):
            assert _function(resolver, talking, name) == name


def test_a_program_in_another_root_is_named_also_without_map_files(
    resolver: Resolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    build("named.c", root / "bin" / "named", "-static")
    real = procfs.open_stable
    monkeypatch.setattr(
        procfs,
        "open_stable",
        lambda path, **more: None if "map_files" in path else real(path, **more),
    )
    with Talking("chroot", root, "/bin/named") as talking:
        assert _function(resolver, talking, "hidden_work") == "hidden_work"


def test_the_vdso_is_named(resolver: Resolver) -> None:
    me = _process(resolver, os.getpid())
    vdso = next(it for it in me.space().mappings if it.path == "[vdso]")
    image = os.memfd_create("vdso")
    os.write(image, ctypes.string_at(vdso.start, vdso.end - vdso.start))
    found = _native.find_functions(f"/proc/self/fd/{image}", ["__vdso_clock_gettime"])
    os.close(image)
    if not found:
        pytest.skip("this machine's vdso has no clock_gettime")
    with Talking(sys.executable, "-c", "print('ready 0', flush=True); input()") as talking:
        space = _process(resolver, talking.pid).space()
        start = next(it.start for it in space.mappings if it.path == "[vdso]")
        frame = _frame(resolver, talking.pid, start + found[0].offset + 1)
        assert (frame.kind, frame.binary) == ("vdso", "[vdso]")
        assert frame.function.endswith("clock_gettime")
        assert frame.build_id


def test_kernel_addresses_are_named(resolver: Resolver) -> None:
    table = {}
    for line in Path("/proc/kallsyms").read_text().splitlines():
        address, kind, name, *module = line.split()
        if kind in "tT" and int(address, 16):
            table[name] = (int(address, 16), module)
    if "ksys_write" not in table:
        pytest.skip("the kernel hides its addresses")
    me = _process(resolver, os.getpid())
    stack = [table["ksys_write"][0] + 4, table["ksys_read"][0] + 9]
    leaf, caller = (known.frame for known in resolver.resolve(me, stack, []))
    assert (leaf.kind, leaf.function, leaf.binary) == ("kernel", "ksys_write", "[kernel]")
    assert caller.function == "ksys_read"
    assert leaf.build_id == _native.kernel_build_id()
    assert leaf.offset == stack[0] - table["_text"][0]
    of_modules = [(name, where) for name, where in table.items() if where[1]]
    for name, (address, module) in of_modules[:1]:
        (known,) = resolver.resolve(me, [address], [])
        assert (known.frame.function, known.frame.binary) == (name, module[0])


def test_kernel_addresses_that_mean_nothing_make_one_nameless_frame(resolver: Resolver) -> None:
    me = _process(resolver, os.getpid())
    stack = [1, 0, 0xFFFF800000000000, 2**64 - 1]
    frames = {known.frame for known in resolver.resolve(me, stack, [])}
    assert frames == {Frame("kernel", "", "[kernel]")}


JIT = """
import ctypes, mmap, os, sys
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
start = ctypes.addressof(ctypes.c_char.from_buffer(code))
path = sys.argv[1].format(pid=os.getpid())
with open(path, "w") as out:
    print(f"{start:x} 40 jitted_step", file=out)
    print(f"{start + 64:x} 40 py::train.<locals>.loss:/home/someone/secret/train.py", file=out)
print(f"code {start:x}", flush=True)
print("ready 0", flush=True)
sys.stdin.readline()
with open(path, "a") as out:
    print(f"{start + 128:x} 40 jitted_later", file=out)
print("ready 0", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def jit(tmp_path: Path) -> Iterator[Talking]:
    with Talking(sys.executable, "-c", JIT, "/tmp/perf-{pid}.map") as talking:
        try:
            yield talking
        finally:
            Path(f"/tmp/perf-{talking.pid}.map").unlink(missing_ok=True)


def test_generated_code_is_named_by_its_compilers_map(resolver: Resolver, jit: Talking) -> None:
    start = jit.addresses["code"]
    frame = _frame(resolver, jit.pid, start + 5)
    assert (frame.kind, frame.function, frame.binary) == ("jit", "jitted_step", "[jit]")
    python = _frame(resolver, jit.pid, start + 70)
    assert (python.kind, python.function, python.file) == (
        *("python", "train.<locals>.loss"),
        "train.py",
    )
    assert _frame(resolver, jit.pid, start + 130) == Frame("unknown", "", "[anon]", offset=130)
    jit.go_on()
    jit.listen()
    time.sleep(1.1)  # a map is not asked more often than this
    assert _frame(resolver, jit.pid, start + 130).function == "jitted_later"


def test_a_map_that_belongs_to_somebody_else_is_refused(resolver: Resolver, jit: Talking) -> None:
    os.chown(f"/tmp/perf-{jit.pid}.map", 12345, 12345)
    frame = _frame(resolver, jit.pid, jit.addresses["code"] + 5)
    assert (frame.function, frame.binary) == ("", "[anon]")
    assert resolver.counters.perf_maps_refused == 1


def test_a_map_that_is_a_link_or_a_pipe_is_not_followed(resolver: Resolver, jit: Talking) -> None:
    path = Path(f"/tmp/perf-{jit.pid}.map")
    path.rename(f"{path}.real")
    try:
        path.symlink_to(f"{path}.real")
        assert _frame(resolver, jit.pid, jit.addresses["code"] + 5).function == ""
        path.unlink()
        os.mkfifo(path)
        time.sleep(1.1)
        assert _frame(resolver, jit.pid, jit.addresses["code"] + 5).function == ""
    finally:
        Path(f"{path}.real").unlink()


def test_a_map_is_found_by_the_pid_that_its_process_has_in_its_own_namespace(
    resolver: Resolver, tmp_path: Path
) -> None:
    # The interpreter itself: a checkout below /tmp, with its .venv, is out of sight in there.
    inner = [str(Path(sys.executable).resolve()), "-c", JIT, "/tmp/perf-{pid}.map"]
    script = f'mount --bind {tmp_path} /tmp && exec "$@"'
    # unshare --fork stays our child; the program is its child, with pid 1.
    with Talking("unshare", "-mp", "--fork", "sh", "-c", script, "sh", *inner) as talking:
        children = Path(f"/proc/{talking.pid}/task/{talking.pid}/children").read_text()
        pid = int(children.split()[0])
        assert (tmp_path / "perf-1.map").exists()
        frame = _frame(resolver, pid, talking.addresses["code"] + 5)
        assert frame.function == "jitted_step"
        os.kill(pid, 9)


def test_code_in_a_memory_file_is_no_danger_and_named_as_such(resolver: Resolver) -> None:
    fd = os.memfd_create("jit cache")
    os.write(fd, os.urandom(4096))
    code = mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    start = ctypes.addressof(ctypes.c_char.from_buffer(code))
    frame = _frame(resolver, os.getpid(), start + 5)
    assert (frame.kind, frame.binary, frame.offset) == ("unknown", "[memfd:jit cache]", 5)
    os.close(fd)


def test_one_frame_has_one_id_in_every_process_and_at_every_start(
    resolver: Resolver, tmp_path: Path
) -> None:
    program = build("named.c", tmp_path / "named")
    ids = set()
    for at in (resolver, resolver, Resolver()):
        with Talking(program) as talking:
            address = talking.addresses["hidden_work"] + 1
            (known,) = at.resolve(_process(at, talking.pid), [], [address])
            ids.add(known.id)
    assert len(ids) == 1
    assert 0 < ids.pop() < 1 << 64


def test_files_are_held_open_no_longer_than_needed(resolver: Resolver, tmp_path: Path) -> None:
    before = _open_files()
    with Talking(build("named.c", tmp_path / "named")) as talking:
        _function(resolver, talking, "main")
        assert resolver.usage()["files_open"] == 1
        resolver.tick(time.monotonic_ns() + 10**11)
        assert resolver.usage()["files_open"] == 0
        assert _function(resolver, talking, "hidden_work") == "hidden_work"
    resolver.close()
    assert _open_files() <= before


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_looking_up_what_is_known_costs_about_a_dictionary_lookup(resolver: Resolver) -> None:
    me = _process(resolver, os.getpid())
    code = [it for it in me.space().mappings if it.has_file]
    stack = [it.start + 64 * n for it in code for n in range(1, 5)][:40]
    resolver.resolve(me, [], stack)
    best = min(_seconds_of(resolver, me, stack) for _ in range(5))
    assert best / len(stack) < 500e-9


def _seconds_of(resolver: Resolver, process: TrackedProcess, stack: list[int]) -> float:
    start = time.process_time()
    for _ in range(1000):
        resolver.resolve(process, [], stack)
    return (time.process_time() - start) / 1000


def test_frames_are_bounded_and_come_back_when_they_were_dropped(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonde.resolve.resolver.MAX_PROCESS_FRAMES", 500)
    me = _process(resolver, os.getpid())
    libc = next(it for it in me.space().mappings if it.name.startswith("libc.so"))
    first = resolver.resolve(me, [], [libc.start + 1])
    for n in range(50):
        stack = [libc.start + 16 * (n * 30 + k) for k in range(30)]
        assert len(resolver.resolve(me, [], stack)) == 30
        assert len(me.frames) <= 501
    assert resolver.resolve(me, [], [libc.start + 1]) == first
    resolver.tick(time.monotonic_ns())
    assert resolver.counters.frames_evicted >= 900


def test_a_shell_can_be_looked_at_without_a_shell(resolver: Resolver) -> None:
    """A process that is there but whose memory nobody may look at: kernel threads."""
    stat = procfs.read_stat(2)
    if stat is None:
        pytest.skip("no kernel threads in sight")
    process = resolver.processes.find(2, stat.start_ns)
    assert (process.record().comm, process.exe) == ("kthreadd", "")
    assert subprocess.run(["true"], check=True).returncode == 0
    (known,) = resolver.resolve(process, [], [0x1234])
    assert known.frame.binary == "[unknown]"
