# SPDX-License-Identifier: Apache-2.0
"""Questions to ELF files, well-formed and not: build ids, functions by name, probe sites."""

from __future__ import annotations

import os
import platform
import random
import struct
import subprocess
import time
from pathlib import Path

import pytest

from sonde import _native
from symbol_programs import build, library, plugin, write_library

x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 instructions")


@pytest.fixture(name="plugin", scope="module")
def _plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plugin(tmp_path_factory.mktemp("elf") / "plugin.so")


def test_the_build_id_is_that_of_the_linker(tmp_path: Path) -> None:
    wanted = "0123456789abcdef0123456789abcdef"
    named = build("named.c", tmp_path / "named", f"-Wl,--build-id=0x{wanted}")
    assert _native.build_id(str(named)) == wanted
    without = build("named.c", tmp_path / "without", "-Wl,--build-id=none")
    assert _native.build_id(str(without)) == ""
    subprocess.run(["objcopy", "--remove-section=.note.gnu.build-id", named], check=True)
    assert _native.build_id(str(named)) == ""


def test_every_version_of_a_function_is_found_once(plugin: Path) -> None:
    found = _native.find_functions(str(plugin), ["plugin_work", "plugin_step", "no_such_function"])
    names = sorted(site.name for site in found)
    assert names == ["plugin_step", "plugin_step", "plugin_work"]
    assert len({site.offset for site in found}) == 3
    assert all(site.size > 0 for site in found)


def test_indirect_functions_are_left_out(plugin: Path) -> None:
    assert _native.find_functions(str(plugin), ["plugin_indirect"]) == []


def test_functions_of_a_static_program_are_found_by_its_symbol_table(tmp_path: Path) -> None:
    program = build("named.c", tmp_path / "static", "-static")
    found = _native.find_functions(str(program), ["hidden_work", "visible_work", "malloc"])
    assert {site.name for site in found} >= {"hidden_work", "visible_work", "malloc"}
    subprocess.run(["strip", program], check=True)
    assert _native.find_functions(str(program), ["hidden_work", "visible_work"]) == []


@x86_only
def test_a_name_that_is_the_tail_of_another_is_distinguished(tmp_path: Path) -> None:
    names = library("names.S", tmp_path / "names.so", "-nostdlib", "-Wl,-O2")
    tail, long = "tail_of_a_name", "long_tail_of_a_name"
    assert _places(names, tail).keys() == {tail}
    both = _places(names, tail, long)
    assert both.keys() == {tail, long}
    assert both[tail] != both[long]


def _places(path: Path, *names: str) -> dict[str, int]:
    return {site.name: site.offset for site in _native.find_functions(str(path), names)}


SITES = {
    "push_first": (0, "emulated"),
    "push_high": (0, "emulated"),
    "endbr_then_push": (4, "emulated"),
    "load_then_jump": (10, "emulated"),
    "wide_nop_then_push": (4, "emulated"),
    "loops_to_start": (3, "emulated"),
    "wide_nop_only": (0, "nop"),
    "stack_first": (0, "single-step"),  # the return address is no longer on top behind it
    "argument_first": (0, "single-step"),
    "half_argument_first": (0, "single-step"),
    "jumped_into": (0, "single-step"),  # would be hit again and again
    "far_push": (0, "single-step"),
    "returns_at_once": (0, "single-step"),
    "sizeless": (0, "single-step"),  # unknown where it ends, so unknown who jumps where
}


