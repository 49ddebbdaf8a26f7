# SPDX-License-Identifier: Apache-2.0
"""`sonde mcp`: offers a server's questions to assistants as tools (Model Context Protocol)."""

from __future__ import annotations

import argparse
from pathlib import Path

from sonde.errors import MissingDependency, UsageError

EXAMPLE = """\
examples:
  sonde token make --store DIR --tenant lab --scope read    prints ID TOKEN: TOKEN into a file
  sonde mcp --server https://HOST:7373 --token-file ~/.config/sonde/token
  sonde mcp --server https://HOST:7373 --listen 127.0.0.1:7374    over HTTP, for several assistants

An assistant starts it and speaks over its input and output. With --listen it is an HTTP server on
loopback, and each request sends a token. It only reads: what the token may see.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `mcp` to the commands."""
    parser = subparsers.add_parser(
        "mcp",
        help="answer the questions of assistants about a server's nodes (MCP)",
        description="Offer the questions of a Sonde server as tools of the Model Context Protocol, "
        "over standard input and output, or over HTTP on loopback.",
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
    add("--listen", default="", metavar="HOST:PORT",
        help="serve over HTTP on this address of loopback, path /mcp, instead of input and output; "
        "each request has a token for `read` as its bearer")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until the input ends, or until SIGTERM. Raises UsageError, SinkError,
    MissingDependency."""
    if args.listen and args.token_file is not None:
        raise UsageError(
            "--token-file and --listen exclude each other: any user of this machine could ask with "
            "that token",
            "have each assistant send a token of its user as `Authorization: Bearer`",
        )
    try:
        return _over_http(args) if args.listen else _over_pipes(args)
    except ModuleNotFoundError as error:
        extras = "mcp,server" if args.listen else "mcp"
        raise MissingDependency(
            f"this command needs {error.name}", f"install it: pip install 'sonde[{extras}]'"
        ) from error


def _over_pipes(args: argparse.Namespace) -> int:
    from sonde import __version__
    from sonde.server.client import ServerClient

    client = ServerClient(args.server, args.token_file)
    page = _page(args)
    from sonde.mcp.server import build
    from sonde.mcp.tools import Tools

    build(Tools(client, page), __version__).run("stdio")
    return 0


def _over_http(args: argparse.Namespace) -> int:
    from sonde import __version__
    from sonde.server.addresses import Address, listening_socket, parse
    from sonde.server.client import ServerClient

    host, port = parse(args.listen)
    if not Address(host, port).is_loopback:
        raise UsageError(
            f"{host} is not this machine's loopback: tokens would cross the network in the clear",
            "listen on 127.0.0.1, and put a proxy with TLS in front",
        )
    from sonde.mcp import http
    from sonde.mcp.server import build
    from sonde.mcp.tools import Tools

    client = ServerClient(args.server, token=http.token_of_request)
    server = build(Tools(client, _page(args)), __version__)
    listening = listening_socket(host, port)
    shown = f"[{host}]" if ":" in host else host
    print(f"serving http://{shown}:{listening.getsockname()[1]}{http.PATH}", flush=True)
    http.serve(server, listening, lambda token: _tenant_of(args.server, token))
    return 0


def _tenant_of(url: str, token: str) -> str | None:
    """Whose token it is where the server accepts it, '' where it is not for reading; else None."""
    from sonde.errors import SondeError
    from sonde.server.client import QuestionError, ServerClient

    try:
        identity = ServerClient(url, token=token).ask("identity")
    except QuestionError as error:
        return "" if error.status == 403 else None
    except SondeError:
        return None
    return str(identity.get("tenant", "")) if isinstance(identity, dict) else ""


def _page(args: argparse.Namespace) -> str:
    from sonde.server.client import ServerClient

    return ServerClient(args.page).url if args.page else ""
