# SPDX-License-Identifier: Apache-2.0
"""Seccomp filters, run by hand: what each instruction does, and which calls of a load are asked."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from sonde.attach import seccomp

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
ALLOW, ERRNO, KILL, LOG, TRAP = 0x7FFF0000, 0x00050001, 0x80000000, 0x7FFC0000, 0x00030000
AUDIT_ARCH_X86_64 = 0xC000003E
LD_NR, LD_ARCH, RET, JEQ = (0x20, 0, 0, 0), (0x20, 0, 0, 4), 0x06, 0x15

# What a load calls, as glibc, the loader and our own code make it: which arguments count. Addresses
# are left out (no filter can follow one), and so is what differs from load to load.
NEEDED = {
    "memfd_create": {1: 0x13},  # close on exec, sealable, executable
    "getppid": {},
    "openat": {0: (1 << 64) - 100, 2: 0x80000},  # AT_FDCWD, O_CLOEXEC
    "read": {0: 3, 2: 832},
    "mmap": {0: 0, 1: 1 << 16, 2: 5, 3: 0x802, 4: 3, 5: 0},  # r-x, private, no writing to it
    "mprotect": {1: 4096, 2: 1},
    "munmap": {1: 4096},
    "close": {0: 3},
    "futex": {1: 0x80},  # FUTEX_WAIT_PRIVATE
    "rt_sigreturn": {},
    "rt_sigprocmask": {0: 2},
    "ftruncate": {0: 3, 1: 1 << 20},
    "exit": {0: 0},
}
ASKED = {
    "clone": {0: 0x3D0F00},
    "clone3": {1: 88},
    "newfstatat": {0: 3, 3: 0x1000},  # AT_EMPTY_PATH
    "fstat": {0: 3},
    "pread64": {0: 3, 2: 64},
    "lseek": {0: 3},
    "brk": {0: 0},
    "fcntl": {0: 3, 1: 1033, 2: 15},  # F_ADD_SEALS
    "madvise": {1: 4096, 2: 4},
    "set_robust_list": {1: 24},
    "rseq": {1: 32},
    "prctl": {0: 15},
    "gettid": {},
    "getpid": {},
    "clock_gettime": {0: 1},
    "clock_nanosleep": {0: 1},
    "nanosleep": {},
    "poll": {1: 0, 2: 1},
    "readlink": {},
    "getdents64": {0: 3},
    "sched_yield": {},
    "getrandom": {1: 8},
    "prlimit64": {1: 1},
    "process_vm_readv": {},
    "tgkill": {0: 1, 1: 1, 2: 0},
}


@pytest.fixture(scope="module")
def numbers():
    if not HEADER.exists():
        pytest.skip("needs the kernel's headers of x86-64")
    found = re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text())
    return {name: int(number) for name, number in found}


def packed(*program):
    return b"".join(struct.pack("<HBBI", *one) for one in program)


def only(number, arguments, answer=KILL):
    """Lets this call through with these arguments alone, and every other call."""
    checks = []
    for index, value in arguments.items():
        for half in (0, 1):
            checks += [
                (0x20, 0, 0, 16 + 8 * index + 4 * half),
                (JEQ, 1, 0, value >> 32 * half & 0xFFFFFFFF),
                (RET, 0, 0, answer),
            ]
    return packed(
        LD_ARCH,
        (JEQ, 1, 0, AUDIT_ARCH_X86_64),
        (RET, 0, 0, KILL),
        LD_NR,
        (JEQ, 0, len(checks), number),
        *checks,
        (RET, 0, 0, ALLOW),
    )


def refused(number, answer):
    return packed(LD_NR, (JEQ, 0, 1, number), (RET, 0, 0, answer), (RET, 0, 0, ALLOW))


@pytest.mark.parametrize(("name", "arguments"), [*NEEDED.items(), *ASKED.items()])
def test_a_filter_that_lets_a_call_of_a_load_through_as_it_is_made_is_no_obstacle(
    numbers, name, arguments
):
    assert seccomp.verdict([only(numbers[name], arguments)]) is None


@pytest.mark.parametrize(
    ("name", "aligned_to"), [("munmap", 4096), ("mprotect", 4096), ("madvise", 4096), ("futex", 4)]
)
def test_a_filter_that_wants_addresses_aligned_as_a_load_s_are_is_no_obstacle(
    numbers, name, aligned_to
):
    filter_ = packed(
        LD_NR,
        (JEQ, 0, 3, numbers[name]),
        (0x20, 0, 0, 16),
        (0x45, 0, 1, aligned_to - 1),
        (RET, 0, 0, KILL),
        (RET, 0, 0, ALLOW),
    )
    assert seccomp.verdict([filter_]) is None


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("answer", [ERRNO, KILL, TRAP])
def test_a_filter_that_refuses_a_needed_call_stands_in_the_way(numbers, name, answer):
    assert seccomp.verdict([refused(numbers[name], answer)]).endswith(f"forbids {name}")
    assert seccomp.verdict([refused(numbers[name], LOG)]) is None


@pytest.mark.parametrize("name", ASKED)
def test_other_calls_may_be_refused_and_must_not_end_or_halt_the_thread(numbers, name):
    assert seccomp.verdict([refused(numbers[name], ERRNO)]) is None
    for answer in (KILL, TRAP, 0x7FF00000, 0x7FC00000, 0):
        assert seccomp.verdict([refused(numbers[name], answer)]).endswith(f"calls {name}")


def test_one_way_to_make_a_thread_is_enough(numbers):
    both = [refused(numbers[name], ERRNO) for name in ("clone", "clone3")]
    assert seccomp.verdict(both) == "its seccomp filter forbids new threads"
    assert seccomp.verdict(both[:1]) is None and seccomp.verdict(both[1:]) is None


def test_of_several_filters_the_strictest_holds(numbers):
    allow, kill = packed((RET, 0, 0, ALLOW)), refused(numbers["close"], KILL)
    for filters in ([allow, kill], [kill, allow]):
        assert seccomp.verdict(filters).endswith("forbids close")


M = 0xFFFFFFFF
LDI, LDXI, TAX, TXA, RETA = 0x00, 0x01, 0x07, 0x87, (0x16, 0, 0, 0)


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ([(LDI, 0, 0, 7), RETA], 7),
        ([LD_NR, RETA], 5),
        ([LD_ARCH, RETA], AUDIT_ARCH_X86_64),
        ([(0x20, 0, 0, 16), RETA], 0x55667788),
        ([(0x20, 0, 0, 20), RETA], 0x11223344),
        ([(0x20, 0, 0, 56), RETA], 0),
        ([(0x80, 0, 0, 0), RETA], 64),
        ([(LDI, 0, 0, 7), (0x81, 0, 0, 0), RETA], 7),
        ([(0x81, 0, 0, 0), (TXA, 0, 0, 0), RETA], 64),
        ([(LDXI, 0, 0, 9), (TXA, 0, 0, 0), RETA], 9),
        ([(LDI, 0, 0, 8), (TAX, 0, 0, 0), (LDI, 0, 0, 1), (TXA, 0, 0, 0), RETA], 8),
        ([(LDI, 0, 0, 6), (0x02, 0, 0, 3), (LDI, 0, 0, 1), (0x60, 0, 0, 3), RETA], 6),
        ([(LDXI, 0, 0, 6), (0x03, 0, 0, 15), (0x60, 0, 0, 15), RETA], 6),
        ([(LDI, 0, 0, 6), (0x02, 0, 0, 0), (0x61, 0, 0, 0), (TXA, 0, 0, 0), RETA], 6),
        ([(0x05, 0, 0, 1), (RET, 0, 0, 1), (RET, 0, 0, 2)], 2),
        # Arithmetic with a constant (X is 100) and with X.
        *[
            ([(LDXI, 0, 0, 100), (LDI, 0, 0, 12), (0x04 | kind, 0, 0, 5), RETA], result)
            for kind, result in (
                *((0x00, 17), (0x10, 7), (0x20, 60), (0x30, 2), (0x40, 13), (0x50, 4)),
                *((0x60, 384), (0x70, 0), (0x80, M - 11), (0xA0, 9)),
            )
        ],
        *[
            ([(LDXI, 0, 0, 5), (LDI, 0, 0, 12), (0x0C | kind, 0, 0, 100), RETA], result)
            for kind, result in ((0x00, 17), (0x10, 7), (0x20, 60), (0x30, 2), (0x60, 384))
        ],
        # The thread is killed (0), whatever would follow.
        ([(LDI, 0, 0, 12), (0x3C, 0, 0, 0), (RET, 0, 0, ALLOW)], 0),
        ([(LDI, 0, 0, 1), (0x64, 0, 0, 31), RETA], 1 << 31),
        ([(LDXI, 0, 0, 32), (LDI, 0, 0, 6), (0x6C, 0, 0, 0), RETA], 6),
        ([(LDXI, 0, 0, 33), (LDI, 0, 0, 6), (0x6C, 0, 0, 0), RETA], 12),
        ([(LDI, 0, 0, 1 << 31), (0x74, 0, 0, 31), RETA], 1),
        ([(LDXI, 0, 0, 32), (LDI, 0, 0, 6), (0x7C, 0, 0, 0), RETA], 6),
        ([(LDXI, 0, 0, M), (LDI, 0, 0, M), (0x7C, 0, 0, 0), RETA], 1),
        ([(LDI, 0, 0, M), (0x04, 0, 0, 2), RETA], 1),
        ([(LDI, 0, 0, 1), (0x14, 0, 0, 2), RETA], M),
        # Jumps, with a constant (X is 100) and with X.
        *[
            (
                [
                    *((LDXI, 0, 0, x), (LDI, 0, 0, a), (0x05 | kind | by, 0, 1, k)),
                    *((RET, 0, 0, 1), (RET, 0, 0, 0)),
                ],
                result,
            )
            for by, x, k in ((0, 100, 6), (8, 6, 100))
            for kind, a, result in (
                *((0x10, 6, 1), (0x10, 7, 0), (0x20, 6, 0), (0x20, 7, 1), (0x30, 5, 0)),
                *((0x30, 6, 1), (0x40, 2, 1), (0x40, 9, 0)),
            )
        ],
    ],
)
def test_each_instruction_does_what_the_kernel_s_does(program, answer):
    assert seccomp.run(program, 5, [0x1122334455667788]) == answer


@pytest.mark.parametrize(
    "program",
    [
        [],
        [(LDI, 0, 0, 1)],
        [(0x05, 0, 0, 5), (RET, 0, 0, 0)],
        [(0x28, 0, 0, 0), (RET, 0, 0, 0)],  # a half-word
        [(0x55, 0, 0, 0), (RET, 0, 0, 0)],
        [(0x94, 0, 0, 0), (RET, 0, 0, 0)],
        [(0x34, 0, 0, 0), (RET, 0, 0, 0)],  # the kernel takes no constants like these
        [(0x64, 0, 0, 32), (RET, 0, 0, 0)],
        [(0x74, 0, 0, 32), (RET, 0, 0, 0)],
        [(0x20, 0, 0, 61), (RET, 0, 0, 0)],
        [(0x20, 0, 0, 64), (RET, 0, 0, 0)],
        [(0x20, 0, 0, M), (RET, 0, 0, 0)],
        *[[(code, 0, 0, 16), (RET, 0, 0, 0)] for code in (0x60, 0x61, 0x02, 0x03)],
    ],
)
def test_what_is_no_filter_is_an_error(program):
    with pytest.raises(ValueError, match="filter"):
        seccomp.run(program, 5)
    found = seccomp.verdict([packed(*program)])

    assert found.startswith("its seccomp filter cannot be interpreted")


def test_bytes_that_are_no_whole_instructions_are_an_error():
    with pytest.raises(ValueError, match="filter"):
        seccomp.decode(packed((RET, 0, 0, ALLOW))[:-1])
