# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Attach hundreds of times to programs in a storm and count who survived.

    python3 storm.py [--attaches 200] [--out DIR]

Needs gcc and root; no GPU. Every storm program checks itself (heap, loader, children, registers,
extended state, red zone, restarted calls, errno); this script counts loads, stop times and verdicts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from building import HERE, sources

PER_PROCESS = 20


def build(to: Path) -> None:
    warn = ["-O2", "-Wall", "-Wextra"]
    library = ["-shared", "-fPIC", str(HERE / "payload.c"), "-lpthread"]
    for command in (
        ["gcc", *warn, "-o", str(to / "inject"), *sources("inject")],
        [
            "gcc",
            *warn,
            "-mavx2",
            "-mno-red-zone",
            "-pthread",
            "-rdynamic",
            "-o",
            str(to / "storm"),
            str(HERE / "storm.c"),
            "-ldl",
        ],
        ["gcc", *warn, "-Wl,-z,nodelete", "-o", str(to / "payload.so"), *library],
        ["gcc", *warn, "-DGROUND_LOCKED", "-o", str(to / "locked.so"), *library, "-ldl"],
    ):
        subprocess.run(command, check=True)


def quantile(values: list[float], q: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else None


def mapped(pid: int) -> int:
    """How many distinct injected libraries the process holds."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(set(re.findall(r"memfd:(ground-\S+)", maps)))


def inject(bin_: Path, pid: int, library: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [str(bin_ / "inject"), str(pid), str(bin_ / library), *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {"why": "killed"}


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(p: subprocess.Popen[str]) -> tuple[int | None, dict[str, Any], str]:
    assert p.stdin and p.stdout and p.stderr
    p.stdin.close()
    try:
        code: int | None = p.wait(30)
    except subprocess.TimeoutExpired:
        p.kill()
        return None, {}, "hang"
    text = p.stdout.read()
    return code, json.loads(text) if text else {}, p.stderr.read().strip()


def in_namespaces(p: subprocess.Popen[str]) -> int:
    """The storm itself, below the unshare that started it."""
    for _ in range(100):
        for kid in Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split():
            if Path(f"/proc/{kid}/comm").read_text().strip() == "storm":
                return int(kid)
        time.sleep(0.02)
    raise RuntimeError("no storm below unshare")


def storm(bin_: Path, mode: str, attaches: int, kind: str) -> dict[str, Any]:
    """One storm: `kind` is plain, control (nobody attaches), killed (the injector dies) or namespaced."""
    row: dict[str, Any] = {
        "mode": mode,
        "kind": kind,
        "attaches": 0,
        "loaded": 0,
        "survived": 0,
        "processes": 0,
        "harm": [],
        "why": {},
        "syscalls": {},
    }
    stops: list[float] = []
    totals: list[float] = []
    while row["attaches"] < attaches:
        command = [str(bin_ / "storm"), mode, "120"]
        if kind == "namespaced":
            # Its own mounts, /tmp hidden behind an empty one, and its own process numbers.
            command = [
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--mount-proc",
                "sh",
                "-c",
                f"cp {bin_}/storm /run/ground-storm && mount -t tmpfs none /tmp && "
                f"mkdir -p /tmp/x && cp /run/ground-storm /tmp/x/storm && exec /tmp/x/storm {mode} 120",
            ]
        p = start(command)
        time.sleep(0.15)
        pid = in_namespaces(p) if kind == "namespaced" else p.pid
        for _ in range(PER_PROCESS):
            row["attaches"] += 1
            if kind == "control":
                time.sleep(0.03)
                continue
            options = ["--die-us", str(random.randrange(300, 6000))] if kind == "killed" else []
            code, answer = inject(bin_, pid, "payload.so", *options)
            if code == 0:
                stops.append(answer["stop_us"])
                totals.append(answer["total_us"])
                row["aborts"] = row.get("aborts", 0) + answer["aborts"]
                name = str(answer["syscall"])
                row["syscalls"][name] = row["syscalls"].get(name, 0) + 1
            else:
                why = answer.get("why", "killed after the load")
                row["why"][why] = row["why"].get(why, 0) + 1
        row["loaded"] += mapped(pid)
        code, said, err = finish(p)
        row["processes"] += 1
        bad = {k: v for k, v in said.items() if k.startswith("bad_") and v}
        if kind == "killed":  # a sleeping call may then end early with EINTR, as after any signal
            bad = {k: v for k, v in bad.items() if k not in ("bad_eintr", "bad_time", "bad_errno")}
            code = 0 if code == 1 and not bad else code
        if code == 0:
            row["survived"] += 1
        if code != 0 or bad:
            row["harm"].append({"exit": code, "bad": bad, "stderr": err[:200]})
        for key in ("mallocs", "loads", "forks", "keeps"):
            row[key] = row.get(key, 0) + said.get(key, 0)
    for name, values in (("stop_us", stops), ("total_us", totals)):
        row[name] = {q: quantile(values, v) for q, v in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    return row


def trap(bin_: Path, rounds: int) -> dict[str, Any]:
    """A load that can never finish: is it given up in time, is the program whole, does a later one work?"""
    row: dict[str, Any] = {
        "mode": "trap",
        "kind": "abort",
        "attaches": 0,
        "why": {},
        "survived": 0,
        "processes": 0,
        "harm": [],
    }
    for _ in range(rounds):
        p = start([str(bin_ / "storm"), "trap", "4", str(bin_ / "locked.so")])
        time.sleep(0.3)
        code, answer = inject(bin_, p.pid, "payload.so", "--wait-ms", "1000")
        row["attaches"] += 1
        row["why"][answer.get("why", "loaded")] = row["why"].get(answer.get("why", "loaded"), 0) + 1
        row["aborts"] = row.get("aborts", 0) + answer.get("aborts", 0)
        code, said, err = finish(p)
        row["processes"] += 1
        row["survived"] += code == 0
        if code != 0:
            row["harm"].append({"exit": code, "said": said, "stderr": err[:200]})
    return row


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--attaches", type=int, default=200)
    args.add_argument("--out", type=Path, default=None)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--kinds", default="control,plain,killed")
    a = args.parse_args()
    random.seed(a.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ground-") as tmp:
        bin_ = Path(tmp)
        build(bin_)
        for mode in ("malloc", "dlopen", "fork", "all"):
            for kind in a.kinds.split(","):
                rows.append(storm(bin_, mode, a.attaches, kind))
                print(json.dumps(rows[-1]), flush=True)
        rows.append(storm(bin_, "all", a.attaches, "namespaced"))
        print(json.dumps(rows[-1]), flush=True)
        rows.append(trap(bin_, 3))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "libc": " ".join(platform.libc_ver()),
        "seed": a.seed,
        "rows": rows,
    }
    if a.out:
        a.out.mkdir(parents=True, exist_ok=True)
        (a.out / "storm.json").write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{'storm':8} {'kind':11} {'attach':>6} {'loaded':>6} {'alive':>7} {'stop p50':>9} {'p99 us':>8}  aborts, harm, answers"
    )
    for r in rows:
        stop = r["stop_us"] if isinstance(r.get("stop_us"), dict) else {}
        print(
            f"{r['mode']:8} {r['kind']:11} {r['attaches']:6} {r.get('loaded', 0):6} "
            f"{r['survived']:3}/{r['processes']:3} {stop.get('p50') or 0:9.0f} {stop.get('p99') or 0:8.0f}  "
            f"{r.get('aborts', 0) or ''} {r['harm'] or ''} {r['why'] or ''}"
        )


if __name__ == "__main__":
    main()
