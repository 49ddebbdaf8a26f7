# SPDX-License-Identifier: Apache-2.0
"""What this machine supports, found by trying each feature, never by comparing versions.

`examine()` runs every probe and returns one `Finding` each. Probes read /proc and /sys and make
a few harmless system calls: what they create (a map of one page, a disabled perf event) is gone
when the call returns. They never raise for what a machine lacks; lacking is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sonde.host import attaching, capabilities, devices, kernel, machine, namespaces
from sonde.host.finding import Finding, Status

__all__ = ["Finding", "Status", "blocking", "examine"]

_ROOMS: tuple[Callable[[], Iterator[Finding]], ...] = (
    machine.findings,
    kernel.findings,
    namespaces.findings,
    capabilities.findings,
    devices.findings,
    attaching.findings,
)


def examine() -> list[Finding]:
    """Every finding about this machine, in the order of the report."""
    return [finding for room in _ROOMS for finding in room()]


def blocking(findings: list[Finding]) -> list[Finding]:
    """Those of `findings` without whose remedy `sonde record` cannot work at all."""
    return [finding for finding in findings if finding.status is Status.FAIL]
