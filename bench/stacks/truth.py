# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.stacks.truth`: which share of stacks is right, of programs made by chance.

A sample is right where the functions of the program on its stack are, one after the other, the one
path that leads to the innermost of them (`trees`), from the thread's entry on. Every sample of the
process counts, wherever it fell: in the program, in libc, in the interpreter, in the kernel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.stacks import sources, trees
from bench.stacks.programs import interpreters
from bench.stacks.share import Share, pooled
from bench.stacks.trees import SPIN, Tree
from bench.tools import require_root

HZ = 997
TARGET = 0.999
CAPTURE = "truth.sonde"
_FLAGS = ("-O2", "-g0", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-ipa-icf")
_OWN = re.compile(r"n\d+(_\w+)?\Z")
_STARTS = ("_start", "clone3", "clone", "__clone3", "__clone")
_BEFORE = {
    "native": (["main"], ["thread_entry"]),
    "python": (
        ["<module>", "main"],
        ["_bootstrap", "_bootstrap_inner", "run", "thread_entry"],
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A program and its truth."""

    name: str
    command: tuple[str, ...]
    tree: Tree
    language: str


def cases(folder: Path, seeds: int) -> Iterator[Case]:
    """Those that can be built here; every seed is another tree."""
    for seed in range(seeds):
        yield native_case(folder, seed)
    for number, (name, command) in enumerate(interpreters()):
        yield _python_case(folder, 100 + number, name, command)
        yield mixed_case(folder, 200 + number, name, command)


def native_case(folder: Path, seed: int) -> Case:
    """In C++."""
    tree = trees.random_tree(seed, trees.NATIVE)
    program = _compiled(folder, f"native-{seed}", sources.native(tree), "-pthread")
    return Case(f"native, tree {seed}", (str(program),), tree, "native")


def _python_case(folder: Path, seed: int, name: str, command: tuple[str, ...]) -> Case:
    tree = trees.random_tree(seed, trees.PYTHON)
    script = folder / f"python-{seed}.py"
    script.write_text(sources.python(tree))
    return Case(f"{name}, tree {seed}", (*command, str(script)), tree, "python")


def mixed_case(folder: Path, seed: int, name: str, command: tuple[str, ...]) -> Case:
    """In Python, by an interpreter, that calls C++ that calls Python."""
    tree = trees.random_tree(seed, (*trees.PYTHON, "calls", "calls"))
    script = folder / f"mixed-{seed}.py"
    script.write_text(sources.python(tree))
    shared = _compiled(folder, f"mixed-{seed}.so", sources.library(tree), "-shared", "-fPIC")
    mixed = (*command, str(script), str(shared))
    return Case(f"{name} and C++, tree {seed}", mixed, tree, "python")


def _compiled(folder: Path, name: str, text: str, *more: str) -> Path:
    source = folder / f"{name}.cpp"
    source.write_text(text)
    command = ["g++", *_FLAGS, *more, "-o", str(folder / name), str(source)]
    subprocess.run(command, check=True)
    return folder / name


def share_of(case: Case, seconds: float, folder: Path) -> tuple[Share, Counter[str]]:
    """Of its samples over a while those that are right; and the others, by stack."""
    program = subprocess.Popen(list(case.command), stdout=subprocess.PIPE, text=True)
    path = folder / CAPTURE
    try:
        assert program.stdout is not None
        if program.stdout.readline() != "ready\n":
            raise RuntimeError(f"{case.name} did not start")
        options = ["-p", str(program.pid), "-F", str(HZ), "-d", str(seconds), "--no-device", "-q"]
        record = [sys.executable, "-m", "sonde", "record", *options, "--force", "-o", str(path)]
        subprocess.run(record, check=True)
    finally:
        program.kill()
        program.communicate()
    return judge(case, path, program.pid)


def judge(case: Case, capture: Path, pid: int) -> tuple[Share, Counter[str]]:
    """The samples of a process in a capture."""
    from sonde.query.capture import read

    tables = read(capture).tables
    frames = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    stacks = {row["stack_id"]: row["frame_ids"] for row in tables["stack"].to_pylist()}
    total, wrong = 0, Counter[str]()
    for row in tables["sample"].to_pylist():
        if row["kind"] != "cpu" or row["pid"] != pid:
            continue
        total += round(row["weight_count"])
        stack = [frames[it] for it in reversed(stacks.get(row["stack_id"], []))]
        if not _is_right(case, stack):
            wrong[";".join(_name(it) for it in stack)] += round(row["weight_count"])
    return Share(total - wrong.total(), total), wrong


def _stop_reasons(capture: Path) -> dict[str, int]:
    """The stop reasons of walks (event `stack_end`), by name."""
    from sonde.query.capture import read

    ends = Counter[str]()
    for row in read(capture).tables["event"].to_pylist():
        if row["kind"] == "stack_end":
            ends[row["name"]] += round(row["value"])
    return dict(ends)


def _is_right(case: Case, stack: list[dict[str, Any]]) -> bool:
    """`stack`: frames, the outermost first."""
    if not stack or _name(stack[0]) not in _STARTS:
        return False
    names = [_name(it) for it in stack if _belongs(case, it)]
    for before in _BEFORE[case.language]:
        if names[: len(before)] == before:
            own = names[len(before) :]
            return not own or case.tree.is_right(own)
        if before[: len(names)] == names:
            return True  # a thread that has just begun
    return False


def _belongs(case: Case, frame: dict[str, Any]) -> bool:
    """To the path that must be as it is: functions of the program, and all of Python's."""
    if frame["kind"] == "python":
        return True
    name = _name(frame)
    if case.language == "native":
        return bool(_OWN.match(name)) or name in ("main", "thread_entry", SPIN)
    return bool(_OWN.match(name))


def _name(frame: dict[str, Any]) -> str:
    name = str(frame["function"]).removesuffix(".cold")
    return name.rpartition(".")[2] if frame["kind"] == "python" else name


def main() -> int:
    """1 where the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.stacks.truth", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4, help="a program (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=4, help="native trees (default: %(default)s)")
    parser.add_argument("--only", default="", help="programs whose name has one of these, by comma")
    parser.add_argument("--results", type=Path, help="JSON to add to, and to print in whole")
    parser.add_argument("--wrong", type=int, default=0, help="print N stacks that are wrong")
    args = parser.parse_args()
    require_root()
    shares = _load(args.results)
    with tempfile.TemporaryDirectory(prefix="bench-truth-") as name:
        for case in cases(Path(name), args.seeds):
            if not any(part in case.name for part in args.only.split(",")):
                continue
            shares[case.name], wrong = share_of(case, args.seconds, Path(name))
            if wrong and args.wrong:
                print(f"{case.name}: {_stop_reasons(Path(name) / CAPTURE)}", file=sys.stderr)
            for stack, count in wrong.most_common(args.wrong):
                print(f"{case.name}: {count} {stack}", file=sys.stderr)
    if args.results:
        plain = {case: [it.hits, it.total] for case, it in shares.items()}
        args.results.write_text(json.dumps(plain, indent=1))
    print("| program | right |\n|---|---|")
    for case_name, share in shares.items():
        print(f"| {case_name} | {share} |")
    all_of_them = pooled(shares.values())
    print(f"| **pooled** | {all_of_them} |")
    return 0 if all_of_them.value >= TARGET else 1


def _load(path: Path | None) -> dict[str, Share]:
    if path is None or not path.exists():
        return {}
    return {name: Share(*pair) for name, pair in json.loads(path.read_text()).items()}


if __name__ == "__main__":
    sys.exit(main())
