# SPDX-License-Identifier: Apache-2.0
"""Source lines and inlined functions of frames, looked up when somebody wants to see them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sonde import interpreter
from sonde.procfs import printable
from sonde.resolve.seen_files import SeenFiles

READER: Final = interpreter.command("sonde.resolve.line_reader")
FILE_S: Final = 20.0
"""For one file; one that takes longer has no lines."""
ALL_S: Final = 60.0
"""For all files of a report."""

Place = tuple[str, str, int]
"""(function, source file, line); '' and 0 where they are not known."""


@dataclass(slots=True)
class Lines:
    """What was found."""

    places: dict[tuple[str, int], list[Place]] = field(default_factory=dict)
    """By (build id, offset in the file): the innermost inlined function first, last the function
    that the code belongs to. Those about which nothing is known are absent."""
    files: int = 0
    """Files that say something of the lines asked for."""
    not_found: int = 0
    """Files of which there is none here any more."""
    failed: int = 0
    """Files that took too long or too much memory, or cannot be read."""


def look_up(
    wanted: Mapping[str, Sequence[int]],
    seen: SeenFiles | None = None,
    reader: Sequence[str] = READER,
    file_s: float = FILE_S,
    all_s: float = ALL_S,
) -> Lines:
    """Lines of offsets in files, by build id."""
    seen = seen or SeenFiles()
    found = Lines()
    until_s = time.monotonic() + all_s
    paths = {build_id: seen.find(build_id) for build_id in wanted}
    found.not_found = sum(path is None for path in paths.values())
    todo = [(build_id, path) for build_id, path in paths.items() if path is not None]
    while todo:
        with _started(reader) as process:
            while todo:
                build_id, path = todo.pop()
                left_s = min(file_s, until_s - time.monotonic())
                if left_s <= 0:
                    found.failed += 1 + len(todo)
                    return found
                offsets = sorted(set(wanted[build_id]))
                places = _ask(process, path, offsets, left_s)
                if places is None:
                    found.failed += 1
                    if process.poll() is not None or _is_given_up(process):
                        break
                    continue
                known = zip(offsets, places, strict=False)
                kept = {(build_id, offset): _told(it) for offset, it in known if it}
                found.places.update(kept)
                found.files += bool(kept)
    return found


def shown(file: str) -> str:
    """A source file as frames show it: with its folder, never a full path."""
    return printable("/".join(Path(file).parts[-2:]).lstrip("/"))


def _told(places: list[list[str | int]]) -> list[Place]:
    return [(printable(str(name)), shown(str(file)), int(line)) for name, file, line in places]


def _ask(
    process: subprocess.Popen[bytes], path: Path, offsets: Sequence[int], left_s: float
) -> list[list[list[str | int]]] | None:
    """None where there is no answer; the process is then ended, unless it gave a reason."""
    answer = {}
    with suppress(OSError, ValueError):
        request = json.dumps({"path": str(path), "offsets": offsets})
        answer = json.loads(_exchange(process, f"{request}\n".encode(), left_s))
    if not answer:
        interpreter.give_up(process)
    places: list[list[list[str | int]]] | None = answer.get("places")
    return places


def _is_given_up(process: subprocess.Popen[bytes]) -> bool:
    return process.stdin is not None and process.stdin.closed


def _exchange(process: subprocess.Popen[bytes], request: bytes, left_s: float) -> bytes:
    """A line of answer. Never waits in a read or write: a killed child may keep its ends open."""
    assert process.stdin is not None
    assert process.stdout is not None
    to, answers = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(to, False)
    until_s = time.monotonic() + left_s
    answer = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(answers, selectors.EVENT_READ)
        selector.register(to, selectors.EVENT_WRITE)
        while not answer.endswith(b"\n"):
            ready = {key.fd for key, _ in selector.select(max(0.0, until_s - time.monotonic()))}
            if answers in ready:
                if not (more := os.read(answers, 65536)):
                    return b""
                answer += more
            elif to in ready:
                request = request[os.write(to, request) :]
                if not request:
                    selector.unregister(to)
            else:
                return b""
    return bytes(answer)


@contextmanager
def _started(reader: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = interpreter.start(reader)
    try:
        yield process
    finally:
        interpreter.give_up(process)
