# SPDX-License-Identifier: Apache-2.0
"""Go programs that were stripped: rules and names out of Go's own table equal those of the program
before."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sonde import _native

SOURCE = """
package main

import "fmt"

type Tree struct{ v int }

//go:noinline
func (t *Tree) grow(n int) int { if n == 0 { return len(fmt.Sprint(n)) }; return t.grow(n-1) + 1 }

func main() { println((&Tree{}).grow(3)) }
"""
SAMPLED = 1 << 15
"""Addresses compared, evenly spread."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `whole`, `stripped` and `position-independent`."""
    if shutil.which("go") is None:
        pytest.skip("needs go")
    folder = tmp_path_factory.mktemp("go")
    (folder / "main.go").write_text(SOURCE)
    (folder / "go.mod").write_text("module tree\n\ngo 1.19\n")
    for name, flags in (
        ("whole", []),
        ("stripped", ["-ldflags", "-s -w"]),
        ("position-independent", ["-buildmode=pie", "-ldflags", "-s -w"]),
    ):
        subprocess.run(["go", "build", *flags, "-o", name, "main.go"], cwd=folder, check=True)
    return folder


def functions(program: Path) -> list[tuple[int, int, str]]:
    """(address, size, name) by its symbols."""
    printed = subprocess.check_output(["readelf", "-sW", program], text=True)
    rows = re.findall(r"^ *\d+: (\w+) +(\d+) FUNC .* (\S+)$", printed, re.MULTILINE)
    return [(int(address, 16), int(size), name) for address, size, name in rows if int(size)]


def rules(program: Path, addresses: list[int]) -> list[bytes | None]:
    table = program.with_suffix(".unw")
    _native.build_unwind_table(str(program), str(table))
    return _native.find_unwind_rules(str(table), addresses)


def test_without_its_descriptions_every_instruction_has_the_same_rule(programs: Path) -> None:
    code = [
        at
        for address, size, name in functions(programs / "whole")
        if name.partition(":")[0] != "go"  # marks of the linker
        for at in range(address, address + size)
    ]
    chosen = code[:: max(1, len(code) // SAMPLED)]

    expected = rules(programs / "whole", chosen)

    assert None not in expected
    assert rules(programs / "stripped", chosen) == expected


def test_without_its_symbols_functions_have_the_same_names(programs: Path) -> None:
    printed = subprocess.check_output(["readelf", "-SW", programs / "stripped"], text=True)
    text = re.search(r"\.text +PROGBITS +(\w+) (\w+)", printed)
    assert text is not None
    start, offset = int(text[1], 16), int(text[2], 16)
    wanted = [
        address - start + offset + 1
        for address, _, name in functions(programs / "whole")
        if address >= start and name.partition(":")[0] != "go"
    ]
    symbolizer = _native.Symbolizer()

    expected = symbolizer.elf(str(programs / "whole"), wanted)
    found = symbolizer.elf(str(programs / "stripped"), wanted)

    assert {("main.(*Tree).grow", 1), ("runtime.goexit", 1)} <= set(found)
    both = zip(expected, found, strict=True)
    wrong = [
        (it, other)
        for it, other in both
        if it is None or other is None or clean(it[0]) != clean(other[0])
    ]
    assert len(wrong) <= len(wanted) / 100, wrong[:20]


def clean(name: str) -> str:
    """Without what Go's linker does to names in symbols alone."""
    return name.removesuffix(".abi0").replace("·", ".")


def test_position_independent_programs_have_rules_and_names(programs: Path) -> None:
    program = programs / "position-independent"
    described, _, _, _, followed = _native.build_unwind_table(
        str(program), str(program.with_suffix(".unw"))
    )
    assert described + followed > 1000
