# SPDX-License-Identifier: Apache-2.0
"""Takes OTLP profiles, over HTTP or gRPC: decoded when it is the tenant's turn, then stored."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sonde.server.admission import Bodies
from sonde.server.service import Service
from sonde.server.tokens import Caller
from sonde.server.turns import Turns

if TYPE_CHECKING:
    from sonde.server.otlp_profiles import NodeChunk


class OtlpIngest:
    """Takes requests with OTLP profiles. For use in one event loop."""

    def __init__(self, service: Service, bodies: Bodies) -> None:
        """`bodies`: counts the memory of what requests become, too."""
        self._service, self._bodies = service, bodies
        self._decoder = ThreadPoolExecutor(1, "sonde-otlp")
        self._one = asyncio.Lock()
        """Held to decode: one request at a time, as decoded messages are large."""
        waiting = service.limits.queries_waiting
        self._turns = Turns(1, waiting, waiting // 4)

    async def take(self, caller: Caller, body: bytes, encoding: str, node: str) -> None:
        """Store the profiles of an ExportProfilesServiceRequest; returns when they are durable.

        `encoding`: of the body, gzip or identity; `node`: the name where a resource has no host.
        Raises RefusedRequestError; WalBusyError, WalFailedError where the disk fails.
        """
        tenant = caller.tenant
        with self._turns.place(tenant):
            async with self._turns.turn(tenant), self._one:
                found = await self._decoded(tenant, body, encoding, node)
        made_bytes = sum(len(one.content) for one in found)
        try:
            self._bodies.charge(tenant, made_bytes)
            for one in found:
                for future, _ in self._service.take(caller, one.node, one.content):
                    await asyncio.shield(asyncio.wrap_future(future))
        finally:
            self._bodies.give_back(tenant, made_bytes)

    async def _decoded(self, tenant: str, body: bytes, encoding: str, node: str) -> list[NodeChunk]:
        """The chunks of a request. Raises RefusedRequestError."""
        from sonde.server import otlp_profiles  # and with it the messages of OTLP

        unpacked_bytes = otlp_profiles.MAX_BYTES if encoding == "gzip" else 0
        try:
            self._bodies.charge(tenant, unpacked_bytes)
            return await asyncio.get_running_loop().run_in_executor(
                self._decoder, otlp_profiles.chunks, body, encoding, node, time.time_ns()
            )
        finally:
            self._bodies.give_back(tenant, unpacked_bytes)


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
