# SPDX-License-Identifier: Apache-2.0
"""Running one child: a PyTorch zygote and its trials, and the CUDA programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from building import HERE, library_path


class Zygote:
    """A process that has imported torch, with the given CUPTI (if any) loaded before its own."""

    def __init__(self, preload: Path | None) -> None:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_MODULE_LOADING": "LAZY"}
        if preload:
            env["LD_PRELOAD"] = str(preload)
        self.p = subprocess.Popen(
            [sys.executable, str(HERE / "work.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.torch = ""

    def ready(self) -> str:
        assert self.p.stdout
        if not self.torch:
            self.torch = json.loads(self.p.stdout.readline() or '{"ready":"died"}')["ready"]
        return self.torch

    def run(self, cell: dict[str, Any]) -> dict[str, Any]:
        self.ready()
        assert self.p.stdin and self.p.stdout
        self.p.stdin.write(json.dumps(cell) + "\n")
        self.p.stdin.flush()
        line = self.p.stdout.readline()
        return json.loads(line) if line else {"exit": "zygote died"}

    def stop(self) -> None:
        assert self.p.stdin
        self.p.stdin.close()
        try:
            self.p.wait(5)
        except subprocess.TimeoutExpired:
            self.p.kill()


def stages(
    bins: Path, builds: dict[str, Path], names: list[str], limit_s: float = 14
) -> dict[str, Any]:
    """stages.cu with every build: costs one after the other, finalize cycles three at a time."""
    out: dict[str, Any] = {}

    def start(build: str, mode: str, cycles: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [f"{bins}/stages", f"{bins}/windows.so", str(builds[build]), mode, str(cycles)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=library_path(),
        )

    def end(p: subprocess.Popen[str]) -> Any:
        try:
            text, _ = p.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            p.kill()
            text, _ = p.communicate()
            return {"exit": "hang", "output": text[-600:]}
        try:
            return {"exit": p.returncode, **json.loads(text)}
        except json.JSONDecodeError:
            return {"exit": p.returncode, "output": text[-600:]}

    for b in names:
        out[f"{b} cost"] = end(start(b, "cost", 0))
    for b in names:
        running = {m: start(b, m, 20) for m in ("idle", "exit", "busy")}
        for m, p in running.items():
            out[f"{b} {m}"] = end(p)
    return out


def launch_costs(bins: Path, builds: dict[str, Path], binary: str, cupti: str) -> dict[str, Any]:
    """launch.cu, with one build: what one launch costs under each way to see it."""
    try:
        done = subprocess.run(
            [f"{bins}/{binary}", f"{bins}/windows.so", str(builds[cupti]), "5"],
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
            env=library_path(),
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        return {"exit": done.returncode, "err": done.stderr[-500:]}
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as e:
        return {"failed": repr(e)[:500]}
