# SPDX-License-Identifier: Apache-2.0
"""OTLP profiles: as bytes of any kind, and as messages whose indices and values an input chose."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.profiles.v1development import profiles_pb2

from data import Data, MemoryFile
from sonde.analyze.bound import explain
from sonde.readers import otlp_profiles
from timeline_checks import check

_file = MemoryFile()
_TEXTS = ("", "cpu", "samples", "nanoseconds", "count", "process.pid", "thread.id", "main", "f")
_MOST = 4


def one(raw: bytes) -> None:
    """Read a message; its first byte sets of which kind it is made."""
    kind, rest = raw[:1], raw[1:]
    if kind == b"m":
        rest = _message(Data(rest)).SerializeToString()
    timeline = otlp_profiles.read(_file.holding(rest))
    check(timeline)
    explain(timeline)


def _message(data: Data) -> Any:
    message = profiles_pb2.ProfilesData()
    tables = message.dictionary
    tables.string_table.extend(data.text(_TEXTS) for _ in range(data.byte() % 12))
    for _ in range(data.byte() % _MOST):
        tables.function_table.add(name_strindex=_index(data))
    for _ in range(data.byte() % _MOST):
        location = tables.location_table.add()
        for _ in range(data.byte() % _MOST):
            location.lines.add(function_index=_index(data))
    for _ in range(data.byte() % _MOST):
        tables.stack_table.add(location_indices=[_index(data) for _ in range(data.byte() % _MOST)])
    for _ in range(data.byte() % _MOST):
        attribute = tables.attribute_table.add(key_strindex=_index(data))
        attribute.value.int_value = _signed(data, 64)
    resource = message.resource_profiles.add()
    own = resource.resource.attributes.add(key=data.text(_TEXTS))
    own.value.int_value = _signed(data, 64)
    scope = resource.scope_profiles.add()
    for _ in range(data.byte() % _MOST):
        _profile(data, scope.profiles.add())
    return message


def _profile(data: Data, profile: Any) -> None:
    profile.sample_type.type_strindex = _index(data)
    profile.sample_type.unit_strindex = _index(data)
    profile.period = _signed(data, 64)
    profile.time_unix_nano = data.number(64)
    for _ in range(data.byte() % 8):
        sample = profile.samples.add(stack_index=_index(data))
        sample.attribute_indices.extend(_index(data) for _ in range(data.byte() % _MOST))
        sample.timestamps_unix_nano.extend(data.number(64) for _ in range(data.byte() % _MOST))
        sample.values.extend(_signed(data, 64) for _ in range(data.byte() % _MOST))


def _index(data: Data) -> int:
    return data.byte() % 12 if data.byte() < 240 else _signed(data, 32)


def _signed(data: Data, bits: int) -> int:
    value = data.number(bits)
    return value - (1 << bits) if value >> (bits - 1) else value
