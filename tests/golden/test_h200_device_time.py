# SPDX-License-Identifier: Apache-2.0
"""What an H200 did, timed by events of our own in three loops there, and what reading makes of it.

Calls were counted by probes at the same time, so the estimates stand beside exact numbers: from the
tick on in which the library had come into the running process, two seconds after the begin.
"""

from pathlib import Path

import pytest

from sonde.export import html, summary, table
from sonde.model.profile import ProfileKind
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.device_callers import device_callers
from sonde.query.device_runs import device_runs, kinds_seen
from sonde.query.queries import Where
from sonde.query.session import Session

DATA = Path(__file__).parents[1] / "data" / "device_time"


@pytest.fixture(scope="module", params=["eager", "graph", "decode"])
def capture(request):
    return request.param, Session(read(DATA / f"{request.param}.sonde"))


def test_durations_are_those_of_the_device(capture):
    """CUPTI: 0.93 us a kernel, 1.04 on a device just idle; a replay took 95 us by the clock in the
    graph loop (there with 98 us from replay to replay), and 113 us in decode."""
    loop, session = capture
    for it in device_runs(session):
        if it.kind == "replay":
            usual = {"graph": 96_400, "decode": 112_000}[loop]
            assert it.mean_ns == pytest.approx(usual, rel=0.01)
        else:
            assert 700 < it.mean_ns < 1_100
            assert "at::native::" in it.name


def test_estimates_stand_beside_exact_counts(capture):
    """Whole ticks in which launches were timed from begin to end."""
    _, session = capture
    [(first_ns,)] = session.rows("SELECT min(start_time_ns) FROM device_run")
    ticks = sorted({it for (it,) in session.rows("SELECT time_ns FROM activity")})
    begin_ns = next(it for it in ticks if it > first_ns)
    names = "('cudaLaunchKernel', 'cudaGraphLaunch')"
    [(launched,)] = session.rows(
        f'SELECT sum("count") FROM activity WHERE name IN {names} AND time_ns BETWEEN ? AND ?',
        [begin_ns, ticks[-2]],
    )
    whole = Where(start_ns=begin_ns, end_ns=ticks[-1])
    found = [it for it in device_runs(session, whole) if it.kind in ("kernel", "replay")]
    assert sum(it.count for it in found) == pytest.approx(launched, rel=0.05)


def test_who_asked_is_a_function_of_the_program(capture):
    loop, session = capture
    callers = {it.function: it for it in device_callers(session)}
    asked = {"eager": "make_loop.<locals>.ops", "graph": "CUDAGraph.replay"}
    if loop == "decode":
        replay, kernels = callers["CUDAGraph.replay"], callers["make_loop.<locals>.decode"]
        assert replay.share + kernels.share == pytest.approx(1)
        assert replay.share == pytest.approx(0.968, abs=replay.share_error)
    else:
        assert callers[asked[loop]].share == 1


def test_every_run_lies_under_the_stack_that_asked_for_it(capture):
    profile = queries.profile(capture[1], ProfileKind.GPU_TIME)
    whole = sum(row.ns for row in profile)
    assert whole == pytest.approx(sum(it.ns for it in device_runs(capture[1])), rel=1e-3)
    assert all(row.stack for row in profile)


def test_reports_show_the_device(capture, tmp_path):
    session = capture[1]
    assert "GPU TIME" in summary.render(session)
    for exporter in (table, html):
        with (tmp_path / "out").open("wb") as out:
            exporter.write(session, out, kinds_seen(session))
    assert "device_time.lost_pool" in summary.render(session)
