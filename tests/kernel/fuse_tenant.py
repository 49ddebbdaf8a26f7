# SPDX-License-Identifier: Apache-2.0
"""An unprivileged user who makes others wait, in a user and mount namespace of his own.

usage: fuse_tenant.py MODE SECONDS FOLDER FUSE_DEVICE [LIBRARY]

He serves a FUSE file system with one file, which stops answering. It prints a line "tenant PID …"
once it does. Everything ends with this process, and after SECONDS at the latest.

    exec     closes a file of it in execve(): readers of /proc/PID/stat and the like wait
    elf      runs a program from overlayfs above it: readers of that file wait
    libc     maps it as libc.so.6 and has touched it: readers of that memory wait
    mmap     reads it through its own /proc/PID/mem: readers of its mappings wait
    share    maps LIBRARY, for reading alone, and keeps the lock of its mappings for reading
    own      the same, with somebody who waits for it for writing
    later    the same as share, once it gets SIGUSR2
    pulses   the same as share, again and again, for random times of up to 0.8 s
    thread   the same as share, after its first thread has ended
    stack    a thread of it sleeps with its stack there, another has touched that page
    write    writes from it into the memory that the library makes: writers to it wait
    dead     the same as elf, but its server was killed: what reads that file fails
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

ENOENT, ENOSYS = 2, 38
FOREVER_S: Final = 1000
PAGE: Final = 4096
AT: Final = 0x10000000
CONTENT: Final = Path("/bin/dash").read_bytes()
NAMES: Final = (b"f", b"libc.so.6")
RING_BYTES: Final = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]


def check(result: int, what: str) -> None:
    """Raise OSError where a function of the C library failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, data: str = "") -> None:
    check(libc.mount(source.encode(), target.encode(), kind.encode(), 0, data.encode()), kind)


def enter_namespaces() -> None:
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(0x10000000 | 0x00020000), "unshare")  # CLONE_NEWUSER, CLONE_NEWNS
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"0 {uid} 1")
    (own / "gid_map").write_text(f"0 {gid} 1")
    check(libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None), "private")  # MS_REC, MS_PRIVATE


def map_file(path: str, at: int, pages: int = 1) -> int:
    """Map it privately, for reading, at that address."""
    fd = os.open(path, os.O_RDONLY)
    found = int(libc.mmap(at, pages * PAGE, 1, 0x2 | 0x10, fd, 0) or -1)
    if found != at:
        raise OSError("it was not mapped")
    return found


class Server:
    """One file, inode 2, in a folder, inode 1. SIGUSR1: reads are answered no more."""

    def __init__(self, fd: int, *, caches: bool, answers_flush: bool, late_s: float) -> None:
        self._fd = fd
        self._caches = caches
        self._answers_flush = answers_flush
        self._late_s = late_s
        self._answers_read = True
        signal.signal(signal.SIGUSR1, self._stop_answering)

    def _stop_answering(self, *_: object) -> None:
        self._answers_read = False

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, 1 << 17 | PAGE)
            except InterruptedError:
                continue
            except OSError:
                return
            _, operation, unique, node = struct.unpack_from("<IIQQ", request)
            answer = self._answer(operation, node, request[40:])
            if answer is None:
                continue
            error, data = (answer, b"") if isinstance(answer, int) else (0, answer)
            head = struct.pack("<IiQ", 16 + len(data), -error, unique)
            try:
                os.write(self._fd, head + data)
            except OSError:
                continue  # the caller is gone

    def _answer(self, operation: int, node: int, body: bytes) -> bytes | int | None:
        """What it brings, the error, or nothing."""
        match operation:
            case 26:  # INIT
                return struct.pack("<IIIIHHII32x", 7, 31, 65536, 0, 16, 12, 65536, 1)
            case 1:  # LOOKUP
                if not self._answers_read:
                    return None
                if body.rstrip(b"\0") not in NAMES:
                    return ENOENT
                return struct.pack("<QQQQII", 2, 0, 1000, 1000, 0, 0) + _attributes(2)
            case 3:  # GETATTR
                return struct.pack("<QII", 1000, 0, 0) + _attributes(node)
            case 14 | 27:  # OPEN, OPENDIR; 1: FOPEN_DIRECT_IO
                return struct.pack("<QII", 5, 0 if self._caches else 1, 0)
            case 15:  # READ
                _, offset, size = struct.unpack_from("<QQI", body)
                time.sleep(random.uniform(0, self._late_s))
                return CONTENT[offset : offset + size] if self._answers_read else None
            case 17:  # STATFS
                return struct.pack("<5Q3I28x", 1000, 1000, 1000, 1000, 1000, PAGE, 255, PAGE)
            case 25:  # FLUSH
                if self._answers_flush:
                    return b""
                STEPS.announce()
                return None
            case 2 | 36 | 42:  # FORGET, INTERRUPT, BATCH_FORGET: never answered
                return None
            case 18 | 28 | 29 | 34:  # RELEASE, READDIR, RELEASEDIR, ACCESS
                return b""
            case _:
                return ENOSYS


