# SPDX-License-Identifier: Apache-2.0
"""What the kernel needs to walk stacks: tables of files, mappings of processes, Python's layouts.

A room of its own, because it lies between two that do not know each other: it asks `resolve` what a
process has mapped and hands that to the kernel maps that the programs of `collect` walk by.
`Unwinder` is the door; `PythonCode` names what those walks bring back of Python; `ENDS` says why
they ended.
"""

from sonde.unwind.cpython import Interpreter
from sonde.unwind.ends import ENDS
from sonde.unwind.loader import Unwinder
from sonde.unwind.python_code import PythonCode

__all__ = ["ENDS", "Interpreter", "PythonCode", "Unwinder"]
