# SPDX-License-Identifier: Apache-2.0
"""Which settings an agent can take over while it runs, and what a new configuration asks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from sonde.config import Config

LIVE: Final = frozenset(
    {"chunk_s", "dcgm_names", "otlp", "otlp_period_s", "server_token_file", "spool_mb"}
)
"""The others decide which programs are in the kernel, what these are compiled for, or where the
agent listens: they need a new start."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What changed between two configurations."""

    taken: Config
    """The running one with what can change live."""
    changed: tuple[str, ...]
    """Settings that are taken over."""
    refused: tuple[str, ...]
    """Settings that are not, each as `NAME (OLD, not NEW)`."""


def difference(running: Config, wanted: Config) -> Difference:
    """What of a new configuration can be taken over. Raises UsageError where the live settings
    do not go together with those that stay."""
    names = [
        field.name
        for field in dataclasses.fields(Config)
        if getattr(running, field.name) != getattr(wanted, field.name)
    ]
    live = {name: getattr(wanted, name) for name in names if name in LIVE}
    return Difference(
        dataclasses.replace(running, **live),
        tuple(sorted(live)),
        tuple(
            f"{name} ({getattr(running, name)!r}, not {getattr(wanted, name)!r})"
            for name in sorted(set(names) - LIVE)
        ),
    )
