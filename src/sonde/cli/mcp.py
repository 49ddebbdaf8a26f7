# SPDX-License-Identifier: Apache-2.0
"""`sonde mcp`: offers a server's questions to assistants as tools (Model Context Protocol)."""

from __future__ import annotations

import argparse
from pathlib import Path

from sonde.errors import MissingDependency

EXAMPLE = """\
examples:
  sonde token make --store DIR --tenant lab --scope read    prints ID TOKEN: TOKEN into a file
  sonde mcp --server https://HOST:7373 --token-file ~/.config/sonde/token

An assistant starts it and speaks over its input and output. It only reads: what the token may see.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `mcp` to the commands."""
    parser = subparsers.add_parser(
        "mcp",
        help="answer the questions of assistants about a server's nodes (MCP)",
        description="Offer the questions of a Sonde server as tools of the Model Context Protocol, "
        "over standard input and output.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--server", default="http://127.0.0.1:7373", metavar="URL",
        help="of `sonde serve` or `sonde up`; default http://127.0.0.1:7373")  # fmt: skip
    add("--token-file", type=Path, metavar="FILE",
        help="a token for `read`; without it, the server has to be --open")  # fmt: skip
    add("--page", default="", metavar="URL",
        help="address of the page in links; default that of the server")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until the input ends. Raises UsageError, SinkError, MissingDependency."""
    from sonde import __version__
    from sonde.server.client import ServerClient

    client = ServerClient(args.server, args.token_file)
    page = ServerClient(args.page).url if args.page else ""
    try:
        from sonde.mcp.server import build
        from sonde.mcp.tools import Tools
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"this command needs {error.name}", "install it: pip install 'sonde[mcp]'"
        ) from error
    build(Tools(client, page), __version__).run("stdio")
    return 0
