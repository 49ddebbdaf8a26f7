# SPDX-License-Identifier: Apache-2.0
"""Records the loads with Sonde while nvidia-smi's dmon and pmon watch the same device."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.signals import costs

PHASE_S, TENANTS_S, IDLE_S = 8, 10, 15
TENANTS = ((0.0, 0.5), (0.5, 0.75))


@contextmanager
def _beside(out: Path, name: str, *command: str) -> Iterator[None]:
    with (out / f"{name}.txt").open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def _record(out: Path, name: str, *arguments: str) -> list[str]:
    path = str(out / f"{name}.sonde")
    options = ["-q", "-f", "-F", "19", "--no-offcpu", "-o", path]
    return [sys.executable, "-m", "sonde", "record", *options, *arguments]


def _loads(out: Path, name: str, *arguments: object) -> list[str]:
    path = str(out / f"{name}.json")
    return [sys.executable, "-m", "bench.signals.loads", path, *map(str, arguments)]


def _run(command: Sequence[str], timeout: float) -> None:
    subprocess.run(command, check=True, timeout=timeout)


def main() -> int:
    """Everything into the folder OUT."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    costs.main()
    (out / "clock.json").write_text(json.dumps([time.time_ns(), time.monotonic_ns()]))
    dmon = ("nvidia-smi", "dmon", "-s", "pucmet", "-o", "T", "-d", "1")
    with _beside(out, "dmon", *dmon):
        _run(_record(out, "phases", "--", *_loads(out, "phases", PHASE_S)), timeout=180)
    with _beside(out, "pmon", "nvidia-smi", "pmon", "-s", "um", "-o", "T", "-d", "1"):
        recorder = subprocess.Popen(_record(out, "tenants", "-d", str(TENANTS_S + 12)))
        tenants = [
            subprocess.Popen(_loads(out, f"tenant-{number}", TENANTS_S, *part))
            for number, part in enumerate(TENANTS)
        ]
        for process in (*tenants, recorder):
            process.wait(60)
    _run(_record(out, "idle", "-d", str(IDLE_S), "--no-device"), timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
