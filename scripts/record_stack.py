# SPDX-License-Identifier: Apache-2.0
"""Record one thread for the tests of the stack walk: registers, stack, unwind tables, the result.

    sudo .venv/bin/python scripts/record_stack.py OUT DESCRIPTION [--until NAME] -- PROGRAM …

The program stops itself (SIGSTOP) where its stack is to be taken. Before that it prints a line
"ADDRESS NAME" for each of its Python code objects. gdb then gives the native frames that the walk
must find, else nothing is written. With --until the program runs on instead, and is stopped
repeatedly until its stack has a function with NAME in its name; gdb is not asked. Needs root, gdb
and bpftool.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from sonde import procfs
from sonde.collect.kernel import Kernel
from sonde.resolve import Resolver
from sonde.unwind import Unwinder
from stack_recordings import Recording, Walker

STACK_BYTES = 48 << 10
"""The most that is recorded of a stack."""
PYTHON = 1 << 63
"""Bit of a word of a walk that is an interpreted frame's first one (abi/unwind.h)."""
_ATTACH, _DETACH, _GET_REGISTERS = 16, 17, 12
"""Requests of ptrace."""
_USER_REGISTERS = 27
"""In user_regs_struct: those of pt_regs, then fs_base and others."""
_RANGE_WORDS, _RULE_WORDS = 10, 4
"""32-bit words of a range and of a rule in the unwind tables (abi/unwind.h)."""


def main() -> int:
    """Write OUT."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("description")
    parser.add_argument("--until", default="")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    program = subprocess.Popen(args.command, stdout=subprocess.PIPE, text=True)
    try:
        names: dict[int, str] = {}
        if not args.until:
            _wait_stopped(program.pid)
            output = b""
            os.set_blocking(program.stdout.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                output = os.read(program.stdout.fileno(), 65536)
            for line in output.decode().splitlines():
                address, name = line.split(maxsplit=1)
                names[int(address, 16)] = name
        recording = _record(program.pid, args.until, names, args.description)
    finally:
        program.kill()
    recording.write(args.out)
    print(json.dumps(dict(recording.about), indent=1))
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    return 0


def _wait_stopped(pid: int) -> None:
    while (stat := procfs.read_stat(pid)) is not None and stat.state != "T":
        time.sleep(0.01)


def _record(pid: int, until: str, names: dict[int, str], description: str) -> Recording:
    kernel, resolver = Kernel(None), Resolver()
    unwinder = Unwinder(kernel.unwind, resolver)
    unwinder.expect([pid])
    deadline = time.monotonic() + 10
    while unwinder.is_busy and time.monotonic() < deadline:
        unwinder.update()
        time.sleep(0.01)
    process, chunks = _kernel_maps(pid)
    process_key = resolver.processes.find(pid, _start_ns(pid))
    with tempfile.TemporaryDirectory() as folder:
        walker = Walker(Path(folder))
        for attempt in range(5000):
            if until:
                os.kill(pid, signal.SIGSTOP)
                _wait_stopped(pid)
            made = _take(pid, walker, process, chunks)
            found = walker.again()
            native = [word for word in found.words if word and not word & PYTHON]
            frames = resolver.resolve(process_key, (), native)
            functions = [it.frame.function for it in frames]
            if not until or any(until in name for name in functions):
                break
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.001 * (attempt % 7))
        else:
            raise SystemExit(f"no stack led through {until}")
    expected = []
    if not until:
        expected = _distinct([it for it in _gdb(pid) if not _is_evaluation(process, it)])
    pairs = zip_longest(expected, _distinct(native))
    # Of a signal's frame gdb gives no address, here 0.
    if expected and expected != [0 if it == 0 else word for it, word in pairs]:
        print([hex(it) for it in expected], [hex(it) for it in native], sep="\n")
        raise SystemExit("gdb sees another stack")
    about = {
        "description": description,
        "words": list(found.words),
        "stop": found.stop,
        "functions": functions,
        "code_objects": {hex(at): name for at, name in names.items()},
    }
    unwinder.close()
    return Recording(made.registers, made.process, made.memory, made.tables, about)


def _start_ns(pid: int) -> int:
    stat = procfs.read_stat(pid)
    if stat is None:
        raise SystemExit("the program has ended")
    return stat.start_ns


def _registers(pid: int) -> list[int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(_ATTACH, pid, None, None):
        raise OSError(ctypes.get_errno(), "cannot trace")
    os.waitpid(pid, 0x40000000)  # __WALL
    values = (ctypes.c_uint64 * _USER_REGISTERS)()
    libc.ptrace(_GET_REGISTERS, pid, None, ctypes.addressof(values))
    libc.ptrace(_DETACH, pid, None, ctypes.c_void_p(signal.SIGSTOP))
    return [*values[:21], values[21]]


def _take(pid: int, walker: Walker, process: bytes, chunks: dict[int, bytes]) -> Recording:
    """Walk the live thread, and keep what the walk needed: the stack, and other memory that it
    read."""
    registers = _registers(pid)
    read: dict[int, bytes] = {}
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    stack = registers[19]
    try:
        whole = os.pread(memory, _room(pid, stack), stack)

        def reader(at: int, size: int, to: int) -> int:
            try:
                data = os.pread(memory, size, at)
            except OSError:
                return -14
            if len(data) != size:
                return -14
            read[at] = data if len(data) > len(read.get(at, b"")) else read[at]
            ctypes.memmove(to, data, size)
            return 0

        callback = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
        )(reader)
        every = [(number << 16, data) for number, data in chunks.items()]
        walker.load(Recording(registers, process, [(stack, whole)], every, {}))
        walker.use_reader(callback)
        found = walker.again()
        walker.use_reader(None)
    finally:
        os.close(memory)
    pieces = [(stack, whole), *sorted(read.items())]
    tables = _used(process, chunks, found.words)
    made = Recording(registers, process, pieces, tables, {})
    assert walker.walk(made) == found, "the recording lacks something"
    return made


def _room(pid: int, stack: int) -> int:
    """How many bytes to record from a stack pointer on."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        begin, end = (int(it, 16) for it in line.split()[0].split("-"))
        if begin <= stack < end:
            return min(end - stack, STACK_BYTES)
    raise SystemExit("no stack")


