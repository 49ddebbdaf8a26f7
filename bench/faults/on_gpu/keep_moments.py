# SPDX-License-Identifier: Apache-2.0
"""`sonde diagnose` that also keeps every moment, so that detection and explanation can be run again
on them: `python -m bench.faults.on_gpu.keep_moments FILE [ARGUMENT…]`.

FILE has a record after another, each a u32 of its length and MessagePack: a dict with `moment`,
`suspects` (pid to the series that rose), `who` (processes that are new in it), and `places` (new
ones). A replay: `bench.faults.on_gpu.replay`.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sonde.agent import slowdown_watcher
from sonde.cli.main import main as sonde
from sonde.collect.collector import Batch
from sonde.diagnose.detector import Suspicion
from sonde.diagnose.moments import Window

LENGTH = struct.Struct("<I")


class Keeper(slowdown_watcher.Watcher):
    """A watcher that writes what it sees."""

    path = Path()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._file = self.path.open("wb")
        self._suspects: list[Suspicion] = []
        self._facts_of: list[dict[str, Any]] = []
        self._written: dict[int, int] = {}
        self._places_written = 0

    def on_tick(self, since_ns: int, now_ns: int, batches: Sequence[Batch]) -> None:
        """As the watcher, and then write."""
        super().on_tick(since_ns, now_ns, batches)
        if self._file.closed:
            return  # the last tick comes after the end
        moment = self._kept[-1]
        new = {}
        for pid in moment.processes:
            who = self._who_of(pid)
            start = self._who[pid][0]
            if self._written.get(pid) != start:
                self._written[pid] = start
                new[pid] = who
        places = self._maker.places[self._places_written :]
        self._places_written += len(places)
        raw = msgspec.msgpack.encode(
            {
                "moment": moment,
                "chosen": dict(self._selection.pids),
                "who": new,
                "places": places,
                "suspects": {one.pid: [str(it) for it in one.series] for one in self._suspects},
                "facts": self._facts_of,
            }
        )
        self._suspects, self._facts_of = [], []
        self._file.write(LENGTH.pack(len(raw)) + raw)

    def _suspect(self, found: Iterable[Suspicion], now_ns: int) -> None:
        found = list(found)
        self._suspects += found
        super()._suspect(found, now_ns)

    def _window(self, one: Any) -> Window:
        window = super()._window(one)
        self._facts_of.append({"pid": one.suspicion.pid, "facts": window.facts})
        return window

    def close(self) -> None:
        """As the watcher, and the file."""
        super().close()
        self._file.close()


def main() -> None:
    """Run it."""
    Keeper.path = Path(sys.argv[1])
    slowdown_watcher.Watcher = Keeper  # type: ignore[misc]
    sys.argv = ["sonde", "diagnose", *sys.argv[2:]]
    sys.exit(sonde())


if __name__ == "__main__":
    main()
