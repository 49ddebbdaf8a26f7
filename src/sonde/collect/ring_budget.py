# SPDX-License-Identifier: Apache-2.0
"""How much is read of the rings of profiled processes in one turn, and how that is shared out.

A process may claim any number of records. None gets more than the launches that it was asked to
time, and all together no more than one budget: shared evenly between parties (users, containers),
then between the processes of a party, where each first gets what it wants as far as that is little.
So no number of processes of one party takes the records of another's away.
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
"""Names that were not known yet, of all rings together."""
STACKS_A_SECOND: Final = 1_024
"""Stacks that were not known yet, of all rings together: each has to be resolved."""
LONGEST_TURN_S: Final = 4.0
"""A turn that comes later than this gets no more for it."""
MAX_SPARE_S: Final = 1.0
"""Handed on from one turn to the next."""
LIKELY_RECORDS: Final = 2.0
"""A launch that was asked for has this many records, and as many again in a burst ..."""
STACK_RECORDS: Final = 12.0
"""... or this many where its stack comes with it."""
FIRST_RECORDS: Final = 4_096
"""What was timed before anybody read."""

Key = TypeVar("Key", bound=Hashable)


def fair(wanted: Mapping[Key, int], most: int) -> dict[Key, int]:
    """Parts of `most`: what is wanted, as far as everybody's even part allows (max-min fair)."""
    parts: dict[Key, int] = {}
    for number, (key, want) in enumerate(sorted(wanted.items(), key=lambda it: it[1])):
        parts[key] = min(want, most // (len(wanted) - number))
        most -= parts[key]
    return parts


def shares(wanted: Mapping[int, int], parties: Mapping[int, int], most: int) -> dict[int, int]:
    """The same by process, first between parties: `parties` by process (procfs.party_of)."""
    of_party: dict[int, dict[int, int]] = {}
    for pid, want in wanted.items():
        of_party.setdefault(parties[pid], {})[pid] = want
    part_of = fair({party: sum(wants.values()) for party, wants in of_party.items()}, most)
    found: dict[int, int] = {}
    for party, wants in of_party.items():
        found |= fair(wants, part_of[party])
    return found


@dataclass(slots=True)
class Allowance:
    """Records that one process may still have read: what it was asked for, and some at first."""

    records: float = FIRST_RECORDS

    def earn(self, per_second: int, seconds: float, *, with_stacks: bool) -> int:
        """`per_second`: launches asked for. Returns what may be read now."""
        each = STACK_RECORDS if with_stacks else LIKELY_RECORDS
        earned = (per_second + 64) * each * seconds
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
        """What was not needed of its time, for the next turn: launches come in bursts."""
        left = min(
            self.records / RECORDS_A_SECOND,
            self.name_bytes / NAME_BYTES_A_SECOND,
            self.stacks / STACKS_A_SECOND,
            self.cpu_s / CPU_SHARE,
        )
        return min(max(left, 0.0), MAX_SPARE_S)