def _attributes(inode: int) -> bytes:
    size = len(CONTENT) if inode == 2 else 0
    mode = 0o40755 if inode == 1 else 0o100755
    times = (1, 1, 1, 0, 0, 0)
    return struct.pack("<6Q10I", inode, size, size // 512, *times, mode, 1, 0, 0, 0, PAGE, 0)


def fork(run: Callable[[], None]) -> int:
    """A child that ends with us."""
    pid = os.fork()
    if pid == 0:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        try:
            run()
        finally:
            os._exit(1)
    return pid


def in_thread(run: Callable[[], object]) -> None:
    threading.Thread(target=run, daemon=True).start()


class Steps:
    """What the process and who started it wait for of one another."""

    def __init__(self) -> None:
        self._news, self._announce = os.pipe()
        self._go, self._let_go = os.pipe()

    def pass_one(self) -> None:
        """It has mapped what it wants, and goes on once nobody answers any more."""
        os.write(self._announce, b"m")
        os.read(self._go, 1)

    def done(self, last: Callable[[], object] = lambda: None) -> NoReturn:
        """It makes others wait once it has done the last, and stays."""
        time.sleep(0.5)
        self.announce()
        last()
        while True:
            time.sleep(1)

    def announce(self) -> None:
        """It makes others wait."""
        os.write(self._announce, b"w")

    def wait_for_step(self) -> None:
        """The process is one step further."""
        os.read(self._news, 1)

    def let_go(self) -> None:
        """Nobody answers any more."""
        os.write(self._let_go, b"g")


STEPS: Final = Steps()
LIBRARY: Final = sys.argv[5] if len(sys.argv) > 5 else ""
LATE_S: Final = 0.8


def run_exec(folder: Path) -> None:
    os.open(folder / "fuse/f", os.O_RDONLY | os.O_CLOEXEC)
    os.execv("/bin/sleep", ["sleep", str(FOREVER_S)])


def run_elf(folder: Path) -> None:
    os.execv(folder / "ov/f", ["f", "-c", "while :; do :; done"])


def run_libc(folder: Path) -> None:
    map_file(str(folder / "fuse/libc.so.6"), AT, 16)
    STEPS.pass_one()
    copy = ctypes.create_string_buffer(64)
    in_thread(lambda: libc.memcpy(copy, ctypes.c_void_p(AT), ctypes.c_size_t(64)))
    STEPS.done()


def run_mmap(folder: Path) -> None:
    map_file(str(folder / "fuse/f"), AT)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    STEPS.pass_one()
    in_thread(lambda: os.pread(memory, 64, AT))  # holds the lock for reading
    # This waits for it, and all others wait behind; a thread could not even be made any more.
    STEPS.done(lambda: libc.mmap(0, PAGE, 1, 0x22, -1, 0))


def run_write(folder: Path) -> None:
    """The memory that stands for what the library makes is descriptor 700."""
    map_file(str(folder / "fuse/f"), AT)
    memory = os.memfd_create("sonde-inject")
    os.ftruncate(memory, RING_BYTES)
    os.dup2(memory, 700)
    STEPS.pass_one()
    in_thread(lambda: libc.pwrite(700, ctypes.c_void_p(AT), ctypes.c_size_t(64), ctypes.c_long(0)))
    STEPS.done()


def read_own_memory(memory: int) -> None:
    """Through /proc: the lock is held for reading until the page is there."""
    os.pread(memory, 64, AT)


def read_on_signal(memory: int) -> None:
    """When SIGUSR2 comes."""
    signal.sigwait([signal.SIGUSR2])
    read_own_memory(memory)


def read_a_little_later(memory: int) -> None:
    """When the process has had time to go on."""
    time.sleep(0.3)
    read_own_memory(memory)


def map_library() -> None:
    map_file(LIBRARY, AT + 0x100000, 64)


def run_share(folder: Path) -> None:
    map_library()
    map_file(str(folder / "fuse/f"), AT)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    STEPS.pass_one()
    in_thread(lambda: read_own_memory(memory))
    STEPS.done()


def run_own(folder: Path) -> None:
    map_library()
    run_mmap(folder)


def run_later(folder: Path) -> None:
    map_library()
    map_file(str(folder / "fuse/f"), AT)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    STEPS.pass_one()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    in_thread(lambda: read_on_signal(memory))
    STEPS.done()


def run_thread(folder: Path) -> None:
    map_library()
    map_file(str(folder / "fuse/f"), AT)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    STEPS.pass_one()
    in_thread(lambda: read_a_little_later(memory))
    in_thread(STEPS.done)
    libc.syscall(60, 0)  # exit, of this thread alone


def run_stack(folder: Path) -> None:
    """The page is locked from the moment that the other thread asks for it."""
    map_file(str(folder / "fuse/f"), AT, 16)
    code = mmap.mmap(-1, PAGE, prot=7)
    # mov rsp, rdi; lea rbp, [rdi + 64]; again: mov eax, 34 (pause); syscall; jmp again
    code.write(bytes.fromhex("4889fc488d6f40b8220000000f05ebf7"))
    sleep_there = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        ctypes.addressof(ctypes.c_char.from_buffer(code))
    )
    copy = ctypes.create_string_buffer(64)
    STEPS.pass_one()
    in_thread(lambda: sleep_there(AT + 0x800))
    in_thread(lambda: libc.memcpy(copy, ctypes.c_void_p(AT), ctypes.c_size_t(64)))
    STEPS.done()


