# SPDX-License-Identifier: Apache-2.0
"""The entry point: picks the subcommand, and turns whatever goes wrong into one clear line."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from sonde import __version__
from sonde.cli import pausing
from sonde.errors import SondeError
from sonde.export.layout import one_line

COMMANDS = {
    "doctor": "what this machine can observe, what is missing, and how to fix it",
    "record": "capture where time goes: on-CPU, waits, device calls",
    "report": "a capture as flame graph, tables, pprof, speedscope, JSON",
    "explain": "what limits the work, why the GPU stalled, and one next step",
    "diff": "what changed between two recordings: steps, kernels, causes, functions",
    "attach": "bring the library for device time into a running process",
    "detach": "end device time in a process",
    "agent": "run on a node and let its metrics out: Prometheus, OTLP",
    "health": "whether this node's devices are fit for work",
    "top": "live table of the processes that use CPUs and devices",
    "dump": "the current stack of every thread of a process",
    "fleet": "fleet totals with differential privacy",
}
"""Every command with the line that its own module says of it."""

EXAMPLES = """\
examples:
  sonde doctor                         what this machine can observe, and what is missing
  sudo sonde record -d 30              the whole machine for 30 seconds
  sudo sonde record -- python train.py until the program ends
  sonde report FILE.sonde --format html -o report.html
"""

ABORTED_BY_SIGINT = 128 + signal.SIGINT


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser, subparsers = _parser()
    for name in COMMANDS:
        importlib.import_module(f"sonde.cli.{name}").add_parser(subparsers)
    return parser


def build_outline() -> argparse.ArgumentParser:
    """The commands without their flags: all that help needs, at a fraction of the time."""
    parser, subparsers = _parser()
    for name, text in COMMANDS.items():
        subparsers.add_parser(name, help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    """Those of the commands are of this class, too."""

    def error(self, message: str) -> NoReturn:
        """Names that a shell put in for a pattern may hold what a terminal obeys."""
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

    A Ctrl-C that comes when all is done changes nothing, and neither does what pauses a recorder:
    the interpreter, on its way out, would die of it after it has let go of its handlers.
    """
    pausing.catch_early()
    code = main()
    for number in (signal.SIGINT, *pausing.SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `sonde ARGV…`; returns the exit code: 0 done, 1 failed, 2 wrong use, 3 cannot here."""
    try:
        return _dispatch(argv)
    except SondeError as error:
        complain(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader (head, less) went away; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ABORTED_BY_SIGINT
    except Exception as error:
        return _defect(error)


def _dispatch(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = build_outline() if given in (["-h"], ["--help"]) else build_parser()
    args = parser.parse_args(given)
    if args.command is None:
        parser.print_help()
        return 2
    code: int = args.run(args)
    sys.stdout.flush()  # here, where a closed pipe is still handled
    return code


def _print_traceback(error: BaseException) -> None:
    import traceback  # rarely needed, and `--help` shall come at once

    traceback.print_exception(error)


def complain(error: SondeError) -> None:
    """Cause and remedy, one line each."""
    print(f"sonde: {one_line(error.cause)}", file=sys.stderr)
    if error.remedy:
        print(f"  remedy: {one_line(error.remedy)}", file=sys.stderr)
    if error.__cause__ is not None and os.environ.get("SONDE_DEBUG"):
        _print_traceback(error)


def _defect(error: Exception) -> int:
    """What nobody foresaw is a defect of ours: say so, and where to bring it."""
    import platform

    if os.environ.get("SONDE_DEBUG"):
        _print_traceback(error)
    kind = type(error).__name__
    print(
        f"sonde: a defect in Sonde {__version__}: {kind}: {one_line(str(error))}", file=sys.stderr
    )
    print(
        "  remedy: Report it (CONTRIBUTING.md says where) with what the same command prints under "
        f"SONDE_DEBUG=1 (Python {platform.python_version()}, Linux {platform.release()}).",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
