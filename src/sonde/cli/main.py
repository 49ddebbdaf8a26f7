# SPDX-License-Identifier: Apache-2.0
"""The entry point: runs the subcommand, and prints each error as cause and remedy."""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from sonde import __version__
from sonde.cli import pause_signals
from sonde.errors import MissingDependency, SondeError
from sonde.export.layout import one_line
from sonde.without_pandas import keep_pandas_out

COMMANDS = {
    "doctor": "what this machine can observe, what is missing, and how to fix it",
    "record": "capture where time goes: on-CPU, waits, device calls",
    "report": "a capture as flame graph, tables, pprof, speedscope, JSON",
    "explain": "what limits the work, why the GPU stalled, and one next step",
    "diff": "what changed between two recordings: steps, kernels, causes, functions",
    "attach": "load the device-time library into a running process",
    "detach": "turn device time off in a process",
    "agent": "run on a node: send what happens to a server, export metrics to Prometheus and OTLP",
    "diagnose": "watch this node: what became slower, why, and who did it",
    "incidents": "incidents that were kept: cause, offender, evidence",
    "health": "whether this node's devices are fit for work",
    "trace": "every kernel, copy and call of a running process for a second, at a stated price",
    "top": "live table of the processes that use CPUs and devices",
    "dump": "the current stack of every thread of a process",
    "up": "watch this machine, keep its history, answer questions: agent and server in one",
    "serve": "take chunks of many nodes, remember them, answer questions over HTTP",
    "upload": "send a recording to a server",
    "collection": "pause and resume the agents that send to a server",
    "deploy": "print what installs Sonde on a cluster: Kubernetes, Slurm",
    "alerts": "check rules of alerts and what they give now; list alerts",
    "mcp": "answer the questions of assistants about a server's nodes (MCP)",
    "job": "what a job did with its GPUs: hours held and wasted, why, functions",
    "owners": "who held GPUs and who wastes them, by user, job, pod, …",
    "token": "make, list and revoke the tokens of a server",
    "docs": "print a tutorial: a slow job, a slow server, a noisy neighbour, a leak",
    "fleet": "fleet totals with differential privacy",
}
"""Every command with its help line, as in its module."""

EXAMPLES = """\
examples:
  sonde doctor                         what this machine can observe, and what is missing
  sudo sonde record -d 30              the whole machine for 30 seconds
  sudo sonde record -- python train.py until the program ends
  sonde report FILE.sonde --format html -o report.html
"""

_NO_LIBRARY = "cannot open shared object file"
"""Part of the dynamic linker's message for a missing library."""
_READING = frozenset({"duckdb", "numpy", "pyarrow"})
"""Packages that an installation for recording alone does not have."""
ABORTED_BY_SIGINT = 128 + signal.SIGINT
"""Exit code, as of shells."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser, subparsers = _parser()
    for name in COMMANDS:
        _add_command(name, subparsers)
    return parser


def build_command_parser(name: str) -> argparse.ArgumentParser:
    """The parser with one command: imports no module of another one."""
    parser, subparsers = _parser()
    _add_command(name, subparsers)
    return parser


def _add_command(
    name: str, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]
) -> None:
    importlib.import_module(f"sonde.cli.{name}").add_parser(subparsers)


def build_outline() -> argparse.ArgumentParser:
    """The parser of the commands without flags: enough for --help, and much faster."""
    parser, subparsers = _parser()
    for name, text in COMMANDS.items():
        subparsers.add_parser(name, help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    """The parser of `sonde` and of each command."""

    def error(self, message: str) -> NoReturn:
        """Print the message escaped, and exit: file names that a shell pattern gave may contain
        control sequences of the terminal."""
        super().error(one_line(message))


def _parser() -> tuple[
    argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]
]:
    parser: argparse.ArgumentParser = _Parser(
        prog="sonde",
        description="Why is my GPU waiting? Ask the running job.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sonde {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    return parser, commands


def run() -> NoReturn:
    """The program `sonde`.

    After the command, SIGINT and the pause signals are ignored: the interpreter resets its handlers
    before it exits, and would be killed by them.
    """
    pause_signals.catch_early()
    keep_pandas_out()
    code = main()
    for number in (signal.SIGINT, *pause_signals.SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    if not _READING & sys.modules.keys():  # DuckDB prints what was not collected as a leak
        gc.freeze()  # the kernel takes all of it back: the last collections of cycles take 0.15 s
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `sonde ARGV…`; returns the exit code: 0 done, 1 failed, 2 wrong use, 3 this machine
    cannot; or that of a recorded program."""
    try:
        return _dispatch(argv)
    except SondeError as error:
        print_error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader (head, less) has exited; keep the interpreter from reporting it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ABORTED_BY_SIGINT
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _report_bug(error)
        where = error.filename or "standard output or a temporary file"
        print_error(SondeError(f"cannot write {where}: {error.strerror}", "free some space"))
        with suppress(OSError, ValueError):  # else the interpreter tries once more, and reports it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SondeError.exit_code
    except Exception as error:
        if isinstance(error, ImportError) and (missing := _missing(error)) is not None:
            print_error(missing)
            return MissingDependency.exit_code
        return _report_bug(error)


