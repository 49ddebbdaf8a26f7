# SPDX-License-Identifier: Apache-2.0
"""The cache of unwind tables, where one tenant's file pretends to be another's."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from walk_watch import Watch

from sonde import _native

pytestmark = pytest.mark.bpf

SOURCE = Path(__file__).parents[1] / "programs/stacks/two_faced.c"
BUILD_ID = "0x" + "c0ffee" * 6 + "c0ff"
RIGHT, WRONG = 48, 64
NOBODY = 65534


@pytest.fixture(scope="module")
def faces():
    """The honest program and the hostile one, where everybody can run them."""
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        made = []
        for cfa in (RIGHT, WRONG):
            program = folder / f"faced{cfa}"
            flags = ["-O2", "-fomit-frame-pointer", "-no-pie", f"-DCFA={cfa}"]
            options = [f"-Wl,--build-id={BUILD_ID}", "-o", program]
            subprocess.run([compiler, *flags, SOURCE, *options], check=True)
            made.append(program)
        yield made


def functions_of(program):
    """(start, end, name)"""
    table = subprocess.run(["nm", "-S", program], check=True, capture_output=True, text=True).stdout
    rows = [it.split() for it in table.splitlines()]
    sized = [row for row in rows if len(row) == 4]
    return [(int(at, 16), int(at, 16) + int(size, 16), name) for at, size, _, name in sized]


def _names(words, functions):
    """A return address belongs to the call before it."""
    for i, word in enumerate(words):
        at = word - (i > 0)
        yield from (name for start, end, name in functions if start <= at < end)


def walked(program, cache, user=None):
    """The program's own functions on each of its stacks, leaf first."""
    process = subprocess.Popen([program], user=user, group=user, extra_groups=[], cwd="/")
    watch = Watch(process.pid, cache)
    functions = functions_of(program)
    try:
        watch.settle(process.pid)
        found = watch.sample()
        return {tuple(_names(words, functions)) for _, _, words, _ in found.values()}
    finally:
        watch.close()
        process.kill()
        process.wait()


def test_a_file_with_the_build_id_and_size_of_another_does_not_steer_its_stacks(faces, tmp_path):
    honest, hostile = faces
    assert _native.build_id(str(honest)) == _native.build_id(str(hostile)) == BUILD_ID[2:]
    assert honest.stat().st_size == hostile.stat().st_size
    walked(hostile, tmp_path, user=NOBODY)
    stacks = walked(honest, tmp_path)
    assert stacks
    assert all(stack[:3] == ("spin", "outer", "main") for stack in stacks), stacks


def test_one_content_in_two_files_has_one_table(faces, tmp_path):
    honest, _ = faces
    copy = honest.with_name("copy")
    shutil.copy(honest, copy)
    for program in (honest, copy):
        assert all(stack[:3] == ("spin", "outer", "main") for stack in walked(program, tmp_path))
    prefix = f"{BUILD_ID[2:]}-{honest.stat().st_size:x}-"
    assert len(list(tmp_path.glob(f"{prefix}*.unw"))) == 1
