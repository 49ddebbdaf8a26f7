# SPDX-License-Identifier: Apache-2.0
"""Libraries brought into real processes: in storms, in namespaces, where it must not be done."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import storms

from sonde.attach import glibc, process, remote, tracer
from sonde.errors import (
    AttachFailed,
    PermissionDenied,
    ProcessGone,
    SondeError,
    TargetRefused,
    UsageError,
)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64", reason="needs root on x86-64"
)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PTRACE_SEIZE = 38, 22, 0x4206


@pytest.fixture(scope="module")
def bin_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storms, targets, and what is loaded into them."""
    folder = tmp_path_factory.mktemp("attach")
    storms.build(folder)
    source = str(storms.PROGRAMS / "target.c")
    for name, flags in (("target", []), ("target-static", ["-static"])):
        command = ["cc", "-O2", "-pthread", *flags, source, "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program that prints "ready"; it must end well after the test unless it was killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str, **options: Any) -> subprocess.Popen[str]:
        it = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        started.append(it)
        assert it.stdout.readline().startswith("ready")
        time.sleep(0.05)
        return it

    yield begin
    for it in started:
        killed = it.poll() is not None
        it.stdin.close()
        assert killed or it.wait(10) == 0, "the process was harmed"


def python(body: str) -> list[str]:
    """A Python program that does something, prints "ready", and sleeps until its input closes."""
    wait = "import select\nwhile not select.select([0], [], [], 0.05)[0]: pass\n"
    return [sys.executable, "-c", f"{body}\nprint('ready', flush=True)\n{wait}"]


def load(it: subprocess.Popen[str], bin_: Path, name: str = "first", wait_s: float = 5.0):
    return remote.load(it.pid, bin_ / "payload.so", name, wait_s)


# ---- it works, and nothing is harmed ----


@pytest.mark.parametrize("mode", ["malloc", "dlopen", "fork", "users", "all"])
def test_programs_in_a_storm_take_a_library_and_stay_whole(bin_: Path, mode: str) -> None:
    row = storms.storm(bin_, mode, "plain", 6)

    assert (row.loaded, row.whole, row.harm) == (6, 1, []), row.why


@pytest.mark.parametrize("mode", ["dlopen", "all"])
def test_an_attach_that_is_killed_harms_nothing(bin_: Path, mode: str) -> None:
    random.seed(7)
    row = storms.storm(bin_, mode, "killed", 8)

    assert (row.whole, row.harm) == (1, [])
    assert row.why["killed"] > 0


def test_in_other_mount_and_pid_namespaces(bin_: Path) -> None:
    row = storms.storm(bin_, "malloc", "namespaced", 3)

    assert (row.loaded, row.whole, row.harm) == (3, 1, []), row.why


def test_a_load_that_cannot_end_is_given_up(bin_: Path) -> None:
    row = storms.storm(bin_, "trap", "trap", 1)

    assert (row.loaded, row.whole, row.harm) == (0, 1, [])
    assert "the loader was busy" in next(iter(row.why))


def test_a_python_program(bin_: Path, start: Start) -> None:
    it = start(*python(""))

    done = load(it, bin_)

    assert done is not None
    assert done.stop_us < 1e6 * tracer.BOUND_S  # some ms, where the machine is not busy
    assert remote.is_mapped(it.pid, "first")


def test_afterwards_it_may_change_its_user(start: Start) -> None:
    """For which the C library has every thread answer, ours too."""
    body = (
        "import os, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "os.setegid(65534); os.seteuid(65534)\n"
        "print(os.geteuid(), os.getegid(), flush=True)\n"
    )
    it = start(sys.executable, "-c", body)
    assert remote.load_injected_library(it.pid) is not None
    found = (Path(task, "status").read_text() for task in Path(f"/proc/{it.pid}/task").iterdir())
    blocked = [int(text.partition("SigBlk:\t")[2].split()[0], 16) for text in found]

    assert not any(mask >> (33 - 1) & 1 for mask in blocked)
    out, _ = it.communicate("\n", timeout=10)
    assert out == "65534 65534\n"


def test_it_ends_with_the_last_thread_of_its_own(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "leaderless")
    assert remote.load_injected_library(it.pid) is not None
    assert it.poll() is None

    it.stdin.close()
    assert it.wait(5) == 0


def test_a_program_executed_since_it_was_looked_at_is_left_alone(bin_: Path, start: Start) -> None:
    body = (
        "import os, sys; print('ready', flush=True); sys.stdin.readline(); "
        f"os.execv({str(bin_ / 'target')!r}, ['target', 'sleep'])"
    )
    it = start(sys.executable, "-c", body)
    before = process.program_of(it.pid)
    it.stdin.write("\n")
    it.stdin.flush()
    assert it.stdout.readline()
    with pytest.raises(TargetRefused, match="executed another program"):
        remote.load(it.pid, bin_ / "payload.so", "first", program=before)
    assert remote.load(it.pid, bin_ / "payload.so", "first", program=process.program_of(it.pid))


def test_it_is_loaded_once(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "sleep")

    assert load(it, bin_) is not None
    assert load(it, bin_) is None


def test_the_direction_flag_is_clear_in_the_library_and_afterwards_as_it_was(
    bin_: Path, start: Start
) -> None:
    it = start(str(bin_ / "target"), "backwards")

    assert load(it, bin_) is not None


def test_two_at_once_load_it_once(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "sleep")
    came: list[object] = []
    both = [threading.Thread(target=lambda: came.append(load(it, bin_))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()

    assert sorted(done is None for done in came) == [False, True]


def test_a_c_library_whose_file_is_gone(bin_: Path, start: Start, tmp_path: Path) -> None:
    copies = {}
    for line in subprocess.check_output(["ldd", bin_ / "target"], text=True).splitlines():
        for word in line.split():
            if word.startswith("/"):
                copies[Path(word).name] = shutil.copy(word, tmp_path)
    loader = str(tmp_path / "ld-linux-x86-64.so.2")
    it = start(loader, "--library-path", str(tmp_path), str(bin_ / "target"), "sleep")
    for copy in copies.values():
        Path(copy).unlink()

    assert load(it, bin_) is not None


# ---- seccomp: the filter is read and judged ----


def seccomp_program(*kill: int, allow: int = 0x7FFF0000) -> str:
    """A Python statement that installs a filter which ends the process at some calls."""
    code = [(0x20, 0, 0, 0)]
    for number in kill:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x80000000)]
    code.append((0x06, 0, 0, allow))
    return (
        "import ctypes, struct\n"
        f"code = b''.join(struct.pack('<HBBI', *i) for i in {code!r})\n"
        "buffer = ctypes.create_string_buffer(code)\n"
        f"fprog = struct.pack('<HxxxxxxQ', {len(code)}, ctypes.addressof(buffer))\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"assert libc.prctl({PR_SET_NO_NEW_PRIVS}, 1, 0, 0, 0) == 0\n"
        f"assert libc.prctl({PR_SET_SECCOMP}, 2, fprog, 0, 0) == 0"
    )


def test_a_seccomp_filter_that_lets_it_pass(bin_: Path, start: Start) -> None:
    it = start(*python(seccomp_program(101)))  # ptrace

    assert load(it, bin_) is not None


@pytest.mark.parametrize(
    ("number", "name"), [(319, "memfd_create"), (110, "getppid"), (56, "clone")]
)
def test_a_seccomp_filter_that_would_end_the_process(
    bin_: Path, start: Start, number: int, name: str
) -> None:
    it = start(*python(seccomp_program(number)))

    with pytest.raises(TargetRefused, match="seccomp filter") as refused:
        load(it, bin_, wait_s=0.3)
    assert name in refused.value.cause
    assert it.poll() is None


# ---- what is refused, with its reason, and goes on as if nothing had been ----


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("busy", "no thread of process"),
        ("futex", "no thread of process"),
        ("little-stack", "too little stack"),
        ("own-stack", "a stack of the program's own making"),
        ("handler", "inside a signal handler"),
    ],
)
def test_threads_that_must_not_be_borrowed(
    bin_: Path, start: Start, mode: str, reason: str
) -> None:
    it = start(str(bin_ / "target"), mode)

    with pytest.raises(TargetRefused, match=reason) as refused:
        load(it, bin_, wait_s=0.4)
    assert refused.value.exit_code == 3
    assert refused.value.remedy


