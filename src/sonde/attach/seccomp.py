# SPDX-License-Identifier: Apache-2.0
"""Whether a thread's seccomp filters allow the system calls of a load: by an interpreter of them.

Most containers run under a filter, so its presence alone decides nothing. A filter is a classic BPF
program over `struct seccomp_data` (linux/seccomp.h, linux/filter.h); it is run here for each system
call that a load makes, with the arguments of a load. Where a needed call would be refused, or any
of them would end or halt the thread, the thread is not borrowed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, constant)"""

_ARCH_X86_64: Final = 0xC000003E
_ALLOWED: Final = (0x7FFF0000, 0x7FFC0000)  # SECCOMP_RET_ALLOW, SECCOMP_RET_LOG
_ERRNO: Final = 0x00050000
_ACTION: Final = 0xFFFF0000
_WORD: Final = 0xFFFFFFFF
_DATA: Final = struct.Struct("<iIQ6Q")  # struct seccomp_data
_LOADED: Final = struct.Struct("<I")
_MAX_STEPS: Final = 65_536
"""Instructions of one run; the kernel takes no longer filters (BPF_MAXINSNS is 4,096)."""

_THREAD_FLAGS: Final = 0x3D0F00  # as pthread_create() calls clone()
_NEEDED: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    "memfd_create": (319, (0, 0x13)),
    "getppid": (110, ()),
    "openat": (257, (-100 & (1 << 64) - 1, 0, 0x80000)),
    "read": (0, (3, 0, 832)),
    "mmap": (9, (0, 1 << 16, 5, 0x802, 3, 0)),
    "mprotect": (10, (0, 4096, 1)),
    "munmap": (11, (0, 4096)),
    "close": (3, (3,)),
    "futex": (202, (0, 0x80)),
    "rt_sigreturn": (15, ()),
    "rt_sigprocmask": (14, (2,)),
    "ftruncate": (77, (3, 1 << 20)),
    "exit": (60, (0,)),
}
"""(number, arguments) of calls that must be allowed."""
_OPTIONAL: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    "clone": (56, (_THREAD_FLAGS,)),
    "clone3": (435, (0, 88)),
    "newfstatat": (262, (3, 0, 0, 0x1000)),
    "fstat": (5, (3,)),
    "pread64": (17, (3, 0, 64)),
    "lseek": (8, (3,)),
    "brk": (12, (0,)),
    "fcntl": (72, (3, 1033, 15)),
    "madvise": (28, (0, 4096, 4)),
    "set_robust_list": (273, (0, 24)),
    "rseq": (334, (0, 32)),
    "prctl": (157, (15,)),
    "gettid": (186, ()),
    "getpid": (39, ()),
    "clock_gettime": (228, (1,)),
    "clock_nanosleep": (230, (1,)),
    "nanosleep": (35, ()),
    "poll": (7, (0, 0, 1)),
    "readlink": (89, ()),
    "getdents64": (217, (3,)),
    "sched_yield": (24, ()),
    "getrandom": (318, (0, 8)),
    "prlimit64": (302, (0, 1)),
    "process_vm_readv": (310, ()),
    "tgkill": (234, (1, 1, 0)),
}
"""The same of calls that may be refused with an error, and must not end or halt the thread."""


def decode(program: bytes) -> list[Instruction]:
    """The instructions of a packed program of `struct sock_filter`. Raises ValueError."""
    try:
        return list(struct.iter_unpack("<HBBI", program))
    except struct.error as error:
        raise ValueError("not whole instructions of a filter") from error


def verdict(programs: Iterable[bytes]) -> str | None:
    """None where a load is possible under these filters; else why not: which call they prevent, or
    that a filter cannot be interpreted."""
    try:
        return _verdict([decode(program) for program in programs])
    except ValueError as error:
        return f"its seccomp filter cannot be interpreted: {error}"


