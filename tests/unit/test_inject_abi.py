# SPDX-License-Identifier: Apache-2.0
"""The Python layout of abi/inject.h is current, and is what a compiler makes of the header."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.collect import inject_abi as abi
from sonde.collect import inject_trace_abi as trace_abi

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "abi/inject.h"
STRUCTS = {
    "inject_header": (abi.HEADER, abi.Header, abi.HEADER_FIELDS),
    "inject_control": (abi.CONTROL, abi.Control, abi.CONTROL_FIELDS),
    "inject_state": (abi.STATE, abi.State, abi.STATE_FIELDS),
    "inject_record": (abi.RECORD, abi.Record, abi.RECORD_FIELDS),
    "inject_frames": (abi.FRAMES, abi.Frames, abi.FRAMES_FIELDS),
    "inject_name": (abi.NAME, abi.Name, abi.NAME_FIELDS),
    "inject_trace": (trace_abi.TRACE, trace_abi.Trace, trace_abi.TRACE_FIELDS),
    "inject_traced": (trace_abi.TRACED, trace_abi.Traced, trace_abi.TRACED_FIELDS),
}
ENUMS = {
    "REQUEST": abi.Request,
    "STATUS": abi.Status,
    "REASON": abi.Reason,
    "TYPE": abi.Type,
    "SOURCE": abi.Source,
    "FLAGS": abi.Flag,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(offset, size) of every field by 'struct.field', sizes of structs and constants by name."""
    lines = []
    for struct, (_, _, fields) in STRUCTS.items():
        lines.append(f'P("{struct}", sizeof(struct {struct}));')
        for field in fields:
            c_name = re.sub(r"_(\d+)$", r"[\1]", field)
            lines.append(f'P("{struct}.{field}", offsetof(struct {struct}, {c_name}));')
    for name in re.findall(r"^#define (INJECT_\w+) ", HEADER.read_text(), re.MULTILINE):
        if not name.endswith("_MEMFD"):
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


def test_the_layout_is_made_from_the_header():
    script = ROOT / "scripts" / "inject_types.py"
    done = subprocess.run([sys.executable, str(script), "--check"])
    assert done.returncode == 0, "run scripts/inject_types.py"


@pytest.mark.parametrize("struct", STRUCTS)
def test_structs_lie_as_the_compiler_has_them(compiled, struct):
    layout, record, fields = STRUCTS[struct]
    assert layout.size == compiled[struct]
    assert record._fields == tuple(fields)
    codes = "".join(code for _, code in fields.values())
    assert layout.format == f"={codes}"
    for name, (offset, _) in fields.items():
        assert offset == compiled[f"{struct}.{name}"], name


def test_constants_are_the_same(compiled):
    for name in (
        "MAGIC", "ABI", "HEARTBEAT_NS", "IDLE_NS", "AHEAD_NS", "HEADER_AT", "CONTROL_AT",
        "STATE_AT", "RING_AT", "RECORD_BYTES", "RING_RECORDS", "NAMES_AT", "NAMES_BYTES", "BYTES",
        "NAME_MAX", "KILL", "FRAMES_EACH", "TYPES",
    ):  # fmt: skip
        assert getattr(abi, name) == compiled[f"INJECT_{name}"], name
    for name in ("MAGIC", "AT", "RECORDS", "BYTES", "MOST_US"):
        assert getattr(trace_abi, f"TRACE_{name}") == compiled[f"INJECT_TRACE_{name}"], name
    assert trace_abi.TRACED.size == trace_abi.TRACED_BYTES
    assert abi.RECORD.size == abi.FRAMES.size == abi.RECORD_BYTES
    assert f'"{abi.MEMFD}"' in HEADER.read_text()


@pytest.mark.parametrize("name", ENUMS)
def test_enums_are_the_same(compiled, name):
    for member in ENUMS[name]:
        assert compiled[f"INJECT_{member.name}"] == member, member
    body = re.search(rf"enum inject_{name.lower()} {{(.*?)}};", HEADER.read_text(), re.DOTALL)
    plain = re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.DOTALL)
    assert len(re.findall(r"INJECT_\w+", plain)) == len(ENUMS[name])
