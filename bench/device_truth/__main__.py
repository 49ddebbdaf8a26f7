# SPDX-License-Identifier: Apache-2.0
"""Do intervals of `sonde explain` hold what CUPTI measures? Root; PyTorch, an NVIDIA GPU.

    python -m bench.device_truth OUT [--set first|unseen] [--only LOOP…] [--seconds 6]
                                     [--profiled 0.7] [--budget 560] [--stub]
    python -m bench.device_truth --judge OUT

Each loop is a process. A session of torch.profiler opens it, so that what CUPTI leaves behind slows
all that follows alike. Then, in turns: torch.profiler (CUDA's activity alone), `sonde record
--device-time` of the running process, torch.profiler, the same again, torch.profiler. So each
recording has a window before it and one after it. About 20 s a loop; the next loop's process is
started meanwhile, and waits.

OUT/device-truth-00.tar and so on hold recordings and truths, which `--judge` scores, later and
elsewhere: recording needs neither DuckDB nor this machine's GPU to be free again.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import stub
from bench.device_truth.program import STUB_LOOPS
from bench.explain import kept

OPENING_S = 0.3
RECORDINGS = 2
LIMIT_S = 60.0
"""Deadline of one answer of a loop."""
MAX_FILES = 8


class Loop:
    """The process of a loop."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.device_truth.program", name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, line: str) -> Any:
        """Its answer to a line. Raises RuntimeError where there is none."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"{self.name} ended: {self._process.wait()}") from None
        if not select.select([self._process.stdout], [], [], LIMIT_S)[0]:
            raise RuntimeError(f"{self.name} takes too long: {line}")
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended: {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End it, unless it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


def record(pid: int, capture: Path, seconds: float) -> str:
    """Record a process; returns what went wrong, '' nothing."""
    command = [sys.executable, "-m", "sonde", "record", "-q", "--device-time", "-f"]
    command += ["-p", str(pid), "-d", f"{seconds:g}", "-o", str(capture)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds + LIMIT_S)
    except subprocess.TimeoutExpired:
        return "the recorder did not end"
    return "" if ran.returncode == 0 else f"exit {ran.returncode}: {ran.stderr.strip()[-400:]}"


def measure(loop: Loop, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All of one loop: windows of CUPTI, and recordings between them."""
    found: dict[str, Any] = {"loop": loop.name, "pid": loop.pid, "stub": args.stub, "failures": []}
    found |= loop.ask("begin")
    loop.ask(f"profile {OPENING_S}")
    found["windows"] = [loop.ask(f"profile {args.profiled}")]
    for number in range(RECORDINGS):
        if trouble := record(loop.pid, folder / f"{number}.sonde", args.seconds):
            found["failures"].append(trouble)
        found["windows"].append(loop.ask(f"profile {args.profiled}"))
    found["stamps"] = loop.ask("stamps")
    return found


def run_all(names: list[str], args: argparse.Namespace, scratch: Path) -> int:
    """Each loop; 1 where one gave no truth or a recording failed."""
    began, failed = time.monotonic(), []
    args.out.mkdir(parents=True, exist_ok=True)
    folders: list[Path] = []
    left = iter(names)

    def start() -> Loop | None:
        name = next(left, None)
        return None if name is None else Loop(name, args.out / "loops.log")

    loop = start()
    while loop is not None:
        loop_began = time.monotonic()
        folder = scratch / loop.name
        folder.mkdir()
        following = start()
        try:
            found = measure(loop, folder, args)
            (folder / "truth.json").write_text(json.dumps(found))
            folders.append(folder)
            if len(kept.pack(folders, args.out, "device-truth")) >= MAX_FILES:
                failed.append("too many archives")
            print(json.dumps({key: found[key] for key in ("loop", "windows", "failures")}))
            failed += found["failures"]
        except (RuntimeError, OSError, ValueError) as error:
            failed.append(f"{loop.name}: {error!r}")
            print(failed[-1])
        finally:
            loop.close()
        print(f"{loop.name}: {time.monotonic() - loop_began:.0f} s", flush=True)
        loop = following
        if time.monotonic() - began > args.budget and loop is not None:
            print(f"budget spent: {loop.name} and those after it are left out")
            loop.close()
            break
    print(f"{time.monotonic() - began:.0f} s; failed: {failed or 'none'}")
    return int(bool(failed))


def main() -> int:
    """Record, or judge what was recorded."""
    from bench.device_truth.loops import LOOPS
    from bench.device_truth.unseen_loops import UNSEEN

    parser = argparse.ArgumentParser(
        prog="python -m bench.device_truth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, nargs="?", help="where recordings and truths go")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="score what is there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was judged, too")
    parser.add_argument("--set", choices=("first", "unseen"), default="unseen",
                        help="of loops: those that the table was fitted by, or others")  # fmt: skip
    parser.add_argument("--only", nargs="*", default=[], metavar="LOOP",
                        help=", ".join((*LOOPS, *UNSEEN)))  # fmt: skip
    parser.add_argument("--seconds", type=float, default=6.0, help="of a recording")
    parser.add_argument("--profiled", type=float, default=0.7, help="seconds of a window of CUPTI")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds; the rest is left out")
    parser.add_argument("--stub", action="store_true", help="without a GPU, to see that it runs")
    args = parser.parse_args()
    if args.judge:
        from bench.device_truth.judge import judge_folder

        return judge_folder(args.judge, args.json)
    if args.out is None:
        parser.error("where are recordings to go?")
    chosen = LOOPS | UNSEEN if args.only else LOOPS if args.set == "first" else UNSEEN
    known = STUB_LOOPS if args.stub else tuple(chosen)
    if unknown := set(args.only) - set(known):
        parser.error(f"no such loops: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        if args.stub:
            built = Path(folder, "stub")
            built.mkdir()
            stub.build(built)
        scratch = Path(folder, "runs")
        scratch.mkdir()
        try:
            return run_all([one for one in known if one in (args.only or known)], args, scratch)
        finally:
            os.environ.pop(stub.FOLDER, None)
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
