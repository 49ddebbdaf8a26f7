# SPDX-License-Identifier: Apache-2.0
"""Results of checks, and the tables of expected values and limits.

Expected values and limits are in skus.toml, classes of failure in failures.toml, what each state of
each check means in checks.toml.
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from sonde.health.facts import Device


class Status(enum.StrEnum):
    """Outcome of a check."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check of one device, or of the node."""

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


def limit(name: str) -> float:
    """One of the limits that hold for every device (`limits` of skus.toml)."""
    return float(table("skus")["limits"][name])


def expectations(name: str) -> Mapping[str, Any]:
    """Expected values of a device of this name; empty for an unknown model."""
    for sku in table("skus")["sku"]:
        if fnmatchcase(name, sku["match"]):
            expected: Mapping[str, Any] = sku
            return expected
    return {}


def expected_of(device: Device, name: str) -> float | None:
    """One expected value of a device; None where it is not known."""
    value = expectations(device.about.get("hw.model", "")).get(name)
    return float(value) if value is not None else None


def graded(value: float, warn: float, fail: float) -> Status:
    """Status of a value that is worse the greater it is; it warns or fails from these limits on."""
    return Status.FAIL if value >= fail else Status.WARN if value >= warn else Status.PASS


def severity(status: Status) -> int:
    """A number that is greater for a worse status."""
    return (Status.PASS, Status.WARN, Status.FAIL).index(status)


def result(
    check: str,
    device: Device | None,
    status: Status,
    figure: str,
    expected: str,
    failure: str,
    remedy: str = "",
) -> Result:
    """A result with the given remedy, or that of its class of failure."""
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
