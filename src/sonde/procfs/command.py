# SPDX-License-Identifier: Apache-2.0
"""What a process was started as, without what its arguments may hold: passwords, paths, tokens.

Of an interpreter's command line its script (`python train.py`) or module (`python -m serve`) is
kept, of any other only that there are arguments; and the number of a rank of a job.
"""

from __future__ import annotations

import re
from typing import Final

from sonde.procfs.files import read_file
from sonde.procfs.names import text

_MOST_BYTES: Final = 1 << 12
_MOST_ENVIRONMENT_BYTES: Final = 1 << 16
_INTERPRETER: Final = re.compile(rb"^(?:python|pypy|perl|ruby|node|php|bash|sh|Rscript)[\d.]*$")
_WITH_VALUE: Final = frozenset({b"-W", b"-X", b"--require", b"-r"})
"""Options of interpreters whose value is the next argument."""
_RANK: Final = re.compile(
    rb"(?:^|\0)(?:RANK|OMPI_COMM_WORLD_RANK|PMIX_RANK|PMI_RANK|SLURM_PROCID)=(\d{1,7})(?=\0|$)"
)


def command_of(pid: int, comm: str) -> str:
    """Program and script of a process, and its rank; `comm` where that is not known."""
    line = read_file(f"/proc/{pid}/cmdline", _MOST_BYTES)
    found = _program_and_script(line) if line else ""
    if not found:
        return comm
    rank = _RANK.search(read_file(f"/proc/{pid}/environ", _MOST_ENVIRONMENT_BYTES) or b"")
    return f"{found} [rank {int(rank[1])}]" if rank else found


def _program_and_script(line: bytes) -> str:
    program, *arguments = line.rstrip(b"\0").split(b"\0")
    name = program.rpartition(b"/")[2].lstrip(b"-")
    if b" " in program or not name:  # a title that the process gave itself
        return ""
    shown = [name]
    rest = arguments
    if _INTERPRETER.match(name):
        script, rest = _script(arguments)
        shown += script
    return text(b" ".join(shown)) + (" …" if rest else "")


def _script(arguments: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """What an interpreter runs, and the arguments behind that."""
    at = 0
    while at < len(arguments) and arguments[at].startswith(b"-") and arguments[at] != b"-":
        if arguments[at] == b"-m":
            return arguments[at : at + 2], arguments[at + 2 :]
        if arguments[at] in (b"-c", b"-e"):  # the program itself, which may hold anything
            return [arguments[at]], arguments[at + 1 :]
        at += 2 if arguments[at] in _WITH_VALUE else 1
    script = arguments[at : at + 1]
    return [it.rpartition(b"/")[2] for it in script], arguments[at + 1 :]
