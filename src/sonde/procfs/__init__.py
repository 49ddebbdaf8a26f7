# SPDX-License-Identifier: Apache-2.0
"""What /proc says about a process that is still there. Everything may vanish at any time: None."""

from sonde.procfs.broker import BROKER, Broker, Hung
from sonde.procfs.files import (
    Opened,
    identity_of,
    open_memory,
    open_regular,
    open_stable,
    read_file,
    read_inode,
    read_lines,
    read_link,
)
from sonde.procfs.group_parties import (
    MACHINE,
    GroupMount,
    GroupParties,
    GroupParty,
    group_mounts,
    party_of_group,
)
from sonde.procfs.held import HeldFile
from sonde.procfs.map_locks import Holder, MapLocks
from sonde.procfs.maps import MAX_MAPS_BYTES, MapsReader, read_maps
from sonde.procfs.names import printable, raw_name, text
from sonde.procfs.parties import NOBODY, UNKNOWN_PARTY, name_of, party_of
from sonde.procfs.processes import (
    MAX_PARENTS,
    START_UNIT_NS,
    Owner,
    Stat,
    descends,
    family,
    has_threads,
    parents,
    pids,
    read_comm,
    read_exe,
    read_owner,
    read_stat,
    read_stats,
)

__all__ = [
    "BROKER",
    "MACHINE",
    "MAX_MAPS_BYTES",
    "MAX_PARENTS",
    "NOBODY",
    "START_UNIT_NS",
    "UNKNOWN_PARTY",
    "Broker",
    "GroupMount",
    "GroupParties",
    "GroupParty",
    "HeldFile",
    "Holder",
    "Hung",
    "MapLocks",
    "MapsReader",
    "Opened",
    "Owner",
    "Stat",
    "descends",
    "family",
    "group_mounts",
    "has_threads",
    "identity_of",
    "name_of",
    "open_memory",
    "open_regular",
    "open_stable",
    "parents",
    "party_of",
    "party_of_group",
    "pids",
    "printable",
    "raw_name",
    "read_comm",
    "read_exe",
    "read_file",
    "read_inode",
    "read_lines",
    "read_link",
    "read_maps",
    "read_owner",
    "read_stat",
    "read_stats",
    "text",
]
