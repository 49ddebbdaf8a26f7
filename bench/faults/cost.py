# SPDX-License-Identifier: Apache-2.0
"""What `sonde diagnose` costs: CPU time by thread, its child apart, and of its BPF programs.

    sudo python -m bench.faults.cost [--seconds 60] [--idle 100] [--serve 50] [--busy] [--json FILE]

`--idle`: the number of sleeping processes besides what runs anyway; `--serve`: an HTTP server, and
a client that sends it this number of requests a second; `--busy`: four that work and wait, and a
shell that starts programs all the time, beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CLOCK = os.sysconf("SC_CLK_TCK")
IDLE = "import threading; threading.Event().wait()"
BUSY = (
    "import os, time\nwhile True:\n sum(i * i for i in range(20_000))\n time.sleep(0.001)\n",
    "import threading, queue\nq = queue.Queue(4)\n"
    "def put():\n while True: q.put(sum(range(3000)))\n"
    "threading.Thread(target=put).start()\nwhile True: q.get(); sum(range(3000))\n",
)
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        sum(range(2000))
        self.send_response(200)
        self.send_header("Content-Length", "200")
        self.end_headers()
        self.wfile.write(bytes(200))
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
print(server.server_port, flush=True)
server.serve_forever()
"""
CLIENT = """
import http.client, sys, time
rate, port = float(sys.argv[1]), int(sys.argv[2])
connection, due = http.client.HTTPConnection("127.0.0.1", port), time.monotonic()
while True:
    connection.request("GET", "/")
    connection.getresponse().read()
    due += 1 / rate
    time.sleep(max(0.0, due - time.monotonic()))
"""
SHELL = "while :; do /bin/true; sleep 0.02; done"
SETTLE_S = 8.0


def main() -> None:
    """Measure once and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.cost")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--serve", type=float, default=0.0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    others = [_start(["-c", IDLE]) for _ in range(args.idle)]
    if args.serve:
        others += _serve(args.serve)
    if args.busy:
        others += [_start(["-c", code]) for code in (*BUSY, *BUSY)]
        others.append(subprocess.Popen(["/bin/sh", "-c", SHELL]))
    agent = subprocess.Popen(
        [sys.executable, "-m", "sonde", "diagnose", "--json", "--all"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert agent.stderr is not None
        for line in agent.stderr:
            if line.startswith("sonde: watching"):
                break
        time.sleep(SETTLE_S)
        if agent.poll() is not None:
            raise SystemExit("sonde diagnose ended")
        found = measure(agent.pid, args.seconds)
    finally:
        agent.send_signal(signal.SIGTERM)
        incidents, errors = agent.communicate(timeout=30)
        for other in others:
            other.kill()
            other.wait()
    found["incidents"] = len(incidents.splitlines())
    found["log"] = errors.strip().splitlines()[-3:]
    text = json.dumps(found, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments])


def _serve(rate: float) -> list[subprocess.Popen[bytes]]:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    assert server.stdout is not None
    port = server.stdout.readline().decode().strip()
    return [server, _start(["-c", CLIENT, str(rate), port])]


def measure(pid: int, seconds: float) -> dict[str, Any]:
    """Shares of one core, over so long."""
    others_s, before, bpf, began_s = _all_cpu_s(), _threads(pid), _bpf_s(pid), time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - began_s
    after = _threads(pid)
    used = {name: (after[name] - before.get(name, 0.0)) / passed_s for name in after}
    whole = sum(used.values())
    ran = _bpf_s(pid)
    return {
        "seconds": round(passed_s, 1),
        "percent_of_a_core": round(100 * whole, 3),
        "by_thread": {name: round(100 * it, 3) for name, it in used.items() if it > 1e-5},
        "bpf_percent": round(100 * (ran - bpf) / passed_s, 3) if ran else None,
        "machine_cpus": round((_all_cpu_s() - others_s) / passed_s, 2),
        "processes": len([it for it in os.listdir("/proc") if it.isdigit()]),  # noqa: PTH208
    }


def _threads(pid: int) -> dict[str, float]:
    """CPU seconds by thread of a process and of its children, by scheduler statistics."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = f"{(task / 'comm').read_text().strip()} {task.name}"
        found[name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        for child in (task / "children").read_text().split():
            for name, used_s in _threads(int(child)).items():
                found[f"{_module(child)} {name.split()[-1]}"] = used_s
    return found


def _module(pid: str) -> str:
    """What a child of Python runs."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return next((word for word in words if word.startswith("sonde.")), words[0])


def _bpf_s(pid: int) -> float:
    """Of all BPF programs that it holds, where the kernel counts (kernel.bpf_stats_enabled)."""
    found: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            lines = dict(line.split(":", 1) for line in entry.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if "run_time_ns" in lines:
            found[lines["prog_id"].strip()] = int(lines["run_time_ns"])
    return sum(found.values()) / 1e9


def _all_cpu_s() -> float:
    words = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    return sum(int(words[i]) for i in (0, 1, 2, 5, 6)) / CLOCK


if __name__ == "__main__":
    main()
