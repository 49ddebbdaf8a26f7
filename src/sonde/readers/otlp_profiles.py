# SPDX-License-Identifier: Apache-2.0
"""Reads OTLP profiles: a ProfilesData message as protobuf, or as OTLP's JSON.

Schema: opentelemetry-proto 1.45, `profiles/v1development`, which is not stable; a message of
another version without on-CPU samples is refused. Each on-CPU sample type becomes samples; other
types (allocations, locks) are named in the notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sonde.errors import MissingDependency, NotACapture
from sonde.limits import MAX_NAME_CHARS, Budget, shortened, text_bytes
from sonde.model.timeline import Samples, Timeline
from sonde.readers.charged_interner import ChargedInterner
from sonde.readers.text import opened

SCHEMA = "opentelemetry-proto 1.45, profiles/v1development"
_JSON_BYTES = 72
"""Memory per byte of JSON until it is decoded: an empty message (`{},`) has three bytes, and takes
205 at most."""
_TEXT_BYTES = 200
_SAMPLE_BYTES = 240
"""Memory of a text and a sample, from reading to the verdict."""
_KNOWN_BYTES = 200
"""Memory of the name that is known of a stack, or of a location."""
_MAX_NS = 10**15
"""Largest weight of one sample: eleven days."""
# Names of sample types that are on-CPU samples.
_CPU = {"cpu", "samples", "on-cpu", "on_cpu", "sample"}
_NS_OF = {"nanoseconds": 1, "ns": 1, "microseconds": 1_000, "us": 1_000, "milliseconds": 1_000_000}
_USUAL_NS = 1_000_000_000 // 99
"""Weight of a sample where the profile states no period: 99 samples a second."""


def looks_like(head: bytes) -> bool:
    """Whether a file that begins with `head` may hold OTLP profiles."""
    if head.lstrip().startswith(b"{"):
        return b'"resourceProfiles"' in head or b'"resource_profiles"' in head
    return head[:1] in (b"\x0a", b"\x12")


def read(path: Path) -> Timeline:
    """Reads profiles. Raises CaptureError, NotACapture for another format, MissingDependency."""
    try:
        from google.protobuf import json_format, message
        from opentelemetry.proto.profiles.v1development import profiles_pb2

        from sonde.protobuf_size import sizes_of
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the Python package {error.name} is not installed", "pip install opentelemetry-proto"
        ) from error
    data: Any = profiles_pb2.ProfilesData()
    budget = Budget(str(path), 1)
    with opened(path) as file:
        raw = file.read(budget.limit_bytes + 1)
    budget.hold(len(raw))
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        if raw.lstrip().startswith(b"{"):
            budget.hold(_JSON_BYTES * len(raw))
            json_format.Parse(raw, data, ignore_unknown_fields=True)
        else:
            left_bytes = budget.limit_bytes - budget.held_bytes
            budget.hold(sizes_of(data.DESCRIPTOR).decoded_bytes(raw, left_bytes))
            data.ParseFromString(raw)
    except (
        *(message.DecodeError, json_format.ParseError, RecursionError),
        *(ValueError, TypeError, AttributeError),
    ) as error:
        why = next(iter(str(error).splitlines()), "damaged")
        raise NotACapture(
            f"{path} is no profile by {SCHEMA}: {why[:120]}",
            "export it with that version of the schema",
        ) from error
    reader = _Reader(data.dictionary, budget)
    for resource in data.resource_profiles:
        pid = reader.number(resource.resource.attributes, "process.pid")
        name = reader.text_of(resource.resource.attributes, "process.executable.name")
        for scope in resource.scope_profiles:
            for profile in scope.profiles:
                reader.add(profile, pid, name)
    if not reader.time:
        raise NotACapture(
            f"{path} holds no on-CPU sample by {SCHEMA}",
            "export it with that version of the schema",
        )
    return reader.timeline()


class _Reader:
    """Collects samples. Invalid indices leave a sample without a name; they are no error."""

    def __init__(self, dictionary: Any, budget: Budget) -> None:
        self._dictionary = dictionary
        self._strings: Sequence[str] = dictionary.string_table
        self.interner = ChargedInterner(budget)
        self.time: list[int] = []
        self._track: list[int] = []
        self._weight: list[int] = []
        self._name: list[int] = []
        self._left_out: set[str] = set()
        self._lost: Counter[str] = Counter()
        self._function_of: dict[int, int] = {}
        self._location_of: dict[int, str] = {}
        self._budget = budget
        self._text_of: dict[int, str] = {}
        self._names_cut = 0

    def text(self, index: int) -> str:
        """A text of the string table. Each is decoded once: many entries may share it."""
        known = self._text_of.get(index)
        if known is None:
            known = self._strings[index] if 0 <= index < len(self._strings) else ""
            known = self._text_of[index] = self._short(known)
        return known

    def _short(self, text: str) -> str:
        if len(text) > MAX_NAME_CHARS:
            self._names_cut += 1
            text = shortened(text)
        self._budget.hold(_TEXT_BYTES + text_bytes(text))
        return text

    def text_of(self, attributes: Any, key: str) -> str:
        return self._short(next((a.value.string_value for a in attributes if a.key == key), ""))

    def number(self, attributes: Any, key: str) -> int:
        return next((a.value.int_value for a in attributes if a.key == key), 0)

    def _attribute(self, indices: Sequence[int], key: str) -> int:
        table = self._dictionary.attribute_table
        for index in indices:
            if 0 <= index < len(table) and self.text(table[index].key_strindex) == key:
                return int(table[index].value.int_value)
        return 0

    def add(self, profile: Any, pid: int, process: str) -> None:
        kind = self.text(profile.sample_type.type_strindex)
        unit = self.text(profile.sample_type.unit_strindex)
        if kind and kind not in _CPU:
            self._left_out.add(kind)
            return
        scale = _NS_OF.get(unit, 0)
        period = int(profile.period) if profile.period > 0 else _USUAL_NS
        tracks: dict[tuple[int, ...], int] = {}
        for sample in profile.samples:
            times = list(sample.timestamps_unix_nano)
            values = list(sample.values)
            if not times and not values:  # of which a file of some KB may hold a million
                self._lost["without a value or a time"] += 1
                continue
            attributes = tuple(sample.attribute_indices)
            track = tracks.get(attributes)
            if track is None:
                self._budget.hold(_KNOWN_BYTES + 8 * len(attributes))
                track = tracks[attributes] = self._thread(attributes, pid, process)
            name = self._function(sample.stack_index)
            if not times:
                times = [profile.time_unix_nano] * len(values)
            if len(values) != len(times):
                whole = sum(values) if values else len(times)
                values = [0] * len(times)
                values[0] = whole
            self._budget.hold(_SAMPLE_BYTES * len(times))
            for time_ns, value in zip(times, values, strict=True):
                weight = value * (scale or period)
                if time_ns >= 1 << 62:
                    self._lost["with a time out of range"] += 1
                    continue
                if not 0 <= weight <= _MAX_NS:
                    self._lost["with an impossible weight"] += 1
                    continue
                self.time.append(time_ns)
                self._track.append(track)
                self._weight.append(weight)
                self._name.append(name)

    def _thread(self, attributes: Sequence[int], pid: int, process: str) -> int:
        """The track of samples with these attributes."""
        pid = self._attribute(attributes, "process.pid") or pid
        tid = self._attribute(attributes, "thread.id") or pid
        return self.interner.thread(pid, tid, process, process)

    def _function(self, stack_index: int) -> int:
        """The index of the name of the innermost named frame of a stack."""
        known = self._function_of.get(stack_index)
        if known is not None:
            return known
        self._budget.hold(_KNOWN_BYTES)
        found = ""
        tables = self._dictionary
        if 0 <= stack_index < len(tables.stack_table):
            for at in tables.stack_table[stack_index].location_indices:
                found = self._of_location(at)
                if found:
                    break
        number = self._function_of[stack_index] = self.interner.name(found)
        return number

    def _of_location(self, at: int) -> str:
        """The innermost named function of a location. Cached: many stacks may share a location."""
        known = self._location_of.get(at)
        if known is not None:
            return known
        self._budget.hold(_KNOWN_BYTES)
        tables = self._dictionary
        found = ""
        if 0 <= at < len(tables.location_table):
            for line in tables.location_table[at].lines:
                if 0 <= line.function_index < len(tables.function_table):
                    found = self.text(tables.function_table[line.function_index].name_strindex)
                    if found:
                        break
        self._location_of[at] = found
        return found

    def timeline(self) -> Timeline:
        count = len(self.time)
        return Timeline(
            names=self.interner.names,
            tracks=self.interner.tracks,
            samples=Samples(
                np.array(self.time, np.int64),
                np.array(self._track, np.int32),
                np.array(self._weight, np.int64),
                np.array(self._name, np.int32),
                np.zeros(count, bool),
            ),
            tick_ns=_USUAL_NS,
            sources=("OTLP profiles",),
            notes=[
                *(f"profiles of {kind[:80]} are left out" for kind in sorted(self._left_out)),
                *(f"{count:,} samples {what}" for what, count in self._lost.items()),
                *([f"{self._names_cut:,} names were truncated"] if self._names_cut else []),
            ],
        )
