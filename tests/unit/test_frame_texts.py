# SPDX-License-Identifier: Apache-2.0
"""Long names of one user's code do not make a chunk too large, nor cut other users' names."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonde.agent.frame_texts import MOST_BYTES, shortened
from sonde.limits import common_length, cut
from sonde.model.code import Frame, KnownFrame

HOSTILE = 1001
HONEST = 1002


def frames(first: int, count: int, function: str, file: str) -> tuple[KnownFrame, ...]:
    return tuple(
        KnownFrame(first + n, Frame("python", f"{n}{function}", "", file=f"{n}{file}"))
        for n in range(count)
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 5_000), max_size=40), st.integers(0, 20_000))
def test_the_common_length_is_the_greatest_that_fits(sizes: list[int], most: int) -> None:
    length = common_length(sizes, most)

    assert sum(min(size, length) for size in sizes) <= most
    if sizes and length < max(sizes):
        assert sum(min(size, length + 1) for size in sizes) > most


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=60), st.integers(3, 100))
def test_a_cut_text_has_no_more_bytes(text: str, most: int) -> None:
    found = cut(text, most)

    assert len(found.encode()) <= most
    assert found == text or found.endswith("…")


def test_endless_names_of_one_user_leave_others_whole() -> None:
    endless = frames(1, 10_000, "\U0001f525" * 512, "\U0001f525" * 512)
    long_but_honest = frames(50_000, 200, "cutlass::Kernel2<" * 100, "kernel.cu")

    found = shortened([(HOSTILE, endless), (HONEST, long_but_honest)])

    assert not found.keys() & set(long_but_honest)
    assert found.keys() == set(endless)
    assert all(new.id == old.id for old, new in found.items())
    size = sum(
        len(text.encode())
        for known in (*found.values(), *long_but_honest)
        for text in (known.frame.function, known.frame.file)
    )
    assert size <= MOST_BYTES


def test_short_names_of_the_same_user_stay_whole() -> None:
    endless = frames(1, 10_000, "x" * 2_000, "y" * 2_000)
    short = frames(50_000, 500, "step", "train.py")

    found = shortened([(HOSTILE, endless + short)])

    assert found.keys() == set(endless)


def test_nothing_is_cut_where_all_fit() -> None:
    assert not shortened([(HONEST, frames(1, 1_000, "f" * 100, "g" * 100))])
