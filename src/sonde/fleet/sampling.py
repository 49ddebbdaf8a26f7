# SPDX-License-Identifier: Apache-2.0
"""Samples time in each node: which kernel ran at a few random instants of the period.

Each node takes part and each instant is equally likely, so counts of samples are unbiased estimates
of shares of device time. Sampling nodes instead would lose most of the accuracy.
"""

from __future__ import annotations

import csv
import hmac
import io
import json
import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import UsageError
from sonde.fleet.buckets import BucketSpace
from sonde.fleet.classify import IDLE, OTHER, Classes
from sonde.input_files import open_input

_MIN_BUSY_SHARE = 0.05
"""Below it the application of a period is idle: the same limit as that of `idle` in classes.toml.
"""


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One kernel execution on the device. `activity`: how busy the hardware was meanwhile, in [0,
    1], if a metric has that, else 0.
    """

    name: str
    start_ns: int
    duration_ns: int
    activity: float = 0.0


@dataclass(frozen=True)
class Period:
    """The kernel records of a period. `start_ns` is on the clock of the records; `time_s`: when the
    period ended, in seconds since 1970; `source`: what the records are of (`device_use.Source`).
    """

    records: list[KernelRecord]
    start_ns: int
    duration_ns: int
    time_s: int
    source: str


def rng_of_period(key: bytes, task: bytes, period: int) -> random.Random:
    """The random numbers of a node's period, from its signing key: nobody else can predict them,
    and a report is made of the same samples however often it is made.
    """
    message = b"sonde fleet sampling" + task + period.to_bytes(8, "big", signed=True)
    return random.Random(int.from_bytes(hmac.digest(key, message, "sha512"), "big"))


class Sampler:
    """Selects the kernels that run at random instants of one period.

    Kernels may overlap: of those that run at an instant, one is chosen with equal probability
    (reservoir sampling). `rng`: for tests and `rng_of_period`; else that of the system.
    """

    def __init__(
        self,
        space: BucketSpace,
        start_ns: int,
        duration_ns: int,
        samples: int,
        rng: random.Random | None = None,
    ) -> None:
        self._space, self._classes = space, Classes.shipped()
        self._rng = rng or random.SystemRandom()
        self._start_ns, self._duration_ns = start_ns, duration_ns
        self._instants = sorted(start_ns + self._rng.randrange(duration_ns) for _ in range(samples))
        # Per instant: (class, activity) of the chosen kernel, and how many ran then, as far as
        # seen.
        self._chosen: list[tuple[int, float] | None] = [None] * samples
        self._running = [0] * samples
        self._busy_ns: dict[int, int] = defaultdict(int)  # by kernel class
        self._class_of: dict[str, int] = {}  # by kernel name
        self._unclassified: str | None = None

    def observe(self, record: KernelRecord) -> None:
        """Counts one kernel execution, in any order of their times."""
        class_ = self._class_of.get(record.name)
        if class_ is None:
            class_ = self._class_of[record.name] = self._classes.kernel(record.name)
        end_ns = record.start_ns + record.duration_ns
        self._busy_ns[class_] += record.duration_ns
        at = bisect_left(self._instants, record.start_ns)
        while at < len(self._instants) and self._instants[at] < end_ns:
            self._running[at] += 1
            if self._rng.random() * self._running[at] < 1:
                self._chosen[at] = (class_, record.activity)
                if at == 0:
                    self._unclassified = record.name if class_ == OTHER else None
            at += 1

    def unclassified_kernel(self) -> str | None:
        """The name of the kernel chosen at the first instant, if it has no class, for `discovery`.
        It does not leave the node.
        """
        return self._unclassified

    def buckets(self) -> list[int]:
        """One bucket index per sample; an instant without a kernel is idle."""
        busy_ns = sum(self._busy_ns.values())
        whole_ns = max(busy_ns, self._duration_ns)
        if busy_ns < _MIN_BUSY_SHARE * whole_ns:
            application = IDLE
        else:  # the mix of busy time: utilization does not identify the application
            mix = {class_: ns / busy_ns for class_, ns in self._busy_ns.items()}
            application = self._classes.application(mix)
        return [
            self._space.index(IDLE, IDLE)
            if chosen is None
            else self._space.index(application, chosen[0], chosen[1])
            for chosen in self._chosen
        ]


def read_records(path: Path) -> Iterator[KernelRecord]:
    """Reads kernel records: CSV with a header, or one JSON object per line.

    Columns: name, start_ns, duration_ns and, optionally, activity. Raises UsageError.
    """
    try:
        with io.TextIOWrapper(open_input(path), "utf-8", newline="") as file:
            rows: Iterable[dict[str, str]] = (
                csv.DictReader(file)
                if path.suffix == ".csv"
                else (json.loads(line) for line in file if line.strip())
            )
            for row in rows:
                activity = float(row.get("activity") or 0.0)
                if not math.isfinite(activity):
                    raise ValueError(f"an activity of {activity}")
                yield KernelRecord(
                    str(row["name"]), int(row["start_ns"]), int(row["duration_ns"]), activity
                )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UsageError(
            f"{path} holds no kernel records: {error!r}",
            "give CSV or JSON lines with name, start_ns and duration_ns",
        ) from error
