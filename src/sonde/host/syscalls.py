# SPDX-License-Identifier: Apache-2.0
"""bpf(2) and perf_event_open(2) through ctypes, to test features by real system calls.

Layouts follow the kernel's own include/uapi/linux/bpf.h and perf_event.h. Every function returns
0 on success or the errno; what it opened is closed before it returns.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_NUMBERS = {  # machine: (bpf, perf_event_open)
    "x86_64": (321, 298),
    "aarch64": (280, 241),
}

BPF_MAP_CREATE = 0
BPF_PROG_LOAD = 5
BPF_BTF_LOAD = 18
BPF_LINK_CREATE = 28

# Types of maps and programs, an attach type, and helpers (GET_… to LOOP), by their numbers in
# bpf.h.
MAP_ARRAY = 2
MAP_RINGBUF = 27
MAP_TASK_STORAGE = 29

PROG_KPROBE = 2
PROG_PERF_EVENT = 7
ATTACH_UPROBE_MULTI = 48

GET_CURRENT_TASK_BTF = 158
GET_ATTACH_COOKIE = 174
TASK_PT_REGS = 175
LOOP = 181

PERF_TYPE_HARDWARE = 0
PERF_TYPE_SOFTWARE = 1
PERF_COUNT_HW_CPU_CYCLES = 0
PERF_COUNT_SW_CPU_CLOCK = 0

_ATTR_BYTES = 128
"""Of union bpf_attr, and of struct perf_event_attr, as passed; unused bytes are 0."""
_F_NO_PREALLOC = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _numbers() -> tuple[int, int] | None:
    return _NUMBERS.get(platform.machine())


def _bpf(command: int, attr: bytes) -> int:
    """The raw call: a file descriptor, or minus the errno."""
    numbers = _numbers()
    if numbers is None:
        return -errno.ENOSYS
    buffer = ctypes.create_string_buffer(attr.ljust(_ATTR_BYTES, b"\0"), _ATTR_BYTES)
    result: int = _libc.syscall(
        ctypes.c_long(numbers[0]),
        ctypes.c_int(command),
        buffer,
        ctypes.c_uint(_ATTR_BYTES),
    )
    return result if result >= 0 else -ctypes.get_errno()


def _closed(fd: int) -> int:
    """0 for a file descriptor, which is closed; the errno otherwise."""
    if fd < 0:
        return -fd
    os.close(fd)
    return 0


def _map(kind: int, key: int, value: int, entries: int) -> int:
    return _bpf(BPF_MAP_CREATE, struct.pack("<5I", kind, key, value, entries, 0))


def create_array_map() -> int:
    """The simplest request to bpf(2): is the system call allowed at all?"""
    return _closed(_map(MAP_ARRAY, 4, 4, 1))


def create_ring_buffer() -> int:
    """A ring buffer of one page (kernel 5.8)."""
    return _closed(_map(MAP_RINGBUF, 0, 0, os.sysconf("SC_PAGE_SIZE")))


def create_task_storage() -> int:
    """A task-storage map (kernel 5.11), with the BTF type int for key and value."""
    names = b"\0int\0"
    an_int = struct.pack("<4I", 1, 1 << 24, 4, (1 << 24) | 32)  # BTF_KIND_INT, signed, 32 bits
    header = struct.pack("<HBBI4I", 0xEB9F, 1, 0, 24, 0, len(an_int), len(an_int), len(names))
    blob = ctypes.create_string_buffer(header + an_int + names)
    size = len(blob) - 1
    btf = _bpf(BPF_BTF_LOAD, struct.pack("<QQIII", ctypes.addressof(blob), 0, size, 0, 0))
    if btf < 0:
        return -btf
    try:
        # In order: map_type, key_size, value_size, max_entries, map_flags, inner_map_fd,
        # numa_node; the name; then the interface, btf_fd and the type ids of key and value.
        attr = struct.pack(
            "<7I16s4I", MAP_TASK_STORAGE, 4, 4, 0, _F_NO_PREALLOC, 0, 0, b"", 0, btf, 1, 1
        )
        return _closed(_bpf(BPF_MAP_CREATE, attr))
    finally:
        os.close(btf)


_RETURN_0 = struct.pack("<QQ", 0xB7, 0x95)
"""Two instructions: move 0 to r0, exit."""
_R1_IS_R0 = struct.pack("<Q", 0x01BF)
"""One instruction: move r0 to r1, a helper's result to the first argument of the next."""