def test_a_thread_inside_the_loader(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "loading", str(bin_ / "sleepy.so"))

    with pytest.raises(TargetRefused, match="inside the loader"):
        load(it, bin_, wait_s=0.3)


def test_a_static_program(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target-static"), "sleep")

    with pytest.raises(TargetRefused, match="a static program"):
        load(it, bin_)


def test_a_stopped_process_stays_stopped(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "sleep")
    it.send_signal(signal.SIGSTOP)
    time.sleep(0.05)

    with pytest.raises(TargetRefused, match="is stopped") as refused:
        load(it, bin_)
    assert f"kill -CONT {it.pid}" in refused.value.remedy
    status = process.read_status(it.pid)
    assert status is not None
    assert status.state == "T"
    it.send_signal(signal.SIGCONT)


def test_a_process_under_a_debugger(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "sleep")
    debugger = start(
        *python(
            "import ctypes; libc = ctypes.CDLL(None)\n"
            f"assert libc.ptrace({PTRACE_SEIZE}, {it.pid}, None, None) == 0"
        )
    )

    with pytest.raises(TargetRefused, match=f"traced by .*pid {debugger.pid}"):
        load(it, bin_)
    debugger.communicate()


def test_a_process_that_ends_meanwhile(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "busy")
    end = threading.Timer(0.4, lambda: (it.kill(), it.wait()))
    end.start()

    with pytest.raises(ProcessGone, match="ended meanwhile") as gone:
        load(it, bin_)
    end.join()
    assert gone.value.exit_code == 1


def test_a_zombie(bin_: Path) -> None:
    it = subprocess.Popen(["true"])
    time.sleep(0.2)

    with pytest.raises(TargetRefused, match="has ended"):
        remote.load(it.pid, bin_ / "payload.so")
    it.wait()


@pytest.mark.parametrize("pid", [0, -1, 99_999_999])
def test_no_such_process(bin_: Path, pid: int) -> None:
    with pytest.raises(UsageError, match=f"there is no process {pid}") as wrong:
        remote.load(pid, bin_ / "payload.so")
    assert wrong.value.exit_code == 2


def test_a_thread_is_not_a_process(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "sleep")
    tid = max(int(path.name) for path in Path(f"/proc/{it.pid}/task").iterdir())

    with pytest.raises(UsageError, match=f"is a thread of process {it.pid}"):
        remote.load(tid, bin_ / "payload.so")


def test_a_thread_of_the_kernel(bin_: Path) -> None:
    kernel = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()]
    kernel = [pid for pid in kernel if (s := process.read_status(pid)) and s.name == "kthreadd"]
    if not kernel:
        pytest.skip("shows no kernel threads")
    with pytest.raises(TargetRefused, match="thread of the kernel"):
        remote.load(kernel[0], bin_ / "payload.so")


