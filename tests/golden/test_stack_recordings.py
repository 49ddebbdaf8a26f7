# SPDX-License-Identifier: Apache-2.0
"""The kernel's walker over threads that were recorded: no process, no kernel, no privileges.

gdb agreed with every native frame of the C++ and Python recordings when they were made
(scripts/record_stack.py).
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import struct
from pathlib import Path

import pytest

from stack_recordings import Recording, Walk, Walker

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "stacks"
RECORDINGS = sorted(FOLDER.glob("*.stack"))
STOPS = [name for name, *_ in json.loads((ROOT / "abi" / "errors.json").read_text())["stops"]]
NOTES = {"PYTHON_NO_THREAD", "PYTHON_MEMORY", "PYTHON_NO_FRAME"}
MAX_STEPS = int(re.search(r"unwind_steps = (\d+)", (ROOT / "bpf/unwind_state.h").read_text())[1])
PYTHON = 1 << 63


@pytest.fixture(scope="module")
def walker(tmp_path_factory):
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    return Walker(tmp_path_factory.mktemp("walker"))


@pytest.fixture(autouse=True)
def nothing_undefined(capfd):
    """The walker itself does nothing undefined, whatever it is fed."""
    yield
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture(params=RECORDINGS, ids=lambda path: path.stem)
def recording(request):
    return Recording.read(request.param)


def recorded(name: str) -> Recording:
    return Recording.read(FOLDER / f"{name}.stack")


def functions(recording: Recording, walk: Walk) -> list[str]:
    """Names of the frames, Python's among them; '' where the program has none."""
    native = iter(recording.about["functions"])
    code = {int(at, 16): name for at, name in recording.about["code_objects"].items()}
    names, words = [], iter(walk.words)
    for word in words:
        if word & PYTHON:
            names.append(code.get(word - PYTHON, "<module>"))
            next(words)
        elif word:
            names.append(next(native))
    return names


def with_stack(recording: Recording, stack: bytes) -> Recording:
    (at, _), *rest = recording.memory
    return dataclasses.replace(recording, memory=[(at, stack), *rest])


def is_sound(walk: Walk) -> bool:
    """It ended for one numbered reason, counted once, within the bound."""
    ends = sum(n for name, n in zip(STOPS, walk.counted, strict=True) if name not in NOTES)
    return (
        walk.steps <= MAX_STEPS
        and walk.stop < len(STOPS)
        and STOPS[walk.stop] not in NOTES
        and ends == walk.counted[walk.stop] == 1
    )


def test_recordings_are_small():
    assert len(RECORDINGS) >= 3
    assert sum(path.stat().st_size for path in RECORDINGS) < 300_000


def test_frame_by_frame(walker, recording):
    walk = walker.walk(recording)
    assert walk.words == tuple(recording.about["words"])
    assert STOPS[walk.stop] == "STOP_ENTRY"
    assert is_sound(walk)
    assert not any(walk.counted[STOPS.index(name)] for name in NOTES)


def test_rules_that_are_remembered_lead_the_same_way(walker, recording):
    first = walker.walk(recording)
    assert walker.again() == first


def test_what_lies_beside_the_frames_is_not_taken_for_them(walker, recording):
    walk = walker.walk_whole_pages(recording)
    assert walk == walker.walk(recording)


def test_frames_that_lie_close_together_are_read_together(walker, recording):
    walk = walker.walk_whole_pages(recording)
    assert walker.reads < walk.steps / 2


def test_the_functions_are_those_of_the_cpp_program(walker):
    recording = recorded("cpp")
    names = [it.removesuffix(".cold") for it in functions(recording, walker.walk(recording))]
    own = [it for it in names if not it.startswith(("__pthread_kill", "msort", "qsort", "gsignal"))]
    assert own == [
        *("handler", "", "variable_frame", "compare", "sorter", "catcher"),
        *["recurse"] * 13,
        *("main", "__libc_start_call_main", "__libc_start_main", "_start"),
    ]


@pytest.mark.parametrize("name", [it.stem for it in RECORDINGS if it.stem.startswith("python")])
def test_the_functions_are_those_of_the_python_program(walker, name):
    recording = recorded(name)
    code = {*recording.about["code_objects"].values(), "<module>"}
    own = [it for it in functions(recording, walker.walk(recording)) if it in code]
    chain = ["stop", "Work.method", "key", "generator", *["recurse"] * 7, "<module>"]
    assert own == chain


