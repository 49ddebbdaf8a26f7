# SPDX-License-Identifier: Apache-2.0
"""Attach hundreds of times to programs in a storm and count who survived.

    python -m bench.storms [--attaches 200] [--out FILE]

Needs a C compiler and root; no GPU. Every storm program checks itself (heap, loader, children,
registers, extended state, red zone, restarted calls, errno), every server counts the EINTR that its
calls answer; this counts loads, stop times and verdicts. Each program also keeps a checksum of its
work and is run a second time, for as much work, with nobody near: the two must be equal. The
attaches are the product's own (`sonde.attach`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sonde.attach import remote
from sonde.errors import SondeError

PROGRAMS = Path(__file__).parents[1] / "tests/programs/attach"
PER_PROCESS = 20
SERVERS = {
    "timeouts": ("recv", "read", "accept"),
    "signalfd": ("signalfd",),
    "sigwait": ("sigwait",),
    "io_uring": ("uring",),
    "seccomp": ("--filter", "recv", "epoll", "sigwait", "signalfd", "semop"),
    "server": (
        *("recv", "read", "accept", "sigwait", "signalfd", "epoll", "poll", "select", "uring"),
        *("semop", "msgrcv", "futex"),
    ),
}
MODES = ("malloc", "dlopen", "fork", "users", "all", *SERVERS)
KINDS = ("control", "plain", "killed", "namespaced", "trap")
SLEEPS_MAY_END_EARLY = ("bad_eintr", "bad_time", "bad_errno")


def build(to: Path) -> None:
    """The storm and the libraries that are loaded into it."""
    library = ["-shared", "-fPIC", str(PROGRAMS / "payload.c"), "-lpthread"]
    storm = ["-mavx2", "-mno-red-zone", "-pthread", "-rdynamic", str(PROGRAMS / "storm.c"), "-ldl"]
    for name, arguments in (
        ("storm", storm),
        ("waits", ["-pthread", *(str(PROGRAMS / it) for it in ("waits.c", "waits_calls.c"))]),
        ("payload.so", ["-Wl,-z,nodelete", *library]),
        ("locked.so", ["-DSTORM_LOCKED", *library, "-ldl"]),
        ("sleepy.so", ["-DSTORM_SLEEPY", *library]),
    ):
        subprocess.run(
            ["cc", "-O2", "-Wall", "-Wextra", "-o", str(to / name), *arguments], check=True
        )


@dataclass
class Row:
    """One storm, attached to in one way."""

    mode: str
    kind: str
    attaches: int = 0
    loaded: int = 0
    processes: int = 0
    whole: int = 0
    harm: list[dict[str, Any]] = field(default_factory=list)
    why: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    stops_us: list[float] = field(default_factory=list)
    busy: int = 0
    work: Counter[str] = field(default_factory=Counter)
    eintr: int = 0
    """Answered by calls of the programs."""
    identical: int = 0
    """Programs whose checksums are those of a run with nobody near."""

    def quantile(self, q: float) -> float:
        """Of the stops, µs; 0 without any."""
        ordered = sorted(self.stops_us)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


class Storm:
    """A storm at work; at its end, its own verdict."""

    def __init__(self, bin_: Path, mode: str, *, namespaced: bool = False) -> None:
        self._command = [str(bin_ / "storm"), mode, "120"]
        if mode == "trap":
            self._command = [str(bin_ / "storm"), mode, "4", str(bin_ / "locked.so")]
        if namespaced:
            # Its own mounts, /tmp hidden behind an empty one, and its own process numbers.
            shell = (
                f"cp {bin_}/storm /run/sonde-storm-$$ && mount -t tmpfs none /tmp && mkdir /tmp/x"
                f" && mv /run/sonde-storm-$$ /tmp/x/storm && exec /tmp/x/storm {mode} 120"
            )
            unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
            self._command = [*unshare, "sh", "-c", shell]
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(0.2)
        self.pid = self._inner() if namespaced else self.process.pid

    def _inner(self) -> int:
        """The storm itself, below the unshare that started it."""
        pid = self.process.pid
        for _ in range(200):
            for kid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if Path(f"/proc/{kid}/comm").read_text().strip() == "storm":
                    return int(kid)
            time.sleep(0.02)
        raise RuntimeError("no storm below unshare")

    def loaded(self) -> int:
        """How many libraries it took in."""
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return len(set(re.findall(r"memfd:(storm-\S+)", maps)))

    def end(self) -> tuple[int | None, dict[str, Any], str]:
        """Its exit code (None: it hung), what it counted, what it complained of."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.stdin = None
        try:
            out, err = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None, {}, "hang"
        return self.process.returncode, json.loads(out) if out else {}, err.strip()

    def is_repeated(self, bin_: Path, outcome: dict[str, Any]) -> bool:
        """Whether a run for as much work, with nobody near, comes to the same checksums."""
        if "sums" not in outcome:
            return False
        command = [str(bin_ / "storm"), outcome["mode"], "120", outcome["turns"]]
        again = _undisturbed(command)
        return bool((again["turns"], again["sums"]) == (outcome["turns"], outcome["sums"]))


