# SPDX-License-Identifier: Apache-2.0
"""What collectors hand over, as the page for Prometheus shows it."""

from __future__ import annotations

import re

import pytest

from sonde.agent.exporters import Exporters
from sonde.collect.collector import Batch
from sonde.config import Config
from sonde.metrics import labels
from sonde.sinks.chunk import columns_of


@pytest.fixture
def exporters():
    exporters = Exporters(
        Config(prometheus="127.0.0.1:0"), lambda pid, start: {"process.owner": "ann"}
    )
    yield exporters
    exporters.close()


def row(table, **values):
    texts = {"kind", "name", "api", "op", "direction", "source", "grid", "block"}
    return tuple(values.get(name, "" if name in texts else 0) for name in columns_of(table))


def test_calls_are_counted_by_what_they_do_and_not_by_process(exporters):
    copy = {"kind": "device", "api": "cuda-runtime", "op": "copy", "direction": "h2d"}
    batch = Batch()
    for pid in (1, 2):
        batch.add("activity", row("activity", **copy, pid=pid, count=5, ns=2_000_000, bytes=4096))
    batch.add("activity", row("activity", **copy | {"status": 2}, pid=3, count=1))
    batch.add("activity", row("activity", kind="blocked", name="futex", count=9, ns=1))
    exporters.take(batch)
    page = exporters.page()
    call = 'network_io_direction="receive",sonde_api="cuda-runtime",sonde_op="copy"'
    assert f"sonde_device_calls_total{{{call}}} 10.0" in page
    assert f'sonde_device_calls_total{{error_type="2",{call}}} 1.0' in page
    assert f"sonde_device_call_io_bytes_total{{{call}}} 8192.0" in page
    assert re.search(r"sonde_device_call_time_seconds_total{\S+} 0.004", page)
    assert "futex" not in page


def test_what_processes_used_is_exported_by_owner(exporters):
    batch = Batch()
    for pid in (1, 2):
        batch.add("usage", row("usage", pid=pid, start_ns=10, cpu_ns=500_000_000))
    exporters.take(batch)
    assert 'process_cpu_time_seconds_total{process_owner="ann"} 1.0' in exporters.page()


def test_use_is_summed_up_by_owner_and_kind(exporters):
    owners = {1: {"process.owner": "ann"}, 2: {"process.owner": "bob"}}
    exporters._owner_of = lambda pid, start: owners[pid]
    for _ in range(2):
        batch = Batch()
        for pid, faults in ((1, 3), (2, 5), (1, 4)):
            batch.add("usage", row("usage", pid=pid, minor_faults=faults, voluntary=faults * 10))
        exporters.take(batch)
    page = exporters.page()
    for who, faults in (("ann", 14.0), ("bob", 10.0)):
        name = f'process_owner="{who}",system_paging_fault_type="minor"'
        assert f"process_paging_faults_total{{{name}}} {faults}" in page
        name = f'process_context_switch_type="voluntary",process_owner="{who}"'
        assert f"process_context_switches_total{{{name}}} {10 * faults}" in page


def test_runs_on_devices_are_counted(exporters):
    batch = Batch()
    run = {"kind": "kernel", "name": "gemm", "weight": 4.0, "end_time_ns": 1_000_000}
    batch.add("device_run", row("device_run", **run))
    exporters.take(batch)
    assert 'sonde_gpu_kernel_time_seconds_total{sonde_gpu_kernel="gemm"} 0.004' in exporters.page()


def test_a_page_is_whole_where_the_push_ends_meanwhile(exporters):
    class Pusher:
        failed = 1

        @property
        def pushed(self):
            exporters.pusher = None  # as `reconfigure` does in the main thread
            return 3

    exporters.pusher = Pusher()
    page = exporters.page()

    assert 'sonde_otlp_pushes_total{sonde_outcome="done"} 3.0' in page
    assert 'sonde_otlp_pushes_total{sonde_outcome="failed"} 1.0' in page


def test_losses_are_exported_by_name(exporters):
    exporters.take_loss("waits.ring_full", 7)
    assert 'sonde_agent_lost_total{sonde_loss="waits.ring_full"} 7.0' in exporters.page()


def test_names_cannot_break_the_page(exporters):
    evil = 'x"} 1\nhw_power_watts 9\\'
    exporters.take_metrics([(1, "hw.power", labels(hw__id=evil), 5.0)])
    for line in exporters.page().splitlines():
        assert not line.startswith("hw_power_watts 9")
