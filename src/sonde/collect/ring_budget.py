# SPDX-License-Identifier: Apache-2.0
"""How much is read of the rings of profiled processes in one turn, and how that is shared out.

A process may claim any number of records. Of none more is read than the launches that it was asked
to time, and of all together no more than one budget: shared between parties (users, containers),
then between the processes of a party, max-min fair: who has little to read is served whole, the
others get even parts. So no number of processes of one party keeps the records of another unread.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

RECORDS_A_SECOND: Final = 16_384
"""Of all rings together: seventy processes at the rate of the default budget."""
CPU_SHARE: Final = 0.15
"""Of a CPU, at the most, for reading them."""
NAME_BYTES_A_SECOND: Final = 256 << 10
"""Names that were not known yet, of all rings together, as they are in memory."""
KEPT_BYTES: Final = 16 << 20
"""Memory of what is kept of all rings together: names, stacks whose runs have not come yet.
Shared between parties (`procfs.party_memory`)."""
STACKS_A_SECOND: Final = 1_024
"""Stacks that were not known yet, of all rings together: each has to be resolved."""
LONGEST_TURN_S: Final = 4.0
"""A turn that comes later than this gets no more for it."""
MAX_SPARE_S: Final = 1.0
"""Of what a turn did not use, added to the next."""
LIKELY_RECORDS: Final = 2.0
"""Records that may be read for each launch that was asked for, half of them for bursts ..."""
STACK_RECORDS: Final = 12.0
"""... or this many where its stack comes with it."""
MORE_A_SECOND: Final = 64
"""Launches besides those that were asked for: chance chooses some more."""
FIRST_RECORDS: Final = 4_096
"""Records that may be read at first: what was timed before anybody read."""

Key = TypeVar("Key", bound=Hashable)


def fair(wanted: Mapping[Key, int], total: int) -> dict[Key, int]:
    """Parts of `total`, max-min fair: what somebody does not want of an even part goes to the
    others."""
    parts: dict[Key, int] = {}
    for number, (key, want) in enumerate(sorted(wanted.items(), key=lambda it: it[1])):
        parts[key] = min(want, total // (len(wanted) - number))
        total -= parts[key]
    return parts


def shares(wanted: Mapping[int, int], parties: Mapping[int, int], total: int) -> dict[int, int]:
    """Parts of `total` by process, fair between parties first, then between the processes of each;
    `parties`: by process (procfs.party_of)."""
    of_party: dict[int, dict[int, int]] = {}
    for pid, want in wanted.items():
        of_party.setdefault(parties[pid], {})[pid] = want
    part_of = fair({party: sum(wants.values()) for party, wants in of_party.items()}, total)
    found: dict[int, int] = {}
    for party, wants in of_party.items():
        found |= fair(wants, part_of[party])
    return found


@dataclass(slots=True)
class Allowance:
    """How many records of one process may still be read."""

    records: float = FIRST_RECORDS

    def earn(self, per_second: int, seconds: float, *, with_stacks: bool) -> int:
        """Add what `seconds` allow; `per_second`: launches asked for. Returns what may be read
        now."""
        each = STACK_RECORDS if with_stacks else LIKELY_RECORDS
        earned = (per_second + MORE_A_SECOND) * each * seconds
        self.records = min(self.records + earned, max(FIRST_RECORDS, 2 * earned))
        return int(self.records)


@dataclass(slots=True)
class Turn:
    """What is left of the budget of one turn, of all rings together."""

    seconds: float
    records: int
    cpu_s: float
    name_bytes: int
    stacks: int
    names_left_out: int = 0
    stacks_left_out: int = 0

    @classmethod
    def of(cls, seconds: float) -> Turn:
        """The budget of a turn that covers `seconds`."""
        seconds = min(max(seconds, 0.0), LONGEST_TURN_S)
        return cls(
            seconds,
            int(RECORDS_A_SECOND * seconds),
            CPU_SHARE * seconds,
            int(NAME_BYTES_A_SECOND * seconds),
            int(STACKS_A_SECOND * seconds),
        )

    @property
    def spare_s(self) -> float:
        """What the turn did not use, in seconds of a turn, for the next: launches come in
        bursts."""
        left = min(
            self.records / RECORDS_A_SECOND,
            self.name_bytes / NAME_BYTES_A_SECOND,
            self.stacks / STACKS_A_SECOND,
            self.cpu_s / CPU_SHARE,
        )
        return min(max(left, 0.0), MAX_SPARE_S)
