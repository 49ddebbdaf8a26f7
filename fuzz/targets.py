# SPDX-License-Identifier: Apache-2.0
"""The fuzz targets: what they are built from, how they are started, what they printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DATA: Final = ROOT / "tests/data/fuzz"
WORK: Final = ROOT / "build/fuzz"
TIMEOUT_S: Final = 5
RSS_MB: Final = 512
_NATIVE: Final = (
    *("elf", "eh_frame", "go", "cpython", "inferred_rules", "unwind_table", "perf_map", "lines"),
    *("names", "modules", "protobuf"),
)
_PYTHON: Final = (
    *("ring", "python_code", "python_threads", "chunks", "questions", "stored", "kineto"),
    *("perf_script", "otlp_profiles"),
)
_LENGTHS: Final = {"inferred_rules": 16_384, "lines": 16_384, "elf": 16_384, "kineto": 8_192}
"""Longest input where it is not libFuzzer's own choice."""
_COVERAGE: Final = ("level=4", "inline-8bit-counters", "pc-table", "trace-compares")


@dataclass(frozen=True, slots=True)
class Target:
    """One of them."""

    name: str
    is_native: bool

    @property
    def folders(self) -> list[Path]:
        """Seeds and inputs that once broke something, those that there are."""
        kinds = (DATA / kind / self.name for kind in ("seeds", "regressions"))
        return [folder for folder in kinds if folder.is_dir()]

    @property
    def corpus(self) -> Path:
        """What was found so far: kept, to go on from."""
        return WORK / "corpus" / self.name

    @property
    def crashes(self) -> Path:
        """Where inputs go that break something."""
        return WORK / "crashes" / self.name

    def command(self, *options: str) -> list[str]:
        """What runs it under libFuzzer."""
        if self.is_native:
            return [str(_built(self.name)), *options]
        return [sys.executable, str(ROOT / "fuzz/python/run_target.py"), self.name, *options]

    def fuzz(self, seconds: int) -> list[str]:
        """What fuzzes it for a while, from what was found before."""
        for folder in (self.corpus, self.crashes):
            folder.mkdir(parents=True, exist_ok=True)
        options = [
            *(f"-max_total_time={seconds}", f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={RSS_MB}"),
            *("-print_final_stats=1", f"-artifact_prefix={self.crashes}/"),
        ]
        if self.name in _LENGTHS:
            options.append(f"-max_len={_LENGTHS[self.name]}")
        words = ROOT / f"fuzz/dictionaries/{self.name}.dict"
        if words.exists():
            options.append(f"-dict={words}")
        return self.command(*options, str(self.corpus), *map(str, self.folders))


TARGETS: Final = (*(Target(it, True) for it in _NATIVE), *(Target(it, False) for it in _PYTHON))


def environment() -> dict[str, str]:
    """For targets: sanitizers that hold back little freed memory, engines on one core."""
    more = {
        "ASAN_OPTIONS": "quarantine_size_mb=8:detect_leaks=0:allocator_may_return_null=1",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **more}


def _host() -> str:
    version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    return str(re.findall(r"^host: (\S+)$", version, re.MULTILINE)[0])


def _built(name: str) -> Path:
    found = sorted(WORK.glob(f"target/*/release/{name}"))
    return found[0] if found else WORK / name


def _has_address_sanitizer(host: str) -> bool:
    command = ["rustc", "--print", "sysroot"]
    sysroot = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return any(Path(sysroot).glob(f"lib/rustlib/{host}/lib/librustc*_rt.asan.a"))


def build() -> None:
    """Compile the native targets: libFuzzer's instrumentation, and AddressSanitizer where the
    compiler has its runtime. No nightly compiler is needed."""
    host = _host()
    flags = ["--cfg", "fuzzing", "-Cpasses=sancov-module"]
    flags += [f"-Cllvm-args=-sanitizer-coverage-{it}" for it in _COVERAGE]
    if _has_address_sanitizer(host):
        flags.append("-Zsanitizer=address")
    more = {
        "CARGO_TARGET_DIR": str(WORK / "target"),
        "RUSTC_BOOTSTRAP": "1",  # for the sanitizer's flag alone
        "RUSTFLAGS": " ".join(flags),
    }
    command = ["cargo", "build", "--release", "--locked", "--target", host]
    subprocess.run(command, cwd=ROOT / "fuzz", env={**os.environ, **more}, check=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a target printed."""

    executions: int
    edges: int
    features: int
    slowest_s: float
    peak_mb: int


def outcome(printed: str) -> Outcome:
    """Read libFuzzer's own figures."""

    def last(pattern: str) -> int:
        found: Sequence[str] = re.findall(pattern, printed, re.MULTILINE)
        return int(found[-1]) if found else 0

    return Outcome(
        executions=last(r"^#(\d+)\s") or last(r"number_of_executed_units: +(\d+)"),
        edges=last(r" cov: (\d+)"),
        features=last(r" ft: (\d+)"),
        slowest_s=last(r"slowest_unit_time_sec: +(\d+)"),
        peak_mb=max(last(r"peak_rss_mb: +(\d+)"), last(r" rss: (\d+)Mb")),
    )
