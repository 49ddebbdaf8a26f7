# SPDX-License-Identifier: Apache-2.0
"""Reads API tables, strictly: what is misspelt or does not fit is an error that has its place."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

from sonde.apis.model import DIRECTIONS, OPS, RESULTS, Api, Call, Reading
from sonde.errors import UsageError

REGISTER_ARGUMENTS = {"x86_64": 6, "aarch64": 8}
"""Integer words of the arguments that are passed in registers."""

_API_KEYS = {"api", "libraries", "hands_out", "verified", "directions", "call"}
_CALL_KEYS = {
    *("function", "suffixes", "arguments", "op", "bytes", "scale"),
    *("direction", "blocking", "result", "status", "calls_back"),
}


def load(extra: Path | None = None) -> tuple[Api, ...]:
    """The APIs that come with Sonde, then those of the TOML files in the folder `extra`.

    Raises UsageError where a table is wrong.
    """
    tables = [(table.name, table.read_text()) for table in files(__package__).iterdir()
              if table.name.endswith(".toml")]  # fmt: skip
    if extra is not None:
        try:
            tables += [(str(path), path.read_text()) for path in extra.glob("*.toml")]
        except OSError as error:
            raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    apis = tuple(parse(text, source) for source, text in sorted(tables))
    seen: dict[str, str] = {}
    for api in apis:
        for call in api.calls:
            for symbol in call.symbols:
                if symbol in seen:
                    raise UsageError(
                        f"{symbol} is described twice, in {seen[symbol]} and {api.name}"
                    )
                seen[symbol] = api.name
    return apis


def parse(text: str, source: str, machine: str | None = None) -> Api:
    """One API from the text of its table; `source` names it in errors. Raises UsageError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is no TOML: {error}") from error
    return _ApiParser(source, machine or platform.machine()).api(table)


