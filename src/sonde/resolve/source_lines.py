# SPDX-License-Identifier: Apache-2.0
"""Source lines and inlined functions of frames, looked up when somebody wants to see them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sonde.procfs import printable
from sonde.resolve.seen_files import SeenFiles

READER: Final = (sys.executable, "-m", "sonde.resolve.line_reader")
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
                    if process.poll() is not None:
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
    process: subprocess.Popen[str], path: Path, offsets: Sequence[int], left_s: float
) -> list[list[list[str | int]]] | None:
    """None where there is no answer; the process is then ended, unless it gave a reason."""
    if process.stdin is None or process.stdout is None:
        return None
    watchdog = threading.Timer(left_s, process.kill)
    watchdog.start()
    answer = {}
    with suppress(OSError, ValueError):
        process.stdin.write(json.dumps({"path": str(path), "offsets": offsets}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
    watchdog.cancel()
    if not answer:
        process.kill()
        process.wait()
    places: list[list[list[str | int]]] | None = answer.get("places")
    return places


@contextmanager
def _started(reader: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        list(reader),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
