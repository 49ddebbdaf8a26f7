# SPDX-License-Identifier: Apache-2.0
"""The profilers that are compared, watching one process over the same seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.stacks.entries import Entries
from bench.stacks.share import Share

HZ = 199
PERF_DUMP_BYTES = 65528
"""Of the stack that perf copies with each sample: the most that it allows, not its default."""
PYTHON_ENTRIES = ("<module>", "_bootstrap")
_THREAD_NAMES = ("process ", "thread ", "Thread-", "MainThread")
_UNWIND_S = 100
"""For perf to unwind the stacks that it has copied."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A process while the tools look at it."""

    pid: int
    seconds: float
    folder: Path
    entries: Entries
    passes: tuple[str, ...] = ()
    """As the program's (`programs`)."""
    is_native: bool = False
    is_python: bool = False

    def has_names_of(self, tid: int) -> bool:
        """Whether the stacks of a thread count for the share that is named: of Python, the main
        thread, since those of libraries' thread pools run no Python."""
        return tid == self.pid or not self.is_python

    def is_named(self, names: Iterable[str]) -> bool:
        """Whether each function to be passed through is a whole word of a frame's name."""
        text = "\n".join(names)
        return all(re.search(rf"(?<!\w)(?:{_either(it)})(?!\w)", text) for it in self.passes)


def _either(names: str) -> str:
    return "|".join(map(re.escape, names.split("|")))


@dataclass(slots=True)
class Outcome:
    """What a tool found, and why it found nothing."""

    share: Share = field(default_factory=Share)
    named: Share = field(default_factory=Share)
    failed: str = ""


def sonde_command(it: Watched) -> list[str]:
    """The recorder, on that process."""
    options = ["-p", str(it.pid), "-F", str(HZ), "-d", str(it.seconds), "--no-device", "--force"]
    path = str(it.folder / "sonde.sonde")
    return [sys.executable, "-m", "sonde", "record", *options, "-o", path]


def sonde_share(it: Watched) -> Outcome:
    """From its capture, by the outermost frame and not by its own flags; and by names."""
    from sonde.query.capture import read

    tables = read(it.folder / "sonde.sonde").tables
    frames = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    stacks = {row["stack_id"]: row["frame_ids"] for row in tables["stack"].to_pylist()}
    kinds = {row["frame_id"] for row in frames.values() if row["kind"] != "kernel"}
    named_stacks = {
        key: it.is_named(frames[one]["function"] or "" for one in ids if one in kinds)
        for key, ids in stacks.items()
    }
    whole = named = nameable = total = 0.0
    for row in tables["sample"].to_pylist():
        if row["kind"] != "cpu" or row["pid"] != it.pid:
            continue
        total += row["weight_count"]
        if it.has_names_of(row["tid"]):
            nameable += row["weight_count"]
            named += row["weight_count"] * named_stacks.get(row["stack_id"], False)
        ids = stacks.get(row["stack_id"])
        last = frames[ids[-1]] if ids else None
        if last is not None and last["kind"] == "user":
            address = it.entries.of_offset(last["binary"], last["offset"])
            whole += row["weight_count"] * (address is not None and it.entries.has(address))
    share = Share(round(whole), round(total))
    return Outcome(share, Share(round(named), round(nameable)) if it.passes else Share())


def perf_command(how: str) -> Callable[[Watched], list[str]]:
    """`perf record` with one of its ways to walk."""

    def command(it: Watched) -> list[str]:
        path = str(it.folder / f"perf-{how}.data")
        depth = f"dwarf,{PERF_DUMP_BYTES}" if how == "dwarf" else how
        options = ["-e", "cpu-clock", "-F", str(HZ), "--call-graph", depth, "-m", "16M"]
        options += ["-p", str(it.pid), "-o", path]
        return ["perf", "record", "-q", *options, "--", "sleep", str(it.seconds)]

    return command


def perf_share(how: str) -> Callable[[Watched], Outcome]:
    """By perf script: addresses, the outermost last."""

    def share(it: Watched) -> Outcome:
        path = str(it.folder / f"perf-{how}.data")
        script = ["perf", "script", "-i", path, "-F", "ip,dso", "--no-inline"]
        whole = total = 0
        for stack in _run([*script, "--max-stack", "4096"], _UNWIND_S).split("\n\n"):
            if frames := stack.strip().splitlines():
                total += 1
                # "    133c (/usr/bin/program)": an offset in the file
                offset, _, binary = frames[-1].strip().partition(" ")
                name = Path(binary.strip("()")).name
                address = it.entries.of_offset(name, int(offset, 16))
                whole += address is not None and it.entries.has(address)
        return Outcome(Share(whole, total))

    return share


