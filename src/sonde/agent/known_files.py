# SPDX-License-Identifier: Apache-2.0
"""Joins what the resolver knows of mapped files with what earlier runs found in them, so that
collectors need not open them a second time."""

from __future__ import annotations

from sonde.collect.mapped_files import MappedFile
from sonde.resolve import Resolver
from sonde.resolve.binary import Binary
from sonde.unwind.code_files import key_of_file
from sonde.unwind.plain_index import PlainIndex


class KnownFiles:
    """`collect.plain_files.PlainFiles` of files that the resolver has opened in this run: the
    unwinder has it open those of given processes before collectors start."""

    def __init__(self, resolver: Resolver, index: PlainIndex | None = None) -> None:
        """`index`: what earlier runs found; the default is that of this machine."""
        self._resolver = resolver
        self._index = index or PlainIndex()

    def has(self, file: MappedFile, wanted: str) -> bool:
        """As in PlainFiles. False where the resolver has not opened the file."""
        binary = self._binary_of(file)
        return binary is not None and self._index.has(key_of_file(binary), wanted)

    def add(self, file: MappedFile, wanted: str) -> None:
        """As in PlainFiles."""
        binary = self._binary_of(file)
        if binary is not None:
            self._index.add(key_of_file(binary), binary.identity.device, wanted)

    def close(self) -> None:
        """Record what was found for the next run."""
        self._index.write()

    def _binary_of(self, file: MappedFile) -> Binary | None:
        """The file behind a mapping as it was when it was opened; None where its identity may also
        be that of another one."""
        processes = self._resolver.processes
        if not (start_ns := processes.start_of(file.pid)):
            return None
        image = processes.find(file.pid, start_ns).image
        if not image.is_built:
            return None
        mapping = image.space().find_all([file.start])[0]
        if mapping is None or (mapping.start, mapping.file) != (file.start, file.key):
            return None
        binary = mapping.binary
        return binary if binary and binary.identity.inode and not binary.distinct else None
