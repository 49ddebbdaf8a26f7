# SPDX-License-Identifier: Apache-2.0
"""Names and tracks of a timeline, each once, while it is built."""

from __future__ import annotations

from dataclasses import replace

from sonde.model.timeline import Track
from sonde.model.timeline_kinds import TrackKind


class Interner:
    """Gives each distinct name and track an index while a timeline is built."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tracks: list[Track] = []
        self._name: dict[str, int] = {}
        self._track: dict[tuple[str, int, int, int], int] = {}

    def name(self, text: str) -> int:
        """The index of a name in `names`."""
        number = self._name.get(text)
        if number is None:
            number = self._name[text] = len(self.names)
            self.names.append(text)
        return number

    def thread(self, pid: int, tid: int, name: str = "", process: str = "") -> int:
        """The index in `tracks` of a thread."""
        key = ("thread", pid, tid, -1)
        number = self._track.get(key)
        if number is None:
            number = self._track[key] = len(self.tracks)
            self.tracks.append(Track(TrackKind.THREAD, pid, tid, name, -1, process))
        elif name and not self.tracks[number].name:
            self.tracks[number] = replace(self.tracks[number], name=name)
        return number

    def stream(self, device: int, stream: int, pid: int = 0) -> int:
        """The index in `tracks` of a stream."""
        key = ("stream", pid, stream, device)
        number = self._track.get(key)
        if number is None:
            number = self._track[key] = len(self.tracks)
            self.tracks.append(Track(TrackKind.STREAM, pid, stream, "", device))
        return number
