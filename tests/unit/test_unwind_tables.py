# SPDX-License-Identifier: Apache-2.0
"""Unwind tables: what is made of files, and what becomes of those that cannot be read."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde import _native
from sonde.unwind import table_cache
from sonde.unwind.table_cache import MAX_SENT, TableCache

RULE = struct.Struct("<BBHiii")
NONE, END, RSP, RBP, REGISTER, PLT, RSP_DEREF = range(7)
SIGNAL, HANDLER, GOROUTINE = 8, 10, 11
UNCHANGED, AT_CFA, AT_RBP, UNKNOWN = range(4)
RCX, RBX, RDI, RSP_REGISTER = 2, 3, 5, 7

# Each function has in its name what is to be found at its label; none has unwind data.
ASSEMBLY = """
.text
.macro FUNCTION name
.p2align 4
.globl \\name
.type \\name, @function
\\name:
.endm

.globl described
.type described, @function
described:
    .cfi_startproc
    ret
    .cfi_endproc

FUNCTION pushes
    push %rbp
    push %rbx
    sub $40, %rsp
at_pushes: .globl at_pushes
    mov $1, %ebp
in_pushes: .globl in_pushes
    add $40, %rsp
    pop %rbx
    pop %rbp
out_pushes: .globl out_pushes
    ret
.size pushes, .-pushes

FUNCTION stores
    sub $96, %rsp
    mov %rbx, (%rsp)
    mov %rbp, 8(%rsp)
    xor %ebp, %ebp
at_stores: .globl at_stores
    test %rdi, %rdi
    je 1f
    mov 8(%rsp), %rbp
    add $96, %rsp
    ret
1:
in_stores: .globl in_stores
    nop
    mov 8(%rsp), %rbp
    add $96, %rsp
    ret
.size stores, .-stores

FUNCTION aligned
    push %rbx
    mov %rsp, %rbx
    sub $128, %rsp
    and $-4096, %rsp
at_aligned: .globl at_aligned
    vzeroupper
    mov %rbx, %rsp
    pop %rbx
    ret
.size aligned, .-aligned

FUNCTION aligned_and_kept
    mov %rsp, %rax
    sub $64, %rsp
    and $-64, %rsp
    mov %rax, 16(%rsp)
    xor %eax, %eax
at_aligned_and_kept: .globl at_aligned_and_kept
    mov 16(%rsp), %rsp
    ret
.size aligned_and_kept, .-aligned_and_kept

FUNCTION framed
    push %rbp
    mov %rsp, %rbp
    sub $48, %rsp
    call *%rax
at_framed: .globl at_framed
    mov %rbp, %rsp
    pop %rbp
    ret
.size framed, .-framed

FUNCTION disagrees
    test %rdi, %rdi
    je 1f
    push %rax
1:
at_disagrees: .globl at_disagrees
    jmp 1b
.size disagrees, .-disagrees

FUNCTION switches
    mov (%rdi), %rsp
at_switches: .globl at_switches
    ret
.size switches, .-switches
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("plain")
    (folder / "plain.s").write_text(ASSEMBLY)
    path = folder / "libplain.so"
    subprocess.run(["gcc", "-shared", "-o", path, folder / "plain.s"], check=True)
    return path


@pytest.fixture(scope="module")
def rules(library):
    """By symbol: (cfa, rbp, register, offset, rbp_offset, extra)."""
    table = library.with_suffix(".unw")
    _, _, _, _, analysed = _native.build_unwind_table(str(library), str(table))
    assert analysed >= 6
    output = subprocess.run(["nm", library], check=True, capture_output=True, text=True).stdout
    symbols = {
        name: int(at, 16)
        for at, _, name in (it.split() for it in output.splitlines() if it.count(" ") == 2)
    }
    names = [name for name in symbols if name.startswith(("at_", "in_", "out_"))]
    found = _native.find_unwind_rules(str(table), [symbols[name] for name in names])
    return {name: RULE.unpack(rule) for name, rule in zip(names, found, strict=True) if rule}


