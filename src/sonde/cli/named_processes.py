# SPDX-License-Identifier: Apache-2.0
"""Processes that are named on the command line: by pid, or by what they run.

A name is that of a program, of the script or module that an interpreter runs (`train.py`, `train`),
with the rank in a job (`train.py rank 3`), or the kernel's name of the process. Arguments are not
searched: they may hold secrets.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from sonde.errors import SondeError, UsageError
from sonde.export.layout import one_line

ErrorT = TypeVar("ErrorT", bound=SondeError)

LISTED: Final = 8
"""Of processes with the same name, at most this many are listed."""
_SUFFIXES: Final = (".py", ".pyc", ".pyz", ".pl", ".rb", ".js", ".mjs", ".cjs", ".php", ".sh", ".R")
"""Of scripts, that a name may leave out."""
MAX_PARENTS: Final = 64
"""Of one process, that are followed."""
MOST_SHOWN: Final = 80
"""Characters of what a process runs."""
_MOST_OF_NAME: Final = 200
_COMPARED: Final = 4_096
"""Processes whose names are compared with one that nobody has."""
_ALIKE: Final = 0.7
"""From which similarity (difflib) on a name is proposed."""
_LEAST_PART: Final = 3
"""Characters of a name from which on longer ones that contain it are proposed."""
_PIDS_END: Final = 1 << 31


def process_name(text: str) -> int | str:
    """A pid, or a name: for argparse."""
    if text.isascii() and text.isdecimal():
        if int(text) >= _PIDS_END:
            raise argparse.ArgumentTypeError(f"{text!r} is no process id")
        return int(text)
    if not text.strip() or len(text) > _MOST_OF_NAME or text.lstrip("-+").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a process id nor a name")
    return text


def pids_of(named: Sequence[int | str]) -> list[int]:
    """The pids of what was named, each once. Raises UsageError for a name of no process that runs,
    or of several."""
    names = [one for one in named if isinstance(one, str)]
    found = _running(names) if names else {}
    return list(dict.fromkeys(one if isinstance(one, int) else found[one] for one in named))


def processes_of(named: Sequence[int | str]) -> tuple[list[int], list[str]]:
    """The pids of what was named, for a thread that of its process; a note for each thread. Raises
    UsageError as `pids_of`."""
    found, notes = [], []
    for pid in pids_of(named):
        process = _process_of(pid)
        found.append(process)
        if process != pid:
            notes.append(thread_note(pid, process, _runs(process)))
    return list(dict.fromkeys(found)), notes


def refuse_of_kernel(pids: Sequence[int]) -> None:
    """Raises UsageError for a thread of the kernel; in the machine's pid namespace alone, as a
    program has its numbers in others."""
    from sonde import procfs
    from sonde.model.process import KTHREADD_PID

    for pid in pids:
        stat = procfs.read_stat(pid)
        if stat is not None and KTHREADD_PID in (pid, stat.ppid):
            raise UsageError(
                f"{pid} ({one_line(stat.comm)}) is a thread of the kernel: it runs no program, so "
                "nothing shows what it works or waits for",
                f"Record the stacks in which it runs: sonde record -p {pid}",
            )


def _runs(pid: int) -> str:
    """What a process runs: a script, or its program; 'process' where that is not known."""
    from sonde import procfs

    (script,) = procfs.scripts_of([pid])
    return script or procfs.command_of(pid, procfs.read_comm(pid, pid) or "process")


def named_list(pids: Sequence[int]) -> str:
    """Processes for people: 'train.py (4121), shop.py (5001) and 6 more'."""
    shown = [f"{one_line(_runs(pid))[:MOST_SHOWN]} ({pid})" for pid in pids[:LISTED]]
    more = f" and {len(pids) - LISTED:,} more" * (len(pids) > LISTED)
    return ", ".join(shown) + more


def thread_note(tid: int, pid: int, runs: str) -> str:
    """That the process is taken for its thread; `runs`: what the process runs, '' not known."""
    shown = f" ({one_line(runs)[:MOST_SHOWN]})" * bool(runs)
    return f"{tid} is a thread of process {pid}{shown}: the whole process is meant"


def _process_of(tid: int) -> int:
    """The process of a thread; `tid` where there is none."""
    from sonde import procfs

    try:
        status = procfs.read_lines(Path(f"/proc/{tid}/status"))
    except OSError:
        return tid
    line = next((one for one in status if one.startswith("Tgid:")), "")
    number = line.removeprefix("Tgid:").strip()
    return int(number) if number.isdecimal() else tid


def is_running(name: str) -> bool:
    """Whether a process is called so, or several are."""
    try:
        _running([name])
    except UsageError as error:
        return "processes are called" in error.cause
    return True


def with_running(error: ErrorT, path: str, command: str) -> ErrorT:
    """The error about a file or program that is not there, with the command that takes the process
    which runs one of that name, where there is one."""
    name = path.rpartition("/")[2]
    if name and is_running(name):
        error.cause += f", and a process runs {name}"
        error.remedy = f"Name that process: {command} {shlex.quote(name)}"
    return error


def pid_of(named: int | str) -> int:
    """The pid of one. Raises UsageError as `pids_of`."""
    return pids_of([named])[0]


def _running(names: Sequence[str]) -> dict[str, int]:
    """The pid of each name, of all processes but this command and what started it."""
    from sonde import procfs

    own = {os.getpid(), *procfs.parents(os.getpid())}
    there = [pid for pid in procfs.pids() if pid not in own]
    stats = procfs.read_stats(there, is_patient=True)
    known = {
        pid: stat for pid, stat in zip(there, stats, strict=True)
        if stat is not None and stat.start_code and stat.goes_on
    }  # fmt: skip
    commands = dict(zip(known, procfs.commands_of(list(known), is_patient=True), strict=True))
    scripts = dict(zip(known, procfs.scripts_of(list(known), is_patient=True), strict=True))
    called = {pid: (stat.comm, commands[pid], scripts[pid] or "") for pid, stat in known.items()}
    found = {}
    for name in names:
        pids = [pid for pid, its in called.items() if _is_called(name, *its)]
        roots = _roots(pids, {pid: stat.ppid for pid, stat in known.items()})
        if not roots:
            raise UsageError(
                f"no process that runs is called {one_line(name)}{_similar(name, called.values())}",
                "Look it up: sonde top --idle --once, or ps -e -o pid,args",
            )
        if len(roots) > 1:
            shown = [(pid, procfs.command_of(pid, known[pid].comm)) for pid in roots[:LISTED]]
            raise several(name, shown, len(roots))
        found[name] = roots[0]
    return found


def several(name: str, shown: Sequence[tuple[int, str]], count: int) -> UsageError:
    """The error for a name of `count` processes, of which some are shown: (pid, what it runs)."""
    listed = ", ".join(f"{pid} ({one_line(command)[:MOST_SHOWN]})" for pid, command in shown)
    more = f", and {count - len(shown):,} more" if count > len(shown) else ""
    return UsageError(
        f"{count:,} processes are called {one_line(name)}: {listed}{more}",
        f"Choose one by its number: {shown[0][0]}, for example",
    )


def _is_called(name: str, *its: str) -> bool:
    """`its`: names of a process, and what it runs, without arguments."""
    wanted = name.rpartition("/")[2] or name
    return any(wanted in (word, _without_suffix(word)) for word in _words(its))


def _words(its: Iterable[str]) -> Iterator[str]:
    """The texts, and what each is made of."""
    for one in its:
        yield from (one, *one.split())


def _without_suffix(word: str) -> str:
    return next((word.removesuffix(end) for end in _SUFFIXES if word.endswith(end)), word)


def _similar(name: str, called: Iterable[Iterable[str]]) -> str:
    """' (did you mean ...?)', where a process has a name that is spelled alike, or that the given
    one is a part of; '' without one. Case does not count."""
    words = {word for its in islice(called, _COMPARED) for word in _words(its) if len(word) > 1}
    wanted = _without_suffix(name.rpartition("/")[2] or name).casefold()
    bare = {_without_suffix(word).casefold(): word for word in sorted(words)}
    found = difflib.get_close_matches(wanted, bare, 1, _ALIKE)
    if not found and len(wanted) >= _LEAST_PART:
        longer = (word for word in bare if wanted in word.rpartition("/")[2])
        found = sorted(longer, key=lambda word: (not word.startswith(wanted), len(word), word))
    return f" (did you mean {one_line(bare[found[0]])[:MOST_SHOWN]}?)" if found else ""


def _roots(pids: Sequence[int], parent_of: Mapping[int, int]) -> list[int]:
    """Those that descend from no other of them: a program with its worker processes is one."""
    mine = set(pids)

    def is_root(pid: int) -> bool:
        for _ in range(MAX_PARENTS):
            pid = parent_of.get(pid, 0)
            if pid in mine or not pid:
                return not pid
        return True

    return [pid for pid in pids if is_root(pid)]


class Recorded(NamedTuple):
    """A process of a record, as far as its names go."""

    shown: str
    others: tuple[str, ...] = ()
    """Names that it can be named by, too."""
    parent: int = 0
    """The parent's pid, 0 not known."""


