# SPDX-License-Identifier: Apache-2.0
"""Records the loads with Sonde while nvidia-smi's dmon and pmon watch the same device, has an agent
that only serves a page watch them too, and prints how far the figures agree: some three minutes.

    python -m bench.signals OUT [PART…]    parts: phases tenants page idle costs agreement

Where one part fails the others go on; the exit code is then 1.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PHASE_S, TENANTS_S, IDLE_S = 8, 8, 10
TENANTS = ((0.0, 0.5), (0.5, 0.75))
"""Which part of each 200 ms they have."""
TENANTS_START_IN_S = 10
DMON = ("nvidia-smi", "dmon", "-s", "pucmet", "-o", "T", "-d", "1")
PMON = ("nvidia-smi", "pmon", "-s", "um", "-o", "T", "-d", "1")


@contextmanager
def _beside(out: Path, name: str, *command: str) -> Iterator[None]:
    """A watcher of the device; its times are UTC."""
    with (out / f"{name}.txt").open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"TZ": "UTC"}
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(10)


def _record(out: Path, name: str, *arguments: str) -> list[str]:
    path = str(out / f"{name}.sonde")
    options = ["-q", "-f", "-F", "19", "--no-offcpu", "-o", path]
    return [sys.executable, "-m", "sonde", "record", *options, *arguments]


def _loads(out: Path, name: str, *arguments: object) -> list[str]:
    path = str(out / f"{name}.json")
    return [sys.executable, "-m", "bench.signals.loads", path, *map(str, arguments)]


def _run(within_s: float, *commands: Sequence[str]) -> None:
    """All at once. Raises RuntimeError where one fails or takes too long; then none is left."""
    end_s = time.monotonic() + within_s
    running = [subprocess.Popen(command, start_new_session=True) for command in commands]
    try:
        for process, command in zip(running, commands, strict=True):
            if code := process.wait(max(0.1, end_s - time.monotonic())):
                raise RuntimeError(f"{' '.join(command[1:4])} ended with {code}")
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"took more than {within_s:g} s") from error
    finally:
        for process in running:
            with suppress(ProcessLookupError):  # its children may be there where it is not
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def phases(out: Path) -> None:
    """The loads one after another, in a capture."""
    (out / "clock.json").write_text(json.dumps([time.time_ns(), time.monotonic_ns()]))
    with _beside(out, "dmon", *DMON):
        _run(100, _record(out, "phases", "--", *_loads(out, "phases", PHASE_S)))


def tenants(out: Path) -> None:
    """Two who take turns, in a capture of the whole machine."""
    recorder = _record(out, "tenants", "-d", str(TENANTS_S + TENANTS_START_IN_S))
    loads = [
        _loads(out, f"tenant-{number}", TENANTS_S, *part) for number, part in enumerate(TENANTS)
    ]
    with _beside(out, "pmon", *PMON):
        _run(50, recorder, *loads)


def page(out: Path) -> None:
    """An agent that only serves a page."""
    _run(120, [sys.executable, "-m", "bench.signals.page", str(out), str(PHASE_S)])


def idle(out: Path) -> None:
    """Nobody uses the device: what does watching it cost?"""
    _run(40, _record(out, "idle", "-d", str(IDLE_S)))


def costs(_out: Path) -> None:
    """What each question to it costs."""
    _run(25, [sys.executable, "-m", "bench.signals.costs"])


def agreement(out: Path) -> None:
    """The table."""
    _run(60, [sys.executable, "-m", "bench.signals.agreement", str(out)])


PARTS = {part.__name__: part for part in (phases, tenants, page, idle, costs, agreement)}


def main() -> int:
    """Everything, or the parts named, into the folder OUT; 1 where one failed."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or not set(sys.argv[2:]) <= set(PARTS):
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in PARTS if name in (sys.argv[2:] or PARTS)]
    failed = []
    for name in wanted:
        began_s = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            PARTS[name](out)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"== {name}: FAILED: {error}", flush=True)
            failed.append(name)
        print(f"== {name}: {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
