# SPDX-License-Identifier: Apache-2.0
"""Symbol names that are forged to hold up the recorder's loop."""

from __future__ import annotations

import random
import time

import pytest

from sonde import _native

LIMIT_S = 0.01
PARTS = {
    "delete": ("_Z1fIX", "dl", "EEvv"),
    "delete[]": ("_Z1fIX", "da", "EEvv"),
    "new": ("_Z1fIX", "nw", "EEvv"),
    "substitution": ("_Z1f", "SaI", ""),
    "local name": ("_Z1fI", "L1aI", ""),
    "inherited constructor": ("_Z1f", "CI1", ""),
    "closure": ("_Z1f", "TsUl", ""),
    "conversion": ("_ZN1fcv", "T_I", ""),
    "empty packs": ("_Z1fIJE", "JT_T_E", "EvT0_"),
    "pointers": ("_Z1f", "P", "i"),
    "lists": ("_Z1fIX", "cl", "EEvv"),
    "of Rust": ("_R", "INvC1a1bB_", ""),
    "of Rust, nested": ("_RNv", "Nt", "C1a1b"),
}


def seconds_of(name: bytes) -> float:
    """CPU time, the least of three attempts."""
    took = []
    for _ in range(3):
        began_s = time.thread_time()
        shown = _native.demangle(name)
        took.append(time.thread_time() - began_s)
        assert len(shown.encode()) <= 1024 + 3
        if took[-1] < LIMIT_S:
            break
    return min(took)


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("size", [64, 1024])
def test_no_name_takes_long(kind: str, size: int) -> None:
    before, part, after = PARTS[kind]
    name = (before + part * ((size - len(before + after)) // len(part)) + after).encode()
    assert seconds_of(name) < LIMIT_S


def test_no_mixture_of_such_parts_takes_long() -> None:
    chosen = random.Random(5)
    parts = [part for _, part, _ in PARTS.values()] + ["E", "i", "1a", "v", "S_", "T_", "I", "X"]
    for _ in range(500):
        name = "_Z1f" + chosen.choice(["", "I", "IX"])
        name += "".join(chosen.choice(parts) * chosen.choice([1, 4]) for _ in range(40))
        assert seconds_of(name.encode()) < LIMIT_S, name
