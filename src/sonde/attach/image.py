# SPDX-License-Identifier: Apache-2.0
"""A shared library as it lies in the memory of a live process, read without its file.

The file may have been replaced since, or lie in another mount namespace; what is in memory is what
the process runs. Layout: elf(5); the hash table as glibc writes it
(https://flapenguin.me/elf-dt-gnu-hash). Everything read is the process's own and may be anything:
every number is bounded before it is used.
"""

from __future__ import annotations

import os
import struct
from typing import Final, Self

_PT_DYNAMIC: Final = 2
_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 5, 6, 0x6FFFFEF5
_STT_FUNC: Final = 2
_SYMBOL: Final = struct.Struct("<IBBHQQ")
# Of program headers, dynamic entries, symbols in a chain, words of the Bloom filter.
_MAX_HEADERS: Final = 64
_MAX_DYNAMIC: Final = 256
_MAX_CHAIN: Final = 1 << 16
_MAX_BLOOM: Final = 1 << 20


class ProcessMemory:
    """The memory of a process, through /proc/PID/mem."""

    def __init__(self, pid: int) -> None:
        """Raises OSError where it may not be read."""
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, address: int, size: int) -> bytes:
        """Exactly `size` bytes. Raises OSError where they are not there."""
        if not 0 < address < 1 << 63:
            raise OSError(f"no memory at {address:#x}")
        data = os.pread(self._fd, size, address)
        if len(data) != size:
            raise OSError(f"no {size} bytes at {address:#x}")
        return data


class LoadedImage:
    """A library at its load address, and the functions that it exports."""

    def __init__(self, memory: ProcessMemory, base: int) -> None:
        """Raises OSError or ValueError for what is no 64-bit ELF image."""
        self._memory = memory
        self.base = base
        header = memory.read(base, 64)
        if header[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit little-endian ELF image")
        self.machine: int = struct.unpack_from("<H", header, 18)[0]
        headers_at: int = struct.unpack_from("<Q", header, 32)[0]
        size, count = struct.unpack_from("<HH", header, 54)
        if size != 56 or not 0 < count <= _MAX_HEADERS or headers_at > 1 << 20:
            raise ValueError("strange program headers")
        self._dynamic = self._read_dynamic(memory.read(base + headers_at, size * count))

    def function(self, name: str) -> int | None:
        """The address of an exported function, whatever its version; None where there is none.

        Raises OSError where the memory cannot be read, ValueError where it is no such image.
        """
        table = self._address(_DT_GNU_HASH)
        strings, symbols = self._address(_DT_STRTAB), self._address(_DT_SYMTAB)
        buckets, first, bloom, _ = struct.unpack("<IIII", self._memory.read(table, 16))
        if not 0 < buckets < 1 << 20 or bloom > _MAX_BLOOM:
            raise ValueError("a strange hash table")
        wanted, encoded = _gnu_hash(name), name.encode() + b"\0"
        buckets_at = table + 16 + 8 * bloom
        (index,) = struct.unpack("<I", self._memory.read(buckets_at + 4 * (wanted % buckets), 4))
        chain_at = buckets_at + 4 * buckets
        for _ in range(_MAX_CHAIN if index >= first else 0):
            (found,) = struct.unpack("<I", self._memory.read(chain_at + 4 * (index - first), 4))
            if found | 1 == wanted | 1:
                raw = self._memory.read(symbols + 24 * index, 24)
                name_at, info, _, section, value, _ = _SYMBOL.unpack(raw)
                text = self._memory.read(strings + name_at, len(encoded))
                if text == encoded and section and value and info & 15 == _STT_FUNC:
                    return self.base + int(value)
            if found & 1:
                break
            index += 1
        return None

    def _read_dynamic(self, headers: bytes) -> dict[int, int]:
        for at in range(0, len(headers), 56):
            kind, _, _, address = struct.unpack_from("<IIQQ", headers, at)
            if kind == _PT_DYNAMIC:
                return self._entries(self.base + address)
        raise ValueError("no dynamic section")

    def _entries(self, at: int) -> dict[int, int]:
        entries: dict[int, int] = {}
        for index in range(_MAX_DYNAMIC):
            tag, value = struct.unpack("<QQ", self._memory.read(at + 16 * index, 16))
            if tag == 0:
                break
            entries[tag] = value
        return entries

    def _address(self, tag: int) -> int:
        value = self._dynamic.get(tag)
        if value is None:
            raise ValueError(f"no dynamic entry {tag:#x}")
        # The loader adds the base to these in memory, except in its own image and the vdso.
        return value if value >= self.base else self.base + value


def _gnu_hash(name: str) -> int:
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
