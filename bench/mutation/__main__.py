# SPDX-License-Identifier: Apache-2.0
"""Change the code at random places, one at a time, and see whether a test fails.

    python -m bench.mutation [--seed S] [--each 45] [--minutes M] [--package NAME] [--again]

Works on a copy of the checkout below build/mutation, and goes on where an earlier run with the same
seed and the same code stopped. Each mutant is held against the few quick tests of its file first,
and against the others only where it survives those. A mutant is *killed* when a test fails or takes
three times as long as before; it *survives* when all of its tests pass; it is *stillborn* when it
cannot be compiled. Those that survive want a test (then `--again`), or a reason in
`survivors.toml`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

from bench.mutation.mutants import Mutant, drawn, possible

ROOT: Final = Path(__file__).parents[2]
WORK: Final = ROOT / "build" / "mutation"
HERE: Final = Path(__file__).parent
NATIVE: Final = "src/sonde/_native.abi3.so"
_PR_SET_CHILD_SUBREAPER: Final = 36
_MAX_MEMORY_BYTES: Final = 12 << 30
"""Of each process of the tests: a mutant may ask for any amount."""


def make_tree(tree: Path) -> None:
    """A copy of what git tracks, with the module that is built and the tests' tools."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, tree / name)
    shutil.copy2(ROOT / NATIVE, tree / NATIVE)
    (tree / "build").mkdir()
    for name in ("tools", "pythons"):
        if (ROOT / "build" / name).exists():
            (tree / "build" / name).symlink_to(ROOT / "build" / name)
    (tree / ".venv").symlink_to(ROOT / ".venv")


def targets() -> list[dict[str, Any]]:
    """The parts of targets.toml, with paths relative to the checkout."""
    parts: list[dict[str, Any]] = tomllib.loads((HERE / "targets.toml").read_text())["part"]
    for part in parts:
        native = part["package"].endswith("native")
        part["files"] = [f"native/{f}" if native else f"src/sonde/{f}" for f in part["files"]]
    return parts


def chosen(
    parts: list[dict[str, Any]], each: int, seed: str, known: dict[str, dict[str, Any]]
) -> list[tuple[dict[str, Any], Mutant]]:
    """`each` mutants a package, spread over its files by how many places each has, and as many more
    as are known to be stillborn."""
    files = {f: possible(ROOT, f, WORK / "listed") for part in parts for f in part["files"]}
    sizes = {file: len({mutant.place for mutant in it}) for file, it in files.items()}
    found = []
    for package in dict.fromkeys(part["package"] for part in parts):
        mine = [part for part in parts if part["package"] == package]
        whole = sum(sizes[file] for part in mine for file in part["files"])
        for part in mine:
            for file in part["files"]:
                count = max(1, round(each * sizes[file] / whole))
                for mutant in drawn(files[file], count, seed):
                    if not count:
                        break
                    found.append((part, mutant))
                    count -= known.get(key_of(mutant), {}).get("outcome") != "stillborn"
    return found


def key_of(mutant: Mutant) -> str:
    """The same for the same change of the same code."""
    return hashlib.sha256(f"{mutant.name}\0{mutant.code}".encode()).hexdigest()[:16]


def end_children() -> None:
    """Kill what is left of the tests: their processes become ours when their parents end."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(1000):
        left = [int(pid) for pid in children.read_text().split()]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    sys.exit(f"processes of the tests cannot be ended: {left}")


def run_tests(tree: Path, tests: list[str], limit_s: float) -> tuple[str, float, str]:
    """(passed, failed or late; seconds; the last lines of output) of these tests in the copy."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    began = time.monotonic()
    log = tree / "build" / "output.txt"
    limits = (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES)
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, *tests],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits),
        )
        try:
            code = child.wait(limit_s)
            outcome = "passed" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "late"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            end_children()
    tail = log.read_text(errors="replace").splitlines()[-4:]
    return outcome, time.monotonic() - began, "\n".join(tail)


def build_native(tree: Path) -> bool:
    """Compile the copy's native module, without optimization; False where it does not compile."""
    environment = os.environ | {"CARGO_TARGET_DIR": str(WORK / "target")}
    environment |= {"PYO3_PYTHON": str(ROOT / ".venv/bin/python"), "CARGO_PROFILE_DEV_DEBUG": "0"}
    command = ["cargo", "build", "-q", "--manifest-path", "native/Cargo.toml"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True)
    if done.returncode:
        return False
    built = next((WORK / "target" / "debug").glob("lib*native*.so"))
    # Another file, not other content of the one that a process may still have mapped.
    (tree / NATIVE).unlink()
    shutil.copy2(built, tree / NATIVE)
    return True


def stages(part: dict[str, Any]) -> list[list[str]]:
    """The quick tests of a part, then the others."""
    return [tests for tests in (part["tests"], part.get("then")) if tests]


def judge(
    tree: Path, part: dict[str, Any], mutant: Mutant, limits_s: list[float]
) -> dict[str, Any]:
    """Apply one mutant, run its tests, and put the file back."""
    path = tree / mutant.file
    original = path.read_bytes()
    path.write_text(mutant.code)
    outcome, seconds, tail = "passed", 0.0, ""
    try:
        if mutant.file.endswith(".rs") and not build_native(tree):
            return {"outcome": "stillborn", "seconds": 0.0, "tail": ""}
        for tests, limit_s in zip(stages(part), limits_s, strict=True):
            outcome, took_s, tail = run_tests(tree, tests, limit_s)
            seconds += took_s
            if outcome != "passed":
                break
    finally:
        path.write_bytes(original)
    result = "survived" if outcome == "passed" else "killed"
    return {"outcome": result, "seconds": round(seconds, 1), "tail": tail}


