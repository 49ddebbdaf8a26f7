# SPDX-License-Identifier: Apache-2.0
"""Soft and hard interrupts by CPU and kind: /proc/softirqs, /proc/interrupts."""

from __future__ import annotations

from collections.abc import Sequence

from sonde import procfs
from sonde.collect.host.files import Counters, KernelFile, labels
from sonde.collect.polling import NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable

MAX_KINDS = 64
"""Hard interrupts reported by kind, those that come most often; the others are one kind, other."""


class Interrupts:
    """What interrupts CPUs, and how often."""

    name = "interrupts"

    def __init__(self) -> None:
        self._soft = KernelFile("/proc/softirqs")
        self._hard = KernelFile("/proc/interrupts")
        self._counters = Counters()
        self._labels: dict[tuple[str, int], str] = {}

    def open(self) -> None:
        """Check that the first can be read. Raises SourceUnavailable."""
        if not self._soft.read():
            raise SourceUnavailable("/proc/softirqs is empty", whole=True)

    def polls(self) -> Sequence[Poll]:
        """Both kinds; hard ones less often, as their file is long on a large machine."""
        return [Poll("soft", NORMAL_S, self._read_soft), Poll("hard", SLOW_S, self._read_hard)]

    def close(self) -> None:
        """Close the files."""
        self._soft.close()
        self._hard.close()

    def _read_soft(self, points: Points) -> None:
        for kind, cpus, counts in _rows(self._soft.read()):
            self._report(points, "sonde.host.softirqs", kind.lower(), cpus, counts)

    def _read_hard(self, points: Points) -> None:
        rows = sorted(_rows(self._hard.read()), key=lambda row: -sum(row[2]))
        rest: list[int] = []
        for number, (kind, cpus, counts) in enumerate(rows):
            if number < MAX_KINDS:
                self._report(points, "sonde.host.interrupts", kind, cpus, counts)
            else:
                rest = [a + b for a, b in zip(rest or [0] * len(counts), counts, strict=True)]
        if rest:
            self._report(points, "sonde.host.interrupts", "other", rows[0][1], rest)

    def _report(
        self, points: Points, series: str, kind: str, cpus: Sequence[int], counts: Sequence[int]
    ) -> None:
        for cpu, count in zip(cpus, counts, strict=True):
            if not count:
                continue
            label = self._labels.get((kind, cpu))
            if label is None:
                if len(self._labels) > 65_536:
                    self._labels.clear()
                label = labels(sonde__interrupt=kind, cpu__logical_number=cpu)
                self._labels[kind, cpu] = label
            self._counters.report(points, series, count, label)


def _rows(raw: bytes) -> list[tuple[str, list[int], list[int]]]:
    """(kind, CPUs, counts) of each line that has a count for every CPU.

    An interrupt with a number is called by the last word of its line, mostly its device or driver;
    the others by their name, such as LOC.
    """
    head, *lines = raw.split(b"\n")
    cpus = [int(word[3:]) for word in head.split()]
    found = []
    for line in lines:
        name, colon, rest = line.partition(b":")
        words = rest.split()
        counts = words[: len(cpus)]
        if not colon or len(counts) < len(cpus) or not all(map(bytes.isdigit, counts)):
            continue
        kind = name.strip()
        if kind.isdigit() and len(words) > len(cpus):
            kind = words[-1]
        found.append((procfs.text(kind), cpus, [int(count) for count in counts]))
    return found
