# SPDX-License-Identifier: Apache-2.0
"""`sonde up`: a server on loopback and an agent that sends to it, for this machine."""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from sonde.cli import retention
from sonde.cli.children import Child, first_line
from sonde.errors import MissingDependency, SinkError, UsageError
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.server.tokens import Scope, Tokens

EXAMPLE = """\
examples:
  sudo sonde up                 watch this machine, keep its history, answer questions
  sudo sonde up --for 20s       the same for a while, then print what took the CPUs
  sudo sonde up --state DIR     keep the history elsewhere

Stops at SIGTERM or Ctrl-C. The next start goes on with the same history.
"""
CHUNK_S = 3.0
"""How often the agent sends."""
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds by the suffix of `--for`."""
READ_TOKEN, AGENT_TOKEN = "token", "agent-token"
"""Files with the token for questions, and with that of the agent, which can only send."""
SHOWN = 5
"""Functions in the summary of `--for`."""
START_S = 60.0
"""How long the server may take to listen."""
END_S = 15.0
"""How long the agent, and the server, may take to end; then they are killed."""
FLUSH_S = 15.0
"""How long the summary waits for the last chunk."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `up` to the commands."""
    parser = subparsers.add_parser(
        "up",
        help="watch this machine, keep its history, answer questions: agent and server in one",
        description="Watch this machine until it is stopped: `sonde serve` on loopback, with a "
        "token, and `sonde agent` that sends to it.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--state", type=Path, metavar="DIR",
        help="of history, token and spool (default: /var/lib/sonde, or "
        "~/.local/state/sonde)")  # fmt: skip
    add("--listen", default="127.0.0.1:7373", metavar="HOST:PORT",
        help="of this machine alone; default 127.0.0.1:7373; port 0: any free port")  # fmt: skip
    add("--for", dest="duration", default="", metavar="TIME",
        help="end after so long: 20s, 5m, 1h")  # fmt: skip
    add("-F", "--hz", type=int, default=0, metavar="HZ",
        help="samples per second on each CPU (default: 19)")  # fmt: skip
    add(
        "--keep-days", type=retention.days, default=14, metavar="N", help="of history (default: 14)"
    )
    add("--keep-gb", type=retention.gigabytes, default=10, metavar="N",
        help="of history, oldest removed first (default: 10)")  # fmt: skip
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Server:
    """The server of this machine, with a token for questions."""

    url: str
    token: str

    def ask(self, question: str, **parameters: object) -> Any:
        """The answer to a question (a path below /v1) with these parameters. Raises SinkError."""
        from sonde import http_client

        try:
            answer = http_client.request(
                "GET",
                f"{self.url}/v1/{question}?{urlencode(parameters)}",
                deadline_s=20,
                max_bytes=16 << 20,
                headers={"Authorization": f"Bearer {self.token}"},
                ours=True,
            )
        except OSError as error:
            raise SinkError(f"the server does not answer: {error}", "see above") from error
        if answer.status != 200:
            raise SinkError(f"the server answered {question} with {answer.status}", "see above")
        return json.loads(answer.body)


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM, SIGINT or the end of `--for`. Raises SondeError."""
    from sonde.cli.state_folder import state_folder
    from sonde.host.requirements import require_recording

    seconds = _seconds(args.duration)
    state = (args.state or state_folder()).absolute()
    require_recording()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    token = _tokens(state)
    started_s = time.time()
    # This process keeps the port open, so that nobody else gets it while the server restarts.
    listening = _listening(args.listen)
    server = Child(
        ("serve", "--store", str(state / "store"), "--listen-fd", str(listening.fileno()),
         "--log-level", "warning", "--keep-days", f"{args.keep_days:g}",
         "--keep-gb", f"{args.keep_gb:g}"),
        pass_fds=(listening.fileno(),),
    )  # fmt: skip
    agent: Child | None = None
    try:
        line = first_line(server, START_S, lambda: bool(signals))
        if not line.startswith("serving "):
            return 0 if signals else server.failed("the server did not start")
        access = _Server(line.removeprefix("serving ").strip(), token)
        agent = Child(
            ("agent", "--server", access.url, "--token-file", str(state / AGENT_TOKEN),
             "--spool", str(state / "spool"), "--chunk", f"{CHUNK_S:g}",
             *(("--hz", str(args.hz)) if args.hz else ())),
        )  # fmt: skip
        _print_address(access, state)
        until_s = time.monotonic() + seconds if seconds else float("inf")
        while not signals and time.monotonic() < until_s:
            time.sleep(0.1)
            for child in (server, agent):
                if child.ended_for_good():
                    return child.failed(f"`sonde {child.name}` ended")
                child.start_again_if_due()
        agent.end(END_S)
        if seconds and not signals:
            _summarize(access, started_s)
    finally:
        for one in (agent, server):
            if one is not None:
                one.end(END_S)
        listening.close()
    return 0


def _seconds(text: str) -> float:
    """Seconds of 20s, 5m, 1h; 0 for ''. Raises UsageError."""
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smh]?)", text)
    if not found or not float(found[1]):
        raise UsageError(f"{text!r} is no time", "write 20s, 5m or 1h")
    return float(found[1]) * UNITS[found[2]]


def _listening(address: str) -> socket.socket:
    """The socket that the server is to listen on. Raises UsageError."""
    from sonde.server.addresses import listening_socket, parse

    return listening_socket(*parse(address))


def _tokens(state: Path) -> str:
    """The token for questions. It and the agent's token are read from their files; where there is
    none, a token is made and written. Raises SondeError."""
    from sonde import private_files

    try:
        from sonde.server.tokens import Scope, Tokens
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the server needs {error.name}",
            "install Sonde with it: pip install 'sonde[server]' or 'FILE.whl[server]'",
        ) from error
    with private_files.secret_folder(state / "store", "the history"):
        tokens = Tokens(state / "store")
    try:
        _token(state / AGENT_TOKEN, tokens, Scope.INGEST)
        return _token(state / READ_TOKEN, tokens, Scope.READ)
    finally:
        tokens.close()


def _token(path: Path, tokens: Tokens, scope: Scope) -> str:
    """The token in a file, which is valid for exactly this scope; else a new one, and one that is
    valid for other scopes is revoked. Raises SondeError."""
    from sonde import private_files
    from sonde.input_files import open_input

    if path.exists():
        with open_input(path) as file:
            text = file.read(4_096).decode("ascii", "replace").strip()
        caller = tokens.caller(text)
        if caller is not None and caller.scopes == {scope}:
            return text
        if caller is not None:
            tokens.revoke(caller.id)
    _, text = tokens.make("default", [scope])
    with private_files.replacing(path) as out:
        out.write(f"{text}\n".encode())
    return text


def _print_address(access: _Server, state: Path) -> None:
    secret = f"/#token={access.token}" if sys.stdout.isatty() else ""
    print(f"sonde: watching this machine: {access.url}{secret}", flush=True)
    print(f"  history and tokens: {state}", flush=True)
    curl = f'curl -H "Authorization: Bearer $(cat {state / READ_TOKEN})"'
    print(f"  what runs: {curl} {access.url}/v1/top", flush=True)
    print(
        f"  what it waits for: {curl} '{access.url}/v1/verdict?node={socket.gethostname()}'",
        flush=True,
    )


def _summarize(access: _Server, started_s: float) -> None:
    """Print what was seen since a time (s since 1970)."""
    given = {"from": f"{started_s - 1:.3f}", "to": f"{time.time() + 1:.3f}"}
    until_s = time.monotonic() + FLUSH_S
    chunks = -1
    while time.monotonic() < until_s:
        nodes = access.ask("nodes", **given)
        if nodes and nodes[0]["chunks"] == chunks:
            break
        chunks = nodes[0]["chunks"] if nodes else -1
        time.sleep(1.5)
    if chunks < 1:
        raise SinkError("nothing was observed in that time", "see above, or run it for longer")
    totals = access.ask("totals", **given)
    print(f"sonde: {totals['n']:,.0f} samples of CPU time in {chunks} chunks; most in")
    for row in access.ask("top", limit=SHOWN, **given):
        share = 100 * row["own_ns"] / max(totals["ns"], 1)
        name = row["function"] or "(no name)"
        print(f"  {share:5.1f} %  {one_line(name)}  {one_line(row['binary'])}", flush=True)
