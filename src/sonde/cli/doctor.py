# SPDX-License-Identifier: Apache-2.0
"""`sonde doctor`: what this machine can observe, what is missing, and how to fix it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from sonde.cli.marks import mark
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.host import Finding

EXAMPLE = """\
example:
  sonde doctor
  sonde doctor --json | jq -r '.findings[] | select(.status == "fail") | .remedy'

exit code: 0 when `sonde record` can work here, 3 when it cannot.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the commands."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine can observe, what is missing, and how to fix it",
        description="Examine this machine. Changes nothing; works without privileges.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 if `sonde record` can work here, else 3."""
    from sonde import host

    findings = host.examine()
    can_record = not host.blocking(findings)
    if can_record:
        findings += [*_kernel_memory(), *_connections(), _runtimes()]
    if args.json:
        document = {
            "can_record": can_record,
            "findings": [finding.as_json() for finding in findings],
        }
        print(json.dumps(document, indent=2))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        print(table(findings, width=width, colour=sys.stdout.isatty()))
        print()
        print(verdict(findings))
    return 0 if can_record else 3


def _kernel_memory() -> list[Finding]:
    """Memory of a recording's BPF maps, measured by loading them; empty where that fails."""
    from sonde.agent.kernel_memory import kernel_memory
    from sonde.errors import HostError
    from sonde.host import Finding, Status

    try:
        at_start, at_most = kernel_memory()
    except HostError:
        return []
    start, limit = f"{at_start / 1e6:.0f} MB", f"{at_most / 1e6:.0f} MB"
    detail = f"{start} at the start, at most {limit} with unwind tables"
    return [Finding("memory of BPF maps", Status.PASS, detail)]


def _connections() -> list[Finding]:
    """How connections are counted, found by loading what follows them; empty where that fails."""
    from sonde.collect.flows import FlowCollector
    from sonde.collect.kernel import Kernel
    from sonde.errors import HostError
    from sonde.host import Finding, Status

    name, needed_for = "connections", "counting all connections"
    try:
        flows = FlowCollector(Kernel(None))
    except HostError:
        return []
    if not flows.scans_recount:
        return [Finding(name, Status.PASS, "counted by a BPF iterator over a map", needed_for)]
    detail = (
        "counted by scans of open files, as the kernel refuses BPF iterators over maps: those that "
        "no process has open (on their way to another one, registered with io_uring) are neither "
        "seen nor counted against their user's share"
    )
    remedy = (
        "The kernel forbids them to root, too: boot one that allows them, where users of this "
        "machine are not to be trusted."
    )
    return [Finding(name, Status.WARN, detail, needed_for, remedy)]


def _runtimes() -> Finding:
    """The interpreters whose functions get names, with their versions."""
    from sonde.host import Finding, Status
    from sonde.unwind import cpython, php_layout, ruby_layout

    ranges = (
        ("CPython", cpython.OLDEST, cpython.NEWEST),
        ("Ruby", ruby_layout.OLDEST, ruby_layout.NEWEST),
        ("PHP", php_layout.OLDEST, php_layout.NEWEST),
    )
    named = [f"{name} {a}.{b} to {c}.{d}" for name, (a, b), (c, d) in ranges]
    detail = f"{', '.join(named)}, Java 17 to 21, Node.js 18 to 24; others have native stacks"
    return Finding("interpreters", Status.PASS, detail)


def table(findings: list[Finding], *, width: int, colour: bool) -> str:
    """One entry per finding, with wrapped details; where it is bad, with what needs it."""
    names = max(len(finding.name) for finding in findings) + 2
    indent = " " * (names + 2)
    lines = []
    for finding in findings:
        sign = mark(finding.status, colour=colour)
        detail = finding.detail
        if finding.status in ("warn", "fail") and finding.needed_for:
            detail += f" — needed for {finding.needed_for}"
        wrapped = textwrap.wrap(
            one_line(detail),
            max(width - len(indent), 40),
            break_on_hyphens=False,
            break_long_words=False,
        )
        lines.append(f"{sign} {finding.name:<{names}}{wrapped[0]}")
        lines += [indent + line for line in wrapped[1:]]
    return "\n".join(lines)


def verdict(findings: list[Finding]) -> str:
    """Whether `sonde record` works here, with each remedy once."""
    from sonde import host

    blocking = host.blocking(findings)
    bad = blocking or [finding for finding in findings if finding.status == "warn"]
    if blocking:
        first = "sonde record cannot work here as this user:"
    elif bad:
        first = "sonde record works here, with less data than possible:"
    else:
        return "sonde record works here, with everything it needs."
    remedies: dict[str, list[str]] = {}
    for finding in bad:
        remedies.setdefault(finding.remedy, []).append(finding.name)
    lines = [first]
    for remedy, names in remedies.items():
        lines.append(f"  {', '.join(names)}")
        lines.append(f"    {one_line(remedy)}")
    if blocking and all(finding.name.startswith("CAP_") for finding in blocking):
        from sonde.host import capabilities

        if capabilities.in_container() is None:
            lines.append("  or, with these capabilities alone and as this user:")
            lines.append(f"    {capabilities.without_root()}")
    return "\n".join(lines)
