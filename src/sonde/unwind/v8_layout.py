# SPDX-License-Identifier: Apache-2.0
"""Where V8 keeps functions, code and texts: the constants that it publishes for debuggers.

Files with V8 export them as `v8dbg_…` (tools/gen-postmortem-metadata.py of V8). Which ones there
are differs from version to version; what is missing is derived from the offsets beside it. They are
read from the memory of the profiled process, so they may be any numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sonde.errors import SondeError
from sonde.unwind.process_memory import Memory, read_exactly

OLDEST: Final = 10, 2
"""Of Node.js 18, (major, minor)."""
NEWEST: Final = 14, 99
"""Later ones are refused: what is not published may have moved."""
MAX_OFFSET: Final = 256
MAX_FIRST_NAMES: Final = 16
_WORD: Final = 8

_VERSION: Final = tuple(f"_ZN2v88internal7Version6{it}_E" for it in ("major", "minor"))
_CONSTANTS: Final = {
    "shared": ("class_JSFunction__shared__SharedFunctionInfo",),
    "code": tuple(f"class_JSFunction__code__{it}" for it in ("Tagged_Code_", "CodeT", "Code")),
    "name": tuple(
        f"class_SharedFunctionInfo__name_or_scope_info__{it}"
        for it in ("Object", "Tagged_Object_", "Tagged_NameOrScopeInfoT_")
    ),
    "script": tuple(
        f"class_SharedFunctionInfo__{it}"
        for it in ("script_or_debug_info__HeapObject", "script__Tagged_HeapObject_")
    ),
    "instance_type": ("class_Map__instance_type__uint16_t",),
    "script_name": ("class_Script__name__Object",),
    "script_source": ("class_Script__source__Object",),
    "line_ends": ("class_Script__line_ends__Object",),
    "length": ("class_String__length__int32_t",),
    "context_locals": ("scopeinfo_idx_ncontextlocals",),
    "first_names": ("scopeinfo_idx_first_vars",),
    "bytecodes": ("class_BytecodeArray__data__uintptr_t",),
    "instruction_start": tuple(
        f"class_Code__instruction_start__{it}" for it in ("Address", "uintptr_t")
    ),
    "instruction_size": ("class_Code__instruction_size__int",),
    "flags": ("class_Code__flags__uint32_t",),
    "baseline": ("CodeKindBaseline",),
    "inlined_count": ("DeoptimizationDataInlinedFunctionCountIndex",),
    "inlined_calls": ("DeoptimizationDataInliningPositionsIndex",),
    "literals": ("DeoptimizationDataLiteralArrayIndex",),
    "of_shared": ("type_SharedFunctionInfo__SHARED_FUNCTION_INFO_TYPE",),
    "of_scope": ("type_ScopeInfo__SCOPE_INFO_TYPE",),
    "of_script": ("type_Script__SCRIPT_TYPE",),
    "of_code": ("type_Code__CODE_TYPE",),
    "of_bytecode": ("type_BytecodeArray__BYTECODE_ARRAY_TYPE",),
    "of_array": ("type_FixedArray__FIXED_ARRAY_TYPE",),
    "first_other": ("FirstNonstringType",),
    "wrapper": ("type_CodeWrapper__CODE_WRAPPER_TYPE",),
}
EXPORTS: Final = (
    *_VERSION,
    *(f"v8dbg_{name}" for names in _CONSTANTS.values() for name in names),
)
"""Symbols of a file with V8 that are read."""
FAILURES: Final = (OSError, ValueError, LookupError, ArithmeticError, struct.error)
"""What reading memory that holds anything raises: it ends early, or its numbers lead nowhere."""
SCOPE_WORDS: Final = 20
"""Words of a ScopeInfo that are read."""
MARK: Final = f"v8dbg_{_CONSTANTS['shared'][0]}"
"""A file without it has no V8, or one that publishes nothing."""


class UnsupportedV8Error(SondeError):
    """A V8 whose functions cannot be read: it publishes no constants, or others than are known."""


@dataclass(frozen=True, slots=True)
class V8Layout:
    """Offsets in bytes within V8's objects, and numbers of their types, for one running V8."""

    version: tuple[int, int]
    """(major, minor)"""
    shared: int
    """JSFunction: SharedFunctionInfo."""
    code: int
    """JSFunction: Code."""
    function_data: int
    """SharedFunctionInfo: bytecode, code, or a number for a builtin."""
    name: int
    """SharedFunctionInfo: name or ScopeInfo."""
    script: int
    """SharedFunctionInfo: Script, or an object with a pointer to it."""
    instance_type: int
    """Map: number of the type, u16."""
    script_name: int
    script_source: int
    line_ends: int
    length: int
    """String: characters, i32."""
    context_locals: int
    """ScopeInfo: index of the word with the number of its context's local variables."""
    first_names: int
    """ScopeInfo: index of the first word with their names."""
    has_fixed_position: bool
    """ScopeInfo: the function's offset in the script is word 3, not behind the names."""
    bytecodes: int
    """BytecodeArray: first one."""
    positions: tuple[int, ...]
    """BytecodeArray: where the pointer to the table of source positions may be."""
    instruction_start: int
    """Code: address of the first instruction, or the first instruction."""
    has_address: bool
    """`instruction_start` is of the address."""
    instruction_size: int
    """Code: bytes of instructions, i32."""
    has_code: bool
    """A JSFunction has a pointer to its Code: not where V8 has dispatch tables instead."""
    code_before: int
    """Bytes from a pointer to Code, or from Code, to the first instruction behind it."""
    code_kind: int
    """Code: u32, kind in the lowest 4 bits."""
    code_positions: int
    """Code: table of source positions."""
    baseline: int
    """Kind of code that Sparkplug made."""
    inlined_count: int
    """Deoptimization data: index of the word with the number of inlined functions,"""
    inlined_calls: int
    """of that with the table of inlined calls,"""
    literals: int
    """and of that with the array that begins with these functions."""
    # Numbers of types (`instance_type`).
    of_shared: int
    of_scope: int
    of_script: int
    of_code: int
    of_bytecode: int
    of_array: int
    first_other: int
    """Types from this one on are no strings."""

    def for_kernel(self, code: list[tuple[int, int]]) -> bytes:
        """`struct unwind_v8`. `code`: start and end of the mappings of its file's code."""
        bounds = [at for range_ in code[:2] for at in range_]
        return struct.pack("<5Q2H", 0, *bounds, *[0] * (4 - len(bounds)), self.shared, self.code)