def test_this_very_command(bin_: Path) -> None:
    with pytest.raises(UsageError, match="this very command"):
        remote.load(os.getpid(), bin_ / "payload.so")


def test_a_process_without_proc(bin_: Path, start: Start) -> None:
    hide = f"mount -t tmpfs none /proc && exec {bin_}/target sleep"
    it = start("unshare", "--mount", "sh", "-c", hide)

    with pytest.raises(TargetRefused, match="sees no /proc"):
        load(it, bin_)


def test_a_file_that_is_no_library(bin_: Path, start: Start, tmp_path: Path) -> None:
    it = start(str(bin_ / "target"), "sleep")
    (tmp_path / "no.so").write_bytes(b"no library")

    with pytest.raises(TargetRefused, match="refused the library"):
        remote.load(it.pid, tmp_path / "no.so", "no")


# ---- who may ----


def as_nobody(body: str) -> subprocess.CompletedProcess[str]:
    """Run Python as an ordinary user, with what this test can import."""
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    # The interpreter of a virtual environment may lie where only its owner can reach it.
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    done = subprocess.run(
        [*drop, python, "-c", body], capture_output=True, text=True, env=environment
    )
    if "No module named" in done.stderr:
        pytest.skip("an ordinary user cannot import what is tested here")
    return done


