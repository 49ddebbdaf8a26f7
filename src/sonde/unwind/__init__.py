# SPDX-License-Identifier: Apache-2.0
"""Stack unwinding: the data by which the BPF programs unwind user stacks.

These are unwind tables of files and of HotSpot's generated code, mappings of processes, and
layouts of the frames of CPython, Ruby and PHP. The package reads mappings from `resolve` and writes
the BPF maps that the programs of `collect` use.

- `Unwinder` keeps those maps up to date.
- `Jvm` reads and names the code that HotSpot has generated in a process.
- `V8` names the functions of V8's frames.
- `Engine` names the functions of Ruby's and PHP's frames.
- `PythonCode` names the Python frames of unwound stacks.
- `PythonThreads` reads the names that a Python program gives its threads.
- `STOP_REASONS` are the reasons why a stack walk ends.

Terms:
- walk: unwinding one stack in the kernel; stop reason: why it ended where it did
- table, page: the unwind rules of a file, and a part of them that is loaded when it is needed
- evaluation loop: the native function that runs interpreted frames
- interpreted frame: two words of a stack with the highest bit set
- tail: the pieces of a long stack behind its first
- chain: the frames of Ruby or PHP, linked in the program's memory; native: a frame of a C function
- REST: in a walk, frames of a chain follow that no evaluation loop has taken; NO_FRAME: a frame
  that is not shown
- engine: a Ruby or PHP; generated code: what a JIT compiler, or HotSpot, has made at run time
- evaluation: in fields, start and end of the evaluation loop, then of its cold part, which the
  compiler has moved elsewhere
- bias: mapped address less linked address; range: an executable mapping with the table for it
- Map, tagged pointer: words of V8 (`v8_objects`); Code, SharedFunctionInfo: objects of V8
- UNREAD: the frame of code whose name could not be read
- place: what a line is found by: an instruction's address, or its offset in the code; of a
  `Function`: its body (Ruby), 1 (PHP)
- serial: a Ruby ID without its scope bits; imemo: CRuby's internal objects; svar: one of them, in
  the place of a method entry while special variables ($~) are kept
- root: where a pointer to a thread's newest frame is; blob: one piece of HotSpot's code
- attempt: to read a runtime that cannot be read yet, as its program has just started
- due: to be done now; stale: to be loaded again; put off: to be tried again later
"""

from sonde.unwind.cpython import Interpreter
from sonde.unwind.engines import Engine
from sonde.unwind.jvm import Jvm
from sonde.unwind.python_code import PythonCode
from sonde.unwind.python_threads import PythonThreads
from sonde.unwind.stop_reasons import STOP_REASONS
from sonde.unwind.unwinder import Unwinder
from sonde.unwind.v8 import V8

__all__ = [
    "STOP_REASONS",
    "V8",
    "Engine",
    "Interpreter",
    "Jvm",
    "PythonCode",
    "PythonThreads",
    "Unwinder",
]
