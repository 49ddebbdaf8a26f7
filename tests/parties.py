# SPDX-License-Identifier: Apache-2.0
"""The aggregators as processes, and `sonde fleet` as a user calls it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

RUNNER = """
import argparse, sys
from sonde.cli import fleet
from sonde.errors import SondeError
parser = argparse.ArgumentParser()
fleet.add_parser(parser.add_subparsers(required=True))
args = parser.parse_args(["fleet", *sys.argv[1:]])
try:
    sys.exit(args.run(args))
except SondeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def command(*args: object) -> list[str]:
    """The command line of `sonde fleet` with these arguments."""
    return [sys.executable, "-c", RUNNER, *map(str, args)]


def run(*args: object) -> subprocess.CompletedProcess[str]:
    """Run `sonde fleet` to its end."""
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=240, check=False)


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Party:
    """An aggregator process that can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            command("aggregate", "--state", self.directory, "--threads", 1),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("listening on https://127.0.0.1:")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=20) == 0
