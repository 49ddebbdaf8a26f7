# SPDX-License-Identifier: Apache-2.0
"""Native frames and Python's, put together."""

from __future__ import annotations

from sonde.agent.stacks import EVAL_FUNCTION, aligned
from sonde.model.code import Frame
from sonde.resolve import KnownFrame


def stack(text: str) -> tuple[list[KnownFrame], list[tuple[int, int]]]:
    """Frames, the innermost first; Python's are in capitals."""
    names = [EVAL_FUNCTION if name == "loop" else name for name in text.split()]
    frames = [KnownFrame(i, Frame("user", name, "")) for i, name in enumerate(names)]
    loops: list[tuple[int, int]] = []
    for at, name in enumerate(names):
        if name.isupper():
            begin = loops.pop()[0] if loops and loops[-1][1] == at else at
            loops.append((begin, at + 1))
    return frames, loops


def names(frames: list[KnownFrame]) -> str:
    return " ".join(it.frame.function for it in frames)


def test_frames_of_loops_that_have_them_stay_where_they_are():
    frames, loops = stack("strlen A B sort vector C main")
    assert names(aligned(frames, loops)) == "strlen A B sort vector C main"


def test_a_loop_without_a_frame_yet_leaves_its_callers_to_its_callers():
    frames, loops = stack("A B sort vector C call loop main")
    assert names(aligned(frames, loops)) == "sort vector A B call C main"


def test_where_more_is_amiss_nothing_is_moved():
    for text in ("A sort loop vector loop main", "loop sort A vector loop main", "loop main"):
        frames, loops = stack(text)
        assert aligned(frames, loops) == frames
