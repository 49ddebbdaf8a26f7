# SPDX-License-Identifier: Apache-2.0
"""How a stack of a trace is described."""

from __future__ import annotations

import pytest

from sonde.analyze.code_locations import describe
from sonde.model.timeline import HostKind

STEP = "train.py(88): step"
MODULE = "train.py(1): <module>"
LIBRARY = "torch/serialization.py(850): save"
WRITE = "<built-in method write of PyTorchFileWriter object at 0x7f>"
ITEM = "<built-in method item of Tensor object at 0x7f>"


@pytest.mark.parametrize(
    ("inner_first", "text"),
    [
        ((ITEM, STEP, MODULE), "item() in step train.py:88"),
        ((STEP, MODULE), "step train.py:88"),
        ((MODULE,), "<module> train.py:1"),
        # What a library called, the program's function did not call.
        ((WRITE, LIBRARY, STEP, MODULE), "step train.py:88"),
        # A built-in that calls Python code again is still what the program's function called.
        ((WRITE, LIBRARY, ITEM, STEP), "item() in step train.py:88"),
    ],
)
def test_a_built_in_is_named_where_the_programs_function_called_it(inner_first, text):
    assert describe([(HostKind.PYTHON, name) for name in inner_first]) == text
