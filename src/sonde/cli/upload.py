# SPDX-License-Identifier: Apache-2.0
"""`sonde upload`: sends a recording to a server."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

EXAMPLE = """\
examples:
  sonde upload FILE.sonde                                    to the server of this machine
  SONDE_TOKEN=… sonde upload FILE.sonde --server https://HOST:7373
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `upload` to the commands."""
    parser = subparsers.add_parser(
        "upload",
        help="send a recording to a server",
        description="Send a recording to a server; what the server has already is not doubled. "
        "The token is read from SONDE_TOKEN, because other users can see command lines.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="of `sonde record`")
    add("--server", default="http://127.0.0.1:7373", metavar="URL", help="of `sonde serve`")
    add("--node", default="", help="name of the machine; default this one's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the recording. Raises SinkError, CaptureError, UsageError."""
    from sonde.server.upload import upload

    node = args.node or socket.gethostname()
    sent = upload(args.file, args.server, node, os.environ.get("SONDE_TOKEN", ""))
    print(f"{sent.accepted} chunks sent, {sent.duplicates} were there, {sent.damaged} unreadable")
    return 0
