# SPDX-License-Identifier: Apache-2.0
"""How many connections may be open of strangers: that have not shown a valid token yet."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any, Generic, TypeVar

from sonde.server.service import ServerLimits

C = TypeVar("C")
ACCEPTED = "sonde.accepted"
"""Extension of a request's scope (ASGI): its `note` is to be called, with the tenant, for a request
that is accepted."""


def accepted(scope: MutableMapping[str, Any], tenant: str) -> None:
    """Note that a request has a valid token: its connection is no stranger's any more, but one of
    this tenant ('': where clients show no tokens; it stays one of its machine)."""
    extension = scope.get("extensions", {}).get(ACCEPTED)
    if extension is not None:
        extension["note"](tenant)


def origin(host: str) -> str:
    """Which clients share the limits of connections: those of one machine. This machine has all of
    127.0.0.0/8 and ::1; a machine with IPv6 most often has a whole /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return "loopback" if address.is_loopback else address.packed[:8].hex()
        address = address.ipv4_mapped
    return "loopback" if address.is_loopback else str(address)


class Silent(Generic[C]):
    """Connections of strangers, the oldest first: in the TLS handshake, without the head of a
    request, or (until that is answered) with requests without a valid token alone."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._all: OrderedDict[C, str] = OrderedDict()
        self._by_origin: dict[str, OrderedDict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, one: C, host: str) -> C | None:
        """Add a connection; returns the one that must be closed in its favour, None: none."""
        found = origin(host)
        self._all[one] = found
        same = self._by_origin.setdefault(found, OrderedDict())
        same[one] = None
        if len(same) > self._limits.connections_unknown:
            return next(iter(same))
        # The other half is for connections with a request.
        return next(iter(self._all)) if 2 * len(self._all) > self._limits.connections else None

    def remove(self, one: C) -> None:
        """It has done its part, or it is closed."""
        found = self._all.pop(one, None)
        if found is not None:
            same = self._by_origin[found]
            del same[one]
            if not same:
                del self._by_origin[found]
