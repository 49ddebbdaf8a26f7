# SPDX-License-Identifier: Apache-2.0
"""What is known already of files that carry no device API, so that they are not read again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Protocol

from sonde import __version__
from sonde.collect.mapped_files import MappedFile


class PlainFiles(Protocol):
    """Files that define no function of a device API. `wanted`: what was looked for in them."""

    def has(self, file: MappedFile, wanted: str) -> bool:
        """Whether the very file that is mapped was found to be one, with the content that it has
        now."""

    def add(self, file: MappedFile, wanted: str) -> None:
        """Note that the mapped file is one."""


class NoPlainFiles:
    """Nothing is known of any file."""

    def has(self, file: MappedFile, wanted: str) -> bool:
        """False."""
        return False

    def add(self, file: MappedFile, wanted: str) -> None:
        """Forget it."""


def digest_of(symbols: Iterable[str]) -> str:
    """What is looked for, as short text: other functions, or another version of Sonde that looks
    for them, have another one."""
    text = "\n".join((__version__, *sorted(symbols)))
    return f"{zlib.crc32(text.encode()):08x}"