def py_spy_command(it: Watched) -> list[str]:
    """py-spy as it comes, reading a running process."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else "py-spy"
    options = ["-d", str(round(it.seconds)), "-r", str(HZ), "-f", "raw", "--nonblocking"]
    path = str(it.folder / "py-spy.txt")
    return [program, "record", "-p", str(it.pid), *options, "-o", path]


def py_spy_share(it: Watched) -> Outcome:
    """By its raw format: one line a stack, its count last."""
    whole = total = 0
    for line in (it.folder / "py-spy.txt").read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        first = next((name for name in stack.split(";") if not name.startswith(_THREAD_NAMES)), "")
        total += int(count)
        # `_bootstrap` of "Thread._bootstrap (threading.py:1002)"
        whole += int(count) * (first.partition(" ")[0].rpartition(".")[2] in PYTHON_ENTRIES)
    return Outcome(Share(whole, total))


Tool = tuple[Callable[[Watched], list[str]], Callable[[Watched], Outcome]]
TOOLS: dict[str, Tool] = {
    "sonde": (sonde_command, sonde_share),
    "perf fp": (perf_command("fp"), perf_share("fp")),
    "perf dwarf": (perf_command("dwarf"), perf_share("dwarf")),
    "py-spy": (py_spy_command, py_spy_share),
}


def watch(it: Watched, names: list[str], otel: Otel | None) -> dict[str, Outcome]:
    """Run the tools side by side, then read what each found."""
    begin_ns = time.time_ns()
    running = {}
    for name in names:
        log = (it.folder / f"{name}.log").open("w")
        command = TOOLS[name][0](it)
        running[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=it.folder)
    outcomes = {}
    for name, process in running.items():
        if process.wait(it.seconds + 120):
            log_text = (it.folder / f"{name}.log").read_text().strip().splitlines()
            outcomes[name] = Outcome(failed=log_text[-1] if log_text else "failed")
    end_ns = time.time_ns()
    for name in names:
        if name not in outcomes:
            outcomes[name] = _read(TOOLS[name][1], it)
    if otel is not None:
        outcomes["otel"] = otel.share(it, begin_ns, end_ns)
    return outcomes


def _read(share: Callable[[Watched], Outcome], it: Watched) -> Outcome:
    try:
        return share(it)
    except (OSError, subprocess.SubprocessError) as error:
        return Outcome(failed=f"{type(error).__name__}: {error}"[:200])


_TRACEFS = Path("/sys/kernel/tracing")


class Otel:
    """OpenTelemetry's profiler, watching the whole machine meanwhile."""

    def __init__(self, folder: Path, program: Path) -> None:
        self._path = folder / "otel.json"
        self._log = folder / "otel.log"
        with self._path.open("w") as out, self._log.open("w") as log:
            command = [str(program), "-hz", str(HZ)]
            self._process = subprocess.Popen(command, stdout=out, stderr=log)
        for _ in range(300):
            if "ready" in self._log.read_text() or self._process.poll() is not None:
                break
            time.sleep(0.1)
        if self._process.poll() is not None:
            raise RuntimeError(f"otel did not start: {self._log.read_text()[-300:]}")

    def share(self, it: Watched, begin_ns: int, end_ns: int) -> Outcome:
        """Of the traces of a process between two times; by names where the tool has any."""
        time.sleep(1.5)
        whole = named = nameable = total = 0
        for text in self._path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # still being written
            if line["pid"] != it.pid or not begin_ns <= line["t"] <= end_ns:
                continue
            total += 1
            if it.has_names_of(line["tid"]):
                nameable += 1
                named += it.is_named(line["names"] or [])
            if line["kind"] in ("native", "go") and line["file"]:
                address = it.entries.of_linked(line["file"], line["address"])
                whole += address is not None and it.entries.has(address)
        has_names = it.passes and not it.is_native
        return Outcome(Share(whole, total), Share(named, nameable) if has_names else Share())

    def close(self) -> None:
        """End it as a user would."""
        self._process.terminate()
        self._process.wait(30)


@contextmanager
def otel_or_none(folder: Path, program: Path | None) -> Iterator[Otel | None]:
    """It, where it was built."""
    if program is None:
        yield None
        return
    with _tracefs():
        tool = Otel(folder, program)
        try:
            yield tool
        finally:
            tool.close()


@contextmanager
def _tracefs() -> Iterator[None]:
    """tracefs where it belongs: OpenTelemetry's profiler finds tracepoints there alone."""
    if any(_TRACEFS.iterdir()):
        yield
        return
    subprocess.run(["mount", "-t", "tracefs", "tracefs", _TRACEFS], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", _TRACEFS], check=True)


def missing(name: str) -> bool:
    """Whether a tool is not here."""
    if name.startswith("perf"):
        return shutil.which("perf") is None
    if name == "py-spy":
        return not Path(sys.executable).with_name("py-spy").exists() and not shutil.which("py-spy")
    return False


def _run(command: list[str], timeout_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    return done.stdout
