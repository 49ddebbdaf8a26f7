# SPDX-License-Identifier: Apache-2.0
"""The programs that are sampled, each built where its compiler or interpreter is here."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.stacks.programs import debian

HERE = Path(__file__).parent
BUILT = HERE.parents[2] / "build" / "bench" / "stacks"
TREES = HERE.parents[2] / "tests" / "programs"
"""Of programs with a known call tree."""
CASES = ("exceptions", "qsort", "signals", "recursion")
PYTHON = ("<module>", "work")
"""Functions of the programs in Python."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


@dataclass(frozen=True, slots=True)
class Program:
    """One that runs until it is killed."""

    name: str
    command: tuple[str, ...]
    warm_up_s: float = 1.0
    is_python: bool = False
    passes: tuple[str, ...] = ()
    """Functions that every stack of its busy threads passes through; `a|b`: one of them."""
    is_native: bool = False
    """OpenTelemetry's profiler leaves its names to what is behind the collector."""
    symbols: Path | None = None
    """The program before it was stripped."""


def programs() -> Iterator[Program]:
    """Those that can be built or found."""
    BUILT.mkdir(parents=True, exist_ok=True)
    yield from _compiled()
    script = str(HERE / "arrays.py")
    for version in PYTHONS:
        if python := _python(version, "numpy"):
            name = f"CPython {version} + numpy"
            yield Program(name, (python, script), 3, is_python=True, passes=PYTHON)
    for of_suite in debian.with_numpy(BUILT):
        name, command = f"{of_suite.name} + numpy", of_suite.command(script)
        yield Program(name, command, 3, is_python=True, passes=PYTHON)
    if python := _python("3.12", "jaxlib", "jax"):
        script = str(HERE / "compile.py")
        name = "CPython 3.12 + jaxlib"
        yield Program(name, (python, script), 8, is_python=True, passes=PYTHON)
    if node := shutil.which("node"):
        with_map = (node, "--perf-basic-prof", str(HERE / "loop.js"))
        yield Program("Node, perf map", with_map, passes=("map|text",))
    yield from _trees()


def _trees() -> Iterator[Program]:
    """Programs without any flag, of sizes by which a call takes 1 to 10 ms."""
    tree = ("work", "down")
    if node := shutil.which("node"):
        script = str(TREES / "node" / "call_tree.js")
        yield Program("Node, no flags", (node, script, "400000", "1"), 4, passes=tree)
    source, java = TREES / "java" / "CallTree.java", shutil.which("java")
    if java and _made(["javac", "-d", str(BUILT / "java"), str(source)]):
        called = (java, "-cp", str(BUILT / "java"), "CallTree", "400000", "1")
        yield Program("Java", called, 4, passes=("main", *tree))
    if ruby := shutil.which("ruby"):
        script = str(TREES / "ruby" / "call_tree.rb")
        yield Program("Ruby", (ruby, script, "8000", "1"), 2, passes=("work",))
    if php := shutil.which("php"):
        script = str(TREES / "php" / "call_tree.php")
        yield Program("PHP", (php, script, "40000"), 2, passes=("work",))


def interpreters() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, command) of every CPython of this machine that is walked."""
    for version in PYTHONS:
        if base := _interpreter(version):
            yield f"CPython {version}", (base,)


def _interpreter(version: str) -> str:
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    return str(found[0]) if found else shutil.which(f"python{version}") or ""


def _compiled() -> Iterator[Program]:
    cases = BUILT / "cases"
    flags = ["-O2", "-g0", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-pthread"]
    if _compiled_of(HERE / "cases.cpp", cases, "g++", *flags):
        for case in CASES:
            command = (str(cases), case)
            yield Program(f"C++, {case}", command, passes=("main|loop",), is_native=True)
    if _compiled_of(HERE / "loop.rs", BUILT / "rust-loop", "rustc", "-O"):
        work = ("by_map|by_closure",)
        yield Program("Rust", (str(BUILT / "rust-loop"),), passes=work, is_native=True)
    symbols, stripped = BUILT / "go-loop", BUILT / "go-loop-stripped"
    if _compiled_of(HERE / "loop.go", symbols, "go", "build"):
        yield Program("Go", (str(symbols),), passes=("main.main",))
        if _compiled_of(HERE / "loop.go", stripped, "go", "build", "-ldflags=-s -w"):
            passes = ("main.main",)
            yield Program("Go, stripped", (str(stripped),), passes=passes, symbols=symbols)
    if _compiled_of(HERE / "goroutines.go", BUILT / "goroutines", "go", "build"):
        passes = ("main.main|main.growing",)
        yield Program("Go, goroutines", (str(BUILT / "goroutines"),), passes=passes)


def _compiled_of(source: Path, binary: Path, *compiler: str) -> bool:
    if binary.exists() and binary.stat().st_mtime > source.stat().st_mtime:
        return True
    return _made([*compiler, "-o", str(binary), str(source)])


def _made(command: list[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _python(version: str, *packages: str) -> str:
    """An interpreter with packages, in an environment that is made once; '' where none is."""
    folder = BUILT / f"python-{version}-{packages[0]}"
    python = folder / "bin" / "python"
    finds = " and ".join(f"find_spec({name!r})" for name in packages)
    wanted = f"from importlib.util import find_spec; exit(not ({finds}))"
    if python.exists() and not subprocess.run([python, "-c", wanted], check=False).returncode:
        return str(python)
    base = _interpreter(version)
    if not base or not _made([base, "-m", "venv", str(folder)]):
        return ""
    install = [str(python), "-m", "pip", "install", "-q", "--no-input", *packages]
    return str(python) if _made(install) else ""
