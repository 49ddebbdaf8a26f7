# SPDX-License-Identifier: Apache-2.0
"""Stack unwinding: the data that the kernel programs unwind user stacks with.

These are unwind tables of files and of HotSpot's generated code, mappings of processes, and
layouts of the frames of CPython, Ruby and PHP. The package reads mappings from `resolve` and writes
the BPF maps that the programs of `collect` use.

- `Unwinder` keeps those maps up to date.
- `Jvm` reads and names the code that HotSpot has generated in a process.
- `V8` names the functions of V8's frames.
- `Engine` names the functions of Ruby's and PHP's frames.
- `PythonCode` names the Python frames of unwound stacks.
- `STOP_REASONS` are the reasons why a stack walk ends.

Terms:
- walk: unwinding one stack in the kernel; stop reason: why it ended where it did
- table, page: the unwind rules of a file, and a part of them that is loaded when it is needed
- evaluation loop: the native function that runs interpreted frames
- interpreted frame: two words of a stack with the highest bit set
- chain: the frames of Ruby or PHP, linked in the program's memory; native: one of C's
- REST: in a walk, frames of a chain follow that no loop has taken; NO_FRAME: one to hide
- engine: a Ruby or PHP; Map, tagged pointer: V8's own words (`v8_objects`)
- UNREAD: the frame of code whose name could not be read
- place: what a line is found by: an instruction's address, or its offset in the code; of a
  `Function`: its body (Ruby), 1 (PHP)
- serial: a Ruby ID without its scope bits; imemo, svar: CRuby's internal objects, and one that
  stands in a frame for an entry while special variables ($~) are kept
- root: where a pointer to a thread's newest frame is; blob: one piece of HotSpot's code
- attempt: one at a runtime that could not be read yet, repeated later and later
"""

from sonde.unwind.cpython import Interpreter
from sonde.unwind.engines import Engine
from sonde.unwind.jvm import Jvm
from sonde.unwind.python_code import PythonCode
from sonde.unwind.stop_reasons import STOP_REASONS
from sonde.unwind.unwinder import Unwinder
from sonde.unwind.v8 import V8

__all__ = ["STOP_REASONS", "V8", "Engine", "Interpreter", "Jvm", "PythonCode", "Unwinder"]
