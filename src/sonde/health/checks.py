# SPDX-License-Identifier: Apache-2.0
"""All health checks: facts in, results out; without clock, files or devices.

A check passes, warns or fails, with its figure, the expected value and a remedy. A check is skipped
where the device does not report the values that it needs.
"""

from __future__ import annotations

from sonde.health.device_checks import DEVICE_CHECKS
from sonde.health.facts import Facts, is_part
from sonde.health.hardware_checks import hardware_results
from sonde.health.node_checks import node_results
from sonde.health.results import Result, Status, table

CHECKS = tuple(table("checks"))
"""Names of all checks."""


def examine(facts: Facts) -> list[Result]:
    """All results: of the node first, then device by device, then of disks and
    sensors; MIG instances are not checked."""
    results = list(node_results(facts))
    for device in facts.devices:
        if not is_part(device.about):
            for check in DEVICE_CHECKS:
                results += check(device, facts)
    results += hardware_results(facts)
    return results


def worst(results: list[Result]) -> Status:
    """The worst status of the results."""
    found = {result.status for result in results}
    return next((one for one in (Status.FAIL, Status.WARN) if one in found), Status.PASS)
