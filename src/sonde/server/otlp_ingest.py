# SPDX-License-Identifier: Apache-2.0
"""Takes OTLP profiles, over HTTP or gRPC: decoded when it is the tenant's turn, then stored."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from sonde.server.service import Service
from sonde.server.tokens import Caller
from sonde.server.turns import Turns


class OtlpIngest:
    """Takes requests with OTLP profiles. For use in one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = ThreadPoolExecutor(1, "sonde-otlp")
        """Decodes one OTLP request at a time: decoded messages are large."""
        waiting = service.limits.queries_waiting
        self._turns = Turns(1, waiting, waiting // 4)

    async def take(self, caller: Caller, body: bytes, encoding: str, node: str) -> None:
        """Store the profiles of an ExportProfilesServiceRequest; returns when they are durable.

        `encoding`: of the body, gzip or identity; `node`: the name where a resource has no host.
        Raises RefusedRequestError; WalBusyError, WalFailedError where the disk fails.
        """
        from sonde.server import otlp_profiles  # and with it the messages of OTLP

        with self._turns.place(caller.tenant):
            async with self._turns.turn(caller.tenant):
                found = await asyncio.get_running_loop().run_in_executor(
                    self._decoder, otlp_profiles.chunks, body, encoding, node, time.time_ns()
                )
        for one in found:
            for future, _ in self._service.take(caller, one.node, one.content):
                await asyncio.shield(asyncio.wrap_future(future))


def sender_node(host: str) -> str:
    """The name of the node that an address is, for profiles that name no host: OpenTelemetry's
    eBPF profiler sends none. This machine's for loopback, else the address; '' for none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return socket.gethostname() if address.is_loopback else str(address)
