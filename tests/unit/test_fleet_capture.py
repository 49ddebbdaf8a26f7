# SPDX-License-Identifier: Apache-2.0
"""A recording as the sampler sees it: kernels first, weights kept, threads side by side."""

from collections import Counter
from types import SimpleNamespace

import pytest

from captures import SECOND_NS, START_NS, Writer
from sonde.errors import UsageError
from sonde.fleet import page
from sonde.fleet.budget import UnitCost, ledger_of
from sonde.fleet.evaluation.local_deployment import small_task
from sonde.fleet.from_capture import period_of
from sonde.fleet.page import render
from sonde.fleet.result import make_result
from sonde.query.device_use import _end_to_end


def test_kernels_are_taken_as_they_ran_and_calls_only_without_them(tmp_path):
    writer = Writer()
    key = writer.process(7, "train")
    writer.on_cpu(key, 7, writer.stack("main", "work"), 40)
    cpu = period_of(writer.write(tmp_path / "cpu.sonde"))
    assert (cpu.source, {r.name for r in cpu.records}) == ("cpu", {"work"})
    writer.add(
        "device_run", key, kind="kernel", name="gemm", weight=1.0, tid=7,
        start_time_ns=START_NS + 5,
        end_time_ns=START_NS + 25,
    )  # fmt: skip
    period = period_of(writer.write(tmp_path / "gpu.sonde"))
    assert period.source == "kernel"
    (record,) = period.records
    assert (record.name, record.start_ns, record.duration_ns) == ("gemm", START_NS + 5, 20)
    assert period.start_ns <= record.start_ns
    with pytest.raises(UsageError, match="holds no device"):
        period_of(tmp_path / "gpu.sonde", "device")


def test_runs_that_were_sampled_stand_for_more_than_themselves(tmp_path):
    writer = Writer()
    key = writer.process(7, "train")
    for name, weight, at in (("gemm", 30.0, 0), ("softmax", 10.0, 1000)):
        begin = START_NS + at
        writer.add(
            "device_run", key, kind="kernel", name=name, tid=7, weight=weight,
            start_time_ns=begin, end_time_ns=begin + 1_000_000,
        )  # fmt: skip
    records = period_of(writer.write(tmp_path / "gpu.sonde")).records
    assert [(r.name, r.duration_ns) for r in records] == [
        ("gemm", 30_000_000),
        ("softmax", 10_000_000),
    ]
    assert records[0].start_ns == START_NS, "the second begins where the clock's does"


def test_rows_of_a_second_fill_it_in_proportion():
    rows = [(0, "a", 3e9), (0, "b", 1e9), (SECOND_NS, "a", 2e8)]
    uses = _end_to_end(rows, 2 * SECOND_NS)
    ns = Counter()
    for use in uses:
        ns[use.name, use.start_ns >= SECOND_NS] += use.duration_ns
    assert ns == {("a", False): 750_000_000, ("b", False): 250_000_000, ("a", True): 200_000_000}
    assert max(u.start_ns + u.duration_ns for u in uses[:2]) <= SECOND_NS


def test_a_second_whose_weights_come_to_nothing_holds_nothing():
    assert _end_to_end([(0, "a", 5e8), (0, "b", -6e8), (SECOND_NS, "a", 0.0)], 2 * SECOND_NS) == []


@pytest.mark.parametrize(("count", "text"), [(900, ""), (1, "1 more are within the noise.")])
def test_totals_state_how_many_classes_are_within_the_noise(count, text):
    rows = [SimpleNamespace(count=900), SimpleNamespace(count=count)]
    table = page._totals("Kernels", ["a", "b"], SimpleNamespace(rows=rows, deviation=10.0))
    assert table.rpartition("</table>")[2] == (f"<p class=note>{text}</p>" if text else "")


def test_nothing_in_a_page_can_become_markup():
    task = small_task(4)
    task = type(task)(**{**task.__dict__, "name": "<script>alert(1)</script>"})
    release = make_result(task, 0, [5, -3, 0, 900], {"gpu": 1.0, "tenant": None})
    text = render(release, ledger_of(task, [0, 3600]))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "default-src 'none'" in text
    assert "http" not in text.replace("http-equiv", "")
    assert 'class="noise"' in text


def test_a_ledger_adds_up_releases_and_a_year_of_them():
    ledger = ledger_of(small_task(scale=1.0), [0, 3600, 3600])
    assert ledger.releases == 2
    assert ledger.yearly == 365 * 24
    cost = ledger.units["gpu"]
    one, two, year = cost.one_release, cost.worst_year, cost.full_year
    assert one == pytest.approx(1.0)
    assert two == pytest.approx(2.0)
    assert year > 100
    assert ledger.units["tenant"] == UnitCost(None, None, None)