def _missing(error: ImportError) -> MissingDependency | None:
    """The error for a package of readers that an installation for recording lacks, or for a library
    that a package (NumPy, Arrow) needs and this host lacks; None for any other module."""
    if (error.name or "").partition(".")[0] in _READING and isinstance(error, ModuleNotFoundError):
        return MissingDependency(
            f"the Python package {error.name} is not installed: this installation only records",
            "install Sonde with its dependencies: pip install sonde",
        )
    if _NO_LIBRARY not in str(error):
        return None
    name = str(error).partition(":")[0]
    return MissingDependency(
        f"the library {name} is missing on this host",
        "install it; libstdc++.so.6 is in libstdc++6 (apt) or libstdc++ (dnf)",
    )


def _dispatch(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given in (["-h"], ["--help"]):
        parser = build_outline()
    elif given and given[0] in COMMANDS:
        parser = build_command_parser(given[0])
    else:
        parser = build_parser()
        if given and not given[0].startswith("-"):
            import difflib  # rarely needed

            if near := difflib.get_close_matches(given[0], COMMANDS, 1):
                parser.error(f"invalid choice: {given[0]!r}: do you mean {near[0]}?")
    args, rest = parser.parse_known_args(given)
    if rest:
        hint = ""
        if given[0] == "top" and not rest[0].startswith("-"):
            from sonde.cli.named_processes import is_running

            hint = f": do you mean -p {rest[0]}?" * is_running(rest[0])
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    args.names_command = "--" in given
    if args.command is None:
        parser.print_help()
        return 2
    code: int = args.run(args)
    sys.stdout.flush()  # now, while `main` still handles a closed pipe
    return code


def _print_traceback(error: BaseException) -> None:
    import traceback  # rarely needed, and it slows down `--help`

    traceback.print_exception(error)


def print_error(error: SondeError) -> None:
    """Print cause and remedy, one line each."""
    print(f"sonde: {one_line(error.cause)}", file=sys.stderr)
    if error.remedy:
        print(f"  remedy: {one_line(error.remedy)}", file=sys.stderr)
    if error.__cause__ is not None and os.environ.get("SONDE_DEBUG"):
        _print_traceback(error)


def _report_bug(error: Exception) -> int:
    """Report an unexpected exception as a bug, with what to do. Returns the exit code."""
    import platform

    if os.environ.get("SONDE_DEBUG"):
        _print_traceback(error)
    kind = type(error).__name__
    print(f"sonde: a bug in Sonde {__version__}: {kind}: {one_line(str(error))}", file=sys.stderr)
    print(
        "  remedy: Report it (see CONTRIBUTING.md) with the output of the same command with "
        f"SONDE_DEBUG=1 (Python {platform.python_version()}, Linux {platform.release()}).",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
