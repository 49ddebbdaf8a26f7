# SPDX-License-Identifier: Apache-2.0
"""`sonde health`: node health checks, for people, Slurm and Kubernetes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.cli.marks import MARKS, mark
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.health import Result, Skipped

EXAMPLE = """\
examples:
  sonde health                       every check, the bad ones with a remedy
  sonde health --json | jq '.results[] | select(.status != "pass")'
  HealthCheckProgram=/usr/local/bin/sonde-healthcheck      in slurm.conf: deploy/slurm
  sonde health --kubernetes          a node condition, to patch into the node's status

exit code: 0 where nothing failed (warnings may be there), 1 where something did.
"""

MAX_REASON = 200
"""Characters of Slurm's Reason or of a condition's message."""
CONDITION = "SondeDevicesHealthy"
"""Type of the node condition for Kubernetes."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `health` to the commands."""
    parser = subparsers.add_parser(
        "health",
        help="whether this node's devices are fit for work",
        description="Check this node's devices, links, memory, disks and sensors. Changes nothing.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = parser.add_mutually_exclusive_group()
    out.add_argument("--json", action="store_true", help="every result as JSON")
    out.add_argument("--slurm", action="store_true",
        help="one line, as a HealthCheckProgram prints: the reason to drain the node")  # fmt: skip
    out.add_argument("--kubernetes", action="store_true",
        help="a condition for the status of a Kubernetes node")  # fmt: skip
    parser.add_argument("--bandwidth", action="store_true",
        help="also measure copies from the host; refused while the GPU is in use")  # fmt: skip
    parser.add_argument("--kernel-log", type=Path, metavar="FILE",
        help="read XIDs from this file (of dmesg) instead of the kernel's log")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print the results; 1 where one failed."""
    from sonde import health

    facts = health.gather(kernel_log=args.kernel_log)
    if args.bandwidth:
        from sonde.health.bandwidth import measure

        facts.bandwidth = measure(facts)
    results = health.examine(facts)
    worst = health.worst(results)
    if args.json:
        document = {
            "status": worst,
            "devices": [device.about | {"hw.id": device.uuid} for device in facts.devices],
            "results": [asdict(result) for result in results],
            "skipped": [asdict(one) for one in facts.hardware.skipped],
            "left_out": facts.hardware.left_out,
        }
        print(json.dumps(document, indent=2))
    elif args.slurm:
        print(line(results))
    elif args.kubernetes:
        print(json.dumps({"conditions": [condition(results)]}))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        colour = sys.stdout.isatty()
        print(table(results, width=width, colour=colour))
        for one in facts.hardware.skipped:
            print(skipped_line(one, colour=colour))
        if facts.hardware.left_out:
            print(
                f"· {facts.hardware.left_out:,} disks or sensors left out: unreadable or too many"
            )
        if results:
            print()
            print(verdict(results))
    return 1 if worst is health.Status.FAIL else 0


def table(results: Sequence[Result], *, width: int, colour: bool) -> str:
    """One line per check; failures and warnings with their remedy."""
    if not results:
        return "nothing was checked: no device here that Sonde can query"
    names = max(len(f"{one.device} {one.check}".strip()) for one in results) + 2
    indent = " " * (names + 2)
    lines = []
    for one in results:
        sign = mark(one.status, colour=colour)
        name = f"{one.device} {one.check}".strip().replace("_", " ")
        line = one_line(f"{name:<{names}}{one.figure} (expected: {one.expected})")
        lines.append(f"{sign} {line}")
        if one.remedy:
            wrapped = textwrap.wrap(one_line(f"remedy: {one.remedy}"), max(width - len(indent), 40))
            lines += [indent + part for part in wrapped]
    return "\n".join(lines)


def skipped_line(skipped: Skipped, *, colour: bool) -> str:
    """A line for checks that were not made."""
    names = ", ".join(skipped.checks).replace("_", " ")
    text = one_line(f"{names}: skipped, {skipped.reason}. {skipped.remedy}")
    return f"{mark('n/a', colour=colour)} {text}"


def verdict(results: Sequence[Result]) -> str:
    """The summary for people: fit or not, and counts."""
    count = {status: sum(one.status == status for one in results) for status in MARKS}
    word = "unfit" if count["fail"] else "fit, with warnings" if count["warn"] else "fit"
    text = f"{count['pass']} passed, {count['warn']} warned, {count['fail']} failed"
    return f"{word} for work: {text}"


def line(results: Sequence[Result]) -> str:
    """The line of --slurm: what failed, else what warned, else 'sonde pass'."""
    for status in ("fail", "warn"):
        bad = [one for one in results if one.status == status]
        if bad:
            text = "; ".join(f"{one.device} {one.check}: {one.figure}".strip() for one in bad)
            return textwrap.shorten(
                one_line(f"sonde {status}: {text}"), MAX_REASON, placeholder=" …"
            )
    return "sonde pass"


def condition(results: Sequence[Result]) -> dict[str, str]:
    """A NodeCondition of Kubernetes: status True means healthy."""
    failed = [one for one in results if one.status == "fail"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    words = failed[0].check.split("_") if failed else ["all", "checks", "passed"]
    return {
        "type": CONDITION,
        "status": "False" if failed else "True" if results else "Unknown",
        "reason": "".join(word.capitalize() for word in words) if results else "NoDevice",
        "message": line(results),
        "lastHeartbeatTime": now,
    }
