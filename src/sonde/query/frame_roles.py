# SPDX-License-Identifier: Apache-2.0
"""What single frames of stacks are: the kind of their code, and the part that it has in waits,
queues, services and pools. Frames with the same code are looked at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sonde.model.call_kinds import kind_by_name
from sonde.model.libraries import CodeKind, is_put, is_python_queue, kind_of_file, kind_of_native
from sonde.model.serving import ACCEPTS, ServingRole, native_role, python_role, takes_requests
from sonde.model.spinning import YIELDS, pool_of_library, pool_that_spins
from sonde.model.timeline import I32, I64, U8, CallKind, Mask
from sonde.query.grouping import grouped_rows

CALL_KINDS = tuple(CallKind)
"""The kind of call of each number in columns."""
TAKES = (ServingRole.LOOP, ServingRole.HANDLES)
"""Roles of Python code that takes requests or tasks."""
_DEVICE_FUNCTION = re.compile(r"^(cuda|cu|hip|cl|ze)[A-Z]\w*$")
"""Names of the functions of device APIs."""
_MACHINE_CODE = ("user", "inlined", "jit")
"""Kinds of frames of a program's or a library's machine code."""


class FrameColumns(NamedTuple):
    """Of each row of the table of frames, and one more for unknown ones."""

    kind: U8
    """`CodeKind`."""
    call: U8
    """1 + the number in `CALL_KINDS` of a function of a device API; 0 none."""
    location: I32
    """Index into `locations`; -1 none."""
    locations: list[str]
    function: I32
    """A number for each Python function; -1 of other frames."""
    is_function: Mask
    """It is a Python function, not the code of a module."""
    in_python_queue: Mask
    """Machine code of CPython's `queue.SimpleQueue`: it waits with the calls that the GIL waits
    with."""
    is_python: Mask
    puts: Mask
    """It puts something into a queue that may be full."""
    serving: U8
    """`ServingRole`."""
    service: I32
    """Index into `services` of the file of code that takes or answers requests; -1 of other."""
    services: list[str]
    pool: U8
    """1 + the number in `POOLS` of the pool whose threads wait in a function of machine code."""
    library_pool: U8
    """Likewise of the pool that a frame's library has."""
    is_yield: Mask


class _Code(NamedTuple):
    """What frames of one kind, function, binary, file and origin share: see `FrameColumns`."""

    kind: int
    call: int
    in_python_queue: bool
    serving: int
    service: int
    is_python: bool
    puts: bool
    function: int
    is_function: bool
    pool: int
    library_pool: int
    is_yield: bool
    place: str
    """The location, of Python without the line; '' none."""


_COLUMN_TYPES: dict[str, Any] = {
    **dict.fromkeys(("kind", "call", "serving", "pool", "library_pool"), np.uint8),
    **dict.fromkeys(("service", "function"), np.int32),
    **dict.fromkeys(("in_python_queue", "is_python", "puts", "is_function", "is_yield"), np.bool_),
}
_UNKNOWN = _Code(0, 0, False, 0, -1, False, False, -1, False, 0, 0, False, "")


def frame_columns(frame: pa.Table) -> FrameColumns:
    services = {ACCEPTS: 0}
    functions: dict[tuple[str, str], int] = {}

    def code_of(kind: str, function: str, binary: str, file: str, origin: str) -> _Code:
        found = _code_of(kind, function, binary, file, origin)
        is_python, is_machine_code = kind == "python", kind in _MACHINE_CODE
        service = -1
        if found[3] in TAKES and takes_requests(file):
            service = services.setdefault(file, len(services))
        place = ""
        if is_python:
            place = f"{function} {file}:" if file else ""
        elif found[0] in (CodeKind.OWN_NATIVE, CodeKind.CPU_KERNEL):
            place = function
        return _Code(
            *found,
            service=service,
            is_python=is_python,
            puts=is_python and is_put(file, function),
            function=functions.setdefault((function, file), len(functions)) if is_python else -1,
            is_function=is_python and function != "<module>",
            pool=pool_that_spins(binary, function) if is_machine_code else 0,
            library_pool=pool_of_library(binary) if is_machine_code else 0,
            is_yield=not is_python and function in YIELDS,
            place=place,
        )

    code, different = _distinct(frame, ("kind", "function", "binary", "file", "origin"))
    codes = [*(code_of(*row) for row in different), _UNKNOWN]
    code = np.append(code, len(different))
    location, locations = _places(codes, code, np.append(frame.column("line").to_numpy(), 0))
    return FrameColumns(
        **{
            name: np.array([getattr(one, name) for one in codes], kind)[code]
            for name, kind in _COLUMN_TYPES.items()
        },
        location=location,
        locations=locations,
        services=[*services],
    )


def _distinct(frame: pa.Table, columns: Sequence[str]) -> tuple[I64, list[tuple[str, ...]]]:
    """(for each row the number of its texts in these columns; the texts of each number, as they
    appear first). Texts of a hundred thousand rows take much memory, those of all kinds little."""
    encoded = []
    for name in columns:
        column = frame.column(name).combine_chunks()
        is_encoded = pa.types.is_dictionary(column.type)
        encoded.append(column if is_encoded else column.dictionary_encode())
    first, number = grouped_rows([one.indices.to_numpy() for one in encoded])
    texts = (one.take(pa.array(first)).to_pylist() for one in encoded)
    return number, list(zip(*texts, strict=True))


def _places(codes: list[_Code], code: I64, line: I64) -> tuple[I32, list[str]]:
    """(index of the location of each frame, -1 none; the locations, as they appear first)."""
    is_python = np.array([one.is_python for one in codes])[code]
    # One number for what has the same location: the code, and of Python the line, of 32 bits.
    both = code << 32 | np.where(is_python, line, 0).astype(np.int64)
    _, firsts, number = np.unique(both, return_index=True, return_inverse=True)
    locations: dict[str, int] = {}
    found = np.full(len(firsts), -1, np.int32)
    for at in np.argsort(firsts).tolist():
        row = firsts[at]
        one = codes[code[row]]
        if one.place:
            place = f"{one.place}{line[row]}" if one.is_python else one.place
            found[at] = locations.setdefault(place, len(locations))
    return found[number], [*locations]


def _code_of(
    kind: str, function: str, binary: str, file: str, origin: str
) -> tuple[int, int, bool, int]:
    """(kind of code, entry of `FrameColumns.call`, whether it is Python's queue, `ServingRole`)
    of a frame."""
    if kind == "python":
        return kind_of_file(file, function, origin), 0, False, python_role(file, function)
    if kind not in _MACHINE_CODE:
        return 0, 0, False, ServingRole.NONE
    found, call = kind_of_native(binary, function, origin), CallKind.OTHER
    if found == CodeKind.DEVICE and _DEVICE_FUNCTION.match(function):
        call = kind_by_name(function)
    number = 0 if call == CallKind.OTHER else 1 + CALL_KINDS.index(call)
    is_queue = is_python_queue(binary, function, origin)
    return found, number, is_queue, native_role(function)
