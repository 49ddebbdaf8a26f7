# SPDX-License-Identifier: Apache-2.0
"""A fleet's leader or helper as an HTTP server without TLS."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from sonde.fleet import service
from sonde.fleet.aggregator import Aggregator
from sonde.fleet.provision import Credentials
from sonde.fleet.service import Service

CREDENTIALS = Credentials(Path(), "leader", "", token="secret", operator_token="secret")
"""What a service reads of them."""


async def listening(party: Aggregator) -> tuple[web.AppRunner, int]:
    """Starts the server of an aggregator: (runner, port)."""
    runner = service.runner_of(Service(party, CREDENTIALS))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]
