# SPDX-License-Identifier: Apache-2.0
"""Source lines and inlined functions of frames, looked up when a report shows them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sonde import interpreter
from sonde.procfs import printable
from sonde.resolve.build_id_links import BuildIdLinks, FoundFile

READER: Final = interpreter.command("sonde.resolve.line_reader")
FILE_S: Final = 20.0
"""Time limit of one file; a slower one has no lines."""
ALL_S: Final = 60.0
"""Time limit of all files of a report."""

_RawLocations = list[list[str | int]]
"""[[function, file, line], …] of one offset, as the subprocess sends them."""


class SourceLocation(NamedTuple):
    """A line of source code; '' and 0 where a part is unknown."""

    function: str
    file: str
    line: int


@dataclass(slots=True)
class SourceLines:
    """The result of `look_up`."""

    locations: dict[tuple[str, int], list[SourceLocation]] = field(default_factory=dict)
    """By (build id, file offset): the innermost inlined function first, the containing function
    last. Offsets without debug data are absent."""
    files: int = 0
    """Files with a location for at least one offset."""
    not_found: int = 0
    """Files that are not on this machine any more."""
    failed: int = 0
    """Files that could not be read, or not within the limits of time and memory."""


def look_up(
    wanted: Mapping[str, Sequence[int]],
    links: BuildIdLinks | None = None,
    reader: Sequence[str] = READER,
    file_s: float = FILE_S,
    all_s: float = ALL_S,
) -> SourceLines:
    """Source locations of file offsets, by build id.

    `reader`: command of the subprocess. `file_s`, `all_s`: time limits. Files beyond them count as
    failed.
    """
    links = links or BuildIdLinks()
    found = SourceLines()
    deadline_s = time.monotonic() + all_s
    todo = list(wanted)
    while todo:
        with ExitStack() as stack:
            process = None
            while todo:
                left_s = min(file_s, deadline_s - time.monotonic())
                if left_s <= 0:
                    found.failed += len(todo)
                    return found
                build_id = todo.pop()
                file = links.open(build_id)
                if file is None:
                    found.not_found += 1
                    continue
                offsets = sorted(set(wanted[build_id]))
                try:
                    process = process or stack.enter_context(_started(reader))
                    locations = _query(process, file, offsets, left_s)
                finally:
                    os.close(file.fd)
                if locations is None:
                    found.failed += 1
                    if process.poll() is not None or _is_given_up(process):
                        break
                    continue
                known = zip(offsets, locations, strict=False)
                kept = {(build_id, offset): _parsed(it) for offset, it in known if it}
                found.locations.update(kept)
                found.files += bool(kept)
    return found


def short_path(file: str) -> str:
    """A source file as frames show it: the last folder and the name, never a full path."""
    # Not by Path, which interns each part: on CPython 3.12 these would be kept for ever.
    parts = [part for part in file.split("/") if part not in ("", ".")]
    return printable("/".join(parts[-2:]))


def _parsed(raw: _RawLocations) -> list[SourceLocation]:
    return [
        SourceLocation(printable(str(function)), short_path(str(file)), int(line))
        for function, file, line in raw
    ]


def _query(
    process: subprocess.Popen[bytes], file: FoundFile, offsets: Sequence[int], left_s: float
) -> list[_RawLocations] | None:
    """The locations of each offset; None for an error.

    The process reads the file that was compared, not what its path leads to by now. It is killed
    unless it reported the error itself.
    """
    response = {}
    with suppress(OSError, ValueError):
        ours = f"/proc/{os.getpid()}/fd/{file.fd}"
        request = json.dumps({"path": ours, "beside": file.path, "offsets": offsets})
        response = json.loads(_exchange(process, f"{request}\n".encode(), left_s))
    if not response:
        interpreter.give_up(process)
    locations: list[_RawLocations] | None = response.get("locations")
    return locations


def _is_given_up(process: subprocess.Popen[bytes]) -> bool:
    return process.stdin is not None and process.stdin.closed


def _exchange(process: subprocess.Popen[bytes], request: bytes, left_s: float) -> bytes:
    """Send a request and return the response line; b'' without one in time.

    Never blocks in a read or write: a killed child may keep its ends of the pipes open.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    requests, responses = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(requests, False)
    deadline_s = time.monotonic() + left_s
    response = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(responses, selectors.EVENT_READ)
        selector.register(requests, selectors.EVENT_WRITE)
        while not response.endswith(b"\n"):
            ready = {key.fd for key, _ in selector.select(max(0.0, deadline_s - time.monotonic()))}
            if responses in ready:
                if not (more := os.read(responses, 65536)):
                    return b""
                response += more
            elif requests in ready:
                request = request[os.write(requests, request) :]
                if not request:
                    selector.unregister(requests)
            else:
                return b""
    return bytes(response)


@contextmanager
def _started(reader: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = interpreter.start(reader, ends_first=True)
    try:
        yield process
    finally:
        interpreter.give_up(process)
