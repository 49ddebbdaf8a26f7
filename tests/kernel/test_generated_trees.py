# SPDX-License-Identifier: Apache-2.0
"""Programs made by chance, whose functions have one place in one tree each (bench/stacks/trees.py).

`python -m bench.stacks.truth` measures the share over many of them; here two stand for all.
"""

from __future__ import annotations

import shutil
import sys

import pytest
from bench.stacks import trees, truth
from bench.stacks.trees import NATIVE, PYTHON

pytestmark = pytest.mark.bpf

RIGHT = 0.995
"""Of some thousand samples; some ten thousand are held against 0.999 by the benchmark."""


@pytest.mark.parametrize("seed", [1, 2])
def test_a_native_tree_is_right(tmp_path, seed):
    """Each has exceptions on their way to a handler under frames of variable size."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    share, wrong = truth.share_of(truth.native_case(tmp_path, seed), 2, tmp_path)
    assert share.total > 300
    assert share.value >= RIGHT, wrong.most_common(3)


def test_a_tree_of_python_and_native_code_is_right(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    pytest.importorskip("ctypes")
    case = truth.mixed_case(tmp_path, 200, "this interpreter", (sys.executable,))
    share, wrong = truth.share_of(case, 2, tmp_path)
    assert share.total > 300
    assert share.value >= RIGHT, wrong.most_common(3)


def test_a_tree_knows_each_of_its_paths():
    tree = trees.random_tree(7, PYTHON)
    again = trees.random_tree(7, PYTHON)
    assert tree.paths == again.paths
    for name, paths in tree.paths.items():
        for path in paths:
            assert path[-1] == name
            assert tree.is_right(path)
            assert tree.is_right([*path, trees.SPIN])
            assert not tree.is_right(path[1:])
    assert not tree.is_right([])
    assert {it.kind for it in trees.nodes(trees.random_tree(7, NATIVE))} >= {"catches", "signals"}
