# SPDX-License-Identifier: Apache-2.0
"""The names that a Python program gives its threads, read from the memory of its process.

Before 3.14 CPython leaves the kernel's name of a thread as it is. `threading._active` has every
running thread by its ident; a `Thread` has `_name` and `_native_id` (its tid). The path there: the
main interpreter's sys.modules, the module `threading`, its dict. Threads of other interpreters of
the process, and those that C code began, have no entry.
"""

from __future__ import annotations

import struct
from typing import Final

from sonde import procfs
from sonde.procfs.long_texts import short_name
from sonde.unwind.cpython import Interpreter
from sonde.unwind.python_objects import Parts, Reader, UnreadableError

MAX_THREADS: Final = 2_048
"""Of one process at a time, the ones that began last."""
MAX_NAME: Final = 120
"""Characters of a name."""
NAME_BYTES: Final = 256
"""Memory of those."""


class PythonThreads:
    """The threads of one process, as its `threading` has them."""

    def __init__(self, python: Interpreter, runtime: int) -> None:
        """`runtime`: address of _PyRuntime in the process."""
        self._python = python
        self._runtime = runtime
        self._active = 0
        """Address of threading._active; 0: not found yet."""

    def read(self, memory: Parts) -> dict[int, str]:
        """Names by tid, as the process itself sees both; the names are printable.

        Empty where the program has not imported `threading`. Raises UnreadableError where memory
        does not hold what it should, OSError where it cannot be read.
        """
        reader = Reader(memory, self._python.version)
        try:
            if self._active and (found := self._names(reader)):
                return found
        except UnreadableError:
            pass  # another dict lies there by now
        self._active = 0
        reader = Reader(memory, self._python.version)
        state = self._python.state
        if not state.modules:
            raise UnreadableError("this build of CPython publishes no place of its modules")
        interpreter = reader.word(self._runtime + state.main)
        module = reader.value_of(reader.word(interpreter + state.modules), "threading")
        if not module:
            return {}
        self._active = reader.value_of(reader.module_dict(module), "_active")
        return self._names(reader) if self._active else {}

    def _names(self, reader: Reader) -> dict[int, str]:
        threads = [value for _, value in reader.items(self._active)][-MAX_THREADS:]
        attributes = reader.attributes(threads, ("_name", "_native_id"))
        tids = reader.numbers([it[1] for it in attributes])
        names = reader.texts([it[0] for it in attributes], MAX_NAME)
        return {
            tid: short_name(
                procfs.text(name.encode("utf-8", "surrogatepass"))[:MAX_NAME], NAME_BYTES
            )
            for tid, name in zip(tids, names, strict=True)
            if tid and name
        }


FAILURES: Final = (OSError, UnreadableError, struct.error, OverflowError)
"""What `PythonThreads.read` may raise."""
