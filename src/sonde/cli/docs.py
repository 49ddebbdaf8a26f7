# SPDX-License-Identifier: Apache-2.0
"""`sonde docs`: prints the tutorials, which an installation from a wheel has, too."""

from __future__ import annotations

import argparse
from importlib.resources import files

SUFFIX = ".md"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `docs` to the commands."""
    parser = subparsers.add_parser(
        "docs",
        help="print a tutorial: a slow job, a slow server, a noisy neighbour, a leak",
        description="Print a tutorial as Markdown; without a name, list them.",
        epilog="example:\n  sonde docs slow-server | less",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("page", metavar="PAGE", nargs="?", choices=names(), help=", ".join(names()))
    parser.set_defaults(run=run)


def names() -> list[str]:
    """The pages, without the ending of their files."""
    there = files("sonde.cli").joinpath("pages").iterdir()
    return sorted(it.name.removesuffix(SUFFIX) for it in there if it.name.endswith(SUFFIX))


def text_of(name: str) -> str:
    """A page. Raises OSError where there is none."""
    return files("sonde.cli").joinpath("pages", name + SUFFIX).read_text(encoding="utf-8")


def run(args: argparse.Namespace) -> int:
    """Print a page, or the list."""
    if args.page:
        print(text_of(args.page), end="")
        return 0
    for name in names():
        title = text_of(name).partition("\n")[0].removeprefix("# ")
        print(f"sonde docs {name:18} {title}")
    return 0
