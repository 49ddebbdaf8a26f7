# SPDX-License-Identifier: Apache-2.0
"""What a process runs, without its arguments, which may hold passwords, paths and tokens.

Of an interpreter's command line its script (`python train.py`), module (`python -m serve`) or main
class (`java org.app.Main`) is shown, without folders; of any other only that there are arguments
(…). A rank of a job has its number. A process chooses all of this: what is too long is not shown.
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
    rb"^(python|pypy|perl|ruby|node|java|php|bash|dash|zsh|sh|Rscript)[\d.]{0,12}t?$"
)
_MAIN_THREADS: Final = frozenset({"MainThread", "node-MainThread", "pt_main_thread"})
"""Names that Node and PyTorch give the first thread of any program."""


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
_SHELL: Final = _Options(
    b"c", b"abefhiklmnprtuvxBCDEHP", b"", frozenset({b"-o", b"-O", b"--rcfile", b"--init-file"})
)
_NODE: Final = _Options(
    b"ep",
    b"i",
    b"",
    frozenset(
        {b"-r", b"--require", b"--import", b"-C", b"--conditions", b"--loader", b"--title"}
        | {b"--experimental-loader", b"--env-file", b"--env-file-if-exists", b"--watch-path"}
        | {b"--icu-data-dir", b"--openssl-config", b"--diagnostic-dir", b"--redirect-warnings"}
    ),
)
_JAVA: Final = _Options(
    b"",
    b"",
    b"",
    frozenset(
        {b"-cp", b"-classpath", b"--class-path", b"-p", b"--module-path", b"--add-modules"}
        | {b"--add-opens", b"--add-exports", b"--add-reads", b"--limit-modules", b"--patch-module"}
        | {b"--upgrade-module-path", b"--enable-native-access", b"--source"}
    ),
)
_PHP: Final = _Options(b"rBRE", b"nqCH", b"", frozenset({b"-d", b"-c", b"-z"}))
_FAMILIES: Final = {
    b"java": _JAVA,
    b"python": _PYTHON,
    b"pypy": _PYTHON,
    **dict.fromkeys((b"bash", b"dash", b"zsh", b"sh"), _SHELL),
    b"perl": _Options(b"eE", b"wWTtUu", b"IMm", frozenset({b"-I"})),
    b"ruby": _Options(b"e", b"wvW", b"IrKT", frozenset({b"-r", b"-I"})),
    b"node": _NODE,
    b"php": _PHP,
    b"Rscript": _Options(b"e", b""),
}
_CODE: Final = frozenset({b"--eval", b"--print", b"--run", b"--command", b"--process-code"})
"""Long options whose value is program text."""
_SCRIPT: Final = re.compile(rb"^[\w.+@-]+\.(?:py|pyc|pyz|pl|rb|js|mjs|cjs|ts|php|sh|R|r)$")
_MOST_OF_NAME: Final = 100
"""Bytes of a script's name; a longer one is not shown."""
_PYTHON_MODULE: Final = re.compile(rb"^[\w.-]{1,100}$")
_CLASS: Final = re.compile(rb"^[\w.$/-]{1,100}$")
"""Of Java, or a module and its class."""
_RANK: Final = re.compile(
    rb"(?:^|\0)(?:RANK|OMPI_COMM_WORLD_RANK|PMIX_RANK|PMI_RANK|SLURM_PROCID)=(\d{1,7})(?=\0|$)"
)


def command_of(pid: int, comm: str) -> str:
    """Program and script of a process, and its rank; `comm` where that is not known."""
    line = read_file(f"/proc/{pid}/cmdline", _MOST_BYTES)
    found = _program_and_script(line) if line else ""
    if not found:
        return comm
    rank = _rank_in(read_file(f"/proc/{pid}/environ", _MOST_ENVIRONMENT_BYTES))
    return f"{found} [{rank}]" if rank else found


def commands_of(pids: Sequence[int], *, is_patient: bool = False) -> list[str]:
    """Program and script of many processes, without their ranks; '' where that is not known.
    `is_patient`: as `Broker.each` takes it."""
    paths = [f"/proc/{pid}/cmdline" for pid in pids]
    lines = BROKER.each(pids, paths, _MOST_BYTES, is_patient=is_patient)
    return [_program_and_script(line) if line else "" for line in lines]


