# SPDX-License-Identifier: Apache-2.0
"""A selection of a store in pprof's format: stacks of functions with their weights, and no more.

Unlike pprof.py's, such a profile has no processes and threads, build ids, addresses, reasons of
waits and losses, and one function for each line of code.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from typing import Any

from sonde.export.pprof import SAMPLE_TYPES
from sonde.export.pprof_profile_pb2 import Profile as PprofProfile
from sonde.model.profile import ProfileKind


class _Strings:
    """The string table; '' has to be its first."""

    def __init__(self, message: PprofProfile) -> None:
        self._message = message
        self._indices: dict[str, int] = {}
        self.index("")

    def index(self, text: str) -> int:
        found = self._indices.get(text)
        if found is None:
            found = self._indices[text] = len(self._indices)
            self._message.string_table.append(text)
        return found


def pprof(
    kind: str,
    stacks: Sequence[Mapping[str, Any]],
    frames: Mapping[int, Mapping[str, Any]],
    start_ns: int,
    end_ns: int,
) -> bytes:
    """A gzipped profile. `kind`: as the column `kind` spells it; `stacks`: rows with frame_keys
    (leaf first), n (events), ns and bytes; `frames`: by key; times in ns since 1970.

    Raises KeyError for a kind that is none.
    """
    message = PprofProfile()
    strings = _Strings(message)
    types = SAMPLE_TYPES[ProfileKind.from_column(kind)]
    for name, unit in types:
        value = message.sample_type.add()
        value.type, value.unit = strings.index(name), strings.index(unit)
    second = "bytes" if types[1][1] == "bytes" else "ns"
    weights = ("n", second, "bytes")[: len(types)]
    message.time_nanos, message.duration_nanos = start_ns, end_ns - start_ns
    mappings: dict[str, int] = {}
    locations: dict[int, int] = {}
    for row in stacks:
        sample = message.sample.add()
        for key in row["frame_keys"]:
            number = locations.get(key)
            if number is None:
                number = locations[key] = len(locations) + 1
                _add_location(message, number, frames.get(key, {}), strings, mappings)
            sample.location_id.append(number)
        sample.value.extend(round(row[name]) for name in weights)
    return gzip.compress(message.SerializeToString(), 6, mtime=0)


def _add_location(
    message: PprofProfile,
    number: int,
    frame: Mapping[str, Any],
    strings: _Strings,
    mappings: dict[str, int],
) -> None:
    binary = str(frame.get("binary", ""))
    if binary not in mappings:
        mappings[binary] = len(mappings) + 1
        mapping = message.mapping.add()
        mapping.id, mapping.filename = mappings[binary], strings.index(binary)
        mapping.has_functions = mapping.has_filenames = mapping.has_line_numbers = True
    function = message.function.add()
    bare = binary if binary.startswith("[") else f"[{binary or 'unknown'}]"
    function.id, function.name = number, strings.index(frame.get("function") or bare)
    function.filename = strings.index(str(frame.get("file", "")))
    location = message.location.add()
    location.id, location.mapping_id = number, mappings[binary]
    line = location.line.add()
    line.function_id, line.line = number, int(frame.get("line") or 0)
