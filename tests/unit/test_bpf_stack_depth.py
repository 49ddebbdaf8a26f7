# SPDX-License-Identifier: Apache-2.0
"""The stack of a BPF program and of what it calls fits into 512 bytes, frames rounded up to 32.

Kernels before 6.3 or so refuse a program for which it does not; newer ones give some programs a
separate stack and round to 16, so that loading them here does not show it.
"""

from __future__ import annotations

import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 512
ROUNDED_TO = 32
FRAME = 10
"""The register that holds the end of a function's stack."""
ADD_IMMEDIATE, MOVE, CALL, LOAD_LONG = 0x07, 0xBF, 0x85, 0x18
PSEUDO_CALL = 1
FUNCTION = 2
"""Of a symbol in ELF."""
TAIL_CALL = 12
"""Number of the helper."""
SYMBOLS, RELOCATIONS = 2, 9
"""Of a section."""


def _text(texts: bytes, at: int) -> str:
    return texts[at : texts.index(b"\0", at)].decode()


class BpfElf:
    """Functions of a compiled object: the size of the stack, and what each calls or passes on."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        (offset,) = struct.unpack_from("<Q", self._data, 40)
        (count,) = struct.unpack_from("<H", self._data, 60)
        self._sections = [
            struct.unpack_from("<IIQQQQIIQQ", self._data, offset + 64 * at) for at in range(count)
        ]
        table = next(section for section in self._sections if section[1] == SYMBOLS)
        symbols = self._content(table)
        self._symbols = [
            struct.unpack_from("<IBBHQQ", symbols, at) for at in range(0, len(symbols), 24)
        ]
        texts = self._content(self._sections[table[6]])
        self.names = {
            (section, value): _text(texts, name)
            for name, info, _, section, value, _ in self._symbols
            if info & 15 == FUNCTION
        }
        (names_at,) = struct.unpack_from("<H", self._data, 62)
        section_names = self._content(self._sections[names_at])
        self.section_of = {
            function: _text(section_names, self._sections[section][0])
            for (section, _), function in self.names.items()
        }
        self.tail_calls: set[str] = set()
        """Functions with a tail call in them."""
        self.depth: dict[str, int] = {}
        self.calls: dict[str, set[str]] = {}
        for _, info, _, section, value, size in self._symbols:
            if info & 15 == FUNCTION:
                self._read(section, value, size)

    def _content(self, section: tuple[int, ...]) -> bytes:
        return self._data[section[4] : section[4] + section[5]]

    def _targets(self, section: int) -> dict[int, tuple[int, int]]:
        """(section, address) of the symbol that the instruction at an offset names."""
        found = {}
        for other in self._sections:
            if other[1] == RELOCATIONS and other[7] == section:
                content = self._content(other)
                for at in range(0, len(content), 16):
                    offset, info = struct.unpack_from("<QQ", content, at)
                    symbol = self._symbols[info >> 32]
                    found[offset] = (symbol[3], symbol[4])
        return found

    def _read(self, section: int, start: int, size: int) -> None:
        name = self.names[section, start]
        code, targets = self._content(self._sections[section]), self._targets(section)
        depth, calls = 0, set()
        copies: set[int] = set()
        for at in range(start, start + size, 8):
            op, registers, offset, immediate = struct.unpack_from("<BBhi", code, at)
            to, source = registers & 15, registers >> 4
            if op & 7 in (1, 2, 3) and FRAME in ((source,) if op & 7 == 1 else (to,)):
                depth = max(depth, -offset)
            if op == MOVE and source == FRAME:
                copies.add(to)
            elif op == ADD_IMMEDIATE and to in copies and immediate < 0:
                depth = max(depth, -immediate)
                copies.discard(to)
            if op == CALL and source == 0 and immediate == TAIL_CALL:
                self.tail_calls.add(name)
            callee = None
            if op == CALL and source == PSEUDO_CALL:
                callee = targets.get(at, (section, at))
                callee = callee[0], callee[1] + 8 * (immediate + 1)
            elif op == LOAD_LONG and at in targets:  # a callback
                callee = targets[at][0], targets[at][1] + immediate
            if callee in self.names:
                calls.add(self.names[callee])
        self.depth[name], self.calls[name] = depth, calls

    def deepest(self, name: str) -> tuple[int, list[str]]:
        """Bytes of the deepest stack from a function on, and the functions on it."""
        below = max((self.deepest(one) for one in self.calls[name]), default=(0, []))
        frame = -(-max(self.depth[name], 1) // ROUNDED_TO) * ROUNDED_TO
        return frame + below[0], [name, *below[1]]


def objects() -> list[Path]:
    """The compiled objects of the newest build."""
    found = sorted(
        ROOT.glob("build/target/release/build/sonde-native-*/out"),
        key=lambda folder: folder.stat().st_mtime,
    )
    assert found, "scripts/setup build"
    return sorted(found[-1].glob("*.bpf.o"))


def test_no_program_needs_more_stack_than_old_kernels_give():
    seen = 0
    for path in objects():
        elf = BpfElf(path)
        for name in elf.depth:
            depth, chain = elf.deepest(name)
            assert depth <= MOST, f"{path.name}: {depth} bytes by {' > '.join(chain)}"
            seen += len(chain) > 1
    assert seen > 20


def test_calls_and_callbacks_are_followed():
    memory = BpfElf(next(path for path in objects() if path.name == "memory.bpf.o"))
    assert {"leave_piece", "count_mapping"} <= memory.calls["on_call"]
    assert 32 <= memory.depth["leave_piece"] <= MOST


def test_programs_that_are_preempted_by_themselves_stay_on_their_threads_stack():
    seen = set()
    for path in objects():
        elf = BpfElf(path)
        for name, section in elf.section_of.items():
            if section.partition(".")[0] in {"uprobe", "uretprobe"}:
                assert name in elf.tail_calls, f"{path.name}: {name} lacks STAY_ON_STACK"
                seen.add(name)
    assert {"on_launch_site", "on_call_entry_multi", "on_call_return"} <= seen
