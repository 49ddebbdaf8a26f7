# SPDX-License-Identifier: Apache-2.0
"""The entry point: picks the subcommand, and turns whatever goes wrong into one clear line."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from sonde import __version__
from sonde.errors import SondeError

COMMANDS = (
    *("doctor", "record", "report", "explain", "diff", "attach", "detach", "agent", "health"),
    *("dump", "fleet"),
)

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
    parser = argparse.ArgumentParser(
        prog="sonde",
        description="Why is my GPU waiting? Ask the running job.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sonde {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name in COMMANDS:
        importlib.import_module(f"sonde.cli.{name}").add_parser(subparsers)
    return parser


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
    parser = build_parser()
    args = parser.parse_args(argv)
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
    print(f"sonde: {error.cause}", file=sys.stderr)
    if error.remedy:
        print(f"  remedy: {error.remedy}", file=sys.stderr)
    if error.__cause__ is not None and os.environ.get("SONDE_DEBUG"):
        _print_traceback(error)


def _defect(error: Exception) -> int:
    """What nobody foresaw is a defect of ours: say so, and where to bring it."""
    import platform

    if os.environ.get("SONDE_DEBUG"):
        _print_traceback(error)
    kind = type(error).__name__
    print(f"sonde: a defect in Sonde {__version__}: {kind}: {error}", file=sys.stderr)
    print(
        "  remedy: Report it (CONTRIBUTING.md says where) with what the same command prints under "
        f"SONDE_DEBUG=1 (Python {platform.python_version()}, Linux {platform.release()}).",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