ATTEMPT = """
import subprocess, sys
from pathlib import Path
from typing import Any
from sonde.attach import remote
from sonde.errors import SondeError
try:
    print("loaded", remote.load({pid}, Path({library!r}), "first") is not None)
except SondeError as error:
    print(type(error).__name__, error.cause, "|", error.remedy)
"""


def test_somebody_elses_process(bin_: Path, start: Start) -> None:
    it = start(str(bin_ / "target"), "sleep")

    done = as_nobody(ATTEMPT.format(pid=it.pid, library=str(bin_ / "payload.so")))

    assert "PermissionDenied" in done.stdout, done.stderr
    assert "belongs to user root, and CAP_SYS_PTRACE is not held" in done.stdout
    assert f"sudo sonde attach {it.pid}" in done.stdout


def test_an_ordinary_user_and_a_process_of_theirs(bin_: Path, tmp_path: Path) -> None:
    if process._yama():
        pytest.skip("kernel.yama.ptrace_scope is on")
    shared = Path("/var/tmp") / f"sonde-attach-{os.getpid()}"  # /tmp/pytest-… is root's alone
    shared.mkdir()
    try:
        shutil.copy(bin_ / "payload.so", shared)
        shared.chmod(0o755)
        body = "import sonde, subprocess, time\n"
        body += "p = subprocess.Popen(['sleep', '20']); time.sleep(0.2)\n"
        attempt = ATTEMPT.format(pid="p.pid", library=str(shared / "payload.so"))
        done = as_nobody(f"{body}{attempt}\nprint(p.poll()); p.kill()")
    finally:
        shutil.rmtree(shared)

    assert done.stdout == "loaded True\nNone\n", done.stderr


@pytest.mark.parametrize(("scope", "held", "allowed"), [
    (0, False, True), (1, False, False), (1, True, True), (2, True, True), (3, True, False),
])  # fmt: skip
def test_yama(
    monkeypatch: pytest.MonkeyPatch, start: Start, tmp_path: Path,
    scope: int, held: bool, allowed: bool,
) -> None:  # fmt: skip
    it = start(*python(""))
    (tmp_path / "scope").write_text(f"{scope}\n")
    monkeypatch.setattr(process, "_YAMA", tmp_path / "scope")
    monkeypatch.setattr(process, "_CAP_SYS_PTRACE", 19 if held else 63)
    if allowed:
        assert process.require(it.pid).tgid == it.pid
        return
    with pytest.raises(PermissionDenied, match="ptrace_scope") as refused:
        process.require(it.pid)
    assert refused.value.remedy


# ---- the pieces ----


def test_landmarks_agree_with_the_dynamic_linker(start: Start) -> None:
    it = start(*python(
        "import ctypes; libc = ctypes.CDLL(None)\n"
        "print('ready', ctypes.cast(libc.dlopen, ctypes.c_void_p).value,"
        " ctypes.cast(libc.getppid, ctypes.c_void_p).value, flush=True)\n"
    ))  # fmt: skip
    assert it.stdout is not None
    with glibc.ProcessMemory(it.pid) as memory:
        mappings = glibc.mappings_of(it.pid)
        base = next(m.start for m in mappings if m.leaf == "libc.so.6")
        libc = glibc.LoadedImage(memory, base)
        found = libc.function("getppid"), libc.function("no_such_function")
    own = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p).value
    own_base = next(m.start for m in glibc.mappings_of(os.getpid()) if m.leaf == "libc.so.6")

    assert own is not None
    assert found == (base + own - own_base, None)


def test_an_attach_that_dies_is_reported(bin_: Path, start: Start, monkeypatch) -> None:
    it = start(str(bin_ / "target"), "sleep")
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.0)

    with pytest.raises((AttachFailed, TargetRefused)) as failed:
        remote.load(it.pid, bin_ / "payload.so", "late", wait_s=0.001)
    assert isinstance(failed.value, SondeError)
