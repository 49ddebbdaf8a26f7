# SPDX-License-Identifier: Apache-2.0
"""docs/reference/kernels.md from results.json; a test compares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "kernels.md"

FEATURES = {
    "doctor": "`sonde doctor`",
    "default": "`sonde record`, all that is on by default",
    "samples": "on-CPU samples",
    "stacks": "native stacks, without frame pointers",
    "python": "Python stacks",
    "waits": "waits",
    "device_calls": "device calls (OpenCL, a stub)",
    "device_time": "device time (CUDA, a stub)",
    "attach": "`sonde attach`, then `detach`",
    "dump": "`sonde dump`",
    "usage": "usage by process (`--host`)",
    "syscalls": "system calls (`--syscalls`)",
    "memory": "memory (`--memory`)",
}
"""Steps of `bench.distro_kernels.guest` in the order of the page."""

HEAD = """\
# Kernels

Written by `python -m bench.distro_kernels` from what it saw; a test compares. Each kernel is
Debian's own, booted under qemu without KVM on two emulated CPUs, with Debian 12's user space.
Programs with a known truth run beside Sonde, and the captures are judged outside of the machine.

- **ok**: what was seen is the truth within 5 %; figures made of few samples, within three standard
  deviations; run-queue time, within 15 %, since a thread is pushed aside before and after its work,
  too. Of the stacks of programs that have run for 4 s, 95 % are whole and 99 % of those right.
- **refused**: Sonde gave the reason and remedy, and changed nothing; or `sonde doctor` reports that
  the machine lacks it, and what was seen falls short by that.
- **failed**: anything else, and any step during which the kernel complained (`BUG`, `WARNING`, a
  stall).

An emulated CPU is a thread of a busy host: a step during which one stood still for more than a
second is repeated, thrice at most.

"""


def load() -> dict[str, Any]:
    """The committed results, by the kernel's name."""
    if not RESULTS.exists():
        return {}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def render(results: Mapping[str, Any]) -> str:
    """The page."""
    names = list(results)
    lines = [
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        f"| release | {' | '.join(it['release'] or 'not reached' for it in results.values())} |",
    ]
    for feature, title in FEATURES.items():
        cells = [it["cells"][feature]["status"] for it in results.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    parts = [HEAD + "\n".join(lines) + "\n"]
    for name, it in results.items():
        parts.append(f"\n## {name}\n\n`{it['package']}`; init after {it['init_s']} s.\n\n")
        parts.append("| | | seen |\n|---|---|---|\n")
        for feature, title in FEATURES.items():
            cell = it["cells"][feature]
            detail = " ".join(cell["detail"].replace("|", "\\|").split())
            parts.append(f"| {title} | {cell['status']} | {detail} |\n")
    return "".join(parts)


def write(results: Mapping[str, Any]) -> None:
    """The results and their page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    DOCUMENT.write_text(render(results))
