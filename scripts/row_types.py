# SPDX-License-Identifier: Apache-2.0
"""Writes src/sonde/model/rows.py from abi/tables.json: `python scripts/row_types.py [--check]`."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from generated import formatted, write_or_check

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "abi" / "tables.json"
TARGET = ROOT / "src" / "sonde" / "model" / "rows.py"

TYPES = {
    "u32": "int",
    "i32": "int",
    "u64": "int",
    "f64": "float",
    "utf8": "str",
}
HOT = ("sample", "traced", "activity", "usage")
"""Tables with a row for each thread or process in each tick. They are written as plain tuples: a
record takes 0.13 us longer to make."""
RECORDS = ("device_run", "event")
"""The other tables that collectors write row by row."""

HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Rows of the tables of a chunk, as typed records.

Generated from `abi/tables.json` by `scripts/row_types.py`; a test checks that it is current.

Rows of `sample`, `activity` and `usage` are many. They are written as plain tuples, whose shape is
a type here (`ActivityTuple`), and read as records (`ActivityRow`, by `RowLists.records`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict, TypeVar, overload
'''

METHODS = '''
    def most_rows(self) -> int:
        """The number of rows of the table that has most."""
        rows: dict[str, list[object]] = self.rows  # type: ignore[assignment]
        return max(map(len, rows.values()), default=0)

    def by_table(self) -> Iterable[tuple[str, Sequence[tuple[object, ...]]]]:
        """Names of tables, and their rows."""
        rows: dict[str, list[tuple[object, ...]]] = self.rows  # type: ignore[assignment]
        return rows.items()
    def records(self, kind: type[_Record]) -> Iterator[_Record]:
        """The rows of one table: of `activity` for ActivityRow."""
        rows: dict[str, list[Iterable[object]]] = self.rows  # type: ignore[assignment]
        return map(kind._make, rows.get(_TABLES[kind], ()))
'''


def class_of(table: str) -> str:
    """`device_run` to `DeviceRunRow`."""
    return "".join(part.title() for part in table.split("_")) + "Row"


def shape_of(table: str) -> str:
    """`activity` to `ActivityTuple`."""
    return class_of(table).removesuffix("Row") + "Tuple"


def written_as(table: str) -> str:
    """The type that rows of a table are added as."""
    return shape_of(table) if table in HOT else class_of(table)


def quoted(doc: str) -> list[str]:
    """The lines of a docstring, of 100 characters at most; no lines where there is no text."""
    indent = {"initial_indent": "    ", "subsequent_indent": "    "}
    return textwrap.wrap(f'"""{doc}"""', 100, **indent) if doc else []


def document() -> str:
    """The module's source, formatted."""
    tables = json.loads(TABLES.read_text())["tables"]
    written = (*HOT, *RECORDS)
    lines = [HEAD]
    for table in written:
        lines += ["", f"class {class_of(table)}(NamedTuple):", *quoted(tables[table]["doc"]), ""]
        for name, kind, doc in tables[table]["columns"]:
            # A column may have the name of a method of tuples, which records then lack.
            ignore = "  # type: ignore[assignment]" if hasattr(tuple, name) else ""
            lines += [f"    {name}: {TYPES[kind]}{ignore}", *quoted(doc)]
        lines.append("")
    for table in HOT:
        types = ", ".join(TYPES[kind] for _, kind, _ in tables[table]["columns"])
        lines += [f"{shape_of(table)} = tuple[{types}]"]
        lines += [f'"""The shape of {class_of(table)}."""', ""]
    lines += ["", "class Rows(TypedDict, total=False):"]
    lines += ['    """Rows that collectors write, by table."""', ""]
    lines += [f"    {table}: list[{written_as(table)}]" for table in written]
    lines += ["", "", '_Record = TypeVar("_Record", ' + ", ".join(map(class_of, written)) + ")"]
    lines += ["_TABLES: Mapping[type, str] = {"]
    lines += [f'    {class_of(table)}: "{table}",' for table in written]
    lines += ["}", "", "", "class RowLists:"]
    lines += ['    """Typed access to `rows`."""', "", "    __slots__ = ()", "    rows: Rows", ""]
    for table in written:
        lines.append("    @overload")
        lines.append(
            f'    def add(self, table: Literal["{table}"], row: {written_as(table)}) -> None: ...'
        )
    lines += [
        "    def add(self, table: str, row: object) -> None:",
        '        """Append a row to a table."""',
        "        rows: dict[str, list[object]] = self.rows  # type: ignore[assignment]",
        "        rows.setdefault(table, []).append(row)",
        METHODS,
    ]
    return formatted("\n".join(lines), TARGET)


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, document))
