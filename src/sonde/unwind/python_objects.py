# SPDX-License-Identifier: Apache-2.0
"""Dicts, attributes, texts and numbers of CPython 3.10 to 3.14 in the memory of a process.

Layouts: Include/internal/pycore_dict.h and pycore_object.h of each minor version,
Objects/dictobject.c of 3.10, Include/cpython/object.h, unicodeobject.h and longintrepr.h. Nothing
of it is trusted: each pointer may lead anywhere, each size may be any number. What is followed is a
fixed path of objects, never a list or a tree, with a limit of reads and bytes (`Reader`).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sonde.unwind.process_memory import USER_END

MAX_ENTRIES: Final = 16_384
"""Of one dict; one with more is not read."""
MAX_ATTRIBUTES: Final = 256
"""Of one object; in those beyond nothing is looked for."""
MAX_READS: Final = 65_536
MAX_BYTES: Final = 4 << 20
"""Of one `Reader`."""
MAX_S: Final = 0.4
"""The same by the clock."""
_READS_AT_ONCE: Final = 512
"""One request to the child that reads; it makes others wait."""
_TEXT_BYTES: Final = 128
"""Read of a text at first: its head, and a name of common length."""
_DICT, _TYPE_FLAGS, _LONG, _UNICODE = 1 << 29, 168, 1 << 24, 1 << 28
"""tp_flags of subclasses of dict, int, str; where a type has them."""
_MANAGED_DICT, _INLINE_VALUES = 1 << 4, 1 << 2
_DICT_OFFSET: Final = 288
_CACHED_KEYS: Final = {11: 872, 12: 880, 13: 880, 14: 880}
"""ht_cached_keys of a class: the keys that its instances share, where they have no dict."""
_DICT_BYTES: Final = 48
_MODULE_DICT: Final = 16
_BEFORE: Final = 32
"""What lies before an object of a class: pointers to its values and to its dict."""
UNICODE_3_10, UNICODE_3_12 = (48, 72), (40, 56)
"""Where the characters of a str begin: of one that is ASCII, of others."""
_ENCODINGS: Final = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}

Version = tuple[int, int]
"""(major, minor)"""


class UnreadableError(ValueError):
    """Memory that does not hold what is looked for, or more of it than is read."""


class Parts(Protocol):
    """Memory that is read in many places at once."""

    def read_many(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """What pread() returns for each (size, address), b"" where it fails. Raises OSError."""


def text_shape(state: int, version: Version) -> tuple[int, bool, int]:
    """(bytes of a character, whether it is ASCII, where the characters begin) of a str, by
    `state`, the 32 bits at 32. The first is 0 or any number up to 7 in memory that is no str."""
    # interned: 2 bits; from 3.14 on a separate field of at most 16 bits
    shift = 16 if version >= (3, 14) and not state >> 2 & 7 else 2
    is_ascii = bool(state >> (shift + 4) & 1)
    after_ascii, after_compact = UNICODE_3_12 if version >= (3, 12) else UNICODE_3_10
    return state >> shift & 7, is_ascii, after_ascii if is_ascii else after_compact


def decoded(raw: bytes, kind: int) -> str:
    """Characters of a str, each of `kind` bytes."""
    return raw.decode(_ENCODINGS.get(kind, "latin-1"), "replace")


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a dict, or those that the instances of a class share."""

    entries: int
    """Address."""
    count: int
    entry_bytes: int

    @property
    def has_hashes(self) -> bool:
        """Whether an entry begins with the key's hash."""
        return self.entry_bytes == 24


