# SPDX-License-Identifier: Apache-2.0
"""How much memory a control group uses, by the content of its files (`GroupFolder.contents`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sonde.procfs.process_groups import NO_LIMIT

MEMORY_FILES: Final = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max",
    "memory.current",
    "memory.stat",
)
"""Of either version: what is read of here."""


def memory_in(contents: Mapping[str, bytes]) -> tuple[int, int]:
    """Bytes that a group uses, and its limit; (0, 0) where it has none."""
    for limit, usage in (MEMORY_FILES[:2], MEMORY_FILES[2:4]):
        most = number_of(contents.get(limit))
        if 0 < most < NO_LIMIT:
            return max(0, number_of(contents.get(usage))), most
    return 0, 0


def working_set_in(contents: Mapping[str, bytes]) -> tuple[int, int]:
    """The same without pages of files that were not used of late, as Kubernetes counts."""
    usage, limit = memory_in(contents)
    if not limit:
        return 0, 0
    stat = contents.get("memory.stat", b"").decode("utf-8", "replace")
    found = dict(line.partition(" ")[::2] for line in stat.split("\n"))
    # Version 1 has the group's own pages beside those of all groups below it.
    files = found.get("total_inactive_file") or found.get("inactive_file") or "0"
    return max(0, usage - (int(files) if files.isdecimal() else 0)), limit


def number_of(raw: bytes | None) -> int:
    """The number that a file holds; -1: none, or it was not read."""
    word = (raw or b"").decode("utf-8", "replace").strip()
    return int(word) if word.lstrip("-").isdigit() else -1
