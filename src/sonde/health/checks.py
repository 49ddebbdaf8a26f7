# SPDX-License-Identifier: Apache-2.0
"""Judgement of a node's health: facts in, results out; no clock, no file, no device.

A check passes, warns or fails, with its figure, what was expected, and what to do. What a device
does not tell is left out. Expected values are in skus.toml, failure classes in failures.toml.
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from sonde.health.facts import Device, Facts, is_part


class Status(enum.StrEnum):
    """What a check came to."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Result:
    """One check of one device, or of the node."""

    check: str
    device: str
    """Its label; '' for the node."""
    uuid: str
    status: Status
    figure: str
    expected: str
    failure: str = ""
    """Class of failures.toml, where it did not pass."""
    remedy: str = ""


@cache
def table(name: str) -> Mapping[str, Any]:
    """One of the data tables beside this module."""
    return tomllib.loads(files("sonde.health").joinpath(f"{name}.toml").read_text("utf-8"))


def expectations(name: str) -> Mapping[str, Any]:
    """What a device of this name should say; empty for one that nobody entered."""
    for sku in table("skus")["sku"]:
        if fnmatchcase(name, sku["match"]):
            expected: Mapping[str, Any] = sku
            return expected
    return {}


def examine(facts: Facts) -> list[Result]:
    """Every result, the node's first, then device by device."""
    results = list(_node(facts))
    for device in facts.devices:
        if not is_part(device.about):
            for check in _DEVICE_CHECKS:
                results += check(device, facts)
    return results


def worst(results: list[Result]) -> Status:
    """Of all of them."""
    found = {result.status for result in results}
    return next((one for one in (Status.FAIL, Status.WARN) if one in found), Status.PASS)


def _result(
    check: str,
    device: Device | None,
    status: Status,
    figure: str,
    expected: str,
    failure: str,
    remedy: str = "",
) -> Result:
    passed = status is Status.PASS
    return Result(
        check=check,
        device=device.label if device else "",
        uuid=device.uuid if device else "",
        status=status,
        figure=figure,
        expected=expected,
        failure="" if passed else failure,
        remedy="" if passed else remedy or table("failures")[failure]["remedy"],
    )


def _graded(value: float, warn: float, fail: float) -> Status:
    """More is worse."""
    return Status.FAIL if value >= fail else Status.WARN if value >= warn else Status.PASS


# ---- the node ----


def _node(facts: Facts) -> Iterator[Result]:
    if facts.on_the_bus or facts.devices or facts.module_version or facts.trouble:
        status = Status.FAIL if facts.trouble else Status.PASS
        said = "; ".join(facts.trouble) or "answers"
        yield _result("library", None, status, said, "answers", "software")
        seen = sum(not is_part(device.about) for device in facts.devices)
        bus = facts.on_the_bus or seen
        status = Status.PASS if seen == bus else Status.FAIL
        yield _result("device_count", None, status, str(seen), f"{bus} on the bus", "gpu")
    versions = {
        device.about["hw.driver_version"]
        for device in facts.devices
        if device.about.get("hw.driver_version")
    }
    if versions and facts.module_version:
        same = versions == {facts.module_version}
        said = f"library {', '.join(sorted(versions))}"
        yield _result(
            "driver_match",
            None,
            Status.PASS if same else Status.FAIL,
            said,
            f"kernel module {facts.module_version}",
            "software",
        )
    if facts.memory_uncorrected is not None:
        corrected = facts.memory_corrected or 0
        status = (
            Status.FAIL if facts.memory_uncorrected else Status.WARN if corrected else Status.PASS
        )
        figure = f"{facts.memory_uncorrected} uncorrected, {corrected} corrected"
        yield _result("host_memory", None, status, figure, "0 uncorrected", "host_memory")
    if facts.ports:
        down = [f"{name} {state}" for name, state in facts.ports.items() if state != "ACTIVE"]
        status = Status.FAIL if len(down) == len(facts.ports) else Status.WARN
        up = f"{len(facts.ports) - len(down)} of {len(facts.ports)} ports up"
        yield _result(
            "network",
            None,
            status if down else Status.PASS,
            f"{up}: {', '.join(down)}" if down else up,
            "all ACTIVE",
            "network",
        )


# ---- a device ----

Check = Callable[[Device, Facts], Iterator[Result]]


def _limit(name: str) -> float:
    return float(table("skus")["limits"][name])


def _expected(device: Device, name: str) -> float | None:
    value = expectations(device.about.get("hw.model", "")).get(name)
    return float(value) if value is not None else None


def _reachable(device: Device, facts: Facts) -> Iterator[Result]:
    index = device.about.get("sonde.gpu.index", "")
    lost = [text for text in facts.trouble if index and f".{index}." in text and "lost" in text]
    status = Status.FAIL if lost else Status.PASS
    yield _result("reachable", device, status, "; ".join(lost) or "answers", "answers", "gpu")