def read_layout(memory: Memory, exports: Mapping[str, int]) -> V8Layout:
    """The layout of a running V8. `exports`: addresses of EXPORTS in its memory.

    Raises UnsupportedV8Error, OSError.
    """
    try:
        return _layout(memory, exports)
    except (KeyError, ValueError) as error:
        raise UnsupportedV8Error(f"no readable constants of V8: {error}") from error


def _layout(memory: Memory, exports: Mapping[str, int]) -> V8Layout:
    def number(symbol: str) -> int:
        return int.from_bytes(read_exactly(memory, 4, exports[symbol]), "little", signed=True)

    version = number(_VERSION[0]), number(_VERSION[1])
    if not OLDEST <= version <= NEWEST:
        raise UnsupportedV8Error(f"the layout of V8 {version[0]}.{version[1]} is not known")
    found = {}
    for field, names in _CONSTANTS.items():
        symbol = next((it for name in names if (it := f"v8dbg_{name}") in exports), None)
        if symbol is not None:
            found[field] = number(symbol)
    is_type = ("of_", "first_other", "baseline", "wrapper")
    for field, value in found.items():
        if not 0 <= value <= (0xFFFF if field.startswith(is_type) else MAX_OFFSET):
            raise ValueError(field)
    has_address = version >= (11, 2)
    # The BPF programs read these words, of the first 64 bytes of a JSFunction.
    shared = found["shared"]
    code = found.get("code", shared - _WORD if version >= (11, 7) else shared + 3 * _WORD)
    if max(shared, code) > 56 or shared % _WORD or code % _WORD or min(shared, code) < _WORD:
        raise ValueError("shared, code")
    if not 0 < found["first_names"] < MAX_FIRST_NAMES:
        raise ValueError("first_names")
    if found["context_locals"] >= SCOPE_WORDS:
        raise ValueError("context_locals")
    if max(found.get(it, 0) for it in ("inlined_count", "inlined_calls", "literals")) > 15:
        raise ValueError("inlined_calls")
    if "instruction_start" in found:
        start = found["instruction_start"]
        size = found["instruction_size"]
    else:  # 11.3, which lost them
        start, size = 40, 56
    if has_address:
        positions = start - (3 if "wrapper" in found else 2) * _WORD
    else:
        positions = size - 2 * _WORD
    return V8Layout(
        version=version,
        shared=shared,
        code=code,
        function_data=_WORD,
        name=found["name"],
        script=found["script"],
        instance_type=found["instance_type"],
        script_name=found["script_name"],
        script_source=found["script_source"],
        line_ends=found["line_ends"],
        length=found["length"],
        context_locals=found["context_locals"],
        first_names=found["first_names"],
        has_fixed_position=found["first_names"] >= 5,
        bytecodes=found["bytecodes"],
        positions=(24,) if "wrapper" in found else (32,),
        instruction_start=start,
        has_address=has_address,
        instruction_size=size,
        has_code="code" in found or version < (13, 0),
        code_before=(24 if "wrapper" in found else 8) if has_address else start,
        code_kind=found.get("flags", start + _WORD),
        code_positions=positions,
        baseline=found["baseline"],
        inlined_count=found.get("inlined_count", 1),
        inlined_calls=found.get("inlined_calls", 7),
        literals=found.get("literals", 2),
        of_shared=found["of_shared"],
        of_scope=found["of_scope"],
        of_script=found["of_script"],
        of_code=found["of_code"],
        of_bytecode=found["of_bytecode"],
        of_array=found["of_array"],
        first_other=found["first_other"],
    )
