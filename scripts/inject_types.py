# SPDX-License-Identifier: Apache-2.0
"""Writes src/sonde/collect/inject_abi.py and inject_trace_abi.py (traces) from abi/inject.h:
`python scripts/inject_types.py [--check]`.

Parses the part of C that the header uses: #define of numbers and strings, enums, structs of
fixed-width fields and arrays. Anything else in a struct is an error. tests/unit/test_inject_abi.py
compares the result with the layout that a C compiler gives the header.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from generated import formatted, write_or_check

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "abi" / "inject.h"
TARGET = ROOT / "src" / "sonde" / "collect" / "inject_abi.py"
TRACE_TARGET = TARGET.with_name("inject_trace_abi.py")

CODES = {"uint64_t": "Q", "uint32_t": "I", "uint16_t": "H", "uint8_t": "B", "double": "d"}
SIZES = {"Q": 8, "I": 4, "H": 2, "B": 1, "d": 8}
OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul, ast.LShift: operator.lshift}
ENUMS = {
    "request": ("Request", "What the library is asked for."),
    "status": ("Status", "What the library does."),
    "reason": ("Reason", "Why something asked for is not done."),
    "type": ("Type", "What a record is of."),
    "source": ("Source", "What a duration was measured by."),
    "flags": ("Flag", "Marks of a record."),
    "traced_kind": ("TracedKind", "What a record of a trace is of."),
}
"""By enum: name and docstring of its class. For other enums both are made of the enum's name."""

HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""The layout of the memory shared with the library in a profiled process: abi/inject.h in Python.

Generated from `abi/inject.h` by `scripts/inject_types.py`; a test checks that it is current. Of
each struct there is its layout (HEADER), its fields as a record (Header), and where each of them
lies (HEADER_FIELDS: offset, and type as in the module `struct`). An array is one field for each
element: `grid_0`, `grid_1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag
from struct import Struct
from typing import NamedTuple
'''


class Field(NamedTuple):
    """One number of a struct."""

    name: str
    code: str
    """Type code of the module `struct`."""
    offset: int
    doc: str


def constants(text: str) -> dict[str, int | str]:
    """Numbers and strings of #define, by name without INJECT_."""
    found: dict[str, int | str] = {}
    for name, raw in re.findall(r"^#define INJECT_(\w+) (.+)$", text, re.MULTILINE):
        value = re.sub(r"/\*.*?\*/", "", raw).strip()
        if value.startswith('"'):
            found[name] = ast.literal_eval(value)
        else:
            found[name] = _number(value, found)
    return found


def _number(text: str, known: dict[str, int | str]) -> int:
    without_suffixes = re.sub(r"\b(0x[0-9a-f]+|\d+)(?:u|ull)\b", r"\1", text)
    return _evaluate(ast.parse(without_suffixes.replace("INJECT_", ""), mode="eval").body, known)


def _evaluate(node: ast.expr, known: dict[str, int | str]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and isinstance(value := known[node.id], int):
        return value
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, known), _evaluate(node.right, known)
        return int(OPERATORS[type(node.op)](left, right))
    raise ValueError(f"no number: {ast.unparse(node)}")


def enums(text: str) -> dict[str, dict[str, tuple[int, str]]]:
    """Members of each enum: number and comment, by name without INJECT_."""
    found = {}
    for enum, body in re.findall(r"^enum inject_(\w+) {\n(.*?)^};", text, re.MULTILINE | re.DOTALL):
        members: dict[str, tuple[int, str]] = {}
        number = -1
        pattern = r"INJECT_(\w+)(?:\s*=\s*(\d+))?,[ \t]*(?:/\*(.*?)\*/)?"
        for name, value, doc in re.findall(pattern, body, re.DOTALL):
            number = int(value) if value else number + 1
            members[name] = (number, _words(doc))
        found[enum] = members
    return found


def structs(text: str, known: dict[str, int | str]) -> dict[str, list[Field]]:
    """The fields of each struct in order. Raises ValueError for a struct that has padding, or a
    field that is not understood."""
    found = {}
    pattern = r"^struct inject_(\w+) {\n(.*?)^};"
    for name, body in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
        fields: list[Field] = []
        at = 0
        lines = r"^\t(\w+) ([\w, \[\]]+);[ \t]*(?:/\*(.*?)\*/)?"
        declarations = re.findall(lines, body, re.MULTILINE | re.DOTALL)
        if len(declarations) != re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).count(";"):
            raise ValueError(f"a field of {name} is not understood")
        for c_type, declared, doc in declarations:
            for each, array, count in re.findall(r"(\w+)(\[(\w*)\])?", declared):
                if array and not count:
                    continue  # a flexible array at the end
                code = CODES[c_type]
                if at % SIZES[code]:
                    raise ValueError(f"{name}.{each} needs padding before it")
                names = [each]
                if count:
                    names = [f"{each}_{i}" for i in range(_number(count, known))]
                for field in names:
                    fields.append(Field(field, code, at, _words(doc)))
                    at += SIZES[code]
        if at % max(SIZES[field.code] for field in fields):
            raise ValueError(f"{name} needs padding at its end")
        found[name] = fields
    return found


def _words(comment: str) -> str:
    return " ".join(re.sub(r"^\s*\*", "", comment, flags=re.MULTILINE).split())


def _quoted(doc: str) -> list[str]:
    if not doc:
        return []
    text = doc.replace("\\", "\\\\").replace('"', "'")
    return textwrap.wrap(f'"""{text}"""', 100, initial_indent="    ", subsequent_indent="    ")


def document(of_traces: bool = False) -> str:
    """The source of a module, formatted: that of traces, or that of all else."""
    text = HEADER.read_text()
    defined = constants(text)
    lines = [HEAD]
    lines += [
        f"{name} = {value!r}"
        for name, value in defined.items()
        if name.startswith("TRACE") == of_traces
    ]
    for enum, members in enums(text).items():
        if enum.startswith("trace") != of_traces:
            continue
        name, doc = ENUMS.get(enum, (enum.title(), f"enum inject_{enum}"))
        explicit = all(number and number & (number - 1) == 0 for number, _ in members.values())
        base = "IntFlag" if explicit and enum in ("request", "flags") else "IntEnum"
        lines += ["", "", f"class {name}({base}):", f'    """{doc}"""', ""]
        for member, (number, comment) in members.items():
            lines += [f"    {member} = {number}", *_quoted(comment)]
    for struct, fields in structs(text, defined).items():
        if struct.startswith("trace") != of_traces:
            continue
        code = "".join(field.code for field in fields)
        lines += ["", "", f"class {struct.title()}(NamedTuple):"]
        lines += [f'    """struct inject_{struct}"""', ""]
        for at, field in enumerate(fields):
            kind = "float" if field.code == "d" else "int"
            lines.append(f"    {field.name}: {kind}")
            following = fields[at + 1].doc if at + 1 < len(fields) else ""
            if field.doc != following:  # fields of one line of C share a comment: at the last one
                lines += _quoted(field.doc)
        upper = struct.upper()
        lines += ["", "", f'{upper} = Struct("={code}")']
        lines += [f"{upper}_FIELDS: Mapping[str, tuple[int, str]] = {{"]
        lines += [f'    "{it.name}": ({it.offset}, "{it.code}"),' for it in fields]
        lines += ["}"]
    source = "\n".join(lines)
    if of_traces:
        source = source.replace("IntEnum, IntFlag", "IntEnum")
    return formatted(source, TARGET)


if __name__ == "__main__":
    sys.exit(
        write_or_check(TARGET, document)
        or write_or_check(TRACE_TARGET, functools.partial(document, of_traces=True))
    )
