# SPDX-License-Identifier: Apache-2.0
"""Reading out a collector in such a way that an error in it ends nobody but itself."""

from __future__ import annotations

import logging
from collections import Counter

from sonde.collect.collector import Batch, Collector
from sonde.errors import SondeError

LOG = logging.getLogger("sonde.agent")


def drain(collector: Collector, since_ns: int, to_the_end: bool, failed: Counter[str]) -> Batch:
    """What a collector saw since `since_ns` (monotonic, ns).

    A mistake in it, or what a process brings it to, costs its own rows of this interval, which
    `failed` counts by its name; the first error of each collector is logged. Raises SondeError:
    that is meant for who runs the agent.
    """
    try:
        return collector.drain(since_ns, to_the_end)
    except SondeError:
        raise
    except Exception:
        failed[collector.name] += 1
        if failed[collector.name] == 1:
            LOG.exception("%s gives no rows of this interval", collector.name)
        return Batch()
