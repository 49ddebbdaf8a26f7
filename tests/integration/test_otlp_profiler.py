# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's eBPF profiler sends to a server over gRPC, and what it saw is what ran."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from served import Server

PROFILER = Path(__file__).parents[2] / "build/tools/ebpf-profiler"
READY_S, RUN_S = 150, 20
"""Until the profiler observes: the kernel verifies its programs. How long the program runs."""
PROGRAM = """
import json, random, sys, time

def heavy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def light(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

used = {"heavy": 0.0, "light": 0.0}
ends = time.monotonic() + float(sys.argv[1])
while time.monotonic() < ends:
    for work, seconds in ((heavy, 0.3), (light, 0.1)):
        begun = time.thread_time()
        work(2 * seconds * random.random())  # sampling must not keep step with it
        used[work.__name__] += time.thread_time() - begun
print(json.dumps(used))
"""


def wait_for(ask, deadline_s):
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if found := ask():
            return found
        time.sleep(0.3)
    raise AssertionError("nothing came")


def totals(box, found):
    """Time by function in a flame tree; one inside itself counts once."""
    found[box["name"]] = found.get(box["name"], 0) + box["value"]
    for inner in box.get("children", ()):
        totals(inner, found)
    return found


@pytest.mark.bpf
@pytest.mark.timeout(420)
def test_what_the_profiler_sends_is_what_ran(tmp_path, capsys):
    if not PROFILER.exists():
        pytest.skip("needs scripts/otel_profiler, which takes minutes and Go 1.26")
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to show the profiler the kernel's tracepoints")
    log = tmp_path / "profiler.log"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Server(tmp_path / "store", "--open", "--otlp-grpc", f"unix:{tmp_path}/otlp") as server:
        assert server.process and server.process.stdout
        target = server.process.stdout.readline().split()[-1]
        with log.open("w") as out:
            # A separate mount namespace: the machine may have no tracefs, and gets none by this.
            profiler = subprocess.Popen(
                [
                    *("unshare", "--mount", "sh", "-c"),
                    'mount -t tracefs none /sys/kernel/tracing; exec "$0" "$@"',
                    *(str(PROFILER), "-collection-agent", target, "-disable-tls"),
                    *("-reporter-interval", "2s"),
                ],
                stdout=out,
                stderr=out,
            )
        try:
            wait_for(
                lambda: "Attached sched monitor" in log.read_text() or profiler.poll() is not None,
                READY_S,
            )
            assert profiler.poll() is None, log.read_text()[-2_000:]
            begun_s = time.time()
            child = subprocess.Popen(
                [sys.executable, str(program), str(RUN_S)], stdout=subprocess.PIPE, text=True
            )
            used = json.loads(child.communicate(timeout=60 + RUN_S)[0])
            time.sleep(5)  # the last report
        finally:
            profiler.send_signal(signal.SIGINT)
            profiler.wait(30)
        failed = [line for line in log.read_text().splitlines() if "Request failed" in line]
        assert not [
            line for line in failed if "code = Canceled" not in line
        ]  # it ends its last one

        def seen():
            tree = server.ask(
                "flametree", kind="cpu", pid=child.pid, **{"from": begun_s - 5, "to": time.time()}
            )
            found = totals(tree["root"], {})
            return found if found.get("heavy", 0) + found.get("light", 0) else None

        found = wait_for(seen, 60)
        assert server.ask("losses", **{"from": begun_s - 5}) == []
    cpu_s = used["heavy"] + used["light"]
    shares = {name: found.get(name, 0) / 1e9 / cpu_s for name in used}
    with capsys.disabled():
        print(f"\nused {used} s, seen {shares} of their sum", end=" ")
    assert found["heavy"] > found["light"]
    # 20 samples a second of some CPU seconds: 5 standard deviations, and the profiler's first look
    # at a new process, which may come a second late.
    error = 5 * (0.25 / (20 * cpu_s)) ** 0.5
    seen_share = shares["heavy"] / sum(shares.values())
    assert abs(seen_share - used["heavy"] / cpu_s) < error
    assert sum(shares.values()) > 0.6
