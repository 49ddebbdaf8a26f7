# SPDX-License-Identifier: Apache-2.0
"""Code that keeps a CPU busy is named by its lines and by the libraries in which it is there."""

from __future__ import annotations

import pytest

from sonde.analyze.native_callees import FASTER_BLAS
from sonde.model.causes import Cause
from training_capture import on_cpu, process

EVAL = ("_PyEval_EvalFrameDefault", "python3.12")
REFERENCE = ("sgemm_", "libblas.so.3.11.0")
OPENBLAS = ("sgemm_kernel_HASWELL", "libopenblasp-r0.3.21.so")


def at(line: int) -> tuple[str, str, str, int, str]:
    """The program's function, at a line."""
    return ("Encoder.step", "[python]", "train.py", line, "python")


@pytest.fixture
def verdict(writer, verdicts):
    def found(*parts):
        key = process(writer)
        for seconds, *stack in parts:
            on_cpu(writer, key, seconds, *stack)
        (one, *_) = verdicts()
        return next(it.facts for it in one.causes if it.key == Cause.HOST), one.advice[0].text

    return found


def test_the_lines_and_the_library_of_the_busiest_function(verdict):
    facts, step = verdict(
        (2.0, at(53), EVAL, REFERENCE), (1.2, at(47), EVAL, REFERENCE), (0.8, at(52), EVAL)
    )
    assert facts == [
        "Encoder.step train.py: in lines 53 (50 %), 47 (30 %), 52 (20 %); "
        "of its CPU time 80 % in sgemm_ [libblas.so.3.11.0]"
    ]
    assert step == FASTER_BLAS


def test_another_blas_is_no_reason_to_change_it(verdict):
    facts, step = verdict((4.0, at(53), EVAL, OPENBLAS))
    assert facts == [
        "Encoder.step train.py: of its CPU time 100 % in "
        "sgemm_kernel_HASWELL [libopenblasp-r0.3.21.so]"
    ]
    assert step != FASTER_BLAS


def test_code_of_the_interpreter_adds_nothing(verdict):
    facts, _ = verdict((4.0, at(53), EVAL))
    assert facts == []


def test_code_without_a_name_is_its_library(verdict):
    facts, _ = verdict((3.0, at(53), EVAL, ("", "libz.so.1.3")), (1.0, at(53), EVAL))
    assert facts == ["Encoder.step train.py: of its CPU time 75 % in [libz.so.1.3]"]


def test_a_function_of_that_name_in_another_process_adds_nothing(writer, verdicts):
    """An attacker's program may have any names."""
    own, other = process(writer), writer.process(66, "python3", threads=[{"tid": 66, "comm": "x"}])
    on_cpu(writer, own, 4.0, at(53), EVAL)
    writer.on_cpu(other, 66, writer.stack(at(53), EVAL, REFERENCE), 390)
    found = {one.device_name: one for one in verdicts()}
    mine = next(one for name, one in found.items() if "66" not in name)
    assert [it.facts for it in mine.causes if it.key == Cause.HOST] == [[]]
    assert mine.advice[0].text != FASTER_BLAS