@pytest.mark.parametrize(
    ("place", "cfa", "register", "offset", "extra", "rbp"),
    [
        ("at_pushes", RSP, 0, 64, 0, (UNCHANGED, 0)),
        ("in_pushes", RSP, 0, 64, 0, (AT_CFA, -16)),
        ("out_pushes", RSP, 0, 8, 0, (UNCHANGED, 0)),
        ("at_stores", RSP, 0, 104, 0, (AT_CFA, -96)),
        ("in_stores", RSP, 0, 104, 0, (AT_CFA, -96)),
        ("at_aligned", REGISTER, RBX, 16, 0, (UNCHANGED, 0)),
        ("at_aligned_and_kept", RSP_DEREF, 0, 16, 8, (UNCHANGED, 0)),
        # Whatever was called may have taken its arguments off the stack.
        ("at_framed", RBP, 0, 16, 0, (AT_CFA, -16)),
        ("at_disagrees", NONE, 0, 0, 0, (UNCHANGED, 0)),
        ("at_switches", NONE, 0, 0, 0, (UNCHANGED, 0)),
    ],
)
def test_code_without_unwind_data_gets_what_its_instructions_show(
    rules, place, cfa, register, offset, extra, rbp
):
    found = rules[place]
    assert found[0] == cfa
    if cfa != NONE:
        assert found[2:4] == (register, offset)
        assert found[5] == extra
        assert (found[1], found[4]) == rbp


GO = """package main
import "fmt"
//go:noinline
func framed(n int) string { return fmt.Sprint(n, n) }
func main() { fmt.Println(framed(1)) }
"""


@pytest.fixture(scope="module")
def go_program(tmp_path_factory):
    """A Go program, and its table."""
    if shutil.which("go") is None:
        pytest.skip("needs go")
    folder = tmp_path_factory.mktemp("go")
    (folder / "main.go").write_text(GO)
    program, table = folder / "main", folder / "main.unw"
    subprocess.run(["go", "build", "-o", program, "main.go"], check=True, cwd=folder)
    _native.build_unwind_table(str(program), str(table))
    return program, table