def _memory_size(device: Device, facts: Facts) -> Iterator[Result]:
    total, expected = device.get("hw.gpu.memory.limit"), _expected(device, "memory_gib")
    if total is None or expected is None:
        return
    gib = total / 2**30
    short = gib < expected * (1 - _limit("memory_tolerance"))
    status = Status.FAIL if short else Status.PASS
    text = (f"{gib:.1f} GiB", f"{expected:g} GiB")
    yield _result("memory_size", device, status, *text, "gpu_memory")


def _ecc(device: Device, facts: Facts) -> Iterator[Result]:
    errors = "hw.errors"
    sram = device.get(errors, error__type="uncorrected", sonde__gpu__memory__kind="sram")
    if sram is not None:
        status = Status.FAIL if sram >= _limit("sram_uncorrected_fail") else Status.PASS
        yield _result("sram_errors", device, status, f"{sram:.0f} uncorrected", "0", "sram")
    now = device.get("sonde.gpu.ecc.volatile", error__type="uncorrected")
    if now is not None:
        status = Status.FAIL if now else Status.PASS
        figure = f"{now:.0f} uncorrected since the driver was loaded"
        yield _result("dram_errors", device, status, figure, "0", "gpu_memory")
    corrected = device.get("sonde.gpu.ecc.volatile", error__type="corrected")
    if corrected is not None:
        most = _limit("corrected_warn")
        status = Status.WARN if corrected >= most else Status.PASS
        figure = f"{corrected:.0f} corrected since the driver was loaded"
        yield _result("corrected_errors", device, status, figure, f"< {most:.0f}", "gpu_memory")


def _remapping(device: Device, facts: Facts) -> Iterator[Result]:
    rows = device.get("sonde.gpu.remapped_rows", error__type="uncorrected")
    if rows is None:
        return
    pending = device.get("sonde.gpu.remap.state", sonde__gpu__remap="pending")
    failed = device.get("sonde.gpu.remap.state", sonde__gpu__remap="failed")
    status = _graded(rows, _limit("remapped_uncorrected_warn"), _limit("remapped_uncorrected_fail"))
    figure = f"{rows:.0f} rows replaced"
    remedy = "Keep an eye on it: spare rows are few." if status is Status.WARN else ""
    if pending:
        status = max(status, Status.WARN, key=_weight)
        figure += ", one pending"
        remedy = "Reset the GPU when its job has ended, so that the row is replaced."
    if failed:
        status, remedy = Status.FAIL, "Drain the node; the GPU needs to be replaced."
        figure += ", no spare row left"
    yield _result("remapping", device, status, figure, "0, none pending", "gpu_memory", remedy)


def _weight(status: Status) -> int:
    return (Status.PASS, Status.WARN, Status.FAIL).index(status)


def _xids(device: Device, facts: Facts) -> Iterator[Result]:
    address = device.about.get("sonde.gpu.pci.address", "")[-12:-2]
    numbers = [number for place, number in facts.xids if address and place.endswith(address)]
    numbers += [
        int(number)
        for number, count in device.all("sonde.gpu.xid", "sonde.gpu.xid.number").items()
        if count and int(number) not in numbers
    ]
    judged = [(number, _xid(number)) for number in dict.fromkeys(numbers)]
    bad = [one for one in judged if one[1]["status"] != "pass"]
    if not bad:
        said = ", ".join(f"{number}: {what['what']}" for number, what in judged) or "none"
        yield _result("xid", device, Status.PASS, said, "none that is the GPU's fault", "gpu")
        return
    number, what = max(bad, key=lambda one: _weight(Status(one[1]["status"])))
    others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    figure = f"XID {number}: {what['what']}{others}"
    yield _result("xid", device, Status(what["status"]), figure, "none", what["class"])


def _xid(number: int) -> Mapping[str, Any]:
    for entry in table("xids")["xid"]:
        if number in entry["numbers"]:
            found: Mapping[str, Any] = entry
            return found
    otherwise: Mapping[str, Any] = table("xids")["otherwise"]
    return otherwise


def _nvlink(device: Device, facts: Facts) -> Iterator[Result]:
    states = device.all("sonde.gpu.nvlink.links", "sonde.gpu.nvlink.state")
    if states:
        up = states.get("up", 0)
        expected = _expected(device, "nvlinks") or up + states.get("down", 0)
        status = Status.FAIL if up < expected else Status.PASS
        yield _result("nvlink_up", device, status, f"{up:.0f} up", f"{expected:.0f} up", "nvlink")
    errors = device.all("sonde.gpu.nvlink.errors", "error.type")
    if errors:
        count, most = sum(errors.values()), _limit("nvlink_errors_warn")
        status = Status.FAIL if errors.get("recovery") else _graded(count, most, float("inf"))
        yield _result("nvlink_errors", device, status, f"{count:.0f}", f"< {most:.0f}", "nvlink")


