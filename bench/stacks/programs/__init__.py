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
CASES = ("exceptions", "qsort", "signals", "recursion")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


@dataclass(frozen=True, slots=True)
class Program:
    """One that runs until it is killed."""

    name: str
    command: tuple[str, ...]
    warm_up_s: float = 1.0
    is_python: bool = False


def programs() -> Iterator[Program]:
    """Those that can be built or found."""
    BUILT.mkdir(parents=True, exist_ok=True)
    yield from _compiled()
    script = str(HERE / "arrays.py")
    for version in PYTHONS:
        if python := _python(version, "numpy"):
            yield Program(f"CPython {version} + numpy", (python, script), 3, is_python=True)
    for of_suite in debian.with_numpy(BUILT):
        yield Program(f"{of_suite.name} + numpy", of_suite.command(script), 3, is_python=True)
    if python := _python("3.12", "jaxlib", "jax"):
        script = str(HERE / "compile.py")
        yield Program("CPython 3.12 + jaxlib", (python, script), 8, is_python=True)
    if node := shutil.which("node"):
        yield Program("Node, perf map", (node, "--perf-basic-prof", str(HERE / "loop.js")))


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
            yield Program(f"C++, {case}", (str(cases), case))
    if _compiled_of(HERE / "loop.rs", BUILT / "rust-loop", "rustc", "-O"):
        yield Program("Rust", (str(BUILT / "rust-loop"),))
    if _compiled_of(HERE / "loop.go", BUILT / "go-loop", "go", "build"):
        yield Program("Go", (str(BUILT / "go-loop"),))
    if _compiled_of(HERE / "goroutines.go", BUILT / "goroutines", "go", "build"):
        yield Program("Go, goroutines", (str(BUILT / "goroutines"),))


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
