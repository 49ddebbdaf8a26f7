# SPDX-License-Identifier: Apache-2.0
"""A fleet's leader or helper as an HTTP server without TLS."""

from __future__ import annotations

from aiohttp import web

from sonde.fleet import service
from sonde.fleet.aggregator import Aggregator
from sonde.fleet.service import Service


class Credentials:
    """The credentials that a service reads."""

    token = operator_token = "secret"


async def listening(party: Aggregator) -> tuple[web.AppRunner, int]:
    """Starts the server of an aggregator: (runner, port)."""
    runner = service.runner_of(Service(party, Credentials()))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]