def _kernel_maps(pid: int) -> tuple[bytes, dict[int, bytes]]:
    """A process's entry and all chunks of unwind tables, as this process put them into BPF maps."""
    own_ids = set()
    for entry in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            own_ids |= {int(it) for it in re.findall(r"^map_id:\s+(\d+)", entry.read_text(), re.M)}
    maps = {it["name"]: it["id"] for it in _bpftool("map", "show") if it["id"] in own_ids}
    key = [f"{byte:#x}" for byte in struct.pack("=I", pid)]
    found = _bpftool("map", "lookup", "id", str(maps["unwind_processe"]), "key", *key)
    process = _bytes(found["value"])
    chunks = {}
    for entry in _bpftool("map", "dump", "id", str(maps["unwind_chunks"])):
        number, inner = (int.from_bytes(_bytes(entry[it]), "little") for it in ("key", "value"))
        (only,) = _bpftool("map", "dump", "id", str(inner))
        chunks[number] = _bytes(only["value"])
    return process, chunks


def _bpftool(*arguments: str) -> Any:
    done = subprocess.run(["bpftool", "-j", *arguments], capture_output=True, check=True)
    return json.loads(done.stdout)


def _bytes(value: list[str]) -> bytes:
    return bytes(int(it, 16) for it in value)


def _used(
    process: bytes, chunks: dict[int, bytes], words: tuple[int, ...]
) -> list[tuple[int, bytes]]:
    """The words of unwind tables that are read by walks through these addresses, or through the
    evaluation loop."""

    def at(reference: int, count: int) -> bytes:
        start = 4 * (reference & 0xFFFF)
        return chunks[reference >> 16][start : start + 4 * count]

    ranges, count = struct.unpack_from("=II", process, 16)
    first, end, cold, cold_end = struct.unpack_from("=QQQQ", process, 32)
    loop = (*range(first, end, 4096), end, *range(cold, cold_end, 4096), cold_end)
    kept = {ranges: at(ranges, count * _RANGE_WORDS)}
    for i in range(count):
        raw = at(ranges + i * _RANGE_WORDS, _RANGE_WORDS)
        start, end, bias, pages, page_count, first, rules = struct.unpack("=QQQIIII", raw)
        for word in (*words, *loop):
            if not (start <= word < end) or not page_count:
                continue
            page = ((word - 1 - bias) >> 16) - first
            entry = pages + 2 * page
            rows, rows_count = struct.unpack("=II", at(entry, 2))
            kept[entry] = at(entry, 2)
            kept[rows] = at(rows, rows_count)
            for (row,) in struct.iter_unpack("=I", kept[rows]):
                rule = rules + _RULE_WORDS * (row & 0xFFFF)
                kept[rule] = at(rule, _RULE_WORDS)
    return sorted(kept.items())


def _is_evaluation(process: bytes, address: int) -> bool:
    """Whether an address is in CPython's evaluation loop: a walk has Python frames in its place."""
    first, end, cold, cold_end = struct.unpack_from("=QQQQ", process, 32)
    return first < address <= end or cold < address <= cold_end


def _gdb(pid: int) -> list[int]:
    """Addresses of the native frames by gdb's unwinder, innermost first; 0 for a signal's frame."""
    orders = ("set backtrace past-main on", "set backtrace past-entry on")
    backtrace = ("-ex", "bt -frame-info location-and-address")
    command = ["gdb", "-p", str(pid), "-batch", "-nx", *(it for x in orders for it in ("-ex", x))]
    done = subprocess.run([*command, *backtrace], capture_output=True, text=True, check=True)
    found = re.findall(r"^#\d+\s+(?:(0x[0-9a-f]+) in |<signal)", done.stdout, re.MULTILINE)
    return [int(it or "0", 16) for it in found]


def _distinct(addresses: list[int]) -> list[int]:
    """Without consecutive repetitions: gdb has a frame with the same address for each inlined
    function."""
    return [it for it, _ in groupby(addresses)]


if __name__ == "__main__":
    sys.exit(main())
