# SPDX-License-Identifier: Apache-2.0
"""The tree with its own interpreter: packed libraries are loaded from memory."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
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

SIZES = json.loads((ROOT / "bench" / "results" / "tree.json").read_text())

pytestmark = pytest.mark.skipif(shutil.which("strip") is None, reason="needs strip")


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
    packed = tree / "lib" / "packed" / f"{EXTENSION.name}.xz"
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 0xFF
    packed.write_bytes(content)
    done = load(tree)

    assert "ImportError" in done.stderr
    assert f"{EXTENSION.name} of this installation is damaged" in done.stderr


def test_a_cut_off_one_is_named(tree: Path) -> None:
    packed = tree / "lib" / "packed" / f"{EXTENSION.name}.xz"
    packed.write_bytes(packed.read_bytes()[:-100])

    assert f"{EXTENSION.name} of this installation is damaged" in load(tree).stderr


def test_links_count_nothing(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 1000)
    (tmp_path / "two").symlink_to("one")

    assert script.size_of(tmp_path) == 1000


@pytest.mark.parametrize("kind", ["whole", "node"])
def test_the_tree_is_as_small_as_promised(script: ModuleType, kind: str) -> None:
    limits: dict[str, int] = script.LIMITS

    assert limits["whole"] <= 60 * 1000**2
    assert sum(SIZES[kind].values()) <= limits[kind]


def test_one_that_is_larger_fails(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_bytes(b"x" * 1000)
    assert script.judged(tmp_path, "node", None) == 0
    monkeypatch.setitem(script.LIMITS, "node", 999)

    assert script.judged(tmp_path, "node", None) == 1


def test_sizes_are_kept_by_part(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.11").write_bytes(b"x" * 1000)
    kept = tmp_path / "kept.json"
    script.judged(tmp_path, "whole", kept)
    (tmp_path / "two").write_bytes(b"x" * 10)
    script.judged(tmp_path, "node", kept)

    found = json.loads(kept.read_text())
    assert found["whole"]["the interpreter"] == found["node"]["the interpreter"] == 1000
    assert found["whole"]["the rest"] == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_functions_in_the_place_of_openblas_are_right(tmp_path: Path) -> None:
    """Against NumPy, as its core calls them: rows first, strides, conjugates."""
    built = tmp_path / "blas.so"
    source = ROOT / "scripts" / "tree_blas.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", built, source], check=True)
    blas = ctypes.CDLL(str(built))
    rng = np.random.default_rng(1)
    for letter, kind in {"s": "f4", "d": "f8", "c": "c8", "z": "c16"}.items():
        a, b = (_numbers(rng, shape, kind) for shape in ((5, 7), (7, 3)))
        for trans_a, left in ((111, a), (112, a.T.copy())):
            for trans_b, right in ((111, b), (112, b.T.copy())):
                out = np.zeros((5, 3), kind)
                sizes = (101, trans_a, trans_b, 5, 3, 7, _factor(kind, 1), left, left.shape[1])
                rest = (right, right.shape[1], _factor(kind, 0), out, 3)
                _call(blas, f"{letter}gemm", *sizes, *rest)
                np.testing.assert_allclose(out, a @ b, rtol=1e-4)
        product, x = np.zeros(10, kind), _numbers(rng, (14,), kind)
        with_x = (a, 7, x, 2, _factor(kind, 0), product, 2)
        _call(blas, f"{letter}gemv", 101, 111, 5, 7, _factor(kind, 1), *with_x)
        np.testing.assert_allclose(product[::2], a @ x[::2], rtol=1e-4)
        square = np.zeros((5, 5), kind)
        with_square = (a, 7, _factor(kind, 0), square, 5)
        _call(blas, f"{letter}syrk", 101, 121, 111, 5, 7, _factor(kind, 1), *with_square)
        np.testing.assert_allclose(square, np.triu(a @ a.T), rtol=1e-4, atol=1e-5)
        to = np.ones(7, kind)
        _call(blas, f"{letter}axpy", 7, _factor(kind, 2), x, 2, to, 1)
        np.testing.assert_allclose(to, 1 + 2 * x[::2], rtol=1e-4)
        if letter in "cz":
            sums = np.zeros(2, kind)
            _call(blas, f"{letter}dotu_sub", 7, x, 2, to, 1, sums[:1])
            _call(blas, f"{letter}dotc_sub", 7, x, 2, to, 1, sums[1:])
            expected = [np.dot(x[::2], to), np.vdot(x[::2], to)]
            np.testing.assert_allclose(sums, expected, rtol=1e-4)
        else:
            getattr(blas, f"scipy_cblas_{letter}dot64_").restype = type(_factor(kind, 1))
            found = _call(blas, f"{letter}dot", 7, x, 2, to, 1)
            assert found == pytest.approx(float(np.dot(x[::2], to)), rel=1e-4)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Any:
    numbers = np.zeros(shape, kind)
    numbers += 0.1 + rng.random(shape).astype(kind)
    if kind.startswith("c"):
        numbers += 1j * rng.random(shape).astype(kind)
    return numbers


def _factor(kind: str, value: float) -> Any:
    """A factor as C passes it: by value, or a complex one by its address."""
    by_value = {"f4": ctypes.c_float, "f8": ctypes.c_double}
    return by_value[kind](value) if kind in by_value else np.array([value], kind)


def _call(blas: ctypes.CDLL, name: str, *values: Any) -> Any:
    passed = [
        ctypes.c_int64(one)
        if isinstance(one, int)
        else ctypes.c_void_p(one.ctypes.data)
        if isinstance(one, np.ndarray)
        else one
        for one in values
    ]
    return getattr(blas, f"scipy_cblas_{name}64_")(*passed)