@x86_only
@pytest.mark.parametrize(("name", "expected"), SITES.items())
def test_a_probe_goes_where_it_is_cheap_and_sees_the_same(
    tmp_path_factory: pytest.TempPathFactory, name: str, expected: tuple[int, str]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "sites.so"
    path = folder if folder.exists() else library("sites.S", folder, "-nostdlib")
    (site,) = _native.find_functions(str(path), [name])
    asked = [(site.offset, site.size, False)]
    [(offset, cost, text, _)] = _native.probe_sites(str(path), asked, 1.0)
    assert (offset - site.offset, cost) == expected
    assert text


@x86_only
def test_a_function_that_only_hands_on_is_known_by_its_jump(tmp_path: Path) -> None:
    """One that leads through a table of its argument is the only one that a program can call."""
    path = library("sites.S", tmp_path / "sites.so", "-nostdlib")
    names = ["forwards", "dispatches", *SITES]
    found = _native.find_functions(str(path), names)
    assert len(found) == len(names)
    sites = _native.probe_sites(str(path), [(it.offset, it.size, True) for it in found], 1.0)
    assert [it.name for it, site in zip(found, sites, strict=True) if site[3]] == ["forwards"]
    sites = _native.probe_sites(str(path), [(it.offset, it.size, False) for it in found], 1.0)
    assert not any(site[3] for site in sites)


def test_code_of_another_machine_gets_no_opinion(tmp_path: Path, plugin: Path) -> None:
    raw = bytearray(plugin.read_bytes())
    raw[18:20] = struct.pack("<H", 183)  # aarch64
    other = tmp_path / "other.so"
    other.write_bytes(raw)
    (site,) = _native.find_functions(str(other), ["plugin_work"])
    asked = [(site.offset, site.size, True)]
    assert _native.probe_sites(str(other), asked, 1.0) == [(site.offset, "unknown", "", False)]


def _ask_everything(path: Path) -> None:
    """Whatever stands in the file, there are answers or an OSError."""
    symbols = _native.Symbolizer()
    try:
        _native.build_id(str(path))
        for site in _native.find_functions(str(path), ["plugin_work", "plugin_step", "x"]):
            _native.probe_sites(str(path), [(site.offset, site.size, True)], 1.0)
        _native.probe_sites(str(path), [(0x1000, 1 << 63, False)], 1.0)
        symbols.elf(str(path), [0, 0x1000, 0x10F9, 1 << 63, (1 << 64) - 1])
    except OSError:
        pass


def test_a_file_cut_anywhere_is_no_danger(tmp_path: Path, plugin: Path) -> None:
    raw, cut = plugin.read_bytes(), tmp_path / "cut.so"
    for length in [*range(200), *range(200, len(raw), 97)]:
        cut.write_bytes(raw[:length])
        _ask_everything(cut)


def test_a_file_of_lies_is_no_danger(tmp_path: Path, plugin: Path) -> None:
    raw, chance, lie = plugin.read_bytes(), random.Random(11), tmp_path / "lie.so"
    tables = struct.unpack_from("<Q", raw, 40)[0]  # the section headers
    for _ in range(1500):
        changed = bytearray(raw)
        for _ in range(chance.randrange(1, 8)):
            at = chance.choice([chance.randrange(64), chance.randrange(64, 700)])
            at = chance.choice([at, chance.randrange(tables, len(raw)), chance.randrange(len(raw))])
            changed[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        lie.write_bytes(changed)
        _ask_everything(lie)


def test_tables_that_claim_to_be_huge_cost_neither_time_nor_memory(
    tmp_path: Path, plugin: Path
) -> None:
    raw = bytearray(plugin.read_bytes())
    sections, count = struct.unpack_from("<Q", raw, 40)[0], struct.unpack_from("<H", raw, 60)[0]
    for n in range(count):
        struct.pack_into("<Q", raw, sections + 64 * n + 32, 1 << 45)  # sh_size
    huge = tmp_path / "huge.so"
    huge.write_bytes(raw)
    os.truncate(huge, 1 << 38)  # and there is as much of it: a hole
    start = time.process_time()
    _ask_everything(huge)
    assert time.process_time() - start < 20


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/proc/self/mem")):
        _ask_everything(path)
    assert _native.build_id(str(Path(__file__))) == ""
    with pytest.raises(FileNotFoundError):
        _native.build_id(str(tmp_path / "missing"))


def test_a_library_of_400_megabytes_is_searched_in_time(tmp_path: Path) -> None:
    """As large as the largest there are: 380,000 functions with the names of templates."""
    name = "_ZN2at6native{0}long_enough_a_name_as_templates_have_them_{0}ERKNS_6TensorEllxd"
    big = tmp_path / "big.so"
    write_library(big, [name.format(n) for n in range(380_000)], total_bytes=400 << 20)
    wanted = [name.format(190_000), "cudaLaunchKernel", "clEnqueueNDRangeKernel", "cuMemcpy_v2"]
    seconds = []
    for _ in range(4):
        start = time.process_time()
        (found,) = _native.find_functions(str(big), wanted)
        seconds.append(time.process_time() - start)
    assert (found.name, found.offset) == (wanted[0], 4096 + 16 * 190_000)
    assert min(seconds) < 0.1
    symbols = _native.Symbolizer()
    start = time.process_time()
    (symbol,) = symbols.elf(str(big), [found.offset + 5])
    assert time.process_time() - start < 0.2
    assert symbol == (wanted[0], 5)
    assert symbols.usage()[1] < 5 << 20
