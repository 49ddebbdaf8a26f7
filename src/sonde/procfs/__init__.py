# SPDX-License-Identifier: Apache-2.0
"""What /proc shows of processes, any of which may end at any time, or make its readers wait.

Terms:
- broker: the child that reads what a process can make wait for ever
- party: a user or a container, who cannot make more of themselves
- map lock: the kernel's lock of a process's mappings (mmap_lock)
- holder: a process that keeps its map lock, so that a probe must wait
- who: as a parameter, the process that a request is about, whose party pays for waiting
- patience: how long readers wait for a process, and for a party; used up, it comes back slowly
- hung: of a process or file, that did not answer in time; left alone: not read for a while
- abandoned: of a child, that was killed and cannot die yet; crowded: there are too many of them
- look: reading a file of each of many processes; late: of a party, that made looks wait; put off:
  of a process, that a look left for another one
- other end: of a connection, the socket that it leads to; asked: it was this process that connected
- elsewhere: the thread by which memory is seen once the first thread has ended
- hold: to have a file by an O_PATH descriptor, before it is looked at and opened
- sound: of a file, that nobody but root can make its readers wait; sure: of such a file, where
  even stat() and open() wait for nobody; strange: whose device number in
  /proc/PID/maps is another than in stat()
- keeps identity: of a device, that nobody but root chooses what is on it, so that a file's identity
  is that of its content
- border: how far a control group's path is named by root's services; below it users name groups
- unit, slice: systemd's; beside: next to our own group, seen from within a namespace
"""

from sonde.procfs.broker import BROKER, Broker
from sonde.procfs.command import (
    command_of,
    commands_of,
    is_interpreter,
    scripts_of,
    with_comm,
)
from sonde.procfs.connections import (
    OtherEnd,
    TcpTables,
    address_of,
    may_hold,
    shares_our_network,
    unix_end,
)
from sonde.procfs.devices import disk_number, keeps_identity
from sonde.procfs.files import (
    Opened,
    character_device,
    identity_of,
    links_at,
    links_of,
    open_memory,
    open_regular,
    open_stable,
    read_file,
    read_inode,
    read_lines,
    read_link,
    sockets_of,
)
from sonde.procfs.group_folders import GROUPS, Below, GroupFolder, GroupFolders
from sonde.procfs.group_memory import MEMORY_FILES, memory_in, number_of, working_set_in
from sonde.procfs.group_mounts import GroupMount, group_mounts
from sonde.procfs.group_parties import (
    MACHINE,
    GroupParties,
    GroupParty,
    party_of_group,
    payer_of_folder,
)
from sonde.procfs.held import HeldFile
from sonde.procfs.ids import user_ids
from sonde.procfs.lookups import is_there, names_in, open_file, owner_of
from sonde.procfs.map_locks import Holder, MapLocks
from sonde.procfs.maps import MAX_MAPS_BYTES, MapsReader, read_maps
from sonde.procfs.names import printable, raw_name, text
from sonde.procfs.parties import (
    NOBODY,
    UNKNOWN_PARTY,
    name_of,
    party_of,
    party_of_user,
    subordinate_ids,
)
from sonde.procfs.patience import Hung
from sonde.procfs.process_groups import (
    MemoryLeft,
    counted_groups_of,
    groups_of,
    memory_left,
    memory_limit,
    memory_of,
    mounts_by_controller,
    number_in,
    working_set_of,
)
from sonde.procfs.processes import (
    MAX_PARENTS,
    START_UNIT_NS,
    Credentials,
    Stat,
    busiest,
    descends,
    family,
    has_threads,
    inner_tids,
    memory_task,
    parents,
    pids,
    read_comm,
    read_credentials,
    read_exe,
    read_stat,
    read_stats,
    tids,
)

__all__ = [
    "BROKER",
    "GROUPS",
    "MACHINE",
    "MAX_MAPS_BYTES",
    "MAX_PARENTS",
    "MEMORY_FILES",
    "NOBODY",
    "START_UNIT_NS",
    "UNKNOWN_PARTY",
    "Below",
    "Broker",
    "Credentials",
    "GroupFolder",
    "GroupFolders",
    "GroupMount",
    "GroupParties",
    "GroupParty",
    "HeldFile",
    "Holder",
    "Hung",
    "MapLocks",
    "MapsReader",
    "MemoryLeft",
    "Opened",
    "OtherEnd",
    "Stat",
    "TcpTables",
    "address_of",
    "busiest",
    "character_device",
    "command_of",
    "commands_of",
    "counted_groups_of",
    "descends",
    "disk_number",
    "family",
    "group_mounts",
    "groups_of",
    "has_threads",
    "identity_of",
    "inner_tids",
    "is_interpreter",
    "is_there",
    "keeps_identity",
    "links_at",
    "links_of",
    "may_hold",
    "memory_in",
    "memory_left",
    "memory_limit",
    "memory_of",
    "memory_task",
    "mounts_by_controller",
    "name_of",
    "names_in",
    "number_in",
    "number_of",
    "open_file",
    "open_memory",
    "open_regular",
    "open_stable",
    "owner_of",
    "parents",
    "party_of",
    "party_of_group",
    "party_of_user",
    "payer_of_folder",
    "pids",
    "printable",
    "raw_name",
    "read_comm",
    "read_credentials",
    "read_exe",
    "read_file",
    "read_inode",
    "read_lines",
    "read_link",
    "read_maps",
    "read_stat",
    "read_stats",
    "scripts_of",
    "shares_our_network",
    "sockets_of",
    "subordinate_ids",
    "text",
    "tids",
    "unix_end",
    "user_ids",
    "with_comm",
    "working_set_in",
    "working_set_of",
]
