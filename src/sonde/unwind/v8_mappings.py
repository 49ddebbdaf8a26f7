# SPDX-License-Identifier: Apache-2.0
"""Which mappings of a process hold code of V8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sonde.resolve.mappings import Mapping

FILES: Final = ("node", "libnode", "libv8")
"""How names of files begin that may have V8 in them."""
MAX_BYTES: Final = 1 << 32
"""Size of a mapping that is taken for V8's, at most: a process can make any."""
MAX_GENERATED: Final = 64
"""Ranges of generated code of one process; code in further ones is walked by frame pointers."""


class V8Mappings:
    """The mappings with code of one file that may have V8 in it.

    V8 maps the code of its builtins a second time, near the code that it generates: then there are
    two biases.
    """

    def __init__(self) -> None:
        self.file: Mapping | None = None
        """A mapping of the file; None: there is no such file."""
        self.bounds: dict[int, tuple[int, int]] = {}
        """(first address, end) of its mappings by bias."""

    def add(self, mapping: Mapping, bias: int) -> None:
        """Take in a mapping of code, if it is of the file that V8 is in: the first such file
        with more than 1 MiB of code, else the last one."""
        if not mapping.path.rpartition("/")[2].startswith(FILES):
            return
        if self.file is not None and self.file.path != mapping.path:
            # Debian's node is a small program, and libnode has V8.
            if self.bounds and sum(end - start for start, end in self.bounds.values()) > 1 << 20:
                return
            self.bounds.clear()
            self.file = None
        self.file = self.file or mapping
        start, end = self.bounds.get(bias, (mapping.start, mapping.end))
        self.bounds[bias] = min(start, mapping.start), max(end, mapping.end)

    @property
    def code(self) -> list[tuple[int, int]]:
        """(start, end) of what is mapped with each bias."""
        return sorted(self.bounds.values())


def generated(mappings: Sequence[Mapping]) -> tuple[list[tuple[int, int]], int]:
    """((start, end) of anonymous code, and of what is reserved beside it, which V8 makes executable
    later without an event; how many such ranges there are beyond MAX_GENERATED)."""
    found: list[tuple[int, int]] = []
    reserved: list[tuple[int, int]] = []
    for mapping in mappings:
        is_code = "x" in mapping.prot
        is_ours = is_code or mapping.prot.startswith("---")
        if mapping.path or not is_ours or mapping.end - mapping.start > MAX_BYTES:
            reserved.clear()
            continue
        if reserved and reserved[-1][1] != mapping.start:
            reserved.clear()
        here = (mapping.start, mapping.end)
        if is_code:
            found += [*reserved, here]
            reserved.clear()
        elif found and found[-1][1] == mapping.start:
            found.append(here)
        else:
            reserved.append(here)
    return found[:MAX_GENERATED], max(0, len(found) - MAX_GENERATED)
