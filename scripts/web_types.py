# SPDX-License-Identifier: Apache-2.0
"""Writes web/src/answers.ts, TypeScript types of the server's answers, from their JSON schemas and
with the comments on them: `python scripts/web_types.py [--check]`."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from inspect import getsource
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from generated import write_or_check
from sonde.server import schemas
from sonde.server.answers import QUESTIONS
from sonde.server.schemas import ALERTS, ANSWERS, FLAME_NODE, FLEET, IDENTITY

TARGET = Path(__file__).parents[1] / "web" / "src" / "answers.ts"
HEAD = """\
// SPDX-License-Identifier: Apache-2.0
// Types of the server's answers as JSON. Generated from src/sonde/server/schemas.py by
// scripts/web_types.py; a test checks that it is current.
"""
_PLAIN = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "Record<string, unknown>",
}
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")
_WIDTH = 120


def written(schema: Mapping[str, Any], indent: str = "") -> str:
    """The TypeScript type of a schema; its lines but the first begin with `indent`. Raises
    ValueError for what no answer uses."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_PLAIN[one] for one in kind)
    if kind == "array":
        items = written(schema["items"], indent)
        return f"({items})[]" if "|" in items else f"{items}[]"
    if kind == "object" and "properties" not in schema:
        values = schema.get("additionalProperties")
        inner = written(values) if isinstance(values, dict) and values else "unknown"
        return f"Record<string, {inner}>"
    if kind == "object":
        lines = list(_fields(schema, indent + "  "))
        one_line = f"{{ {' '.join(line.strip() for line in lines).removesuffix(';')} }}"
        if "/**" not in one_line and "\n" not in one_line and len(indent + one_line) < _WIDTH - 30:
            return one_line
        return "\n".join(["{", *lines, f"{indent}}}"])
    if kind in _PLAIN:
        return _PLAIN[kind]
    raise ValueError(f"no type for {schema!r}")


def _fields(schema: Mapping[str, Any], indent: str) -> Iterator[str]:
    """The lines of an object's fields: several in one where none has a comment or is long."""
    required = set(schema.get("required", ()))
    line = ""
    for name, one in schema["properties"].items():
        key = name if _IDENTIFIER.match(name) else json.dumps(name)
        field = f"{key}{'' if name in required else '?'}: {written(one, indent)};"
        about = one.get("description", "")
        if line and (about or "\n" in field or len(indent + line + field) >= _WIDTH):
            yield indent + line
            line = ""
        if about:
            yield from wrap(
                f"/** {_sentence(about)} */", _WIDTH,
                initial_indent=indent, subsequent_indent=f"{indent} * ",
            )  # fmt: skip
        if about or "\n" in field:
            yield indent + field
        else:
            line = f"{line} {field}".strip()
    if line:
        yield indent + line


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _docstrings() -> dict[str, str]:
    """The docstring of each name of the schemas' module that has one."""
    body = ast.parse(getsource(schemas)).body
    return {
        target.id: " ".join(str(text.value.value).split())
        for one, text in pairwise(body)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        for target in getattr(one, "targets", None) or [getattr(one, "target", None)]
        if isinstance(target, ast.Name)
    }


def document() -> str:
    """The module's source."""
    docstrings = _docstrings()
    named = {"FlameNode": (FLAME_NODE, docstrings["FLAME_NODE"])}
    for name, schema in ANSWERS.items():
        named[f"{name.title()}Answer"] = (schema, QUESTIONS[name].about)
    for name, schema in (("FLEET", FLEET), ("ALERTS", ALERTS), ("IDENTITY", IDENTITY)):
        named[f"{name.title()}Answer"] = (schema, docstrings[name])
    types = [
        f"/** {_sentence(about)} */\nexport type {name} = {written(schema)};"
        for name, (schema, about) in named.items()
    ]
    return "\n".join([HEAD + _comment(), *types, ""])


def _comment() -> str:
    """The docstrings of the schemas' module and of `ANSWERS`."""
    _, _, rest = str(schemas.__doc__).partition("\n\n")
    lines = [*rest.strip().split("\n"), "", *wrap(_docstrings()["ANSWERS"], _WIDTH - 10)]
    return "\n".join(["//", *(f"// {line}".rstrip() for line in lines), ""])


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, document))
