# SPDX-License-Identifier: Apache-2.0
"""What this machine supports, found by trying each feature, never by comparing versions.

`examine()` runs every probe and returns one `Finding` each. Probes read /proc and /sys and make
a few harmless system calls: what they create (a map of one page, a disabled perf event) is gone
when the call returns. They never raise for what a machine lacks; lacking is an answer.

Terms:
- finding: one thing that this machine supports or not, with its remedy; probe: a test for one
- ABSENT: not there, or not known without more privileges (n/a)
- held: of a capability: in the effective set of this process
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sonde.host import attaching, capabilities, devices, kernel, machine, namespaces
from sonde.host.finding import Finding, Status

__all__ = ["Finding", "Status", "blocking", "examine"]

_SECTIONS: tuple[Callable[[], Iterator[Finding]], ...] = (
    machine.findings,
    kernel.findings,
    namespaces.findings,
    capabilities.findings,
    devices.findings,
    attaching.findings,
)


def examine() -> list[Finding]:
    """Every finding about this machine, in the order of the report."""
    return [finding for section in _SECTIONS for finding in section()]


def blocking(findings: list[Finding]) -> list[Finding]:
    """The findings that must be fixed before `sonde record` can work."""
    return [finding for finding in findings if finding.status is Status.FAIL]
