# SPDX-License-Identifier: Apache-2.0
"""Which settings an agent can take over while it runs, and what differs in a new configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from sonde.config import Config

LIVE: Final = frozenset(
    {"chunk_s", "dcgm_names", "otlp", "otlp_period_s", "server_token_file", "spool_mb"}
)
"""Settings that can. The others need a restart: what they decide is made once, when the agent
starts (BPF programs with their constants, collectors, connections, the page's address, the period).
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """What changed between two configurations."""

    taken: Config
    """The running configuration, with the settings of `LIVE` as the new one has them."""
    changed: tuple[str, ...]
    """Settings that are taken over."""
    refused: tuple[str, ...]
    """Settings that are not, each as `NAME (OLD, not NEW)`."""


def difference(running: Config, new: Config) -> Difference:
    """What of a new configuration can be taken over. Raises UsageError where the live settings
    do not go together with those that stay."""
    names = [
        field.name
        for field in dataclasses.fields(Config)
        if getattr(running, field.name) != getattr(new, field.name)
    ]
    live = {name: getattr(new, name) for name in names if name in LIVE}
    return Difference(
        dataclasses.replace(running, **live),
        tuple(sorted(live)),
        tuple(
            f"{name} ({getattr(running, name)!r}, not {getattr(new, name)!r})"
            for name in sorted(set(names) - LIVE)
        ),
    )
