# SPDX-License-Identifier: Apache-2.0
"""abi/inject.h and its Python twin agree, as the compiler lays the structs out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from struct import calcsize

import pytest

from sonde.collect import inject_abi as abi

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "abi/inject.h"
STRUCTS = {
    "inject_header": (abi.HEADER, abi.HEADER_FIELDS),
    "inject_control": (abi.CONTROL, abi.CONTROL_FIELDS),
    "inject_state": (abi.STATE, abi.STATE_FIELDS),
    "inject_record": (abi.RECORD, abi.RECORD_FIELDS),
    "inject_frames": (abi.FRAMES, (*abi.FRAMES_FIELDS, "address")),
}
ENUMS = {
    "REQUEST": abi.Request,
    "STATUS": abi.Status,
    "REASON": abi.Reason,
    "TYPE": abi.Type,
    "SOURCE": abi.Source,
    "FLAGS": abi.Flag,
}
C_NAMES = {
    "grid_x": "grid", "grid_y": "grid[1]", "grid_z": "grid[2]",
    "block_x": "block", "block_y": "block[1]", "block_z": "block[2]",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(offset, size) of every field by 'struct.field', sizes of structs and constants by name."""
    lines = []
    for struct, (_, fields) in STRUCTS.items():
        lines.append(f'P("{struct}", sizeof(struct {struct}));')
        for field in fields:
            c_name = C_NAMES.get(field, field)
            lines.append(f'P("{struct}.{field}", offsetof(struct {struct}, {c_name}));')
    for name in re.findall(r"^#define (INJECT_\w+) ", HEADER.read_text(), re.MULTILINE):
        if name != "INJECT_MEMFD":
            lines.append(f'P("{name}", {name});')
    for body in re.findall(r"enum inject_\w+ {(.*?)};", HEADER.read_text(), re.DOTALL):
        plain = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        lines += [f'P("{name}", {name});' for name in re.findall(r"INJECT_\w+", plain)]
    where = tmp_path_factory.mktemp("abi")
    source = where / "abi.c"
    source.write_text(
        f'#include "{HEADER}"\n#include <stddef.h>\n#include <stdio.h>\n'
        '#define P(n, v) printf("%s %llu\\n", n, (unsigned long long)(v))\n'
        "int main(void) {" + "".join(lines) + "}\n"
    )
    subprocess.run(["cc", "-o", where / "abi", source], check=True)
    text = subprocess.run([where / "abi"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


@pytest.mark.parametrize("struct", STRUCTS)
def test_structs_lie_alike(compiled, struct):
    layout, fields = STRUCTS[struct]
    assert layout.size == compiled[struct]
    offsets, at = [], 0
    # One number a field, counted from the formats: calcsize of each prefix.
    for code in re.findall(r"(\d*)([A-Za-z])", layout.format.lstrip("=")):
        for _ in range(int(code[0] or 1)):
            offsets.append(at)
            at += calcsize("=" + code[1])
    assert offsets[: len(fields)] == [compiled[f"{struct}.{field}"] for field in fields]


def test_constants_are_the_same(compiled):
    for name in (
        "MAGIC", "ABI", "BEAT_NS", "IDLE_NS", "AHEAD_NS", "HEADER_AT", "CONTROL_AT", "STATE_AT",
        "RING_AT", "RECORD_BYTES", "RING_RECORDS", "NAMES_AT", "NAMES_BYTES", "BYTES", "NAME_MAX",
        "KILL", "FRAMES_EACH",
    ):  # fmt: skip
        assert getattr(abi, name) == compiled[f"INJECT_{name}"], name
    assert abi.RECORD.size == abi.FRAMES.size == abi.RECORD_BYTES
    assert f'"{abi.MEMFD}"' in HEADER.read_text()
    assert f"/memfd:{abi.MEMFD} (deleted)" == abi.MAPPED_AS


@pytest.mark.parametrize("name", ENUMS)
def test_enums_are_the_same(compiled, name):
    for member in ENUMS[name]:
        assert compiled[f"INJECT_{member.name}"] == member, member
    body = re.search(rf"enum inject_{name.lower()} {{(.*?)}};", HEADER.read_text(), re.DOTALL)
    plain = re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.DOTALL)
    assert len(re.findall(r"INJECT_\w+", plain)) == len(ENUMS[name])
