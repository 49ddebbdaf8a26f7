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
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
READ_TOKEN, AGENT_TOKEN = "token", "agent-token"
"""Files with the token for questions, and with that of the agent, which can only send."""
SHOWN = 5
"""Functions in the summary of `--for`."""
START_S = 60.0
"""For the server to listen."""
END_S = 15.0
"""For each of both to end."""
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
    add("--keep-days", type=float, default=14, metavar="N", help="of history (default: 14)")
    add("--keep-gb", type=float, default=10, metavar="N",
        help="of history, oldest removed first (default: 10)")  # fmt: skip
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this machine's server is, and how to ask it."""

    url: str
    token: str

    def ask(self, question: str, **parameters: object) -> Any:
        """The answer. Raises SinkError."""
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
    # The port stays with this process: while the server is started again nobody else gets it.
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
        place = _Place(line.removeprefix("serving ").strip(), token)
        agent = Child(
            ("agent", "--server", place.url, "--token-file", str(state / AGENT_TOKEN),
             "--spool", str(state / "spool"), "--chunk", f"{CHUNK_S:g}",
             *(("--hz", str(args.hz)) if args.hz else ())),
        )  # fmt: skip
        _print_address(place, state)
        ends = time.monotonic() + seconds if seconds else float("inf")
        while not signals and time.monotonic() < ends:
            time.sleep(0.1)
            for child in (server, agent):
                if child.ended_for_good():
                    return child.failed(f"`sonde {child.name}` ended")
                child.start_again_if_due()
        agent.end(END_S)
        if seconds and not signals:
            _summarize(place, started_s)
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
    """The socket of the server. Raises UsageError."""
    from sonde.server.addresses import listening_socket, parse

    return listening_socket(*parse(address))


def _tokens(state: Path) -> str:
    """The token for this machine's questions; that of its agent is in its file, too. They are read,
    or made. Raises SondeError."""
    from sonde import private_files

    try:
        from sonde.server.tokens import Scope, Tokens
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the server needs {error.name}", "install it: pip install 'sonde[server]'"
        ) from error
    with private_files.secret_folder(state / "store", "the history"):
        tokens = Tokens(state / "store")
    try:
        _token(state / AGENT_TOKEN, tokens, Scope.INGEST)
        return _token(state / READ_TOKEN, tokens, Scope.READ)
    finally:
        tokens.close()


def _token(path: Path, tokens: Tokens, scope: Scope) -> str:
    """The token of a file, for one scope: one for more is revoked. Raises SondeError."""
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


def _print_address(place: _Place, state: Path) -> None:
    secret = f"/#token={place.token}" if sys.stdout.isatty() else ""
    print(f"sonde: watching this machine: {place.url}{secret}", flush=True)
    print(f"  history and tokens: {state}", flush=True)
    print(
        f'  ask: curl -H "Authorization: Bearer $(cat {state / READ_TOKEN})" {place.url}/v1/top',
        flush=True,
    )


def _summarize(place: _Place, started_s: float) -> None:
    """What was seen since a time."""
    given = {"from": f"{started_s - 1:.3f}", "to": f"{time.time() + 1:.3f}"}
    ends = time.monotonic() + FLUSH_S
    chunks = -1
    while time.monotonic() < ends:
        nodes = place.ask("nodes", **given)
        if nodes and nodes[0]["chunks"] == chunks:
            break
        chunks = nodes[0]["chunks"] if nodes else -1
        time.sleep(1.5)
    if chunks < 1:
        raise SinkError("nothing was observed in that time", "see above, or run it for longer")
    totals = place.ask("totals", **given)
    print(f"sonde: {totals['n']:,.0f} samples of CPU time in {chunks} chunks; most in")
    for row in place.ask("top", limit=SHOWN, **given):
        share = 100 * row["own_ns"] / max(totals["ns"], 1)
        name = row["function"] or "(no name)"
        print(f"  {share:5.1f} %  {one_line(name)}  {one_line(row['binary'])}", flush=True)
