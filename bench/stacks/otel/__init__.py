# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's eBPF profiler, built from its Go module with a reporter that prints."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[2] / "build" / "bench" / "otel"
MODULE = "go.opentelemetry.io/ebpf-profiler"


def program() -> Path | None:
    """Path of the program; None, and why on stderr, where it cannot be built."""
    binary = BUILT / "otel"
    if binary.exists() and binary.stat().st_mtime > (HERE / "main.go").stat().st_mtime:
        return binary
    if shutil.which("go") is None:
        print("bench: otel left out: no Go compiler", file=sys.stderr)
        return None
    try:
        _build(binary)
    except subprocess.CalledProcessError as error:
        print(f"bench: otel left out: {error.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    return binary


def _build(binary: Path) -> None:
    copy = BUILT / "profiler"
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir(parents=True)
    for name in ("main.go", "go.mod", "go.sum"):
        shutil.copy(HERE / name, BUILT / name)
    _go("mod", "download", MODULE)
    shutil.copytree(_go("list", "-m", "-f", "{{.Dir}}", MODULE), copy)
    subprocess.run(["chmod", "-R", "u+w", str(copy)], check=True)
    shutil.copy(HERE / "overlay" / "rlimit.go", copy / "rlimit" / "rlimit.go")
    _go("mod", "edit", "-replace", f"{MODULE}=./profiler")
    _go("build", "-o", str(binary), ".")


def _go(*command: str) -> str:
    done = subprocess.run(
        ["go", *command], cwd=BUILT, capture_output=True, text=True, check=True, timeout=900
    )
    return done.stdout.strip()
