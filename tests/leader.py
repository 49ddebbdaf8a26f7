# SPDX-License-Identifier: Apache-2.0
"""A fleet's leader or helper that listens without TLS, which is OpenSSL's to test."""

from __future__ import annotations

from aiohttp import web

from sonde.fleet import service
from sonde.fleet.aggregator import Aggregator
from sonde.fleet.service import Service


class Credentials:
    """What of a party's secrets a service asks for."""

    token = operator_token = "secret"


async def listening(party: Aggregator) -> tuple[web.AppRunner, int]:
    """(runner, port)"""
    runner = service.runner_of(Service(party, Credentials()))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]
