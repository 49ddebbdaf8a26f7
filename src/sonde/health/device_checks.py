# SPDX-License-Identifier: Apache-2.0
"""Checks of a device: its reported values against expected ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sonde.health.facts import Device, Facts
from sonde.health.results import (
    Result,
    Status,
    expected_of,
    graded,
    limit,
    result,
    severity,
    table,
)

Check = Callable[[Device, Facts], Iterator[Result]]

_CHOSEN_CLOCKS = frozenset(("sync_boost", "display_clock", "application_clocks"))
"""Reasons of a lower clock that follow from a setting: no throttling."""
_BANDWIDTH_WARN, _BANDWIDTH_FAIL = 0.9, 0.5
"""Shares of the expected bandwidth, below which a measured one warns or fails."""
_CLOCK_LIMIT_SHARE = 0.98
"""A clock limit below this share of the expected one warns: it was lowered, not rounded."""
_BUSY = 0.9
"""Utilization from which a device should run near its highest clock."""


def _reachable(device: Device, facts: Facts) -> Iterator[Result]:
    index = device.about.get("sonde.gpu.index", "")
    gaps = [gap for gap in facts.gaps if index and gap.index == index]
    lost = [gap for gap in gaps if gap.of_device]
    status = Status.FAIL if lost else Status.WARN if gaps else Status.PASS
    figure = "; ".join(gap.text for gap in lost or gaps) or "answers"
    remedy = "" if lost else "Run as root; if that does not help, read the driver's log with dmesg."
    yield result("reachable", device, status, figure, "answers", "gpu", remedy)


def _memory_size(device: Device, facts: Facts) -> Iterator[Result]:
    total, expected = device.get("hw.gpu.memory.limit"), expected_of(device, "memory_gib")
    if total is None or expected is None:
        return
    gib = total / 2**30
    short = 1 - gib / expected
    status = graded(short, limit("memory_short_warn"), limit("memory_short_fail"))
    text = (f"{gib:.1f} GiB", f"{expected:g} GiB")
    yield result("memory_size", device, status, *text, "gpu_memory")


def _ecc(device: Device, facts: Facts) -> Iterator[Result]:
    yield from _sram(device)
    lifetime = device.get("hw.errors", error__type="uncorrected", sonde__gpu__memory__kind="dram")
    now = device.get("sonde.gpu.ecc.volatile", error__type="uncorrected")
    if now is not None:
        most = limit("dram_uncorrected_warn")
        figure = f"{now:.0f} uncorrected since the driver was loaded"
        status = Status.FAIL if now else Status.PASS
        if not now and lifetime is not None and lifetime >= most:
            status = Status.WARN
            figure = f"{lifetime:.0f} uncorrected in its lifetime"
        text = (figure, f"0, < {most:.0f} in its lifetime")
        yield result("dram_errors", device, status, *text, "gpu_memory")
    corrected = device.get("sonde.gpu.ecc.volatile", error__type="corrected")
    if corrected is not None:
        most = limit("corrected_warn")
        status = graded(corrected, most, limit("corrected_fail"))
        figure = f"{corrected:.0f} corrected since the driver was loaded"
        yield result("corrected_errors", device, status, figure, f"< {most:.0f}", "gpu_memory")


def _sram(device: Device) -> Iterator[Result]:
    bad, corrected = (
        device.get("hw.errors", error__type=kind, sonde__gpu__memory__kind="sram")
        for kind in ("uncorrected", "corrected")
    )
    if bad is None:
        return
    most = limit("sram_corrected_warn")
    status = Status.WARN if (corrected or 0) >= most else Status.PASS
    status = Status.FAIL if bad >= limit("sram_uncorrected_fail") else status
    figure = f"{bad:.0f} uncorrected, {corrected or 0:.0f} corrected"
    yield result("sram_errors", device, status, figure, f"0, < {most:.0f} corrected", "sram")


def _remapping(device: Device, facts: Facts) -> Iterator[Result]:
    rows = device.get("sonde.gpu.remapped_rows", error__type="uncorrected")
    if rows is None:
        return
    pending = device.get("sonde.gpu.remap.state", sonde__gpu__remap="pending")
    failed = device.get("sonde.gpu.remap.state", sonde__gpu__remap="failed")
    status = graded(rows, limit("remapped_uncorrected_warn"), limit("remapped_uncorrected_fail"))
    figure = f"{rows:.0f} rows replaced"
    remedy = "Watch it: few spare rows are left." if status is Status.WARN else ""
    if pending:
        status = max(status, Status.WARN, key=severity)
        figure += ", one pending"
        remedy = "Reset the GPU when its job has ended, so that the row is replaced."
    if failed:
        status, remedy = Status.FAIL, "Drain the node; the GPU needs to be replaced."
        figure += ", no spare row left"
    yield result("remapping", device, status, figure, "0, none pending", "gpu_memory", remedy)


def _xids(device: Device, facts: Facts) -> Iterator[Result]:
    address = device.about.get("sonde.gpu.pci.address", "")[-12:-2]
    numbers = [number for at, number in facts.xids if address and at.endswith(address)]
    numbers += [
        int(number)
        for number, count in device.all("sonde.gpu.xid", "sonde.gpu.xid.number").items()
        if count and int(number) not in numbers
    ]
    lost = (
        f" ({facts.log_lost:,} records of the kernel's log were overwritten before they were read)"
        if facts.log_lost
        else ""
    )
    judged = [(number, _xid(number)) for number in dict.fromkeys(numbers)]
    bad = [one for one in judged if one[1]["status"] != "pass"]
    if not bad:
        found = ", ".join(f"{number}: {what['what']}" for number, what in judged) or "none"
        yield result("xid", device, Status.PASS, found + lost, "none caused by the GPU", "gpu")
        return
    number, what = max(bad, key=lambda one: severity(Status(one[1]["status"])))
    others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    figure = f"XID {number}: {what['what']}{others}{lost}"
    yield result("xid", device, Status(what["status"]), figure, "none", what["class"])


def _xid(number: int) -> Mapping[str, Any]:
    """The entry of xids.toml for an error, or the one for all unlisted errors."""
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
        known = expected_of(device, "nvlinks")
        expected = known or up + states.get("down", 0)
        short = Status.FAIL if known else Status.WARN  # links may not be connected to a bridge
        status = short if up < expected else Status.PASS
        remedy = (
            "" if known else "Is there an NVLink bridge? Add the links of this model to skus.toml."
        )
        text = (f"{up:.0f} up", f"{expected:.0f} up")
        yield result("nvlink_up", device, status, *text, "nvlink", remedy)
    errors = device.all("sonde.gpu.nvlink.errors", "error.type")
    if errors:
        count, most = sum(errors.values()), limit("nvlink_errors_warn")
        status = Status.FAIL if errors.get("recovery") else graded(count, most, float("inf"))
        figure = f"{count:.0f}, {errors.get('recovery', 0):.0f} of them recoveries"
        expected_text = f"< {most:.0f}, no recovery"
        yield result("nvlink_errors", device, status, figure, expected_text, "nvlink")


def _pcie(device: Device, facts: Facts) -> Iterator[Result]:
    for what in ("width", "generation"):
        yield from _pcie_link(device, what)
    replays = device.get("sonde.gpu.pcie.replays")
    if replays is not None:
        most = limit("pcie_replays_warn")
        status = graded(replays, most, limit("pcie_replays_fail"))
        yield result("pcie_replays", device, status, f"{replays:.0f}", f"< {most:.0f}", "pcie")


def _pcie_link(device: Device, what: str) -> Iterator[Result]:
    """A link below what card and slot both support is a fault; a slot that supports less than the
    card may be the design of the node, which is a warning.
    """
    name, series = f"pcie_{what}", f"sonde.gpu.pcie.link.{what}"
    now = device.get(series, sonde__gpu__pcie__link="current")
    most = device.get(series, sonde__gpu__pcie__link="max")
    if now is None:
        return
    expected = expected_of(device, name) or most or now
    busy = (device.get("hw.gpu.utilization", hw__gpu__task="general") or 0) > limit("busy_share")
    status, figure, remedy = Status.PASS, f"{now:.0f}", ""
    if now < min(expected, most or expected):
        if what == "generation" and not busy:
            figure += " while idle"  # idle links reduce their speed to save power
        else:
            status = Status.FAIL
    if status is Status.PASS and (most or expected) < expected:
        status = Status.WARN
        figure += f", the slot can do {most:.0f}"
        remedy = (
            "Is the slot wired so? If not, reseat the card or its riser; compare with other slots."
        )
    yield result(name, device, status, figure, f"{expected:.0f}", "pcie", remedy)


def _bandwidth(device: Device, facts: Facts) -> Iterator[Result]:
    measured = facts.bandwidth.get(device.uuid)
    expected = expected_of(device, "host_bandwidth_gb_s")
    if measured is None or expected is None:
        return
    rate = measured / 1e9
    status = (
        Status.FAIL
        if rate < _BANDWIDTH_FAIL * expected
        else Status.WARN
        if rate < _BANDWIDTH_WARN * expected
        else Status.PASS
    )
    text = (f"{rate:.1f} GB/s", f"≥ {expected:g} GB/s")
    yield result("host_bandwidth", device, status, *text, "pcie")


def _temperatures(device: Device, facts: Facts) -> Iterator[Result]:
    for where, prefix in (("gpu", ""), ("memory", "memory_")):
        now = device.get("hw.temperature", hw__sensor_location=where)
        if now is None or now == 0:
            continue
        warn = limit(f"{prefix}temperature_warn_c")
        status = graded(now, warn, limit(f"{prefix}temperature_fail_c"))
        text = (f"{now:.0f} °C", f"< {warn:.0f} °C")
        yield result(f"{prefix}temperature", device, status, *text, "thermal")


def _throttling(device: Device, facts: Facts) -> Iterator[Result]:
    reasons = device.all("sonde.gpu.throttled", "sonde.gpu.throttle.reason")
    if not reasons:
        return
    now = sorted(name for name, on in reasons.items() if on and name not in _CHOSEN_CLOCKS)
    hard = [name for name in now if name.startswith("hardware_")]
    specific = [name for name in hard if name != "hardware_slowdown"]
    if specific and len(specific) < len(hard):  # it stands for these and the fast power trigger
        now.remove("hardware_slowdown")
    soft = [name for name in now if name == "software_thermal"]
    status = Status.FAIL if hard else Status.WARN if soft else Status.PASS
    figure = ", ".join(name.replace("_", " ") for name in now) or "none"
    remedy = ""
    if specific == ["hardware_power_brake"]:
        remedy = "Check the power supplies and the power budget of the chassis."
    elif hard and not specific:
        remedy = (
            "Check temperature, power supplies and power cables: the driver reports a slowdown by "
            "the hardware (heat, power brake or fast power trigger), and not which."
        )
    expected = "no thermal throttling, no power brake"
    yield result("throttling", device, status, figure, expected, "thermal", remedy)


def _power_limit(device: Device, facts: Facts) -> Iterator[Result]:
    now, expected = device.get("sonde.gpu.power.limit"), expected_of(device, "power_limit_w")
    if now is None or expected is None:
        return
    share = now / expected
    low = Status.FAIL if share < limit("power_share_fail") else Status.WARN
    status = low if share < limit("power_share_warn") else Status.PASS
    remedy = "Was it lowered on purpose? nvidia-smi -pl sets it."
    text = (f"{now:.0f} W", f"{expected:.0f} W")
    yield result("power_limit", device, status, *text, "thermal", remedy)


def _clocks(device: Device, facts: Facts) -> Iterator[Result]:
    most = device.get("sonde.gpu.clock.limit", sonde__gpu__clock__domain="sm")
    expected = expected_of(device, "sm_clock_mhz")
    if most is not None and expected is not None and most / 1e6 < _CLOCK_LIMIT_SHARE * expected:
        text = (f"{most / 1e6:.0f} MHz at most", f"{expected:.0f} MHz")
        yield result("clocks", device, Status.WARN, *text, "gpu")
        return
    now = device.get("sonde.gpu.clock", sonde__gpu__clock__domain="sm")
    busy = (device.get("hw.gpu.utilization", hw__gpu__task="general") or 0) > _BUSY
    if now is None or most is None:
        return
    capped = device.get("sonde.gpu.throttled", sonde__gpu__throttle__reason="software_power_cap")
    share = now / most if busy and not capped else 1.0
    text = (f"{now / 1e6:.0f} MHz", f"up to {most / 1e6:.0f} MHz")
    remedy = "Busy, not capped, and still slow: compare with another GPU of the node."
    slow = Status.FAIL if share < limit("clock_share_fail") else Status.WARN
    status = slow if share < limit("clock_share_warn") else Status.PASS
    yield result("clocks", device, status, *text, "gpu", remedy)


DEVICE_CHECKS: tuple[Check, ...] = (
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
"""Each check yields nothing where the device does not report the values that it needs."""