def _verdict(filters: Sequence[list[Instruction]]) -> str | None:
    for name, (number, arguments) in _NEEDED.items():
        if _answer(filters, number, arguments) not in _ALLOWED:
            return f"its seccomp filter forbids {name}"
    for name, (number, arguments) in _OPTIONAL.items():
        if _answer(filters, number, arguments) not in (*_ALLOWED, _ERRNO):
            return f"its seccomp filter ends or halts a thread that calls {name}"
    clone = [_answer(filters, *_OPTIONAL[name]) for name in ("clone", "clone3")]
    if not any(answer in _ALLOWED for answer in clone):
        return "its seccomp filter forbids new threads"
    return None


def _answer(filters: Sequence[list[Instruction]], number: int, arguments: tuple[int, ...]) -> int:
    """The action that wins: the lowest as a signed number (kernel/seccomp.c)."""
    actions = [run(program, number, arguments) & _ACTION for program in filters]
    return min(actions, key=lambda action: action - (1 << 32 if action >> 31 else 0))


def run(program: Sequence[Instruction], number: int, arguments: Sequence[int] = ()) -> int:
    """The value that the filter returns for a system call. Raises ValueError for a program that the
    kernel would not accept.

    The caller's instruction pointer is 0: filters that depend on it are rare. `a` and `x` are the
    accumulator and index register, `k` an instruction's constant.
    """
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = _DATA.pack(number, _ARCH_X86_64, 0, *padded)
    a = x = at = 0
    memory = [0] * 16
    for _ in range(_MAX_STEPS):
        try:
            code, jump_true, jump_false, k = program[at]
        except IndexError as error:
            raise ValueError("the filter runs past its end") from error
        at += 1
        match code:
            case 0x20:  # ld [k]
                (a,) = _LOADED.unpack_from(data, _within(k, len(data), _LOADED.size))
            case 0x80 | 0x81:  # ld len, ldx len
                a, x = (len(data), x) if code == 0x80 else (a, len(data))
            case 0x00:
                a = k
            case 0x01:
                x = k
            case 0x60:
                a = memory[_within(k, len(memory))]
            case 0x61:
                x = memory[_within(k, len(memory))]
            case 0x02:
                memory[_within(k, len(memory))] = a
            case 0x03:
                memory[_within(k, len(memory))] = x
            case 0x07:  # tax
                x = a
            case 0x87:  # txa
                a = x
            case 0x05:  # ja
                at += k
            case 0x06:
                return k
            case 0x16:
                return a
            case _ if code & 7 == 5:
                at += jump_true if _holds(code, a, x if code & 8 else k) else jump_false
            case 0x3C if x == 0:  # div x: the kernel ends the program with 0 (core/filter.c)
                return 0
            case _ if code & 7 == 4:
                a = _computed(code, a, x if code & 8 else k)
            case _:
                raise ValueError(f"no instruction {code:#x} in a seccomp filter")
    raise ValueError("the filter does not end")


def _within(k: int, end: int, size: int = 1) -> int:
    """`k`, where `size` bytes or slots from there lie before `end`. Raises ValueError."""
    if k % size or k + size > end:
        raise ValueError(f"an offset {k} that no seccomp filter has")
    return k


def _holds(code: int, a: int, b: int) -> bool:
    """Whether a jump's condition holds. Raises ValueError."""
    match code & 0xF0:
        case 0x10:
            return a == b
        case 0x20:
            return a > b
        case 0x30:
            return a >= b
        case 0x40:
            return bool(a & b)
    raise ValueError(f"no jump {code:#x} in a seccomp filter")


def _computed(code: int, a: int, b: int) -> int:
    """The result of an arithmetic instruction. Raises ValueError for what no filter may compute."""
    if (code == 0x34 and b == 0) or (code in (0x64, 0x74) and b >= 32):
        raise ValueError(f"no constant {b} for {code:#x} in a seccomp filter")
    match code & 0xF0:
        case 0x00:
            a += b
        case 0x10:
            a -= b
        case 0x20:
            a *= b
        case 0x30:
            a //= b
        case 0x40:
            a |= b
        case 0x50:
            a &= b
        case 0x60:
            a <<= b & 31  # as the processor does
        case 0x70:
            a >>= b & 31
        case 0x80:
            a = -a
        case 0xA0:
            a ^= b
        case _:
            raise ValueError(f"no arithmetic {code:#x} in a seccomp filter")
    return a & _WORD
