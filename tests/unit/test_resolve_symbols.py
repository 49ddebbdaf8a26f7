# SPDX-License-Identifier: Apache-2.0
"""Names by file offset: several languages, what is shown, what is kept, and files that change."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sonde import _native
from symbol_programs import build, library, write_library

x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 instructions")


def _name_at(path: Path, symbol: str, into: int = 1) -> tuple[str, int] | None:
    """What the symbolizer finds for the code that the linker calls `symbol`."""
    (site,) = _native.find_functions(str(path), [symbol])
    return _native.Symbolizer().elf(str(path), [site.offset + into])[0]


def _linked_names(path: Path) -> list[str]:
    listing = subprocess.run(["nm", path], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in listing.stdout.splitlines()]


@pytest.mark.parametrize("flags", [["-pie"], ["-no-pie", "-fno-pie"], ["-static"]])
def test_c_functions_have_their_names_local_ones_too(tmp_path: Path, flags: list[str]) -> None:
    program = build("named.c", tmp_path / "named", *flags)
    assert _name_at(program, "hidden_work") == ("hidden_work", 1)
    assert _name_at(program, "visible_work", 3) == ("visible_work", 3)


def test_cpp_names_are_spelt_as_in_the_source(tmp_path: Path) -> None:
    program = build("named.cpp", tmp_path / "named")
    names = _linked_names(program)
    step = next(name for name in names if "5train4stepE" in name)
    loader = next(name for name in names if "6LoaderIiE4nextE" in name)
    assert _name_at(program, step) == ("train::step(int, double)", 1)
    found = _name_at(program, loader)
    assert found is not None
    assert found[0].startswith("train::Loader<int>::next(std::vector<int, std::allocator<int>")


@pytest.mark.parametrize("mangling", ["legacy", "v0"])
def test_rust_names_come_without_their_hash(tmp_path: Path, mangling: str) -> None:
    flags = ["-Csymbol-mangling-version=v0"] if mangling == "v0" else []
    program = build("named.rs", tmp_path / "named", *flags)
    names = _linked_names(program)
    feed = next(name for name in names if "pipeline" in name and "4feed" in name)
    run = next(name for name in names if "pipeline" in name and "3run" in name)
    assert _name_at(program, feed) == ("named::pipeline::feed", 1)
    found = _name_at(program, run)
    assert found == ("<named::pipeline::Stage as named::pipeline::Runs>::run", 1)


def test_without_symbols_there_is_no_name_rather_than_a_wrong_one(tmp_path: Path) -> None:
    program = build("named.c", tmp_path / "named", "-rdynamic")
    (hidden,) = _native.find_functions(str(program), ["hidden_work"])
    (visible,) = _native.find_functions(str(program), ["visible_work"])
    subprocess.run(["strip", program], check=True)
    found = _native.Symbolizer().elf(str(program), [hidden.offset + 1, visible.offset + 1, 1 << 40])
    assert found == [None, ("visible_work", 1), None]


@x86_only
def test_of_several_names_the_plain_one_is_shown(tmp_path: Path) -> None:
    names = library("names.S", tmp_path / "names.so", "-nostdlib")
    assert _name_at(names, "two_names") == ("two_names", 1)
    assert _name_at(names, "__two_names") == ("two_names", 1)


@x86_only
def test_a_symbol_without_a_size_ends_with_its_section(tmp_path: Path) -> None:
    names = library("names.S", tmp_path / "names.so", "-nostdlib")
    (last,) = _native.find_functions(str(names), ["two_names"])
    here = last.offset + last.size  # `unsized` follows: three bytes, then another section
    found = _native.Symbolizer().elf(str(names), [here, here + 2, here + 3, here + 4])
    assert found == [("unsized", 0), ("unsized", 2), None, None]


@x86_only
def test_names_that_would_fill_the_memory_are_cut(tmp_path: Path) -> None:
    names = library("names.S", tmp_path / "names.so", "-nostdlib")
    exploding = next(name for name in _linked_names(names) if name.startswith("_Z1fSt4pair"))
    start = time.process_time()
    found = _name_at(names, exploding)
    assert time.process_time() - start < 1
    assert found is not None
    assert found[0].startswith("void f<") or found[0].startswith("f(std::pair<")
    assert found[0].endswith("…")
    assert len(found[0].encode()) <= 1024 + 3


def test_names_show_no_control_characters(tmp_path: Path) -> None:
    wild = tmp_path / "wild.so"
    write_library(wild, ["plain", "a\x1b[31mb\nc", "_Z" + "N" * 20000, "x" * 20000])
    found = _native.Symbolizer().elf(str(wild), [4096, 4112, 4128, 4144])
    assert found[0] == ("plain", 0)
    assert found[1] == ("a?[31mb?c", 0)
    for symbol in found[2:]:
        assert symbol is not None
        assert len(symbol[0].encode()) <= 1024 + 3


def test_files_used_last_are_kept_within_the_bound(tmp_path: Path) -> None:
    bound = 200_000
    symbols = _native.Symbolizer(bound)
    for n in range(30):
        path = tmp_path / f"{n}.so"
        write_library(path, [f"f{n}_{k}" for k in range(1000)])
        assert symbols.elf(str(path), [4096 + 16 * 7]) == [(f"f{n}_7", 0)]
    files, size, evicted, _, _ = symbols.usage()
    assert 0 < size <= bound
    assert (evicted > 0, files + evicted) == (True, 30)
    # One that is larger than all of it is answered and not kept.
    path = tmp_path / "large.so"
    write_library(path, [f"g{k}" for k in range(20_000)])
    assert symbols.elf(str(path), [4096 + 16 * 19_999]) == [("g19999", 0)]
    assert symbols.usage()[1] <= bound


def test_a_file_can_be_forgotten(tmp_path: Path) -> None:
    symbols = _native.Symbolizer()
    path = tmp_path / "a.so"
    write_library(path, ["one"])
    assert not symbols.drop(str(path))
    symbols.elf(str(path), [4096])
    assert symbols.drop(str(path))
    assert symbols.usage()[:2] == (0, 0)
    assert not symbols.drop(str(tmp_path / "missing"))


def test_a_file_that_was_rewritten_is_read_again(tmp_path: Path) -> None:
    symbols = _native.Symbolizer()
    path = tmp_path / "a.so"
    for name in ("before", "after_it", "again"):
        write_library(path, [name])
        assert symbols.elf(str(path), [4096]) == [(name, 0)]


def test_a_file_that_shrinks_while_it_is_read_kills_nobody(tmp_path: Path) -> None:
    """The owner of a library can do this to a profiler; a reader that maps files dies of it."""
    path, stop = tmp_path / "shrinking.so", threading.Event()
    write_library(path, [f"function_{n}" for n in range(50_000)])
    content = path.read_bytes()

    def shrink() -> None:
        while not stop.is_set():
            os.truncate(path, 4096)
            path.write_bytes(content)

    shrinker = threading.Thread(target=shrink)
    shrinker.start()
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            with suppress(OSError):  # the file may end where it did not a moment ago
                _native.find_functions(str(path), ["function_49999"])
                _native.build_id(str(path))
                for found in _native.Symbolizer().elf(str(path), [4096, 4096 + 16 * 49_999]):
                    assert found is None or "function_49999".startswith(found[0][:9])
    finally:
        stop.set()
        shrinker.join()


def test_the_interpreter_runs_on_while_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.so"
    write_library(path, [f"function_{n}" for n in range(200_000)])
    busy = threading.Event()

    def read() -> None:
        symbols = _native.Symbolizer()
        for _ in range(20):
            symbols.elf(str(path), [4096])
            symbols.drop(str(path))
        busy.set()

    longest = 0.0
    reader = threading.Thread(target=read)
    reader.start()
    while not busy.is_set():
        start = time.perf_counter()
        time.sleep(0)
        longest = max(longest, time.perf_counter() - start)
    reader.join()
    assert longest < 0.5