def run_pulses(folder: Path) -> None:
    map_library()
    file = os.open(folder / "fuse/f", os.O_RDONLY)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    STEPS.pass_one()
    STEPS.announce()
    while True:
        map_file(str(folder / "fuse/f"), AT)
        read_own_memory(memory)
        libc.munmap(ctypes.c_void_p(AT), ctypes.c_size_t(PAGE))
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        time.sleep(random.uniform(0, LATE_S))


RUNS: Final = {
    "exec": run_exec,
    "elf": run_elf,
    "libc": run_libc,
    "mmap": run_mmap,
    "share": run_share,
    "own": run_own,
    "later": run_later,
    "thread": run_thread,
    "pulses": run_pulses,
    "stack": run_stack,
    "write": run_write,
    "dead": run_elf,
}


def main(mode: str, seconds: str, where: str, device: str, *_: str) -> None:
    signal.alarm(int(seconds))
    enter_namespaces()
    folder = Path(where)
    mount("tmpfs", where, "tmpfs")
    for name in ("fuse", "up", "work", "ov"):
        (folder / name).mkdir()
    fd = os.open(device, os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions"
    mount("fuse", f"{where}/fuse", "fuse", options)
    is_elf = RUNS[mode] is run_elf
    late_s = LATE_S if mode == "pulses" else 0.0
    server = fork(
        lambda: Server(fd, caches=not is_elf, answers_flush=mode != "exec", late_s=late_s).serve()
    )
    os.close(fd)
    (folder / "fuse").stat()  # once the server answers
    if is_elf:
        layers = f"lowerdir={where}/fuse,upperdir={where}/up,workdir={where}/work,userxattr"
        mount("overlay", f"{where}/ov", "overlay", layers)
    run = RUNS[mode]
    kid = fork(lambda: run(folder))
    if is_elf:
        while Path(f"/proc/{kid}/comm").read_text() != "f\n":
            time.sleep(0.01)
        time.sleep(0.2)  # it has read what it runs by then
    else:
        STEPS.wait_for_step()
    if mode == "dead":
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    elif mode not in ("exec", "pulses"):
        os.kill(server, signal.SIGUSR1)
    if not is_elf and mode != "exec":
        time.sleep(0.3)
        STEPS.let_go()
        STEPS.wait_for_step()

    def finish(*_: object) -> None:
        for pid in (kid, server):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in (kid, server):  # init may take a second to reap what is left to it
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        os._exit(0)

    signal.signal(signal.SIGTERM, finish)
    signal.signal(signal.SIGALRM, finish)
    print("tenant", os.getpid(), "server", server, "kid", kid, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
