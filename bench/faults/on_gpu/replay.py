# SPDX-License-Identifier: Apache-2.0
"""Detection and explanation once more, on the moments of a run, by the rules as they are now:

    python -m bench.faults.on_gpu.replay FOLDER [--show KEY] [--json FILE]

FOLDER is that of `bench.faults run --gpu`. Facts of a victim (its limits, its peers) are those that
were read in the run, where something was suspected then; else none.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.faults import score
from bench.faults.on_gpu.keep_moments import LENGTH
from sonde.agent.slowdown_watcher import BEFORE_S, KEPT_S, LOOKS_AT_DEVICES_S, LOOKS_S
from sonde.diagnose.detector import Detector, Suspicion
from sonde.diagnose.explain import explain
from sonde.diagnose.moments import CodePlace, Facts, Moment, Who, Window


class Record(msgspec.Struct):
    """One of the file."""

    moment: Moment
    chosen: dict[int, bool]
    who: dict[int, Who]
    places: list[CodePlace]
    suspects: dict[int, list[str]]
    facts: list[dict[str, Any]]


@dataclass
class _Open:
    suspicion: Suspicion
    looks: int = 0
    done: bool = False


@dataclass
class Replay:
    """What is known while moments pass."""

    detector: Detector = field(default_factory=Detector)
    kept: deque[Moment] = field(default_factory=deque)
    who: dict[int, Who] = field(default_factory=dict)
    places: list[CodePlace] = field(default_factory=list)
    since: dict[int, int] = field(default_factory=dict)
    """When processes were chosen."""
    open: list[_Open] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[int, list[tuple[int, list[Facts]]]] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        """Take in a moment."""
        moment = record.moment
        self.who |= record.who
        self.places += record.places
        kernel = {pid for pid, who in self.who.items() if who.is_kernel}
        for pid in record.chosen:
            self.since.setdefault(pid, moment.end_ns)
        self.kept.append(moment)
        while moment.end_ns - self.kept[0].start_ns > KEPT_S * 1e9:
            self.kept.popleft()
        found = self.detector.add(moment, self.places, kernel, record.chosen)
        self.open += [_Open(one) for one in found]
        for one in list(self.open):
            self._look(one, moment.end_ns)

    def _look(self, one: _Open, now_ns: int) -> None:
        victim = one.suspicion.pid
        its = (moment.processes.get(victim) for moment in self.kept)
        calls = any(it is not None and it.calls for it in its)
        looks_s = LOOKS_AT_DEVICES_S if calls else LOOKS_S
        if now_ns - one.suspicion.noticed_ns < looks_s[one.looks] * 1e9:
            return
        one.looks += 1
        is_last = one.looks == len(looks_s)
        if is_last:
            self.open.remove(one)
        began_ns = one.suspicion.began_ns
        since_ns = max(
            self.since.get(victim, 0), one.suspicion.since_ns, began_ns - int(BEFORE_S * 1e9)
        )
        kept = [moment for moment in self.kept if moment.start_ns >= since_ns]
        window = Window(
            victim, 64, [it for it in kept if it.end_ns <= began_ns],
            [it for it in kept if it.start_ns >= began_ns], self.who, self.places,
            self._facts(victim, one.suspicion.noticed_ns),
            [str(it) for it in one.suspicion.series],
        )  # fmt: skip
        verdict = explain(window, is_last_look=is_last)
        if verdict is None:
            return
        if one in self.open:
            self.open.remove(one)
        if not verdict.is_fault:
            self.detector.forget_rest(victim)
        plain = msgspec.to_builtins(verdict)
        plain["cause"] = str(verdict.cause)
        self.incidents.append(
            {
                "victim": victim,
                "began_ns": began_ns,
                "noticed_ns": one.suspicion.noticed_ns,
                "explained_ns": now_ns,
                "noticed_by": window.noticed_by,
                "verdict": plain,
            }
        )

    def _facts(self, pid: int, noticed_ns: int) -> list[Facts]:
        """Those of the run that were read at about that time."""
        near = [
            facts for _, facts in self.facts.get(pid, ())
            if facts and abs(facts[0].time_ns - noticed_ns) < 3e9
        ]  # fmt: skip
        return near[-1] if near else []


def records(path: Path) -> Iterator[Record]:
    """All of a file of moments."""
    decoder = msgspec.msgpack.Decoder(Record)
    with gzip.open(path, "rb") as file:
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            yield decoder.decode(file.read(*LENGTH.unpack(head)))


def replay(folder: Path) -> list[dict[str, Any]]:
    """The trials of a run, with the incidents that today's rules report."""
    incidents = []
    for path in sorted(folder.glob("moments*.gz")):
        one = Replay()
        everything = list(records(path))
        for record in everything:
            for read in record.facts:
                facts = msgspec.convert(read["facts"], list[Facts])
                one.facts.setdefault(read["pid"], []).append((record.moment.end_ns, facts))
        for record in everything:
            one.take(record)
        incidents += one.incidents
    lines = (folder / "trials.jsonl").read_text().splitlines()
    trials: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for trial in trials:
        pids = {*trial["victim_pids"], *trial["cast"]}
        trial["incidents"] = [
            it for it in incidents
            if it["victim"] in pids and it["noticed_ns"] >= trial["start_ns"]
        ]  # fmt: skip
    return trials


def main() -> None:
    """Print each trial, and the scores."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.on_gpu.replay")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", default="", help="all that was reported of these trials")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trials = replay(args.folder)
    for trial in trials:
        print(score.one_line(trial))
        key = f"{trial['fault']}/{trial['victim']}/{trial['level']}"
        if args.show and args.show in key:
            for it in trial["incidents"]:
                at_s = (it["noticed_ns"] - trial["onset_ns"]) / 1e9
                print(
                    f"  {at_s:+.2f} {it['victim']} {it['noticed_by']} {json.dumps(it['verdict'])}"
                )
    if args.json is not None:
        args.json.write_text("".join(json.dumps(trial) + "\n" for trial in trials))
    found = score.scores(trials)
    print("\n".join(score.table(found)))


if __name__ == "__main__":
    main()
