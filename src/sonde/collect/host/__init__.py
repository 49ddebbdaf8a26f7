# SPDX-License-Identifier: Apache-2.0
"""What the machine does, by the kernel's own counters: sources that read its files.

Each module is a concern and a `Source`. Files stay open and are read again with one call; a counter
that has not moved is not reported again.

Terms:
- point: one value of a metric; source, poll: see `sonde.collect.polling`
- controllers: what a hierarchy of control groups limits ("v2": everything, version 2)
- party: a user or container; groups are read in turn, a party after the other
"""

from collections.abc import Sequence

from sonde.collect.host.disks import Disks
from sonde.collect.host.groups import Groups
from sonde.collect.host.hardware import Hardware
from sonde.collect.host.interrupts import Interrupts
from sonde.collect.host.memory import Memory
from sonde.collect.host.network import Network
from sonde.collect.host.pressure import Pressure
from sonde.collect.host.processors import Processors
from sonde.collect.polling import Source


def sources() -> Sequence[Source]:
    """Every one."""
    return (
        *(Processors(), Interrupts(), Memory(), Pressure(), Disks(), Network(), Groups()),
        Hardware(),
    )
