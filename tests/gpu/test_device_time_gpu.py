# SPDX-License-Identifier: Apache-2.0
"""Device time of PyTorch programs on a real GPU, recorded by the command, beside what they know.

PYTHONPATH=src python3 -m pytest -s tests/gpu/test_device_time_gpu.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde.query.capture import read
from sonde.query.device_callers import device_callers
from sonde.query.queries import EVERYTHING, Where, losses
from sonde.query.session import Session

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

PROGRAMS = Path(__file__).parents[1] / "programs/cuda"
WINDOWS = 3


def recorder(pid, seconds, capture, **settings):
    """`sonde record` of a running process, already at work."""
    command = [sys.executable, "-m", "sonde", "record", "--device-time", "-f"]
    made = subprocess.Popen(
        [*command, "-p", str(pid), "-d", str(seconds), "-o", str(capture)],
        env={**os.environ, **settings}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert made.stderr.readline().startswith("sonde: recording")
    return made


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """The program of ten functions at work, and the share of each."""
    ready = tmp_path_factory.mktemp("ten") / "ready"
    program = subprocess.Popen(
        [sys.executable, PROGRAMS / "ten_functions.py", ready], stdout=subprocess.PIPE, text=True
    )
    took_us = json.loads(program.stdout.readline())
    yield program, {name: us / sum(took_us.values()) for name, us in took_us.items()}
    program.kill()
    program.wait()


def shares(session, where=EVERYTHING):
    return {it.function: it for it in device_callers(session, where)}


def test_ten_functions_whole(ten, tmp_path):
    """Every launch timed: the share of each function within a point."""
    program, truth = ten
    made = recorder(program.pid, 10, tmp_path / "c.sonde", SONDE_DEVICE_BUDGET="0.5")
    assert made.wait(40) == 0
    found = shares(Session(read(tmp_path / "c.sonde")))
    print()
    for name, share in truth.items():
        it = found[name]
        print(f"{name:6} {100 * share:6.2f} % reported {100 * it.share:6.2f} ± "
              f"{100 * it.share_error:.2f}, {it.timed:,} timed of {it.count:,}")  # fmt: skip
        assert it.share == pytest.approx(share, abs=0.01)
    assert sum(it.timed for it in found.values()) > 0.8 * sum(it.count for it in found.values())


def test_ten_functions_sampled(ten, tmp_path):
    """At the default budget: within the reported intervals, 95 % of them."""
    program, truth = ten
    made = recorder(program.pid, 33, tmp_path / "c.sonde")
    assert made.wait(60) == 0
    session = Session(read(tmp_path / "c.sonde"))
    first, last = session.info.start_ns + 3_000_000_000, session.info.end_ns
    inside = []
    print()
    for number in range(WINDOWS):
        begin, end = (first + (last - first) * it // WINDOWS for it in (number, number + 1))
        found = shares(session, Where(start_ns=begin, end_ns=end))
        for name, share in truth.items():
            it = found[name]
            inside.append(abs(it.share - share) <= it.share_error)
            print(f"{name:6} {100 * share:6.2f} % reported {100 * it.share:6.2f} ± "
                  f"{100 * it.share_error:.2f}, {it.timed:,} timed of {it.count:,}")  # fmt: skip
            assert abs(it.share - share) <= 2 * it.share_error
    print(f"{sum(inside)} of {len(inside)} within their interval")
    assert sum(inside) >= 25


def test_torch_profiler_sees_the_same_beside_us(tmp_path):
    """Sessions of torch.profiler while Sonde times: as many events as alone; Sonde goes on."""
    program = subprocess.Popen(
        [sys.executable, PROGRAMS / "traces_itself.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def trace():
        began_ns = time.monotonic_ns()
        program.stdin.write("trace\n")
        program.stdin.flush()
        return json.loads(program.stdout.readline()), (began_ns, time.monotonic_ns())

    try:
        assert program.stdout.readline() == "ready\n"
        trace()  # the first one begins CUPTI
        alone, _ = trace()
        made = recorder(program.pid, 15, tmp_path / "c.sonde")
        time.sleep(4)
        times = []
        for _ in range(3):
            beside, span = trace()
            print(f"\nbeside Sonde: {sum(beside.values()):,} events, alone {sum(alone.values()):,}")
            assert beside == alone
            times.append(span)
            time.sleep(1.5)
        assert made.wait(40) == 0
        session = Session(read(tmp_path / "c.sonde"))
        starts = [row[0] for row in session.rows("SELECT start_time_ns FROM device_run")]
        assert any(start < times[0][0] for start in starts)
        for _, ended_ns in times:
            after = sum(ended_ns < start < ended_ns + 1_500_000_000 for start in starts)
            print(f"{after} runs timed in the 1.5 s after")
            assert after > 100
        assert any(it.name == "device_time.yielded_ms" for it in losses(session))
    finally:
        program.kill()
        program.wait()