class Server(Storm):
    """A server whose threads wait in calls that answer EINTR to a stop, fed by one of them."""

    def __init__(self, bin_: Path, mode: str) -> None:
        self._words = SERVERS[mode]
        self.process = subprocess.Popen(
            [str(bin_ / "waits"), "--fed", "0", *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        assert self.process.stdout
        self.process.stdout.readline()

    def end(self) -> tuple[int | None, dict[str, Any], str]:
        """As of a storm, with what went wrong by name."""
        code, outcome, err = super().end()
        for name, it in outcome.get("modes", {}).items():
            outcome |= {f"bad_eintr_{name}": it["eintr"], f"bad_value_{name}": it["odd"]}
        return code, outcome, err

    def is_repeated(self, bin_: Path, outcome: dict[str, Any]) -> bool:
        """As of a storm."""
        if not outcome.get("ticks"):
            return False
        again = _undisturbed([str(bin_ / "waits"), "--fed", str(outcome["ticks"]), *self._words])
        return all(
            (it["rounds"], it["sum"])
            == (outcome["modes"][name]["rounds"], outcome["modes"][name]["sum"])
            for name, it in again["modes"].items()
        )


def _undisturbed(command: list[str]) -> dict[str, Any]:
    """What a program prints that ends by itself."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout
        outcome: dict[str, Any] = json.loads(it.stdout.read().splitlines()[-1])
    return outcome


def attach(row: Row, pid: int, library: Path, wait_s: float = 5.0) -> None:
    """Once, the product's way."""
    row.attaches += 1
    try:
        done = remote.load(pid, library, f"storm-{row.attaches}", wait_s)
    except SondeError as error:
        row.why[error.cause.replace(str(pid), "PID")] += 1
        return
    assert done is not None
    row.stops_us.append(done.stop_us)
    row.calls[done.call] += 1
    row.busy += done.busy


def attach_and_die(row: Row, pid: int, library: Path) -> None:
    """Once, killed at a random moment."""
    row.attaches += 1
    after_us = random.randrange(100, 6000)
    name = f"storm-{row.attaches}"
    tracer = str(Path(__file__).with_name("mortal_tracer.py"))
    done = subprocess.run(
        [sys.executable, tracer, str(after_us), str(pid), str(library), name, "5"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    row.why["killed" if done.returncode == -9 else f"exit {done.returncode}"] += 1


def storm(bin_: Path, mode: str, kind: str, attaches: int) -> Row:
    """Attach to storms of one mode, 20 times each, until there were enough."""
    row = Row(mode, kind)
    library = bin_ / "payload.so"
    while row.attaches < attaches:
        it = (
            Server(bin_, mode)
            if mode in SERVERS
            else Storm(bin_, mode, namespaced=kind == "namespaced")
        )
        for _ in range(min(PER_PROCESS, attaches - row.attaches)):
            match kind:
                case "control":
                    row.attaches += 1
                    time.sleep(0.03)
                case "killed":
                    attach_and_die(row, it.pid, library)
                case "trap":
                    attach(row, it.pid, library, wait_s=1.0)
                    break
                case _:
                    attach(row, it.pid, library)
        if kind == "killed":
            time.sleep(0.1)  # the last guardian
        row.loaded += it.loaded()
        code, outcome, err = it.end()
        _judge(row, code, outcome, err)
        row.identical += mode == "trap" or it.is_repeated(bin_, outcome)
    return row


def _judge(row: Row, code: int | None, outcome: dict[str, Any], err: str) -> None:
    bad = {name: n for name, n in outcome.items() if name.startswith("bad_") and n}
    row.eintr += sum(n for name, n in bad.items() if name.startswith("bad_eintr"))
    if row.kind == "killed":  # a sleeping call may then end early with EINTR, as after any signal
        bad = {name: n for name, n in bad.items() if not name.startswith(SLEEPS_MAY_END_EARLY)}
        code = 0 if code == 1 and not bad else code
    row.processes += 1
    if code == 0 and not bad:
        row.whole += 1
    else:
        row.harm.append({"exit": code, "bad": bad, "stderr": err[:200]})
    row.work.update({name: outcome.get(name, 0) for name in ("mallocs", "loads", "forks", "keeps")})


def line(row: Row) -> str:
    """A row of the table."""
    return (
        f"{row.mode:8} {row.kind:11} {row.attaches:6} {row.loaded:6}"
        f" {row.whole:3}/{row.processes:3} {row.identical:9} {row.eintr:5}"
        f" {row.quantile(0.5):9.0f} {row.quantile(0.99):8.0f}"
        f" {row.busy:5}  {row.harm or ''} {dict(row.why) or ''}"
    )


HEAD = (
    f"{'storm':8} {'kind':11} {'attach':>6} {'loaded':>6} {'whole':>7} {'identical':>9}"
    f" {'EINTR':>5} {'stop p50':>9} {'p99 us':>8} {'again':>5}  harm, answers"
)


def main() -> None:
    """Run them all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attaches", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    random.seed(args.seed)
    kinds = args.kinds.split(",")
    rows: list[Row] = []
    print(HEAD)
    with tempfile.TemporaryDirectory(prefix="sonde-storms-") as folder:
        bin_ = Path(folder)
        build(bin_)
        plans = [
            (mode, kind, args.attaches)
            for mode in args.modes.split(",")
            for kind in kinds
            if kind in ("control", "plain", "killed")
        ]
        plans += [("all", "namespaced", args.attaches)] * ("namespaced" in kinds)
        plans += [("trap", "trap", 3)] * ("trap" in kinds)
        for mode, kind, attaches in plans:
            rows.append(storm(bin_, mode, kind, attaches))
            print(line(rows[-1]), flush=True)
    if args.out:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "libc": " ".join(platform.libc_ver()),
            "seed": args.seed,
            "rows": [vars(row) for row in rows],
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