def test_go_keeps_its_frame_pointer_where_its_descriptions_do_not_say_so(go_program):
    program, table = go_program
    names = ["main.framed", "runtime.systemstack.abi0", "runtime.clone.abi0", "runtime.mcall"]
    found = {
        it.name: it.address + it.size // 2 for it in _native.find_functions(str(program), names)
    }
    rules = _native.find_unwind_rules(str(table), [found[name] for name in names])
    framed, switch, *roots = [RULE.unpack(rule) for rule in rules]
    assert framed[0] == RSP
    assert (framed[1], framed[4]) == (AT_CFA, -16)
    code = subprocess.run(
        ["objdump", "-d", f"--disassemble={names[1]}", program],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    # Without a frame (before Go 1.21) the goroutine keeps where it was left.
    has_frame = re.search(r"push +%rbp", code)
    frame = (RBP, 16, AT_CFA, -16) if has_frame else (GOROUTINE, -8, AT_CFA, 104)
    assert (switch[0], switch[3], switch[1], switch[4]) == frame
    assert [root[0] for root in roots] == [END, END]


def test_go_leads_from_the_threads_stack_and_from_signals_to_goroutines(go_program):
    program, table = go_program
    morestack, nanotime = "runtime.morestack.abi0", "runtime.nanotime1.abi0"
    signals = ["runtime.sigreturn__sigaction.abi0", "runtime.sigreturn.abi0"]
    names = [morestack, nanotime, *signals, "gogo"]
    functions = {it.name: it for it in _native.find_functions(str(program), names)}

    def calls(name):
        """Where calls return to in a function."""
        listing = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={name}", program],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        return [int(it, 16) for it in re.findall(r"\tcall .*\n +(\w+):", listing)]

    def rule(address):
        return RULE.unpack(_native.find_unwind_rules(str(table), [address])[0])

    grown = next(it for it in map(rule, calls(morestack)) if it[0] != RSP)
    place_of_sp = grown[5] & 0xFFFF
    assert grown[:2] == (GOROUTINE, UNKNOWN)
    assert grown[2:4] == (48, -8)  # g.m, and g itself in the thread's own data
    assert place_of_sp == 56  # g.sched
    (vdso,) = calls(nanotime)
    assert rule(vdso - 1)[:6] == (RBP, AT_CFA, 0, 16, -16, 1)
    (trampoline,) = [functions[it].address for it in signals if it in functions]
    for address in (trampoline - 1, trampoline):
        assert rule(address)[0] == SIGNAL
        assert rule(address)[3:] == (160, 120, 168)  # struct ucontext
    gogo = functions["gogo"]
    assert rule(gogo.address + gogo.size - 1)[0] == HANDLER


# As gcc compiles libgcc's: the handler's address and stack pointer are at -0x98 and -0xa0.
LEAVES_FOR_HANDLER = """
.text
.globl _Unwind_Resume
.type _Unwind_Resume, @function
_Unwind_Resume:
    .cfi_startproc
    push %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    mov %rsp, %rbp
    .cfi_def_cfa_register %rbp
    sub $256, %rsp
at_start:
    call other
in_call:
    mov -0x98(%rbp), %rsi
    mov -0xa0(%rbp), %rdi
    call other
at_restore:
    mov 0(%rbp), %rbp
at_leave:
    mov %rcx, %rsp
at_pop:
    pop %rcx
at_jump:
    jmp *%rcx
    .cfi_endproc
.size _Unwind_Resume, .-_Unwind_Resume
.globl other
other:
    .cfi_startproc
in_other:
    ret
    .cfi_endproc
"""


IN_REGISTER = """
.text
.globl forks
.type forks, @function
forks:
    .cfi_startproc
    pop %rdi
    .cfi_adjust_cfa_offset -8
    .cfi_register %rip, %rdi
at_system_call:
    syscall
    push %rdi
    .cfi_adjust_cfa_offset 8
    .cfi_offset %rip, -8
at_return:
    ret
    .cfi_endproc
.size forks, .-forks
"""


def test_a_return_address_may_be_in_a_register(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library, table = tmp_path / "lib.so", tmp_path / "lib.unw"
    (tmp_path / "lib.s").write_text(IN_REGISTER)
    command = ["gcc", "-shared", "-nostdlib", "-o", library, tmp_path / "lib.s"]
    subprocess.run(command, check=True)
    _native.build_unwind_table(str(library), str(table))
    output = subprocess.run(["nm", library], check=True, capture_output=True, text=True).stdout
    places = {name: int(at, 16) for at, _, name in (it.split() for it in output.splitlines())}
    names = ["at_system_call", "at_return"]
    found = _native.find_unwind_rules(str(table), [places[it] for it in names])
    in_register, pushed = [RULE.unpack(it) for it in found]
    assert (in_register[0], *in_register[2:]) == (HANDLER, RDI, 0, 0, 0)
    assert (pushed[0], pushed[3]) == (RSP, 8)


def test_a_frame_that_is_left_for_a_handler_has_the_handlers_frame_as_its_caller(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library, table = tmp_path / "lib.so", tmp_path / "lib.unw"
    (tmp_path / "lib.s").write_text(LEAVES_FOR_HANDLER)
    command = ["gcc", "-shared", "-nostdlib", "-Wl,-Bsymbolic", "-o", library, tmp_path / "lib.s"]
    subprocess.run(command, check=True)
    _native.build_unwind_table(str(library), str(table))
    output = subprocess.run(["nm", library], check=True, capture_output=True, text=True).stdout
    symbols = {name: int(at, 16) for at, _, name in map(str.split, output.splitlines())}

    def rule(name, back=0):
        (found,) = _native.find_unwind_rules(str(table), [symbols[name] - back])
        return RULE.unpack(found)

    as_described = (RBP, AT_CFA, 0, 16, -16, 0)
    assert rule("at_start", back=1) == as_described
    for name, back in (("in_call", 1), ("in_call", 0), ("at_restore", 1), ("at_restore", 0)):
        cfa, rbp, _, offset, rbp_offset, extra = rule(name, back)
        assert (cfa, offset, extra) == (HANDLER, -0xA0, -0x98)
        assert (rbp, rbp_offset) == (AT_RBP, -0xA0 - 0x60)
    # Then the handler's address is behind rcx, behind rsp, in rcx.
    assert rule("at_leave") == (HANDLER, UNCHANGED, RCX, 8, 0, 0)
    assert rule("at_pop") == (HANDLER, UNCHANGED, RSP_REGISTER, 8, 0, 0)
    assert rule("at_jump") == (HANDLER, UNCHANGED, RCX, 0, 0, 0)
    assert rule("in_other")[:4] == (RSP, UNCHANGED, 0, 8)


def wait_for(cache, name, patience_s=20.0):
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        if name in cache.poll():
            return
        time.sleep(0.01)
    pytest.fail(f"{name} was never answered")


def test_a_file_that_hangs_its_reader_is_given_up(tmp_path):
    cache = TableCache(tmp_path, builder=("sleep", "1000"), deadline_s=0.3)
    cache.request("hanging", os.open(os.devnull, os.O_RDONLY))
    child = cache._child.pid
    until_s = time.monotonic() + 5
    while cache.is_busy and time.monotonic() < until_s:
        assert not cache.poll()
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()
    # It may be the machine that was busy: the file is tried again.
    assert cache.put_off == 1
    assert cache.awaits("hanging")
    assert not cache.has_failed("hanging")
    cache.close()


# Takes longer than the first deadline by the clock, but no CPU time.
SLOW = """
import json, sys, time
for line in sys.stdin:
    time.sleep(0.6)
    name = json.loads(line)["prefix"] + "-0"
    print(json.dumps({"name": name, "was_there": False}), flush=True)
"""


def test_what_was_slow_by_the_clock_alone_is_tried_again_for_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(table_cache, "LATE_S", 0.2)
    cache = TableCache(tmp_path, builder=(sys.executable, "-c", SLOW), deadline_s=0.5)
    cache.request("slow", os.open(os.devnull, os.O_RDONLY))
    wait_for(cache, "slow")
    assert cache.put_off >= 1
    assert (cache.built, cache.failed) == (1, 0)
    cache.close()


def test_a_file_that_takes_too_much_cpu_time_gets_no_table(tmp_path):
    turning = "while True: pass"
    cache = TableCache(tmp_path, builder=(sys.executable, "-c", turning), max_cpu_s=0.3)
    cache.request("endless", os.open(os.devnull, os.O_RDONLY))
    wait_for(cache, "endless")
    assert cache.has_failed("endless")
    assert cache.put_off == 0
    cache.close()


def test_files_that_are_needed_most_are_built_first(tmp_path):
    cache = TableCache(tmp_path, builder=(sys.executable, "-c", CLUMSY))
    names = [f"file{number}" for number in range(40)]
    for name in names:
        cache.request(name, os.open(os.devnull, os.O_RDONLY))
    assert cache.has_queue
    cache.order({"file35": 2.0, "file39": 7.0, "file20": 2.0})
    answered = []
    until_s = time.monotonic() + 20
    while len(answered) < len(names) and time.monotonic() < until_s:
        answered += cache.poll()
        time.sleep(0.01)
    cache.close()
    sent_before = names[:MAX_SENT]
    first = ["file39", "file20", "file35"]
    rest = [name for name in names if name not in (*sent_before, *first)]
    assert answered == [*sent_before, *first, *rest]


# Answers requests, but dies over one.
CLUMSY = """
import json, os, sys
for line in sys.stdin:
    name = json.loads(line)["prefix"]
    if "deadly" in name:
        os._exit(1)
    print(json.dumps({"name": name + "-0", "was_there": False}), flush=True)
"""


def test_one_file_that_kills_its_reader_does_not_cost_the_others_their_tables(tmp_path):
    cache = TableCache(tmp_path, builder=(sys.executable, "-c", CLUMSY))
    for name in ("first", "deadly", "second", "third"):
        cache.request(name, os.open(os.devnull, os.O_RDONLY))
    wait_for(cache, "third")
    assert cache.has_failed("deadly")
    assert not any(cache.has_failed(name) for name in ("first", "second", "third"))
    assert (cache.built, cache.failed) == (3, 1)
    cache.close()


def test_closing_ends_a_reader_that_does_not_want_to(tmp_path):
    stubborn = "trap '' TERM; while :; do sleep 1; done"
    cache = TableCache(tmp_path, builder=("sh", "-c", stubborn))
    cache.request("any", os.open(os.devnull, os.O_RDONLY))
    time.sleep(0.2)
    child = cache._child.pid
    cache.close()
    assert not Path(f"/proc/{child}").exists()


# The symbols of CPython that count, and how each build finds the key of its thread states.
PYTHON = """
.globl _PyEval_EvalFrameDefault, _PyRuntime, PyGILState_GetThisThreadState, main
.type _PyEval_EvalFrameDefault, @function
.type PyGILState_GetThisThreadState, @function
.type _PyRuntime, @object
.text
main:
    ret
_PyEval_EvalFrameDefault:
    ret
.size _PyEval_EvalFrameDefault, .-_PyEval_EvalFrameDefault
PyGILState_GetThisThreadState:
    cmpl $0, _PyRuntime+96(%rip)
    je 1f
    {how}
    jmp main
1:  xor %eax, %eax
    ret
.size PyGILState_GetThisThreadState, .-PyGILState_GetThisThreadState
.data
.p2align 5
_PyRuntime:
    .zero 4096
.size _PyRuntime, 4096
"""


@pytest.mark.parametrize(
    "how",
    ["mov $_PyRuntime+96, %edi", "lea _PyRuntime+96(%rip), %rdi", "mov _PyRuntime+100(%rip), %edi"],
)
def test_the_key_of_thread_states_is_found_however_it_is_named(tmp_path, how):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    source, program = tmp_path / "python.s", tmp_path / "python"
    source.write_text(PYTHON.format(how=how))
    subprocess.run(["gcc", "-no-pie", "-o", program, source], check=True)
    found = _native.find_cpython(str(program))
    assert found is not None
    _, runtime, key, _, _ = found
    assert key == runtime + 96
