# SPDX-License-Identifier: Apache-2.0
"""Where HotSpot, OpenJDK's JVM, keeps its code and methods: the tables that libjvm.so publishes.

`gHotSpotVMStructs` and its siblings (src/hotspot/share/runtime/vmStructs.cpp) exist for debuggers
that read a JVM from outside. They are memory of the profiled process, so they may hold anything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sonde.errors import SondeError
from sonde.unwind.process_memory import Memory, read_exactly, read_word

MAX_TABLE_BYTES: Final = 1 << 19
MAX_ENTRIES: Final = 8192
MAX_TEXT_BYTES: Final = 4 << 20
"""From the first to the last name of a table's entries."""
MAX_OFFSET: Final = 4096
_MAX_NAME: Final = 128

OLDEST: Final = 17
NEWEST: Final = 21
"""Versions whose interpreter has the frames of bpf/unwind_java.h, which are not published."""

STRUCTS: Final = "gHotSpotVMStructs"
TYPES: Final = "gHotSpotVMTypes"
CONSTANTS: Final = "gHotSpotVMIntConstants"
EXPORTS: Final = (
    *(STRUCTS, "gHotSpotVMStructEntryArrayStride", "gHotSpotVMStructEntryTypeNameOffset"),
    *("gHotSpotVMStructEntryFieldNameOffset", "gHotSpotVMStructEntryOffsetOffset"),
    "gHotSpotVMStructEntryAddressOffset",
    *(TYPES, "gHotSpotVMTypeEntryArrayStride", "gHotSpotVMTypeEntryTypeNameOffset"),
    "gHotSpotVMTypeEntrySizeOffset",
    *(CONSTANTS, "gHotSpotVMIntConstantEntryArrayStride"),
    *("gHotSpotVMIntConstantEntryNameOffset", "gHotSpotVMIntConstantEntryValueOffset"),
)
"""Symbols of libjvm.so that are read."""


class UnsupportedJvmError(SondeError):
    """A JVM whose code cannot be read: it publishes no tables, or others than are known."""


@dataclass(frozen=True, slots=True)
class HotspotLayout:
    """Offsets in bytes within HotSpot's structs, for one running JVM."""

    heaps: int
    """Address of `CodeCache::_heaps`."""
    array_length: int
    array_data: int
    heap_bytes: int
    heap_memory: int
    """VirtualSpace of the code."""
    heap_segments: int
    """VirtualSpace of the segment map."""
    heap_shift: int
    """log2 of the bytes of a segment."""
    space: tuple[int, int, int, int]
    """In a VirtualSpace: ends of what is reserved, ends of what is committed."""
    block_bytes: int
    """Of the header of a block in a code heap."""
    blob_bytes: int
    """Of a blob's header: enough for the fields of a blob that follow."""
    blob_name: int
    code_begin: int
    code_end: int
    frame_size: int
    """int, in words."""
    frame_complete: int
    """int: offset in the code at which the frame is complete."""
    nmethod_method: int
    verified_entry: int
    method_const: int
    const_constants: int
    const_code_size: int
    const_name: int
    """u2: index in the constant pool."""
    const_flags: int
    const_bytes: int
    has_lines: int
    """Bit of the flags: a line table follows the bytecode."""
    pool_holder: int
    pool_length: int
    pool_source: int
    """u2: index of the source file's name."""
    pool_bytes: int
    skips_zero: bool
    """Compressed numbers have no byte of 0 (from JDK 19 on)."""
    klass_name: int
    symbol_length: int
    symbol_body: int


def read_layout(memory: Memory, exports: Mapping[str, int]) -> HotspotLayout:
    """The layout of a running JVM. `exports`: addresses of EXPORTS in its memory.

    Raises UnsupportedJvmError, OSError.
    """
    try:
        return _layout(memory, exports)
    except (KeyError, ValueError, struct.error) as error:
        raise UnsupportedJvmError(f"no readable tables of HotSpot: {error}") from error


