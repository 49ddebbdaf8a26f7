# SPDX-License-Identifier: Apache-2.0
"""Layouts of PHP's frames and functions, by the number of its interface for extensions.

PHP loads extensions of its number (ZEND_MODULE_API_NO) alone, so what they may access has one
layout for each number. Sources: Zend/zend_globals.h (zend_executor_globals), Zend/zend_compile.h
(zend_execute_data, zend_op, zend_op_array, ZEND_CALL_TOP), Zend/zend.h (zend_class_entry) and
Zend/zend_types.h (zend_string) of each. All offsets in bytes, for 64-bit builds without threads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sonde.unwind.chain import ABSENT, CFA_LOOP, CFA_RSP, ChainLayout, Rule, UnsupportedEngineError

# The same in all versions below.
TYPE: Final = 0
"""zend_function: u8, one of"""
INTERNAL_FUNCTION: Final = 1
USER_FUNCTION: Final = 2
EVAL_CODE: Final = 4
NAME: Final = 8
"""zend_function: zend_string, 0 for the code of a file."""
SCOPE: Final = 16
"""zend_function: its class."""
CLASS_NAME: Final = 8
STRING_LENGTH: Final = 16
STRING_TEXT: Final = 24
OP_LINE: Final = 24
"""zend_op: u32."""

_CALL_TOP: Final = 17
"""Bit of ZEND_CALL_TOP."""
_OPLINE_REGISTER: Final = 15
"""ZEND_VM_IP_GLOBAL_REG on x86-64 (Zend/zend_execute.c)."""
_BUILT: Final = re.compile(r"(\d{8}),(N?TS)(,debug)?(,.*)?")


@dataclass(frozen=True, slots=True)
class PhpLayout:
    """What differs between versions."""

    version: tuple[int, int]
    current: int
    """zend_executor_globals: current_execute_data, the newest frame."""
    filename: int
    """zend_op_array: zend_string."""
    first_line: int
    """zend_op_array: u32, and the last line behind it."""

    @property
    def chain(self) -> ChainLayout:
        """What frames are walked by."""
        return ChainLayout(
            newest=ABSENT,
            frame_bytes=56,
            function=24,
            place=0,  # opline
            previous=48,
            flags=40,  # This.u1.type_info
            flags_are_behind=False,
            last=_CALL_TOP,
            native=ABSENT,
            place_register=_OPLINE_REGISTER,
            is_bounded=False,
            dummy=0,
        )


_LAYOUTS: Final = {
    20210902: PhpLayout((8, 1), 488, 144, 152),
    20220829: PhpLayout((8, 2), 488, 152, 160),
    20230831: PhpLayout((8, 3), 488, 144, 152),
    20240924: PhpLayout((8, 4), 488, 168, 176),
}
OLDEST: Final = min(it.version for it in _LAYOUTS.values())
NEWEST: Final = max(it.version for it in _LAYOUTS.values())


def generated_rule(loop: Rule | None) -> Rule | None:
    """How to unwind code that the JIT compiler has made, by the rule of execute_ex (None: unknown).

    execute_ex jumps to that code, which runs in its frame: that has room for what the code keeps
    (ZEND_VM_HYBRID_JIT_RED_ZONE_SIZE of Zend/zend_vm_opcodes.h).
    """
    if loop is None or loop[0] != CFA_RSP:
        return None
    return CFA_LOOP, *loop[1:]


def php_layout(built: str) -> PhpLayout:
    """The layout of what a file claims to be, "20220829,NTS". Raises UnsupportedEngineError."""
    found = _BUILT.fullmatch(built)
    if found is None:
        raise UnsupportedEngineError("PHP: its version cannot be read")
    layout = _LAYOUTS.get(int(found[1]))
    if layout is None:
        raise UnsupportedEngineError(f"PHP of API {found[1]}: its layout is not known")
    if found[2] != "NTS":
        raise UnsupportedEngineError("PHP: a build for threads (ZTS)")
    if found[3]:
        raise UnsupportedEngineError("PHP: a debug build")
    return layout