class Reader:
    """Reads the objects of one interpreter, within limits. All methods raise UnreadableError, and
    OSError where the process is gone or makes its readers wait."""

    def __init__(self, memory: Parts, version: Version) -> None:
        self._memory = memory
        self._version = version
        self._reads, self._bytes = MAX_READS, MAX_BYTES
        self._until_s = time.monotonic() + MAX_S

    def word(self, at: int) -> int:
        """A pointer."""
        return _word(self._one(8, at))

    def value_of(self, dict_at: int, name: str) -> int:
        """The address of what a dict has for a text that is ASCII; 0 where it has nothing."""
        found = self.items(dict_at)
        for begin in range(0, len(found), _READS_AT_ONCE):
            some = found[begin : begin + _READS_AT_ONCE]
            for (_, value), known in zip(
                some, self._are(name, [it[0] for it in some]), strict=True
            ):
                if known:
                    return value
        return 0

    def items(self, dict_at: int) -> list[tuple[int, int]]:
        """(address of the key, of the value) of all that a dict has, in its order."""
        head = self._one(_DICT_BYTES, dict_at)
        if not self._flags([_word(head, 8)])[0] & _DICT:
            raise UnreadableError("no dict")
        (keys,) = self._keys([_word(head, 32)], MAX_ENTRIES)
        if keys is None:
            raise UnreadableError("no keys of a dict, or too many")
        raw = self._one(keys.count * keys.entry_bytes, keys.entries)
        pairs = list(_pairs(raw, keys))
        if values := _word(head, 40):
            of_values = self._one(8 * keys.count, values + self._before_values)
            pairs = [(key, _word(of_values, 8 * n)) for n, (key, _) in enumerate(pairs)]
        return [(key, value) for key, value in pairs if key and value]

    def module_dict(self, at: int) -> int:
        """The address of a module's dict."""
        return self.word(at + _MODULE_DICT)

    def attributes(self, objects: Sequence[int], names: Sequence[str]) -> list[list[int]]:
        """For each object of a class written in Python, the addresses of its attributes `names`, in
        their order; 0 where it has none, or it cannot be read."""
        sources = self._sources(objects)
        shapes = self._attribute_keys({keys for keys, _ in sources if keys}, names)
        wanted: list[tuple[int, int]] = []
        slots: list[tuple[int, int]] = []
        for number, (at, values) in enumerate(sources):
            keys, places = shapes.get(at, (None, {}))
            for which, place in places.items():
                if keys is None:
                    continue
                if values:
                    address = values + self._before_values + 8 * place
                else:
                    address = keys.entries + keys.entry_bytes * (place + 1) - 8
                wanted.append((8, address))
                slots.append((number, which))
        found = [[0] * len(names) for _ in objects]
        for (number, which), raw in zip(slots, self._many(wanted), strict=True):
            found[number][which] = _word(raw) if len(raw) == 8 else 0
        return found

    def texts(self, addresses: Sequence[int], most: int) -> list[str]:
        """Of each str its first `most` characters; "" for what is no str."""
        version = self._version
        heads = self._many([(_TEXT_BYTES, at) for at in addresses])
        are_texts = self._have(_UNICODE, heads)
        found = [""] * len(addresses)
        longer: list[tuple[int, int]] = []
        of_longer: list[tuple[int, int]] = []
        for number, (head, is_text) in enumerate(zip(heads, are_texts, strict=True)):
            if not is_text or len(head) < 40:
                continue
            length, _, state = struct.unpack_from("<qqI", head, 16)
            kind, _, begin = text_shape(state, version)
            end = begin + max(0, min(length, most)) * kind
            if end > _TEXT_BYTES:
                longer.append((end - begin, addresses[number] + begin))
                of_longer.append((number, kind))
            elif end <= len(head):
                found[number] = decoded(head[begin:end], kind)[:most]
        for (number, kind), raw in zip(of_longer, self._many(longer), strict=True):
            found[number] = decoded(raw, kind)[:most]
        return found

    def numbers(self, addresses: Sequence[int]) -> list[int]:
        """Of each int its value, where that is positive and less than 2^30; 0 for others."""
        heads = self._many([(32, at) for at in addresses])
        found = []
        for head, is_int in zip(heads, self._have(_LONG, heads), strict=True):
            size, digit = struct.unpack_from("<qI", head, 16) if len(head) == 32 else (0, 0)
            one = 1
            if self._version >= (
                3,
                12,
            ):  # digits << 3 | a small int (3.14) << 2 | sign, 0: positive
                size, one = size & ~(1 << 2), 1 << 3
            found.append(digit if is_int and size == one and digit < 1 << 30 else 0)
        return found

    # How instances keep their attributes.

    def _sources(self, objects: Sequence[int]) -> list[tuple[int, int]]:
        """Where each object has its attributes: (address of keys, of values). Values are 0 where
        they are beside the keys, both where nothing was found."""
        minor = self._version[1]
        heads = self._many([(_BEFORE + 16, at - _BEFORE) for at in objects])
        types = [_word(head, _BEFORE + 8) if len(head) == _BEFORE + 16 else 0 for head in heads]
        known = self._types(set(types))
        found = [(0, 0)] * len(objects)
        dicts: list[tuple[int, int]] = []  # (number of the object, address of the dict)
        pointers: list[tuple[int, int]] = []  # (number of the object, where the address is)
        inlined: list[int] = []
        for number, (at, head, type_) in enumerate(zip(objects, heads, types, strict=True)):
            if type_ not in known:
                continue
            flags, offset, keys = known[type_]
            if minor >= 11 and flags & _MANAGED_DICT:
                dict_, values = _word(head, _BEFORE - 24), 0
                if minor == 11:
                    values = _word(head, 0)
                elif minor == 12 and dict_ & 1:
                    values = dict_ + 1
                elif minor > 12 and not dict_ and flags & _INLINE_VALUES:
                    inlined.append(number)
                    continue
                if values:
                    found[number] = keys, values
                else:
                    dicts.append((number, dict_))
            elif 0 < offset < 4096:
                pointers.append((number, at + offset))
        for number, raw in zip(
            inlined, self._many([(8, objects[it] + 16) for it in inlined]), strict=True
        ):
            if len(raw) == 8 and raw[3]:  # they are valid
                found[number] = known[types[number]][2], objects[number] + 16
        read = self._many([(8, at) for _, at in pointers])
        dicts += [
            (number, _word(raw))
            for (number, _), raw in zip(pointers, read, strict=True)
            if len(raw) == 8
        ]
        for (number, _), head in zip(
            dicts, self._many([(_DICT_BYTES, at) for _, at in dicts]), strict=True
        ):
            if len(head) == _DICT_BYTES:
                found[number] = _word(head, 32), _word(head, 40)
        return found

    def _types(self, types: set[int]) -> dict[int, tuple[int, int, int]]:
        """(tp_flags, tp_dictoffset, ht_cached_keys) of classes."""
        cached = _CACHED_KEYS.get(self._version[1], _DICT_OFFSET)
        addresses = sorted(types - {0})
        found = {}
        for at, raw in zip(
            addresses, self._many([(cached + 8, it) for it in addresses]), strict=True
        ):
            if len(raw) == cached + 8:
                offset = struct.unpack_from("<q", raw, _DICT_OFFSET)[0]
                found[at] = _word(raw, _TYPE_FLAGS), offset, _word(raw, cached)
        return found

    def _attribute_keys(
        self, addresses: set[int], names: Sequence[str]
    ) -> dict[int, tuple[_Keys | None, dict[int, int]]]:
        """Keys by address, and where they have each of `names`: its number there by that here."""
        order = sorted(addresses)
        shapes = self._keys(order, MAX_ENTRIES)
        sizes = [min(it.count, MAX_ATTRIBUTES) if it is not None else 0 for it in shapes]
        raws = self._many(
            [
                (size * keys.entry_bytes, keys.entries) if keys is not None else (0, 0)
                for keys, size in zip(shapes, sizes, strict=True)
            ]
        )
        entries = [
            [key for key, _ in _pairs(raw, keys)] if keys is not None else []
            for raw, keys in zip(raws, shapes, strict=True)
        ]
        texts = sorted({key for of_one in entries for key in of_one if key})
        which: dict[int, int] = {}
        for number, name in enumerate(names):
            are = self._are(name, texts)
            which |= {key: number for key, is_name in zip(texts, are, strict=True) if is_name}
        return {
            at: (keys, {which[key]: n for n, key in enumerate(of_one) if key in which})
            for at, keys, of_one in zip(order, shapes, entries, strict=True)
        }

    def _keys(self, addresses: Sequence[int], most: int) -> list[_Keys | None]:
        """None for what cannot be keys, or has more than `most` entries."""
        is_old = self._version < (3, 11)
        heads = self._many([(40, at) for at in addresses])
        found: list[_Keys | None] = []
        for at, head in zip(addresses, heads, strict=True):
            keys = None
            if len(head) == 40:
                keys = _old_keys(at, head) if is_old else _new_keys(at, head)
            found.append(keys if keys is not None and 0 <= keys.count <= most else None)
        return found

    @property
    def _before_values(self) -> int:
        """Bytes before the first value of an object without a dict of it."""
        return 8 if self._version >= (3, 13) else 0

    # Reading.

    def _are(self, name: str, addresses: Sequence[int]) -> list[bool]:
        """Which of these is a str of this text."""
        size = UNICODE_3_10[0] + len(name)
        found = []
        for raw in self._many([(size, at) for at in addresses]):
            if len(raw) < size:
                found.append(False)
                continue
            length, _, state = struct.unpack_from("<qqI", raw, 16)
            kind, is_ascii, begin = text_shape(state, self._version)
            end = begin + len(name)
            is_it = length == len(name) and kind == 1 and is_ascii
            found.append(is_it and raw[begin:end] == name.encode())
        return found

    def _have(self, flag: int, heads: Sequence[bytes]) -> list[bool]:
        """Which objects, by their first bytes, are of a type with this flag."""
        types = [_word(head, 8) if len(head) >= 16 else 0 for head in heads]
        distinct = sorted(set(types) - {0})
        flags = dict(zip(distinct, self._flags(distinct), strict=True))
        return [bool(flags.get(it, 0) & flag) for it in types]

    def _flags(self, types: Sequence[int]) -> list[int]:
        raws = self._many([(8, at + _TYPE_FLAGS) for at in types])
        return [_word(raw) if len(raw) == 8 else 0 for raw in raws]

    def _one(self, size: int, at: int) -> bytes:
        (raw,) = self._many([(size, at)])
        if len(raw) != size:
            raise UnreadableError("memory ends")
        return raw

    def _many(self, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        wanted = [(size, at) if 0 < at < USER_END and size > 0 else (0, 0) for size, at in parts]
        self._reads -= len(wanted)
        self._bytes -= sum(size for size, _ in wanted)
        if self._reads < 0 or self._bytes < 0:
            raise UnreadableError("more than is read")
        found: list[bytes] = []
        for begin in range(0, len(wanted), _READS_AT_ONCE):
            if time.monotonic() > self._until_s:
                raise UnreadableError("it takes too long")
            found += self._memory.read_many(wanted[begin : begin + _READS_AT_ONCE])
        return found


def _word(raw: bytes, at: int = 0) -> int:
    return int.from_bytes(raw[at : at + 8], "little")


def _new_keys(at: int, head: bytes) -> _Keys | None:
    """dk_log2_index_bytes at 9, dk_kind at 10, dk_nentries at 24, dk_indices at 32."""
    log2, kind = head[9], head[10]
    if log2 > 24 or kind > 2:
        return None
    count = struct.unpack_from("<q", head, 24)[0]
    return _Keys(at + 32 + (1 << log2), count, 16 if kind else 24)


def _old_keys(at: int, head: bytes) -> _Keys | None:
    """Of 3.10: dk_size at 8, dk_nentries at 32, dk_indices at 40."""
    size, count = struct.unpack_from("<q", head, 8)[0], struct.unpack_from("<q", head, 32)[0]
    if not 0 < size <= 1 << 22:
        return None
    width = 1 if size <= 0xFF else 2 if size <= 0xFFFF else 4
    return _Keys(at + 40 + width * size, count, 24)


def _pairs(raw: bytes, keys: _Keys) -> Iterable[tuple[int, int]]:
    """(key, value) of each whole entry."""
    whole = len(raw) // keys.entry_bytes * keys.entry_bytes
    if keys.has_hashes:
        return ((key, value) for _, key, value in struct.iter_unpack("<3Q", raw[:whole]))
    return struct.iter_unpack("<2Q", raw[:whole])