def _layout(memory: Memory, exports: Mapping[str, int]) -> HotspotLayout:
    value = {name: read_word(memory, exports[name]) for name in EXPORTS}
    fields: dict[tuple[str, str], tuple[int, int]] = {}
    entry = "gHotSpotVMStructEntry"
    places = [value[f"{entry}{it}Offset"] for it in ("TypeName", "FieldName", "Offset", "Address")]
    stride = value[f"{entry}ArrayStride"]
    for (kind, name), (at, address) in _entries(memory, value[STRUCTS], stride, places, 2):
        fields[kind, name] = at, address
    entry = "gHotSpotVMTypeEntry"
    places = [value[f"{entry}{it}Offset"] for it in ("TypeName", "Size")]
    stride = value[f"{entry}ArrayStride"]
    types = _entries(memory, value[TYPES], stride, places, 1)
    sizes = {names[0]: numbers[0] for names, numbers in types}
    entry = "gHotSpotVMIntConstantEntry"
    places = [value[f"{entry}{it}Offset"] for it in ("Name", "Value")]
    stride = value[f"{entry}ArrayStride"]
    found = _entries(memory, value[CONSTANTS], stride, places, 1)
    constants = {names[0]: numbers[0] & 0xFFFFFFFF for names, numbers in found}

    def offset(*names: str) -> int:
        for name in names:
            kind, _, field = name.partition(".")
            if (kind, field) in fields and fields[kind, field][0] <= MAX_OFFSET:
                return fields[kind, field][0]
        raise KeyError(names[0])

    def size(name: str) -> int:
        if 0 < sizes[name] <= MAX_OFFSET:
            return sizes[name]
        raise ValueError(name)

    at = fields["Abstract_VM_Version", "_vm_major_version"][1]
    version = int.from_bytes(read_exactly(memory, 4, at), "little")
    if not OLDEST <= version <= NEWEST:
        raise UnsupportedJvmError(
            f"no layout of the interpreter's frames of JDK {version} is known"
        )
    lines = constants.get(
        "ConstMethod::_has_linenumber_table",
        constants.get("ConstMethodFlags::_misc_has_linenumber_table", 0),
    )
    ends = ("_low_boundary", "_high_boundary", "_low", "_high")
    low_boundary, high_boundary, low, high = (offset(f"VirtualSpace.{it}") for it in ends)
    return HotspotLayout(
        heaps=fields["CodeCache", "_heaps"][1],
        array_length=offset("GrowableArrayBase._len", "GenericGrowableArray._len"),
        array_data=offset("GrowableArray<int>._data"),
        heap_bytes=size("CodeHeap"),
        heap_memory=offset("CodeHeap._memory"),
        heap_segments=offset("CodeHeap._segmap"),
        heap_shift=offset("CodeHeap._log2_segment_size"),
        space=(low_boundary, high_boundary, low, high),
        block_bytes=size("HeapBlock"),
        blob_bytes=size("nmethod"),
        blob_name=offset("CodeBlob._name"),
        code_begin=offset("CodeBlob._code_begin"),
        code_end=offset("CodeBlob._code_end"),
        frame_size=offset("CodeBlob._frame_size"),
        frame_complete=offset("CodeBlob._frame_complete_offset"),
        nmethod_method=offset("CompiledMethod._method", "nmethod._method"),
        verified_entry=offset("nmethod._verified_entry_point"),
        method_const=offset("Method._constMethod"),
        const_constants=offset("ConstMethod._constants"),
        const_code_size=offset("ConstMethod._code_size"),
        const_name=offset("ConstMethod._name_index"),
        const_flags=offset("ConstMethod._flags", "ConstMethod._flags._flags"),
        const_bytes=size("ConstMethod"),
        has_lines=lines,
        pool_holder=offset("ConstantPool._pool_holder"),
        pool_length=offset("ConstantPool._length"),
        pool_source=offset("ConstantPool._source_file_name_index"),
        pool_bytes=size("ConstantPool"),
        skips_zero=version >= 19,
        klass_name=offset("Klass._name"),
        symbol_length=offset("Symbol._length"),
        symbol_body=offset("Symbol._body"),
    )


def _entries(
    memory: Memory, at: int, stride: int, places: list[int], texts: int
) -> Iterator[tuple[list[str], list[int]]]:
    """(names, numbers) of each entry of a table: the words at `places`, the first `texts` of them
    pointers to names."""
    if not 8 <= stride <= 256 or any(place + 8 > stride for place in places):
        raise ValueError("a table of another form")
    raw = memory.read_at(min(MAX_TABLE_BYTES, MAX_ENTRIES * stride), at)
    rows = []
    for start in range(0, len(raw) - stride + 1, stride):
        row = [struct.unpack_from("<Q", raw, start + place)[0] for place in places]
        if not row[0]:
            break
        rows.append(row)
    else:
        raise ValueError("a table without an end")
    pointers = [pointer for row in rows for pointer in row[:texts] if pointer]
    if not pointers:
        return
    first, size = min(pointers), max(pointers) - min(pointers) + _MAX_NAME
    if size > MAX_TEXT_BYTES:
        raise ValueError("names far apart")
    names = memory.read_at(size, first)
    for row in rows:
        yield [_text(names, it - first) if it else "" for it in row[:texts]], row[texts:]


def _text(raw: bytes, at: int) -> str:
    end = raw.find(b"\0", at, at + _MAX_NAME)
    return raw[at : max(end, at)].decode("ascii", "replace")
