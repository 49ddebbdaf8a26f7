# SPDX-License-Identifier: Apache-2.0
"""The tree with its own interpreter: packed libraries are loaded from memory."""

from __future__ import annotations

import ctypes.util
import importlib.util
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
EXTENSION = next(Path(msgspec.__file__).parent.glob("_core*.so"))
LOAD = f"""
import sys
sys.prefix = sys.argv[1]
sys.path.insert(0, sys.argv[1])
import msgspec._utils
import unpack_extension
unpack_extension.load("msgspec._core", {EXTENSION.name!r}, [])
found = sys.modules["msgspec._core"]
print(found.__spec__.origin, found.Struct.__name__)
"""

pytestmark = pytest.mark.skipif(
    shutil.which("zstd") is None or shutil.which("strip") is None, reason="needs zstd and strip"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("tree_script", str(ROOT / "scripts" / "tree"))
    spec = importlib.util.spec_from_loader("tree_script", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def tree(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one packed extension module."""
    monkeypatch.setattr(script, "CACHE", tmp_path)
    (tmp_path / "lib" / "packed").mkdir(parents=True)
    script.pack(EXTENSION, tmp_path)
    (tmp_path / "unpack_extension.py").write_text(script.UNPACK)
    name = ctypes.util.find_library("zstd")
    assert name
    library = next(Path("/usr/lib").glob(f"*/{name}"))
    shutil.copy(library, tmp_path / "lib" / "libzstd.so.1")
    return tmp_path


def load(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOAD, str(tree)], capture_output=True, text=True, timeout=60
    )


def test_a_packed_module_is_loaded_from_memory(tree: Path) -> None:
    done = load(tree)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/proc/self/fd/")
    assert done.stdout.endswith("Struct\n")


def test_a_damaged_one_is_named(tree: Path) -> None:
    packed = tree / "lib" / "packed" / f"{EXTENSION.name}.zst"
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 0xFF
    packed.write_bytes(content)
    done = load(tree)

    assert "ImportError" in done.stderr
    assert f"{EXTENSION.name} of this installation is damaged" in done.stderr


def test_what_is_too_large_fails(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 1000)
    (tmp_path / "two").symlink_to("one")

    assert script.size_of(tmp_path) == 1000
