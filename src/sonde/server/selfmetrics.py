# SPDX-License-Identifier: Apache-2.0
"""The server's metrics of itself, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from sonde.server.service import ACK_BUCKETS_S, Service


def exposition(service: Service, stored: Mapping[str, int]) -> str:
    """All metrics of the server and of its store; `stored`: the counters of the catalog."""
    counters, wal = service.counters, service.wal.counters
    lines: list[str] = []

    def add(name: str, kind: str, value: float, labels: str = "") -> None:
        if not any(line.startswith(f"# TYPE {name} ") for line in lines):
            lines.append(f"# TYPE {name} {kind}")
        lines.append(
            f"{name}{labels} {value:g}" if value != int(value) else f"{name}{labels} {int(value)}"
        )

    add("sonde_server_chunks_total", "counter", counters.chunks)
    add("sonde_server_duplicates_total", "counter", counters.duplicates)
    add("sonde_server_queries_total", "counter", counters.queries)
    add("sonde_server_query_failures_total", "counter", counters.query_failures)
    for why, count in sorted(counters.refused.items()):
        add("sonde_server_refused_total", "counter", count, f'{{reason="{why}"}}')
    for state, count in service.agents.counts().items():
        add("sonde_server_agents", "gauge", count, f'{{state="{state}"}}')
    add("sonde_server_damaged_files", "gauge", len(service.damaged))
    # "log" is the write-ahead log, "bucket" the object store.
    add("sonde_server_log_records_total", "counter", wal.records)
    add("sonde_server_log_bytes_total", "counter", wal.record_bytes)
    add("sonde_server_log_syncs_total", "counter", wal.syncs)
    add("sonde_server_log_sync_seconds_total", "counter", wal.sync_ns / 1e9)
    add("sonde_server_log_longest_sync_seconds", "gauge", wal.longest_sync_ns / 1e9)
    add("sonde_server_log_failures_total", "counter", wal.failures)
    add("sonde_server_log_refused_total", "counter", wal.refused)
    add("sonde_server_log_waiting_bytes", "gauge", service.wal.left_bytes("")[1])
    if service.shared:
        add("sonde_server_bucket_refuses", "gauge", bool(service.flusher.get("bucket_error")))
        add("sonde_server_bucket_view_age_seconds", "gauge", service.shared.age_s)
        add("sonde_server_bucket_view_failures_total", "counter", service.shared.failures)
        downloads = service.shared.downloads
        add("sonde_server_bucket_files_fetched_total", "counter", downloads.fetched_files)
        for why in ("disk", "size", "time"):
            name, labels = "sonde_server_bucket_fetches_refused_total", f'{{reason="{why}"}}'
            add(name, "counter", downloads.refused[why], labels)
    for name, count in sorted(stored.items()):
        add(f"sonde_store_{name}_total", "counter", count)
    for name, kind, labels, value in service.alerts.figures() if service.alerts else ():
        add(name, kind, value, labels)
    lines.append("# TYPE sonde_server_ack_seconds histogram")
    for upper_s, acks in zip(ACK_BUCKETS_S, counters.ack_bucket_counts, strict=True):
        text = "+Inf" if upper_s == float("inf") else f"{upper_s:g}"
        lines.append(f'sonde_server_ack_seconds_bucket{{le="{text}"}} {int(acks)}')
    lines.append(f"sonde_server_ack_seconds_sum {counters.ack_sum_s:g}")
    lines.append(f"sonde_server_ack_seconds_count {int(counters.ack_bucket_counts[-1])}")
    return "\n".join(lines) + "\n"
