# SPDX-License-Identifier: Apache-2.0
"""A selection of a store in pprof's format: pprof.py, without processes and threads."""

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
        self._places: dict[str, int] = {}
        self.place("")

    def place(self, text: str) -> int:
        found = self._places.get(text)
        if found is None:
            found = self._places[text] = len(self._places)
            self._message.string_table.append(text)
        return found


def pprof(
    kind: str,
    stacks: Sequence[Mapping[str, Any]],
    frames: Mapping[int, Mapping[str, Any]],
    start_ns: int,
    end_ns: int,
) -> bytes:
    """A gzipped profile. `stacks`: frame_keys (leaf first), n, ns, bytes; `frames`: by key.

    Raises KeyError for a kind that no sample has.
    """
    message = PprofProfile()
    strings = _Strings(message)
    types = SAMPLE_TYPES[ProfileKind.from_column(kind)]
    for name, unit in types:
        value = message.sample_type.add()
        value.type, value.unit = strings.place(name), strings.place(unit)
    second = "bytes" if types[1][1] == "bytes" else "ns"
    weights = ("n", second, "bytes")[: len(types)]
    message.time_nanos, message.duration_nanos = start_ns, end_ns - start_ns
    mappings: dict[str, int] = {}
    places: dict[int, int] = {}
    for row in stacks:
        sample = message.sample.add()
        for key in row["frame_keys"]:
            place = places.get(key)
            if place is None:
                place = places[key] = len(places) + 1
                _add_location(message, place, frames.get(key, {}), strings, mappings)
            sample.location_id.append(place)
        sample.value.extend(round(row[name]) for name in weights)
    return gzip.compress(message.SerializeToString(), 6, mtime=0)


def _add_location(
    message: PprofProfile,
    place: int,
    frame: Mapping[str, Any],
    strings: _Strings,
    mappings: dict[str, int],
) -> None:
    binary = str(frame.get("binary", ""))
    if binary not in mappings:
        mappings[binary] = len(mappings) + 1
        mapping = message.mapping.add()
        mapping.id, mapping.filename = mappings[binary], strings.place(binary)
        mapping.has_functions = mapping.has_filenames = mapping.has_line_numbers = True
    function = message.function.add()
    bare = binary if binary.startswith("[") else f"[{binary or 'unknown'}]"
    function.id, function.name = place, strings.place(frame.get("function") or bare)
    function.filename = strings.place(str(frame.get("file", "")))
    location = message.location.add()
    location.id, location.mapping_id = place, mappings[binary]
    line = location.line.add()
    line.function_id, line.line = place, int(frame.get("line") or 0)
