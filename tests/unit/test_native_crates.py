# SPDX-License-Identifier: Apache-2.0
"""The tests of the crates below native/ that need no Python: every parser and builder of tables.

Compiled without optimization: what wraps silently when it is shipped is an error there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "native" / "Cargo.toml"
CRATES = tomllib.loads(MANIFEST.read_text())["workspace"]["members"]
FOR_TESTS = {"images"}
MODULES = {"fleet"}
"""For Python, whose tests are theirs."""
LIMIT_S = 900
"""On a busy machine; mostly that of the compiler and the linker."""


@pytest.mark.timeout(LIMIT_S + 10)
def test_the_tests_of_every_crate_pass() -> None:
    cargo = shutil.which("cargo") or str(Path.home() / ".cargo/bin/cargo")
    command = [cargo, "test", "--workspace", "--locked", "--manifest-path", MANIFEST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    passed = [int(count) for count in re.findall(r"test result: ok\. (\d+) passed", done.stdout)]
    assert sum(passed) > 50


def test_every_crate_has_tests() -> None:
    for crate in set(CRATES) - FOR_TESTS - MODULES:
        assert list((ROOT / "native" / crate / "tests").glob("*.rs")), crate


def test_the_oldest_compiler_is_the_same_everywhere() -> None:
    [minimum] = re.findall(r"^RUST_MINIMUM=(\S+)$", (ROOT / "scripts/setup").read_text(), re.M)
    package = tomllib.loads(MANIFEST.read_text())["workspace"]["package"]
    assert package["rust-version"] == minimum