def pids_in_record(
    named: Sequence[int | str],
    processes: Mapping[int, Recorded],
    path: str,
    threads: Mapping[int, int],
    of_threads: bool = False,
) -> tuple[int, ...]:
    """The pids of what was named, of the processes of a record, by pid. Of a program all worker
    processes with its name. `threads`: pids by thread; `of_threads`: one of those stands for its
    process. Raises UsageError for what is not among
    them, and for a name of several programs."""
    parents = {pid: one.parent for pid, one in processes.items()}
    found: list[int] = []
    for one in named:
        if isinstance(one, int):
            pids = [one] if one in processes else []
            pid = threads.get(one, 0)
            if not pids and pid in processes:
                if not of_threads:
                    raise UsageError(
                        f"{one} is a thread of process {pid}", f"Name the process: {pid}"
                    )
                pids = [pid]
        else:
            called = [(pid, (its.shown, *its.others)) for pid, its in processes.items()]
            pids = [pid for pid, its in called if its[0] == one]
            pids = pids or [pid for pid, its in called if _is_called(one, *its)]
        if not pids:
            what = f"process {one}" if isinstance(one, int) else f"process called {one_line(one)}"
            if isinstance(one, str):
                what += _similar(one, ((its.shown, *its.others) for its in processes.values()))
            raise UsageError(
                f"{path} saw no {what}", f"choose one that `sonde report {path}` lists"
            )
        roots = _roots(pids, parents)
        if len(roots) > 1:
            listed = [(pid, processes[pid].shown) for pid in roots[:LISTED]]
            raise several(str(one), listed, len(roots))
        found += pids
    return tuple(dict.fromkeys(found))
