# SPDX-License-Identifier: Apache-2.0
"""What a trace of torch.profiler has before its list of events: devices and the clock.

The head may be megabytes of anything. Little of it is used, and the rest is not decoded where the
head is large: decoded JSON takes up to `limits.JSON_BYTES` times its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sonde.limits import JSON_BYTES, Budget, shortened

MAX_DEVICES = 256
"""Devices in one trace; a host has about sixteen."""
CHAR_BYTES = 12
"""Memory of a character of a head at most: of four bytes, in up to three texts at once."""
_MAX_DECODED = 1 << 20
"""Largest length of a head, or of a value in a larger one, that is decoded; a device takes about
500 characters."""
_OF_DEVICES = ("name", "uuid", "UUID", "pciDomainID", "pciBusID", "pciDeviceID", "numSms")
"""What is kept of a device, besides its number."""


@dataclass(slots=True)
class Head:
    """What is used of a head."""

    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By number: those values of `_OF_DEVICES` that are texts or numbers."""
    base_time_ns: object = None
    """As the trace has it."""

    def take(self, other: Head) -> None:
        self.devices, self.base_time_ns = other.devices, other.base_time_ns


class _Values(msgspec.Struct):
    """The values that are used, undecoded; others are skipped."""

    deviceProperties: msgspec.Raw = msgspec.Raw(b"null")  # noqa: N815 (a key of the trace)
    baseTimeNanoseconds: msgspec.Raw = msgspec.Raw(b"null")  # noqa: N815


def read(text: str, budget: Budget) -> Head:
    """The head in `text`, a JSON object; an empty one where it is malformed or too deep. Raises
    CaptureTooLarge."""
    head = Head()
    try:
        for one in [text] if len(text) <= _MAX_DECODED else _used(text):
            decoded_bytes = JSON_BYTES * len(one)
            budget.hold(decoded_bytes)
            try:
                _use(json.loads(one), head)
            finally:
                budget.hold(-decoded_bytes)
    except (ValueError, RecursionError, msgspec.DecodeError):
        return Head()
    return head


def _used(text: str) -> Iterator[str]:
    """A JSON object for each value of a large head that is used. Raises RecursionError and
    msgspec.DecodeError."""
    values = msgspec.json.decode(text.encode("utf-8", "replace"), type=_Values)
    for key in _Values.__struct_fields__:
        raw = memoryview(getattr(values, key))
        if len(raw) <= _MAX_DECODED:
            yield f'{{"{key}":{str(raw, "utf-8", "replace")}}}'


def is_small(value: object) -> bool:
    """Whether it is a number of a device or of something else that there are few of."""
    return type(value) is int and 0 <= value < 1 << 16


def _use(found: dict[str, Any], head: Head) -> None:
    """Keep what is used of the values of a head."""
    if (base_time_ns := found.get("baseTimeNanoseconds")) is not None:
        head.base_time_ns = base_time_ns if isinstance(base_time_ns, int | float | str) else ""
    listed = found.get("deviceProperties")
    for one in listed if isinstance(listed, list) else []:
        if not isinstance(one, dict) or not is_small(one.get("id")):
            continue
        if one["id"] in head.devices or len(head.devices) < MAX_DEVICES:
            head.devices[one["id"]] = {
                key: shortened(one[key]) if isinstance(one[key], str) else one[key]
                for key in _OF_DEVICES
                if isinstance(one.get(key), str | int | float)
            }
