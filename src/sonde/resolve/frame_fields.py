# SPDX-License-Identifier: Apache-2.0
"""What frames show of the mapping that their code is in, and their ids."""

from __future__ import annotations

from sys import getsizeof
from typing import Final, NamedTuple

from sonde import procfs
from sonde.model.code import Frame, KnownFrame
from sonde.model.digests import blake2b
from sonde.resolve.code_origin import origin_of_binary
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.mappings import Mapping

MAX_LABELS: Final = 1_024
"""Paths whose `Label` is cached."""
MAX_LABEL_BYTES: Final = 2 << 20
"""Of these together."""
MAX_NAME: Final = 128
"""Characters of a file name that a frame shows."""
FRAME_BYTES: Final = 400
"""Memory of a frame beside its texts: two tuples, their numbers, and an entry of a cache."""
_LABEL_BYTES: Final = 350
"""Memory of a label beside its texts: three tuples, and an entry of a cache."""


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


class _Labelled(NamedTuple):
    """A label with the texts by which it is found."""

    label: Label
    name: str
    path: str


def _label_bytes(known: _Labelled) -> int:
    label, name, path = known
    return _LABEL_BYTES + getsizeof(label.name) + getsizeof(name) + getsizeof(path)


_labels: Final[LruCache[tuple[str, str], _Labelled]] = LruCache(
    MAX_LABELS, MAX_LABEL_BYTES, _label_bytes
)
"""By name and path of a mapping."""


def label_of(mapping: Mapping) -> Label:
    """The label of a mapping."""
    name, path = mapping.name, mapping.path
    known = _labels.get((name, path))
    if known is None:
        label = Label(procfs.printable(name)[:MAX_NAME], origin_of_binary(path).value)
        known = _Labelled(label, name, path)
        _labels.put((name, path), known)
    return known.label
