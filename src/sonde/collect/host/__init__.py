# SPDX-License-Identifier: Apache-2.0
"""What the machine does, by the kernel's own counters: sources that read its files.

Most modules are a `Source`; `files`, `queues` and `shares` serve those. Files stay open and are
read again with one call; a counter that stands still is reported again only every 25 seconds.

Terms:
- point: one value of a metric; source, poll: see `sonde.collect.polling`
- controllers: what a hierarchy of control groups limits ("v2": everything, version 2)
- group: a control group; group paths are those below the mount of their hierarchy
- party: a user or container; what any user may have more of than is read is shared out between them
- look: a search for groups or namespaces that came or went
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
    """All sources of the machine; `group_pressure.GroupPressure` is configured apart."""
    return (
        *(Processors(), Interrupts(), Memory(), Pressure(), Disks(), Network(), Groups()),
        Hardware(),
    )
