# SPDX-License-Identifier: Apache-2.0
"""The other ends of connections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """Who was at the other end of sockets that a thread waited on, where its process connected."""

    address: str
    """127.0.0.1:9301, or the name of a UNIX socket; '' of a pair without a name."""
    pid: int
    """The process; 0: on another machine, or not known."""
    name: str
    """What it runs; '' not known."""
    looks: int
    """How often a look at the thread found it."""
    alone: bool = True
    """The thread waited for this one; False: for any of several sockets, of which this is one that
    its process asked."""
