# SPDX-License-Identifier: Apache-2.0
"""The header Host of a request, which shows under which name a browser reached a server.

A page of another site that makes its name resolve to our address (DNS rebinding) has the browser
send that name, whatever the address is.
"""

from __future__ import annotations

import ipaddress
import socket


def is_direct(host: str) -> bool:
    """Whether the header Host has an address, 'localhost' or the name of this machine, with a port
    or without; also where it is empty, as programs may leave it out and browsers do not."""
    name = host.strip()
    if not name.endswith("]"):
        name = name.rsplit(":", 1)[0]
    if name.lower() in ("", "localhost", socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