def limits_of(tree: Path, part: dict[str, Any]) -> list[float]:
    """How long each stage of a part's tests may take; ends where they fail without a mutant."""
    limits_s = []
    for tests in stages(part):
        outcome, seconds, tail = run_tests(tree, tests, 1200)
        if outcome != "passed":
            sys.exit(f"these tests fail without a mutant: {' '.join(tests)}\n{tail}")
        limits_s.append(3 * seconds + 20)
    return limits_s


def run(
    work: list[tuple[dict[str, Any], Mutant]], known: dict[str, Any], state: Path, until: float
) -> None:
    """Judge what is not known yet; each verdict is kept at once."""
    package = work[0][0]["package"]
    tree = WORK / f"tree-{package.replace(', ', '-')}"
    make_tree(tree)
    if package.endswith("native") and not build_native(tree):
        sys.exit("the native module does not compile as it is")
    limits: dict[str, list[float]] = {}
    for part, mutant in work:
        if key_of(mutant) in known or time.monotonic() > until:
            continue
        tests = " ".join(part["tests"])
        if tests not in limits:
            limits[tests] = limits_of(tree, part)
        result = judge(tree, part, mutant, limits[tests])
        entry = {"key": key_of(mutant), "package": package, "mutant": mutant.name, **result}
        known[entry["key"]] = entry
        with state.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{entry['outcome']:9} {entry['seconds']:6.1f} s  {mutant.name}", flush=True)


def main() -> int:
    """Exit code 1 where under 95 % of a package's mutants are killed, or some have not run."""
    parser = argparse.ArgumentParser(prog="python -m bench.mutation", description=__doc__)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--each", type=int, default=45, help="mutants a package")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--package", help="only this one")
    parser.add_argument(
        "--again", action="store_true", help="run what survived without a reason once more"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "mutants.json")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the tests' processes end with us
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parts = targets()
    state = WORK / f"state-{args.seed}.jsonl"
    known: dict[str, dict[str, Any]] = {}
    if state.exists():
        known = {it["key"]: it for it in map(json.loads, state.read_text().splitlines())}
    settled = dict(known)
    if args.again:
        explained = reasons()
        for key, it in known.items():
            if it["outcome"] == "survived" and not reason_of(it["mutant"], explained):
                del settled[key]
    for package in dict.fromkeys(part["package"] for part in parts):
        if args.report or args.package not in (None, package):
            continue
        while time.monotonic() < until:  # once more for those that replace the stillborn
            work = chosen(parts, args.each, args.seed, known)
            mine = [it for it in work if it[0]["package"] == package]
            if all(key_of(mutant) in settled for _, mutant in mine):
                break
            run(mine, settled, state, until)
            known |= settled
    work = chosen(parts, args.each, args.seed, known)
    results = [known[key_of(it)] for _, it in work if key_of(it) in known]
    return report(results, [it for _, it in work], args.seed, args.out)


def reasons() -> dict[str, str]:
    """Why some that survive need no test, by file and change."""
    path = HERE / "survivors.toml"
    listed: dict[str, str] = tomllib.loads(path.read_text())["reason"] if path.exists() else {}
    return listed


def reason_of(mutant: str, known: dict[str, str]) -> str:
    """'' where there is none. The place is left out: it moves with every line above it."""
    place, change = mutant.split(" ", 1)
    return known.get(f"{place.split(':')[0]} {change}", "")


def report(results: list[dict[str, Any]], drawn: list[Mutant], seed: str, out: Path) -> int:
    """Print and write what came of it."""
    explained = reasons()
    by_package: dict[str, Counter[str]] = defaultdict(Counter)
    for it in results:
        by_package[it["package"]][it["outcome"]] += 1
    table = {}
    print(f"\n{'package':18} {'mutants':>8} {'killed':>7} {'share':>8}")
    for package, counts in by_package.items():
        judged = counts["survived"] + counts["killed"]
        share = counts["killed"] / max(1, judged)
        table[package] = {**counts, "share_killed": round(share, 4)}
        print(f"{package:18} {judged:8} {counts['killed']:7} {share:8.1%}")
    listed = []
    for name in (it["mutant"] for it in results if it["outcome"] == "survived"):
        reason = reason_of(name, explained)
        listed.append({"mutant": name, "reason": reason})
        print(f"survived: {name}\n          {reason or 'no reason given'}")
    if len(results) < len(drawn):
        print(f"not run yet: {len(drawn) - len(results)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    files = sorted({it.file for it in drawn})
    hashes = {it: hashlib.sha256((ROOT / it).read_bytes()).hexdigest()[:16] for it in files}
    summary = {"seed": seed, "drawn": len(drawn), "run": len(results), "packages": table}
    out.write_text(json.dumps(summary | {"survivors": listed, "files": hashes}, indent=1) + "\n")
    missed = any(it["share_killed"] < 0.95 for it in table.values())
    return int(missed or len(results) < len(drawn))


if __name__ == "__main__":
    sys.exit(main())
