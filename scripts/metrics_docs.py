# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/metrics.md from the catalogue.

python scripts/metrics_docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check
from sonde.metrics import PERIODS_S, catalogue
from sonde.sinks.exposition import dcgm_fields, name_of

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"

HEAD = """\
# Metrics

Generated from `abi/metrics.json` by `scripts/metrics_docs.py`; a test checks that it is current.
Names and units follow OpenTelemetry's semantic conventions where these exist; Sonde's own names
begin with `sonde.`. In a capture, a row of the table `metric` has the name as its series and the
attributes as its labels. Prometheus has the second name, and dots in attributes become
underscores.

Rate: fast 10 Hz, normal 1 Hz, slow every 10 s, event as it happens. Series of single
processes (`process.pid`) are summed by owner and program before they leave the machine: in place
of the process they have `process.executable.name`, `process.command` (the script of an
interpreter, for the first of an owner) and what is known of `k8s.namespace.name`,
`k8s.pod.name`, `k8s.container.name`; `sonde.slurm.job`, `sonde.slurm.step`, `process.owner`;
`container.id`; `sonde.unit`. Those with source `tasks` are rows of the table `usage` in a capture.
"""

GROUPS = {
    "device": "Devices",
    "process": "Processes",
    "calls": "Calls of device APIs",
    "host": "The machine",
    "health": "Health",
    "sonde": "Sonde itself",
}


# Columns of the table of devices: by source, the vendor, its interface, and whether real hardware
# was tested.
SOURCES = {
    "nvml": "NVIDIA: NVML (shown)",
    "amdsmi": "AMD: AMD SMI (unverified)",
    "drm": "AMD, Intel and others: DRM, hwmon (unverified)",
}


def document() -> str:
    """The whole page, as Markdown."""
    lines = [HEAD]
    groups = dict.fromkeys([*GROUPS, *(metric.group for metric in catalogue().values())])
    for group in groups:
        metrics = [metric for metric in catalogue().values() if metric.group == group]
        if not metrics:
            continue
        lines += [f"## {GROUPS.get(group, group)}", ""]
        lines += ["| metric | in Prometheus | unit | kind | attributes | rate | from |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for metric in metrics:
            attributes = ", ".join(f"`{name}`" for name in metric.attributes)
            period_s = PERIODS_S[metric.rate]
            rate = f"{metric.rate} ({period_s:g} s)" if period_s else metric.rate
            lines.append(
                f"| `{metric.name}`<br>{metric.brief} | `{name_of(metric)}` | {metric.unit} "
                f"| {metric.kind} | {attributes} | {rate} | {metric.source} |"
            )
        lines.append("")
    lines += ["## Which devices report what", ""]
    lines += [
        "Shown: on an H200. Unverified: with stubs of files and modules alone.",
        "",
    ]
    lines += ["| metric | " + " | ".join(SOURCES.values()) + " |"]
    lines += ["|---|" + "---|" * len(SOURCES)]
    for metric in catalogue().values():
        sources = {one.partition(" ")[0] for one in metric.source.split(", ")}
        if sources & set(SOURCES):
            marks = ("yes" if source in sources else "" for source in SOURCES)
            lines.append(f"| `{metric.name}` | " + " | ".join(marks) + " |")
    lines.append("")
    lines += ["## Names of dcgm-exporter", ""]
    lines += ["With `--dcgm-names`, the same values also appear under these names.", ""]
    lines += ["| name | from | with |", "|---|---|---|"]
    for field in dcgm_fields():
        where = ", ".join(f"`{name}={value}`" for name, value in field.where.items())
        lines.append(f"| `{field.name}` | `{field.series}` | {where} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, document))
