# SPDX-License-Identifier: Apache-2.0
"""Which mappings of a process hold code of V8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sonde.resolve.mappings import Mapping

FILES: Final = ("node", "libnode", "libv8")
"""How the names of files begin that are looked into."""
MAX_BYTES: Final = 1 << 32
"""Of one mapping that is taken for V8's: its process decides how large one is."""
MAX_GENERATED: Final = 64
"""Ranges of generated code. What of it lies in others is walked as code of no known kind."""


class V8Mappings:
    """Those of the code of one file that may have V8 in it.

    V8 maps its own code a second time, near the code that it generates: with another bias.
    """

    def __init__(self) -> None:
        self.file: Mapping | None = None
        """One of them."""
        self.bounds: dict[int, tuple[int, int]] = {}
        """First address and end, by bias."""

    def add(self, mapping: Mapping, bias: int) -> None:
        """Take in a mapping of code, if it is of the file that V8 is in: the first such file
        with more than 1 MiB of code, else the last one."""
        if not mapping.path.rpartition("/")[2].startswith(FILES):
            return
        if self.file is not None and self.file.path != mapping.path:
            # Debian's program is small, and its library has V8.
            if self.bounds and sum(end - start for start, end in self.bounds.values()) > 1 << 20:
                return
            self.bounds.clear()
            self.file = None
        self.file = self.file or mapping
        start, end = self.bounds.get(bias, (mapping.start, mapping.end))
        self.bounds[bias] = min(start, mapping.start), max(end, mapping.end)

    @property
    def code(self) -> list[tuple[int, int]]:
        """Start and end of what is mapped with each bias."""
        return sorted(self.bounds.values())


def generated(mappings: Sequence[Mapping]) -> tuple[list[tuple[int, int]], int]:
    """(start, end) of anonymous code, and of what is reserved beside it: V8 makes that executable
    later, which no event reports. And how many more there are than are kept."""
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
