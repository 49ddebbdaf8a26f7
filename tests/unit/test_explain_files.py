# SPDX-License-Identifier: Apache-2.0
"""CPU time of lines that open, read and close files is a cost of files, not of other code."""

from __future__ import annotations

import pytest

from sonde.model.causes import Cause
from training_capture import on_cpu, process, runs, shares

EVAL = ("_PyEval_EvalFrameDefault", "python3.12")
STEP = ("step", "[python]", "train.py", 88, "python")
OPENED = ("Store.pull", "[python]", "train.py", 31, "python")
READ = ("Store.pull", "[python]", "train.py", 32, "python")
ADDED = ("Store.pull", "[python]", "train.py", 33, "python")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
LAUNCH = ("cudaLaunchKernel", "libcudart.so.13")
CODEC = ("ImagingJpegDecode", "_imaging.so")


def kernel(*names):
    return [(name, "[kernel]", "", 0, "kernel") for name in ("do_syscall_64", *names)]


def test_what_the_interpreter_adds_to_calls_on_files_is_theirs(writer, verdicts):
    key = process(writer)
    on_cpu(writer, key, 0.5, STEP, OPENED, EVAL, *kernel("do_sys_openat2", "path_openat"))
    on_cpu(writer, key, 0.2, STEP, OPENED, EVAL, *kernel("__x64_sys_close"))
    on_cpu(writer, key, 0.8, STEP, OPENED, EVAL)
    on_cpu(writer, key, 0.5, STEP, READ, EVAL, *kernel("ksys_read", "vfs_read"))
    on_cpu(writer, key, 1.0, STEP, ADDED, EVAL)
    on_cpu(writer, key, 1.0, STEP, ADD, LAUNCH)
    runs(writer, key, 0.2)
    (verdict,) = verdicts()
    of = shares(verdict)

    assert of[Cause.IO] == pytest.approx(2 * of[Cause.HOST], rel=0.1)
    (file_cause,) = (one for one in verdict.causes if one.key == Cause.IO)
    assert file_cause.locations[0].function.startswith("Store.pull train.py:31")


@pytest.mark.parametrize("inner", [(EVAL,), (CODEC,)], ids=["few calls", "a library"])
def test_a_line_that_does_other_work_beside_is_not(writer, verdicts, inner):
    key = process(writer)
    on_cpu(writer, key, 0.4, STEP, OPENED, EVAL, *kernel("ksys_read", "vfs_read"))
    on_cpu(writer, key, 1.6, STEP, OPENED, *inner)
    on_cpu(writer, key, 1.0, STEP, ADD, LAUNCH)
    runs(writer, key, 0.2)
    of = shares(verdicts()[0])

    assert of[Cause.HOST] == pytest.approx(4 * of[Cause.IO], rel=0.1)
