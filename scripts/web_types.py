# SPDX-License-Identifier: Apache-2.0
"""Writes web/src/answers.ts, TypeScript types of the server's answers, from their JSON schemas:
`python scripts/web_types.py [--check]`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generated import write_or_check
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


def written(schema: Mapping[str, Any]) -> str:
    """The TypeScript type of a schema. Raises ValueError for what no answer uses."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_PLAIN[one] for one in kind)
    if kind == "array":
        items = written(schema["items"])
        return f"({items})[]" if "|" in items else f"{items}[]"
    if kind == "object" and "properties" not in schema:
        values = schema.get("additionalProperties")
        inner = written(values) if isinstance(values, dict) and values else "unknown"
        return f"Record<string, {inner}>"
    if kind == "object":
        required = set(schema.get("required", ()))
        fields = (
            f"{name if _IDENTIFIER.match(name) else json.dumps(name)}"
            f"{'' if name in required else '?'}: {written(one)}"
            for name, one in schema["properties"].items()
        )
        return f"{{ {'; '.join(fields)} }}"
    if kind in _PLAIN:
        return _PLAIN[kind]
    raise ValueError(f"no type for {schema!r}")


def document() -> str:
    """The module's source."""
    named = {"FlameNode": FLAME_NODE}
    named |= {f"{name.title()}Answer": schema for name, schema in ANSWERS.items()}
    named |= {"FleetAnswer": FLEET, "AlertsAnswer": ALERTS, "IdentityAnswer": IDENTITY}
    types = [f"export type {name} = {written(schema)};" for name, schema in named.items()]
    return "\n".join([HEAD, *types, ""])


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, document))
