# SPDX-License-Identifier: Apache-2.0
"""Source lines and inlined functions from DWARF, against a program whose inlines are known."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sonde import _native
from sonde.resolve import source_lines
from sonde.resolve.build_id_links import BuildIdLinks
from sonde.resolve.source_lines import look_up, short_path

SOURCE = Path(__file__).parents[1] / "programs" / "lines" / "inlined.cpp"
MARKED = {
    found[1]: number
    for number, line in enumerate(SOURCE.read_text().splitlines(), 1)
    if (found := re.search(r"// line: (\w+)", line))
}
CHAIN = [
    ("innermost", "lines/inlined.cpp", MARKED["innermost"]),
    ("shapes::Box<long>::middle(long)", "lines/inlined.cpp", MARKED["middle"]),
    ("outer(long)", "lines/inlined.cpp", MARKED["outer"]),
]


def built(folder, *flags):
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    program = folder / "inlined"
    subprocess.run([compiler, "-O2", "-g", *flags, "-o", program, SOURCE], check=True)
    return program


def offsets(program):
    """Those of `outer`, in the file."""
    (site,) = _native.find_functions(str(program), ["_Z5outerl"])
    return list(range(site.offset, site.offset + site.size))


def noted(folder, program):
    links = BuildIdLinks(folder / "seen")
    build_id = _native.build_id(str(program))
    links.record(build_id, str(program), program.stat())
    return links, build_id


def chains(found):
    return {tuple(locations) for locations in found.locations.values()}


@pytest.mark.parametrize("flags", [[], ["-gdwarf-4"], ["-gz"], ["-no-pie"]], ids=str)
def test_inlined_functions_and_their_lines_are_right(tmp_path, flags):
    program = built(tmp_path, *flags)
    links, build_id = noted(tmp_path, program)
    found = look_up({build_id: offsets(program)}, links)
    assert (found.files, found.not_found, found.failed) == (1, 0, 0)
    assert tuple(CHAIN) in chains(found)
    names = [place[0] for place in CHAIN]
    for locations in chains(found):
        assert [it.function for it in locations] == names[-len(locations) :]


def test_a_stripped_file_has_no_lines_and_is_no_error(tmp_path):
    program = built(tmp_path)
    at = offsets(program)
    subprocess.run(["strip", program], check=True)
    links, build_id = noted(tmp_path, program)
    found = look_up({build_id: at}, links)
    assert (found.locations, found.files, found.failed) == ({}, 0, 0)


def test_a_file_that_was_built_again_is_not_taken_for_the_one_that_ran(tmp_path):
    program = built(tmp_path)
    links, build_id = noted(tmp_path, program)
    built(tmp_path, "-DNDEBUG", "-O1")
    found = look_up({build_id: [0x1000], "00" * 20: [0]}, links)
    assert (found.locations, found.not_found) == ({}, 2)


def test_a_path_that_leads_elsewhere_is_not_noted(tmp_path):
    program = built(tmp_path)
    other = shutil.copy(program, tmp_path / "other")
    links = BuildIdLinks(tmp_path / "seen")
    build_id = _native.build_id(str(program))
    links.record(build_id, str(program), Path(other).stat())
    links.record("../../etc", str(program), program.stat())
    assert links.find(build_id) is None
    made = [it.name for it in (tmp_path / "seen" / "private").iterdir()]
    assert made == [f"{build_id}.disputed"]


def test_lines_are_read_of_the_file_that_was_compared(tmp_path, monkeypatch):
    """Another one takes its place before the subprocess opens it."""
    program = built(tmp_path)
    links, build_id = noted(tmp_path, program)
    query = source_lines._query

    def replaced(*asked):
        other = tmp_path / "other"
        other.write_text("no program")
        other.replace(program)
        return query(*asked)

    monkeypatch.setattr(source_lines, "_query", replaced)
    wanted = {build_id: offsets(program)}
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert tuple(CHAIN) in chains(look_up(wanted, links))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.9])
def test_a_damaged_file_costs_its_lines_alone(tmp_path, cut):
    program = built(tmp_path)
    links, build_id = noted(tmp_path, program)
    raw = bytearray(program.read_bytes())
    at = int(len(raw) * cut)
    raw[at : at + 400] = os.urandom(400)
    program.write_bytes(raw)
    found = look_up({build_id: offsets(program) if cut > 0.5 else [0x1100]}, links)
    assert len(found.locations) <= 200


def test_a_reader_that_hangs_or_dies_costs_its_file_alone(tmp_path):
    program = built(tmp_path)
    links, build_id = noted(tmp_path, program)
    for code in ("import time; time.sleep(60)", "raise SystemExit(1)"):
        reader = (sys.executable, "-c", code)
        found = look_up({build_id: [0x1100]}, links, reader, file_s=0.5)
        assert (found.locations, found.failed) == ({}, 1)


def test_full_paths_stay_here():
    assert short_path("/home/someone/secret/project/src/main.cpp") == "src/main.cpp"
    assert short_path("/main.cpp") == "main.cpp"
    assert short_path("main.cpp") == "main.cpp"
