# SPDX-License-Identifier: Apache-2.0
"""What a process runs, without its arguments, which may hold passwords, paths and tokens.

Of an interpreter's command line its script (`python train.py`) or module (`python -m serve`) is
shown, of any other only that there are arguments (…). A rank of a job has its number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from sonde.procfs.broker import BROKER
from sonde.procfs.files import read_file
from sonde.procfs.names import text

_MOST_BYTES: Final = 1 << 12
"""Of the command line; the script is near its begin."""
_MOST_ENVIRONMENT_BYTES: Final = 1 << 16
_INTERPRETER: Final = re.compile(
    rb"^(python|pypy|perl|ruby|node|php|bash|dash|zsh|sh|Rscript)[\d.]*$"
)


class _Options(NamedTuple):
    """The short options of a family of interpreters, by letter."""

    code: bytes
    """Those whose value is program text (`-c`), which may hold anything."""
    alone: bytes
    """Those without a value."""
    attached: bytes = b""
    """Those whose value follows in the same argument."""
    valued: frozenset[bytes] = frozenset()
    """Whole options whose value is the next argument."""


_PYTHON: Final = _Options(b"c", b"bBdEhiIOPqsStuvVx", b"WX", frozenset({b"-W", b"-X"}))
_SHELL: Final = _Options(b"c", b"abefhiklmnprtuvxBCDEHP", b"", frozenset({b"-o", b"-O"}))
_FAMILIES: Final = {
    b"python": _PYTHON,
    b"pypy": _PYTHON,
    **dict.fromkeys((b"bash", b"dash", b"zsh", b"sh"), _SHELL),
    b"perl": _Options(b"eE", b"wWTtUu", b"IMm"),
    b"ruby": _Options(b"e", b"wvW", b"IrKT", frozenset({b"-r", b"-I"})),
    b"node": _Options(b"ep", b"i", b"", frozenset({b"-r", b"--require", b"--import"})),
    b"php": _Options(b"rBRE", b"nqCH", b"", frozenset({b"-d", b"-c", b"-z"})),
    b"Rscript": _Options(b"e", b""),
}
_CODE: Final = frozenset({b"--eval", b"--print", b"--run", b"--command", b"--process-code"})
"""Long options whose value is program text."""
_SCRIPT: Final = re.compile(rb"^[\w.+@-]+\.(?:py|pyc|pyz|pl|rb|js|mjs|cjs|ts|php|sh|R|r)$")
_MOST_OF_NAME: Final = 100
"""Bytes of a script's name; a longer one is not shown."""
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


def commands_of(pids: Sequence[int]) -> list[str]:
    """Program and script of many processes, without their ranks; '' where that is not known."""
    lines = BROKER.each(pids, [f"/proc/{pid}/cmdline" for pid in pids], _MOST_BYTES)
    return [_program_and_script(line) if line else "" for line in lines]


def _program_and_script(line: bytes) -> str:
    program, *arguments = line.rstrip(b"\0").split(b"\0")
    name = program.rpartition(b"/")[2].lstrip(b"-")
    if b" " in program or not name:  # a title by setproctitle()
        return ""
    shown = [name]
    rest = arguments
    if interpreter := _INTERPRETER.match(name):
        script, rest = _script(arguments, _FAMILIES[interpreter[1]])
        shown += script
    return text(b" ".join(shown)) + (" …" if rest else "")


def _script(arguments: list[bytes], options: _Options) -> tuple[list[bytes], list[bytes]]:
    """What an interpreter runs, and the arguments behind that.

    The argument after an unknown option may be its value: then it is shown only if its name is that
    of a script.
    """
    at, is_certain = 0, True
    while at < len(arguments) and arguments[at].startswith(b"-") and arguments[at] != b"-":
        option = arguments[at]
        letters = option[1:]
        if option == b"--":
            at += 1
            break
        if option == b"-m" and options is _PYTHON:
            return arguments[at : at + 2], arguments[at + 2 :]
        if option.partition(b"=")[0] in _CODE:
            return [], arguments[at:]
        if option in options.valued:
            at += 2
            continue
        if not letters.startswith(b"-") and letters[:1] not in options.attached:
            if any(it in options.code for it in letters):
                is_plain = letters.isalpha() and len(letters) <= 4
                return [option] * is_plain, arguments[at + is_plain :]
            is_certain &= all(it in options.alone for it in letters)
        elif letters.startswith(b"-"):
            is_certain &= b"=" in letters
        at += 1
    name = b"".join(arguments[at : at + 1]).rpartition(b"/")[2]
    is_name = len(name) <= _MOST_OF_NAME and not name.split()[1:]
    if not name or not is_name or not (is_certain or _SCRIPT.match(name)):
        return [], arguments[at:]
    return [name], arguments[at + 1 :]