def _pcie(device: Device, facts: Facts) -> Iterator[Result]:
    busy = (device.get("hw.gpu.utilization", hw__gpu__task="general") or 0) > _limit("busy_share")
    for what, name in (("width", "pcie_width"), ("generation", "pcie_generation")):
        series = f"sonde.gpu.pcie.link.{what}"
        now = device.get(series, sonde__gpu__pcie__link="current")
        most = device.get(series, sonde__gpu__pcie__link="max")
        if now is None:
            continue
        expected = _expected(device, name) or most or now
        status = Status.PASS if now >= expected else Status.FAIL
        figure = f"{now:.0f}"
        if status is Status.FAIL and what == "generation" and not busy and (most or 0) >= expected:
            status = Status.PASS  # an idle link slows down on purpose
            figure += " while idle"
        yield _result(name, device, status, figure, f"{expected:.0f}", "pcie")
    replays = device.get("sonde.gpu.pcie.replays")
    if replays is not None:
        most = _limit("pcie_replays_warn")
        status = _graded(replays, most, float("inf"))
        yield _result("pcie_replays", device, status, f"{replays:.0f}", f"< {most:.0f}", "pcie")


def _bandwidth(device: Device, facts: Facts) -> Iterator[Result]:
    measured = facts.bandwidth.get(device.uuid)
    expected = _expected(device, "host_bandwidth_gb_s")
    if measured is None or expected is None:
        return
    rate = measured / 1e9
    status = (
        Status.FAIL
        if rate < 0.5 * expected
        else Status.WARN
        if rate < 0.9 * expected
        else Status.PASS
    )
    text = (f"{rate:.1f} GB/s", f"≥ {expected:g} GB/s")
    yield _result("host_bandwidth", device, status, *text, "pcie")


def _temperatures(device: Device, facts: Facts) -> Iterator[Result]:
    for where, prefix in (("gpu", ""), ("memory", "memory_")):
        now = device.get("hw.temperature", hw__sensor_location=where)
        if now is None or now == 0:
            continue
        warn = _limit(f"{prefix}temperature_warn_c")
        status = _graded(now, warn, _limit(f"{prefix}temperature_fail_c"))
        text = (f"{now:.0f} °C", f"< {warn:.0f} °C")
        yield _result(f"{prefix}temperature", device, status, *text, "thermal")


def _throttling(device: Device, facts: Facts) -> Iterator[Result]:
    reasons = device.all("sonde.gpu.throttled", "sonde.gpu.throttle.reason")
    if not reasons:
        return
    now = sorted(name for name, on in reasons.items() if on)
    hard = [name for name in now if name.startswith("hardware_")]
    soft = [name for name in now if name == "software_thermal"]
    status = Status.FAIL if hard else Status.WARN if soft else Status.PASS
    figure = ", ".join(name.replace("_", " ") for name in now) or "none"
    yield _result("throttling", device, status, figure, "no heat, no power brake", "thermal")


def _power_limit(device: Device, facts: Facts) -> Iterator[Result]:
    now, expected = device.get("sonde.gpu.power.limit"), _expected(device, "power_limit_w")
    if now is None or expected is None:
        return
    status = Status.PASS if now >= 0.98 * expected else Status.WARN
    remedy = "Was it lowered on purpose? nvidia-smi -pl sets it."
    text = (f"{now:.0f} W", f"{expected:.0f} W")
    yield _result("power_limit", device, status, *text, "thermal", remedy)


def _clocks(device: Device, facts: Facts) -> Iterator[Result]:
    most = device.get("sonde.gpu.clock.limit", sonde__gpu__clock__domain="sm")
    expected = _expected(device, "sm_clock_mhz")
    if most is not None and expected is not None and most / 1e6 < 0.98 * expected:
        text = (f"{most / 1e6:.0f} MHz at most", f"{expected:.0f} MHz")
        yield _result("clocks", device, Status.WARN, *text, "gpu")
        return
    now = device.get("sonde.gpu.clock", sonde__gpu__clock__domain="sm")
    busy = (device.get("hw.gpu.utilization", hw__gpu__task="general") or 0) > 0.9
    if now is None or most is None:
        return
    capped = device.get("sonde.gpu.throttled", sonde__gpu__throttle__reason="software_power_cap")
    slow = busy and not capped and now < _limit("clock_share_warn") * most
    text = (f"{now / 1e6:.0f} MHz", f"up to {most / 1e6:.0f} MHz")
    remedy = "Busy, not capped, and yet slow: compare with another GPU of the node."
    status = Status.WARN if slow else Status.PASS
    yield _result("clocks", device, status, *text, "gpu", remedy)


_DEVICE_CHECKS: tuple[Check, ...] = (
    _reachable,
    _memory_size,
    _ecc,
    _remapping,
    _xids,
    _nvlink,
    _pcie,
    _bandwidth,
    _temperatures,
    _throttling,
    _power_limit,
    _clocks,
)

CHECKS = (
    *("library", "device_count", "driver_match", "host_memory", "network"),
    *("reachable", "memory_size", "sram_errors", "dram_errors", "corrected_errors", "remapping"),
    *("xid", "nvlink_up", "nvlink_errors", "pcie_width", "pcie_generation", "pcie_replays"),
    *("host_bandwidth", "temperature", "memory_temperature", "throttling", "power_limit"),
    "clocks",
)
"""Names of all checks."""