def test_go_leads_from_the_threads_own_stack_to_a_goroutines_below_it(walker):
    recording = recorded("go")
    names = functions(recording, walker.walk(recording))
    at = names.index("runtime.systemstack.abi0")
    assert {"main.grow", "main.main"} <= set(names[at:])
    assert names[-1].startswith("runtime.goexit")


def test_a_stack_that_is_cut_off_gives_what_lies_before_the_cut(walker, recording):
    whole = walker.walk(recording)
    (_, stack), *_ = recording.memory
    lengths = set()
    for cut in range(0, len(stack), max(8, len(stack) // 200)):
        walk = walker.walk(with_stack(recording, stack[:cut]))
        assert is_sound(walk)
        if any(walk.counted[STOPS.index(name)] for name in NOTES):
            continue  # CPython 3.11 keeps on the stack where its newest frame is
        assert walk.words == whole.words[: len(walk.words)]
        if walk.words != whole.words:
            assert STOPS[walk.stop] in ("STOP_MEMORY", "STOP_NO_RULE", "STOP_NO_MAPPING")
        lengths.add(len(walk.words))
    assert len(lengths) > 3


def test_a_stack_that_is_overwritten_ends_with_a_number(walker, recording):
    chance = random.Random(3)
    (at, stack), *_ = recording.memory
    codes = [word for word in recording.about["words"] if word and not word & PYTHON]
    stops = set()
    for _ in range(400):
        damaged = bytearray(stack)
        for _ in range(chance.choice((1, 4, 64))):
            place = 8 * chance.randrange(min(len(stack), 6000) // 8)
            value = chance.choice(
                (chance.getrandbits(64), at + 8 * chance.randrange(800), chance.choice(codes), 0)
            )
            struct.pack_into("=Q", damaged, place, value)
        walk = walker.walk(with_stack(recording, bytes(damaged)))
        assert is_sound(walk)
        stops.add(STOPS[walk.stop])
    assert len(stops) >= 3


def test_a_stack_of_nothing_but_one_address_does_not_loop(walker, recording):
    (at, stack), *_ = recording.memory
    codes = [word for word in recording.about["words"] if word and not word & PYTHON]
    for value in (*codes, at, at + 16, at + len(stack) // 2 & ~7):
        filled = struct.pack("=Q", value) * (len(stack) // 8)
        assert is_sound(walker.walk(with_stack(recording, filled)))


def test_python_frames_that_bite_their_tail_do_not_loop(walker):
    recording = recorded("python311")
    previous = 48
    memory = []
    for at, data in recording.memory:
        looped = bytearray(data)
        if len(data) == 112:  # an interpreter frame
            struct.pack_into("=Q", looped, previous, at)
        memory.append((at, bytes(looped)))
    walk = walker.walk(dataclasses.replace(recording, memory=memory))
    assert is_sound(walk)
    assert len(walk.words) > 100 or STOPS[walk.stop] == "STOP_ENTRY"


def test_python_frames_that_cannot_be_read_leave_the_native_ones(walker):
    recording = recorded("python311")
    memory = [(at, data) for at, data in recording.memory if len(data) != 112]
    walk = walker.walk(dataclasses.replace(recording, memory=memory))
    assert STOPS[walk.stop] == "STOP_ENTRY"
    assert walk.counted[STOPS.index("PYTHON_MEMORY")] == 1
    assert not any(word & PYTHON for word in walk.words)
    native = [word for word in recording.about["words"] if word and not word & PYTHON]
    first, end, cold, cold_end = struct.unpack_from("=QQQQ", recording.process, 32)
    loop = [it for it in walk.words if first < it <= end or cold < it <= cold_end]
    assert loop
    assert [it for it in walk.words if it not in loop] == native


@pytest.mark.parametrize("kept", [0, 1])
def test_tables_that_are_gone_end_the_walk(walker, recording, kept):
    walk = walker.walk(dataclasses.replace(recording, tables=recording.tables[:kept]))
    assert is_sound(walk)
    assert STOPS[walk.stop] != "STOP_ENTRY"
    assert walk.words[0] == recording.about["words"][0]
