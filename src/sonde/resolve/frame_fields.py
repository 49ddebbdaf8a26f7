# SPDX-License-Identifier: Apache-2.0
"""What frames show of the mapping that their code is in, and their ids."""

from __future__ import annotations

from functools import lru_cache
from sys import getsizeof
from typing import Final, NamedTuple

from sonde import procfs
from sonde.model.code import Frame, KnownFrame
from sonde.model.digests import blake2b
from sonde.resolve.code_origin import origin_of_binary
from sonde.resolve.mappings import Mapping

MAX_LABELS: Final = 1_024
"""Paths whose `Label` is cached."""
MAX_NAME: Final = 128
"""Characters of a file name that a frame shows."""
FRAME_BYTES: Final = 400
"""Memory of a frame beside its texts: two tuples, their numbers, and an entry of a cache."""


def frame_id(frame: Frame) -> int:
    """64-bit BLAKE2b hash of a frame's fields, never 0."""
    content = "\0".join(map(str, frame))
    digest = blake2b(content.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def frame_bytes(known: KnownFrame) -> int:
    """Memory of a frame and the texts that it alone may have, about."""
    _, frame = known
    return FRAME_BYTES + getsizeof(frame.function) + getsizeof(frame.file) + getsizeof(frame.binary)


class Label(NamedTuple):
    """What frames show of a mapping's path."""

    name: str
    origin: str
    """A value of `CodeOrigin`."""


@lru_cache(MAX_LABELS)
def _label(name: str, path: str) -> Label:
    """The label of a mapping with this name and path."""
    return Label(procfs.printable(name)[:MAX_NAME], origin_of_binary(path).value)


def label_of(mapping: Mapping) -> Label:
    """The label of a mapping."""
    return _label(mapping.name, mapping.path)
