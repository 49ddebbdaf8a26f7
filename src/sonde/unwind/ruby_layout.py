# SPDX-License-Identifier: Apache-2.0
"""Layouts of Ruby's frames, instruction sequences and strings, by minor version.

Sources: vm_core.h (rb_execution_context_t, rb_control_frame_t, rb_iseq_t, rb_iseq_constant_body,
rb_iseq_location_t), iseq.c (succ_index_table, iseq_insn_info_entry), method.h
(rb_method_entry_t), symbol.h (rb_symbols_t), internal/imemo.h, and
include/ruby/internal/core/{rbasic,rstring,rarray}.h of each. They are the same in all
releases of a minor version. All offsets in bytes, for 64-bit builds. Those of 3.2 and 3.4 were not
tried on a running program.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sonde.unwind.chain import ABSENT, CFA_LOOP, ChainLayout, Rule, UnsupportedEngineError

# The same in all versions below.
NEWEST_FRAME: Final = 16
"""rb_execution_context_t: cfp, the newest frame, behind vm_stack and vm_stack_size."""
ISEQ_BODY: Final = 16
"""rb_iseq_t: its body."""
ENCODED: Final = 8
"""Body: the first instruction."""
PATH: Final = 64
"""Body: the path of its file, a String or an Array of the path as given and the real one."""
LABEL: Final = 80
"""Body: what backtraces call it."""
CALLED_ID: Final = 24
"""rb_method_entry_t: the name's id."""
LINE_BYTES: Final = 12
"""iseq_insn_info_entry: {int line; int node; events}."""
TABLE_IMMEDIATE: Final = 54
"""succ_index_table: positions in its first part, in words of 9 with 7 bits for each;"""
TABLE_BLOCKS: Final = 48
"""then blocks of 512 positions,"""
BLOCK_BYTES: Final = 80
"""each {unsigned rank; u64 ranks of its 64s, 9 bits each; u64 bits[8]}."""
T_MASK: Final = 0x1F
T_STRING: Final = 5
T_ARRAY: Final = 7
STRING_IS_APART: Final = 1 << 13
"""RSTRING_NOEMBED: its text lies elsewhere."""
ARRAY_IS_INSIDE: Final = 1 << 13
"""RARRAY_EMBED_FLAG"""
IMEMO_SHIFT: Final = 12
IMEMO_MASK: Final = 15
IMEMO_SVAR: Final = 2
IMEMO_METHOD: Final = 6
ID_SCOPE_BITS: Final = 4
IDS_A_PIECE: Final = 512
"""ID_ENTRY_UNIT: names in one Array of them, two words each."""
SYMBOLS_BYTES: Final = 32
"""rb_symbols_t: {u32 last; table; Array of pieces; table}."""

_FINISH: Final = 5
"""Bit of VM_FRAME_FLAG_FINISH."""
_DUMMY: Final = 0x7999
"""Upper half of VM_FRAME_MAGIC_DUMMY: of what follows a thread's outermost frame."""
_RELEASED: Final = re.compile(r"(\d{1,2})\.(\d{1,2})\.\d{1,2}")


@dataclass(frozen=True, slots=True)
class RubyLayout:
    """What differs between minor versions."""

    version: tuple[int, int]
    frame_bytes: int
    """Of rb_control_frame_t, which has no __bp__ from 3.3 on."""
    lines: int
    """Body: {lines, positions, u32 how many, table}; from 3.2 on the first line is an int."""
    last_operator: int
    """Ids up to this one (tLAST_OP_ID) have no scope bits."""
    embedded: int
    """RString: its text, where that is inside."""
    has_short_length: bool
    """RString of 3.1: the length of an embedded text is in the flags."""

    generated: Rule | None = None
    """How to unwind code that YJIT has made: that of 3.1 pushes three registers and calls from
    there (yjit_entry_prologue). None: not known."""

    @property
    def chain(self) -> ChainLayout:
        """What frames are walked by."""
        return ChainLayout(
            newest=NEWEST_FRAME,
            frame_bytes=self.frame_bytes,
            function=16,  # iseq
            place=0,  # pc
            previous=ABSENT,
            flags=32,  # ep: the frame's values end with them
            flags_are_behind=True,
            last=_FINISH,
            native=16,  # ep[-2]: its method entry
            place_register=ABSENT,
            is_bounded=True,
            dummy=_DUMMY,
        )


_LAYOUTS: Final = {
    (3, 1): RubyLayout(
        (3, 1), 64, 120, 169, 16, has_short_length=True, generated=(CFA_LOOP, 0, 32, 0)
    ),
    (3, 2): RubyLayout((3, 2), 64, 112, 169, 24, has_short_length=False),
    (3, 3): RubyLayout((3, 3), 56, 112, 169, 24, has_short_length=False),
    (3, 4): RubyLayout((3, 4), 56, 112, 170, 24, has_short_length=False),
}
OLDEST: Final = min(_LAYOUTS)
NEWEST: Final = max(_LAYOUTS)


def ruby_layout(version: str) -> RubyLayout:
    """The layout of a version as `ruby --version` has it. Raises UnsupportedEngineError."""
    found = _RELEASED.fullmatch(version)
    if found is None:
        raise UnsupportedEngineError("Ruby: its version cannot be read")
    layout = _LAYOUTS.get((int(found[1]), int(found[2])))
    if layout is None:
        raise UnsupportedEngineError(f"Ruby {found[1]}.{found[2]}: its layout is not known")
    return layout