def _call(helper: int) -> bytes:
    """The instruction that calls a helper, by its number in include/uapi/linux/bpf.h."""
    return struct.pack("<BBhi", 0x85, 0, 0, helper)


def _load(kind: int, attach_type: int, code: bytes = b"") -> int:
    """Load `code` and `return 0`: a descriptor, or minus the errno."""
    program = ctypes.create_string_buffer(code + _RETURN_0)
    size = len(program) - 1
    licence = ctypes.create_string_buffer(b"GPL")
    # In order: prog_type, insn_cnt, insns, license; log level, size and buffer, kernel version,
    # flags; the name; then the interface and expected_attach_type.
    attr = struct.pack(
        "<IIQQIIQII16sII",
        kind,
        size // 8,
        ctypes.addressof(program),
        ctypes.addressof(licence),
        *(0, 0, 0, 0, 0),
        b"sonde_probe",
        0,
        attach_type,
    )
    return _bpf(BPF_PROG_LOAD, attr)


def load_perf_event_program() -> int:
    """Whether the verifier accepts programs on perf events, which take samples."""
    return _closed(_load(PROG_PERF_EVENT, 0))


def load_task_reader() -> int:
    """A program that finds the registers of the running task (kernel 5.15)."""
    code = _call(GET_CURRENT_TASK_BTF) + _R1_IS_R0 + _call(TASK_PT_REGS)
    return _closed(_load(PROG_PERF_EVENT, 0, code))


def load_cookie_reader() -> int:
    """A program that reads the cookie of its probe (kernel 5.15)."""
    return _closed(_load(PROG_KPROBE, 0, _call(GET_ATTACH_COOKIE)))


def load_loop() -> int:
    """Whether programs may loop by a helper (kernel 5.17).

    It is called without a callback: a kernel that has it rejects the arguments (EACCES), one that
    does not rejects the call (EINVAL).
    """
    zeros = b"".join(struct.pack("<BBhi", 0xB7, register, 0, 0) for register in range(1, 5))
    error = _closed(_load(PROG_PERF_EVENT, 0, zeros + _call(LOOP)))
    return 0 if error == errno.EACCES else error


def link_uprobe_multi() -> int:
    """uprobe_multi (kernel 6.6), tested the way libbpf does.

    A link to offset 0 of "/" always fails: a kernel that has the attach type returns EBADF, because
    the file has the wrong type; one that does not returns EINVAL.
    """
    program = _load(PROG_KPROBE, ATTACH_UPROBE_MULTI)
    if program < 0:
        return -program
    try:
        path = ctypes.create_string_buffer(b"/")
        offset = (ctypes.c_ulong * 1)(0)
        # prog_fd, target_fd, attach_type, flags; then path, offsets, ref_ctr_offsets, cookies,
        # cnt, flags, pid
        attr = struct.pack(
            "<4I4Q3I",
            program,
            0,
            ATTACH_UPROBE_MULTI,
            0,
            ctypes.addressof(path),
            ctypes.addressof(offset),
            *(0, 0, 1, 0, 0),
        )
        error = _closed(_bpf(BPF_LINK_CREATE, attr))
        return 0 if error in (0, errno.EBADF) else error
    finally:
        os.close(program)


def open_cpu_event(kind: int, config: int) -> int:
    """A disabled counter on CPU 0 over all processes: what system-wide sampling needs.

    `kind` and `config` as in struct perf_event_attr (PERF_TYPE_…, PERF_COUNT_…).
    """
    numbers = _numbers()
    if numbers is None:
        return errno.ENOSYS
    # type, size, config, sample_freq, sample_type, read_format, flags: disabled, freq
    flags = 1 | 1 << 10
    attr = struct.pack("<IIQQQQQ", kind, _ATTR_BYTES, config, 99, 0, 0, flags)
    buffer = ctypes.create_string_buffer(attr.ljust(_ATTR_BYTES, b"\0"), _ATTR_BYTES)
    fd: int = _libc.syscall(
        ctypes.c_long(numbers[1]),
        buffer,
        ctypes.c_int(-1),  # every process
        ctypes.c_int(0),  # on CPU 0
        ctypes.c_int(-1),  # no group
        ctypes.c_ulong(8),  # PERF_FLAG_FD_CLOEXEC
    )
    return ctypes.get_errno() if fd < 0 else _closed(fd)
