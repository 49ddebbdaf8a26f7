# SPDX-License-Identifier: Apache-2.0
"""`sonde explain` of a service that waits for another one on this machine: two small servers, one
of which syncs to disk on its event loop."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sonde.analyze.bound import explain
from sonde.model.causes import Cause
from sonde.recording.timelines import open_timeline

pytestmark = pytest.mark.bpf

PROGRAMS = Path(__file__).parents[1] / "programs" / "loopback"


@contextmanager
def shop(folder, *timeout):
    """Ledger, orders and shoppers, each of which asks the one before; (pid, port) of the first."""
    with ExitStack() as stack:

        def start(name, *arguments):
            command = [sys.executable, str(PROGRAMS / name), *map(str, arguments)]
            child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(child.kill)

            return child

        def port(child):
            return int(child.stdout.readline())

        ledger = start("ledger.py", 0, folder / "ledger.dat")
        ledger_port = port(ledger)
        orders = start("orders.py", ledger_port, *timeout)
        start("shoppers.py", port(orders))
        yield orders, ledger, ledger_port


def orders_io(verdicts):
    asking = [one for one in verdicts if one.service.startswith("Handler.do_GET ")]
    assert asking, verdicts
    return asking[0], next(one for one in asking[0].causes if one.key == Cause.IO)


@pytest.mark.parametrize("timeout", [(), (60,)], ids=["recv", "poll"])
def test_a_recording_of_the_machine_leads_to_the_sync(tmp_path, timeout):
    capture = tmp_path / "a.sonde"
    with shop(tmp_path, *timeout) as (orders, ledger, port):
        command = [sys.executable, "-m", "sonde", "record", "-o", str(capture), "--quiet"]
        pids = ["-p", str(orders.pid), str(ledger.pid)]
        subprocess.run([*command, "-d", "6", *pids], check=True, timeout=90)
    first, io = orders_io(explain(open_timeline([capture])).verdicts)
    assert io.culprit is not None
    assert io.culprit.thread == f"ledger.py ({ledger.pid}) at 127.0.0.1:{port}"
    assert io.culprit.pid == ledger.pid
    assert "Ledger.commit " in " ".join(io.facts)
    assert any(f"ledger.py ({ledger.pid})" in one.text for one in first.advice)


def test_of_one_process_alone_the_other_one_s_name_is_known(tmp_path):
    with shop(tmp_path) as (orders, ledger, port):
        command = [sys.executable, "-m", "sonde", "explain", "--pid", str(orders.pid)]
        done = subprocess.run(
            [*command, "-d", "6", "--json"], capture_output=True, text=True, timeout=90
        )
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["verdicts"][0]
    steps = [one["text"] for one in first["advice"]]
    wanted = f"ledger.py ({ledger.pid}) at 127.0.0.1:{port}"
    assert any(wanted in one and f"explain --pid {ledger.pid}" in one for one in steps), steps