def scripts_of(pids: Sequence[int], *, is_patient: bool = False) -> list[str | None]:
    """What the interpreters among many processes run, and their ranks: 'train.py rank 3',
    '-m serve', 'app.jar'. '' of other programs, and of program text (`-c`) without a rank; None of
    those that could not be read. `is_patient`: as `Broker.each` takes it."""

    def read(pids: Sequence[int], file: str, limit: int) -> list[bytes | None]:
        paths = [f"/proc/{pid}/{file}" for pid in pids]
        return BROKER.each(pids, paths, limit, is_patient=is_patient)

    lines = read(pids, "cmdline", _MOST_BYTES)
    found = [_parsed(line) if line else None for line in lines]
    ours = [pid for pid, one in zip(pids, found, strict=True) if one and one.is_interpreter]
    environments = dict(zip(ours, read(ours, "environ", _MOST_ENVIRONMENT_BYTES), strict=True))
    return [
        None if not line else _label(one, environments.get(pid)) if one else ""
        for pid, line, one in zip(pids, lines, found, strict=True)
    ]


def is_interpreter(name: str) -> bool:
    """Whether a program of this name runs scripts, modules or classes that are others' programs."""
    return bool(_INTERPRETER.match(name.encode()))


def with_comm(script: str, comm: str) -> str:
    """What a process runs (`scripts_of`) with the kernel's name of it, where it chose another one
    than its program has: 'pt_data_worker of train.py'."""
    is_usual = not comm or is_interpreter(comm) or comm in _MAIN_THREADS
    if not script or is_usual or script.startswith(comm):
        return script
    return f"{comm} of {script}"


class _Command(NamedTuple):
    """A command line, without what may be secret."""

    program: bytes
    is_interpreter: bool
    shown: list[bytes]
    """The script; -m and a module; of program text its option."""
    has_more: bool

    @property
    def script(self) -> list[bytes]:
        """`shown`, but nothing of program text."""
        is_text = len(self.shown) == 1 and self.shown[0].startswith(b"-")
        return [] if is_text else self.shown


def _parsed(line: bytes) -> _Command | None:
    """None of a title by setproctitle(), which may hold anything."""
    program, *arguments = line.rstrip(b"\0").split(b"\0")
    name = program.rpartition(b"/")[2].lstrip(b"-")
    if b" " in program or not name:
        return None
    interpreter = _INTERPRETER.match(name)
    if not interpreter:
        return _Command(name, False, [], bool(arguments))
    shown, rest = _script(arguments, _FAMILIES[interpreter[1]])
    return _Command(name, True, shown, bool(rest))


def _program_and_script(line: bytes) -> str:
    found = _parsed(line)
    if found is None:
        return ""
    return text(b" ".join([found.program, *found.shown])) + (" …" if found.has_more else "")


def _label(command: _Command, environment: bytes | None) -> str:
    if not command.is_interpreter:
        return ""
    rank = _rank_in(environment)
    script = command.script or ([command.program] if rank else [])
    return " ".join([*map(text, script), *([rank] if rank else [])])


def _rank_in(environment: bytes | None) -> str:
    found = _RANK.search(environment or b"")
    return f"rank {int(found[1])}" if found else ""


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
            if options is _PHP:  # its script is standard input then
                return [], arguments[at:]
            break
        if option.startswith(b"--module="):
            return [], arguments[at:]
        if option == b"-m" and options is _PYTHON:
            module = arguments[at + 1 : at + 2]
            is_named = bool(module) and bool(_PYTHON_MODULE.match(module[0]))
            end = at + 2 if is_named else at
            return arguments[at:end], arguments[end:]
        if options is _JAVA and option in (b"-jar", b"-m", b"--module"):
            is_certain = True
            at += 1
            break
        if option.partition(b"=")[0] in _CODE:
            return [], arguments[at:]
        if option in options.valued:
            at += 2
            continue
        if not letters.startswith(b"-") and letters[:1] not in options.attached:
            if any(it in options.code for it in letters):
                is_plain = letters.isalpha() and len(letters) <= 4
                return [option] * is_plain, arguments[at + is_plain :]
            is_certain &= options is _JAVA or all(it in options.alone for it in letters)
        elif letters.startswith(b"-"):
            is_certain &= b"=" in letters
        at += 1
    whole = b"".join(arguments[at : at + 1])
    name = whole.rpartition(b"/")[2]
    # @FILE holds more arguments.
    if options is _JAVA and (whole.startswith(b"@") or not _CLASS.match(name)):
        return [], arguments[at:]
    is_name = len(name) <= _MOST_OF_NAME and not name.split()[1:]
    if not name or not is_name or not (is_certain or _SCRIPT.match(name)):
        return [], arguments[at:]
    return [name], arguments[at + 1 :]
