# SPDX-License-Identifier: Apache-2.0
"""Two jobs of two ranks at once, one with NCCL RAS and one without, beside `sonde diagnose`:

    python -m bench.stalled --out FOLDER [--seed 1]

In each, one rank stops at random moments, each time in another way, for 12 s. Printed for each
stop: how long after it the incident came, whether it names the right rank and line, what it has of
RAS. What RAS answered meanwhile is kept in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).with_name("program.py")
STOP_S = 12.0
BEFORE_S = 14.0
BETWEEN_S = 9.0
JOBS = {"with RAS": ("sleep", "stop", "file_lock"), "without": ("pipe", "sleep", "lock")}
RAS_PORT = 28028


def main() -> None:
    """Run, print the table, write `stalled.json`."""
    parser = argparse.ArgumentParser(prog="python -m bench.stalled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--torchrun", default="torchrun")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    incidents_file, log = args.out / "incidents.jsonl", args.out / "diagnose.log"
    keep = args.out / "kept"
    with incidents_file.open("w") as out, log.open("w") as err:
        watching = subprocess.Popen(
            [sys.executable, "-m", "sonde", "diagnose", "--json", "--all", "--keep", str(keep)],
            stdout=out, stderr=err,
        )  # fmt: skip
        jobs = {}
        whole_s = BEFORE_S + 3 * (STOP_S + BETWEEN_S)
        for name, ways in JOBS.items():
            at_s, plan = BEFORE_S, []
            for how in ways:
                at_s += chance.uniform(0, 3)
                plan.append(f"{at_s:.2f}:{how}")
                at_s += STOP_S + BETWEEN_S
            notes = args.out / f"notes {name}.jsonl".replace(" ", "_")
            off = {"NCCL_RAS_ENABLE": "0"} if name == "without" else {}
            jobs[name] = notes, subprocess.Popen(
                [*args.torchrun.split(), "--standalone", f"--nproc-per-node={args.ranks}",
                 str(PROGRAM), "--at", ",".join(plan), "--notes", str(notes),
                 "--stop", str(STOP_S), "--seconds", str(whole_s)],
                env={**os.environ, **off, "OMP_NUM_THREADS": "2"},
            )  # fmt: skip
        _record_ras(args.out, jobs["with RAS"][0], whole_s + 60)
        for _, process in jobs.values():
            process.wait(120)
        watching.send_signal(signal.SIGINT)
        watching.wait(60)
    _table(args.out, incidents_file, {name: notes for name, (notes, _) in jobs.items()})


def _record_ras(out: Path, notes: Path, most_s: float) -> None:
    """What RAS serves while a rank is missing, 5 s after each stop, and once before the first."""
    until_s, seen, before = time.monotonic() + most_s, 0, False
    while time.monotonic() < until_s and seen < len(JOBS["with RAS"]):
        time.sleep(0.5)
        stops = notes.read_text().splitlines() if notes.exists() else []
        if not before and not stops:
            for kind in ("TEXT", "JSON"):
                before |= _ask_ras(out / f"ras_running_{kind.lower()}.txt", kind)
        if len(stops) > seen:
            how = json.loads(stops[seen])["how"]
            seen += 1
            time.sleep(5)
            for kind in ("TEXT", "JSON"):
                _ask_ras(out / f"ras_{how}_{kind.lower()}.txt", kind)


def _ask_ras(path: Path, kind: str) -> bool:
    try:
        with socket.create_connection(("localhost", RAS_PORT), 1) as link:
            link.settimeout(12)
            text = ["CLIENT PROTOCOL 2", "TIMEOUT 1", f"SET FORMAT {kind}"]
            raw = b""
            for line in text:
                link.sendall(line.encode() + b"\n")
                raw += link.recv(4096)
            link.sendall(b"VERBOSE STATUS\n")
            while block := link.recv(1 << 16):
                raw += block
    except OSError:
        return False
    path.write_bytes(raw)
    return True


def _table(out: Path, incidents_file: Path, notes: dict[str, Path]) -> None:
    lines = PROGRAM.read_text().splitlines()
    where = {
        found[1]: number for number, line in enumerate(lines, 1)
        if (found := re.search(r"# stops here: (\w+)", line))
    }  # fmt: skip
    incidents = [json.loads(line) for line in incidents_file.read_text().splitlines()]
    mine = [one for one in incidents if one["verdict"]["ranks"]]
    rows = []
    stopped = {}
    for name, path in notes.items():
        for note in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            stopped[note["ns"]] = note["pid"]
            its = [
                one for one in mine
                if note["pid"] in {rank["pid"] for rank in one["verdict"]["ranks"]}
                and note["ns"] <= one["explained_ns"] <= note["ns"] + STOP_S * 1e9 + 2e9
            ]  # fmt: skip
            row = {"job": name, "how": note["how"], "after_s": None, "cause": None}
            if its:
                first = its[0]
                waiting = {one["pid"] for one in first["verdict"]["ranks"] if not one["is_missing"]}
                row["by_waiting_ranks"] = [
                    one["verdict"]["cause"] for one in incidents
                    if one["victim"] in waiting and not one["verdict"]["ranks"]
                    and note["ns"] - 1.5e9 <= one["began_ns"] <= note["ns"] + STOP_S * 1e9
                ]  # fmt: skip
                missing = [rank for rank in first["verdict"]["ranks"] if rank["is_missing"]]
                best = first["verdict"]["candidates"][:1]
                row |= {
                    "after_s": round((first["explained_ns"] - note["ns"]) / 1e9, 2),
                    "cause": first["verdict"]["cause"],
                    "change": first["verdict"]["change"],
                    "rank_right": [rank["pid"] for rank in missing] == [note["pid"]],
                    "line": missing[0]["line"] if missing else "",
                    "doing": missing[0]["doing"] if missing else "",
                    "line_right": bool(missing)
                    and missing[0]["line"].endswith(f"program.py:{where[note['how']]}"),
                    "evidence": best[0]["evidence"] if best else [],
                    "against": best[0]["against"] if best else [],
                }
            rows.append(row)
    spans = list(stopped)
    false = [
        one for one in mine if one["verdict"]["change"] is None
        and not any(at <= one["explained_ns"] <= at + STOP_S * 1e9 + 2e9 for at in spans)
    ]  # fmt: skip
    (out / "stalled.json").write_text(json.dumps({"rows": rows, "false": false}, indent=1))
    for row in rows:
        print(json.dumps(row))
    print("incidents of jobs at other times:", len(false))


if __name__ == "__main__":
    main()
