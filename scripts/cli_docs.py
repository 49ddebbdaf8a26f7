# SPDX-License-Identifier: Apache-2.0
"""Writes the command line's reference from its parsers.

python scripts/cli_docs.py [--check]     docs/reference/cli.md (--check: exit 1 where it differs)
python scripts/cli_docs.py --into DIR    manual pages in DIR/man, completions in DIR/completions
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from sonde.cli.main import COMMANDS, build_parser

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
SHELLS = ("bash", "zsh", "tcsh")

HEAD = """\
# Command line

Made from the parsers by `scripts/cli_docs.py`; a test holds it. `make docs` makes manual pages and
completions for shells from the same. Exit codes: 0 done, 1 failed, 2 wrong use, 3 this machine
cannot (the remedy is printed).
"""

Subparsers = argparse._SubParsersAction


def leaves(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command that can be run, with its path: the words after `sonde`."""
    below = [it for it in parser._actions if isinstance(it, Subparsers)]
    if not below:
        yield path, parser
    for group in below:
        for name, child in group.choices.items():
            yield from leaves(child, (*path, name))


def cell(text: str) -> str:
    """Text as a cell of a Markdown table: on one line, `|` escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def name_of(action: argparse.Action) -> str:
    """An argument as it is typed, as Markdown code."""
    metavar = action.metavar
    if isinstance(metavar, tuple):
        value = " ".join(metavar)
    elif metavar is not None:
        value = metavar
    elif action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = action.dest.upper()
    if not action.option_strings:
        return f"`{value}`"
    flags = ", ".join(action.option_strings)
    return f"`{flags}`" if action.nargs == 0 else f"`{flags} {value}`"


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """The help of an argument, with its default filled in."""
    text = action.help or ""
    if "%" in text:
        text = parser._get_formatter()._expand_help(action)
    return cell(text)


def document() -> str:
    """The whole page."""
    lines = [HEAD]
    for path, parser in leaves(build_parser()):
        words = " ".join(path)
        lines += [f"## sonde {words}", ""]
        about = COMMANDS[path[0]] if len(path) == 1 else parser.description
        if about:
            lines += [" ".join(about.split()), ""]
        actions = [
            it for it in parser._actions if it.help is not argparse.SUPPRESS and it.dest != "help"
        ]
        if actions:
            lines += ["| argument | what it does |", "|---|---|"]
            lines += [f"| {name_of(it)} | {help_of(it, parser)} |" for it in actions]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def write_shell_files(folder: Path) -> None:
    """Write manual pages and completions for shells below a folder."""
    import shtab
    from argparse_manpage.manpage import Manpage

    completions, manual = folder / "completions", folder / "man" / "man1"
    for target in (completions, manual):
        target.mkdir(parents=True, exist_ok=True)
    for shell in SHELLS:
        (completions / f"sonde.{shell}").write_text(shtab.complete(build_parser(), shell=shell))
    parser = build_parser()
    for path, command in [((), parser), *leaves(parser)]:
        name = "-".join(("sonde", *path))
        command.prog = " ".join(("sonde", *path))
        about = COMMANDS[path[0]] if len(path) == 1 else command.description
        command.man_short_description = about  # type: ignore[attr-defined]
        page = Manpage(command)
        body = str(page).split("\n", 1)[1]  # without its title, whose section is wrong
        (manual / f"{name}.1").write_text(f'.TH "{name.upper()}" "1" "" "Sonde"\n{body}')


def main() -> int:
    """Write or check the page, or write the files for shells. Returns the exit code."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--check", action="store_true")
    options.add_argument("--into", type=Path)
    args = options.parse_args()
    if args.into:
        write_shell_files(args.into)
        return 0
    text = document()
    if args.check:
        return int(TARGET.read_text() != text)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