class _ApiParser:
    """Parses one file; `_place`: file and function, for errors."""

    def __init__(self, source: str, machine: str) -> None:
        self._place = source
        self._source = source
        self._registers = REGISTER_ARGUMENTS.get(machine, 6)
        self._structs_in_words = machine == "x86_64"
        self._positions: dict[str, int] = {}
        self._directions: dict[str, dict[int, str]] = {}

    def api(self, table: Mapping[str, object]) -> Api:
        self._known(table, _API_KEYS)
        name = self._text(table, "api")
        libraries = self._texts(table, "libraries")
        self._directions = {
            key: self._numbered(key, values)
            for key, values in self._mapping(table.get("directions", {}), "directions").items()
        }
        entries = table.get("call", [])
        if not isinstance(entries, list) or not entries:
            self._fail("no [[call]]")
        calls = tuple(self._call(name, self._mapping(entry, "call")) for entry in entries)
        hands_out = self._flag(table, "hands_out", default=False)
        verified = self._flag(table, "verified", default=True)
        return Api(name, libraries, hands_out, verified, calls)

    def _call(self, api: str, entry: Mapping[str, object]) -> Call:
        function = self._text(entry, "function")
        self._place = f"{self._source}: {function}"
        self._known(entry, _CALL_KEYS)
        op = self._text(entry, "op")
        if op not in OPS:
            self._fail(f"op is one of {', '.join(OPS)}, not {op!r}")
        suffixes = self._texts(entry, "suffixes") if "suffixes" in entry else ("",)
        names = self._arguments(str(entry.get("arguments", "")))
        blocking = entry.get("blocking", False)
        result = str(entry.get("result", "status"))
        if result not in RESULTS:
            self._fail(f"result is one of {', '.join(RESULTS)}, not {result!r}")
        if "status" in entry and result != "handle":
            self._fail('status goes with result = "handle"')
        reading = self._with_size(Reading(result=result), entry)
        direction, directions, reading = self._direction(reading, entry.get("direction", ""))
        if isinstance(blocking, str):
            reading = replace(reading, blocking_arg=self._position(blocking))
        elif not isinstance(blocking, bool):
            self._fail("blocking is an argument or true")
        if "status" in entry:
            reading = replace(reading, status_arg=self._position(entry["status"]))
        call = Call(
            api=api,
            function=function,
            symbols=tuple(function + suffix for suffix in suffixes),
            op=op,
            reading=reading,
            direction=direction,
            directions=directions,
            blocking=blocking is True,
            arguments=names,
            calls_back=self._flag(entry, "calls_back", default=False),
        )
        self._place = self._source
        return call

    def _arguments(self, text: str) -> tuple[str, ...]:
        """Names of the arguments, after they got their numbers, in words. A struct by value of more
        than two words lies on the stack (System V, x86-64); elsewhere the callee gets a pointer to
        it, and its words have no number."""
        self._positions = {}
        names = []
        in_registers = on_stack = 0
        for item in text.split():
            name, _, words = item.partition(":")
            names.append(name)
            if name in self._positions or not name.isidentifier():
                self._fail(f"{item!r} is no new argument")
            if words and not (words.isdecimal() and int(words) > 2):
                self._fail(f"{item!r}: a struct in words has three or more")
            if words and self._structs_in_words:
                for word in range(int(words)):
                    self._positions[f"{name}.{word}"] = self._registers + on_stack
                    on_stack += 1
            elif in_registers < self._registers:
                self._positions[name] = in_registers
                in_registers += 1
            else:
                self._positions[name] = self._registers + on_stack
                on_stack += 1
        return tuple(names)

    def _position(self, name: object) -> int:
        if not isinstance(name, str) or name not in self._positions:
            self._fail(f"{name!r} is none of its arguments ({', '.join(self._positions)})")
        return self._positions[name]

    def _with_size(self, reading: Reading, entry: Mapping[str, object]) -> Reading:
        scale = entry.get("scale", 1)
        if not isinstance(scale, int) or isinstance(scale, bool) or not 1 <= scale < 2**32:
            self._fail("scale is a positive number")
        size = entry.get("bytes")
        if size is None:
            if "scale" in entry:
                self._fail("scale goes with bytes")
            return reading
        if isinstance(size, dict):
            self._known(size, {"of", "at", "words"})
            words = size.get("words")
            if not isinstance(words, int) or words not in (1, 2, 3):
                self._fail("bytes.words is 1, 2 or 3")
            return replace(
                reading,
                scale=scale,
                vector_arg=self._position(size.get("of")),
                vector_at=self._offset(size.get("at", 0)),
                vector_len=words,
            )
        factors = size if isinstance(size, list) else [size]
        if not 1 <= len(factors) <= 3:
            self._fail("bytes multiplies up to three arguments")
        if not self._structs_in_words and any("." in str(factor) for factor in factors):
            return reading
        size_args = tuple(self._position(factor) for factor in factors)
        return replace(reading, scale=scale, size_args=size_args)

    def _direction(self, reading: Reading, value: object) -> tuple[str, dict[int, str], Reading]:
        """(fixed direction, directions by number, the reading with how to get that number)."""
        if isinstance(value, str):
            if value not in DIRECTIONS:
                self._fail(f"direction is one of {', '.join(DIRECTIONS[1:])}, not {value!r}")
            return value, {}, reading
        entry = self._mapping(value, "direction")
        self._known(entry, {"of", "by", "at", "mask"})
        by = entry.get("by")
        if by not in self._directions:
            self._fail(f"no [directions.{by}]")
        at = entry.get("at", [])
        if not isinstance(at, list) or len(at) > 2:
            self._fail("direction.at is a list of one or two offsets")
        mask = entry.get("mask", 0xFFFFFFFF)
        if not isinstance(mask, int) or not 0 < mask < 2**32:
            self._fail("direction.mask is a number of 32 bits")
        reading = replace(
            reading,
            direction_arg=self._position(entry.get("of")),
            direction_at=tuple(self._offset(offset) for offset in at),
            direction_mask=mask,
        )
        return "", self._directions[str(by)], reading

    def _numbered(self, name: str, values: object) -> dict[int, str]:
        """A table of directions: `1 = "h2d"`, or `"1,2" = "h2d"` for the two ends of a copy."""
        numbers = {}
        for key, direction in self._mapping(values, f"directions.{name}").items():
            parts = key.split(",")
            if not all(part.strip().isdecimal() for part in parts) or len(parts) > 2:
                self._fail(f"directions.{name}: {key!r} is no number, nor two")
            if direction not in DIRECTIONS:
                self._fail(f"directions.{name}: no direction {direction!r}")
            first, *second = (int(part) for part in parts)
            numbers[first << 8 | second[0] if second else first] = str(direction)
        return numbers

    def _offset(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**16:
            self._fail(f"{value!r} is no offset")
        return value

    def _known(self, entry: Mapping[str, object], keys: set[str]) -> None:
        for key in entry:
            if key not in keys:
                self._fail(f"unknown key {key!r}; known are {', '.join(sorted(keys))}")

    def _flag(self, entry: Mapping[str, object], key: str, default: bool) -> bool:
        value = entry.get(key, default)
        if not isinstance(value, bool):
            self._fail(f"{key} is true or false")
        return value

    def _text(self, entry: Mapping[str, object], key: str) -> str:
        value = entry.get(key)
        if not isinstance(value, str) or not value:
            self._fail(f"{key} is missing or no text")
        return value

    def _texts(self, entry: Mapping[str, object], key: str) -> tuple[str, ...]:
        value = entry.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            self._fail(f"{key} is a list of texts")
        return tuple(value)

    def _mapping(self, value: object, what: str) -> dict[str, object]:
        if not isinstance(value, dict):
            self._fail(f"{what} is a table")
        return value

    def _fail(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self._place}: {what}",
            "fix the table; its format is in src/sonde/apis/__init__.py",
        )
