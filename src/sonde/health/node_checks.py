# SPDX-License-Identifier: Apache-2.0
"""Checks of the node: its library, its driver, its memory, its network."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.health.facts import Facts, is_part
from sonde.health.results import Result, Status, result


def node_results(facts: Facts) -> Iterator[Result]:
    """The results of all checks for which the node has values."""
    if facts.on_the_bus or facts.devices or facts.module_version or facts.trouble:
        yield _library(facts)
        yield _device_count(facts)
    yield from _driver_match(facts)
    yield from _host_memory(facts)
    yield from _network(facts)


def _library(facts: Facts) -> Result:
    """Failures of single devices are checked by `reachable`."""
    whole = [gap for gap in facts.gaps if gap.of_all]
    missing = [gap for gap in facts.gaps if not gap.of_all and not gap.index]
    status = Status.FAIL if whole else Status.WARN if missing else Status.PASS
    figure = "; ".join(gap.text for gap in whole or missing) or "answers"
    remedy = (
        "" if whole else "Run as root; if that does not help, read the driver's log with dmesg."
    )
    return result("library", None, status, figure, "answers", "software", remedy)


def _device_count(facts: Facts) -> Result:
    seen = sum(not is_part(device.about) for device in facts.devices)
    bus = facts.on_the_bus or seen
    status = Status.PASS if seen == bus else Status.FAIL if seen < bus else Status.WARN
    remedy = "" if seen < bus else "PCI devices are hidden here: check from outside the container."
    return result("device_count", None, status, str(seen), f"{bus} on the bus", "gpu", remedy)


def _driver_match(facts: Facts) -> Iterator[Result]:
    loaded = facts.module_version
    versions = {
        device.about["hw.driver_version"]
        for device in facts.devices
        if device.about.get("hw.driver_version")
    }
    if not versions or not loaded:
        return
    figure, remedy = f"library {', '.join(sorted(versions))}", ""
    status = Status.PASS if versions == {loaded} else Status.FAIL
    if status is Status.PASS and facts.installed and loaded not in facts.installed:
        status = Status.WARN
        figure += f", installed is {', '.join(sorted(facts.installed))}"
        remedy = "A newer driver is installed and needs a reboot: new programs will fail."
    expected = f"kernel module {loaded}"
    yield result("driver_match", None, status, figure, expected, "software", remedy)


def _host_memory(facts: Facts) -> Iterator[Result]:
    uncorrected, corrected = facts.memory_uncorrected, facts.memory_corrected or 0
    if uncorrected is None:
        return
    status = Status.FAIL if uncorrected else Status.WARN if corrected else Status.PASS
    figure = f"{uncorrected} uncorrected, {corrected} corrected"
    yield result("host_memory", None, status, figure, "0 uncorrected", "host_memory")


def _network(facts: Facts) -> Iterator[Result]:
    if not facts.ports:
        return
    down = [f"{name} {state}" for name, state in facts.ports.items() if state != "ACTIVE"]
    all_down = len(down) == len(facts.ports)
    status = Status.FAIL if all_down else Status.WARN if down else Status.PASS
    up = f"{len(facts.ports) - len(down)} of {len(facts.ports)} ports up"
    figure = f"{up}: {', '.join(down)}" if down else up
    yield result("network", None, status, figure, "all ACTIVE", "network")
