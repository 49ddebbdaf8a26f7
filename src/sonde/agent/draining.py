# SPDX-License-Identifier: Apache-2.0
"""Drains a collector so that an error in it costs its rows of one interval, and nothing else."""

from __future__ import annotations

import logging
from collections import Counter

from sonde.collect.collector import Batch, Collector
from sonde.errors import SondeError

LOG = logging.getLogger("sonde.agent")


def drain(collector: Collector, since_ns: int, to_the_end: bool, failed: Counter[str]) -> Batch:
    """What a collector saw since `since_ns` (CLOCK_MONOTONIC); `to_the_end`: a chunk ends here.

    Where it raises an unexpected error, its rows of this interval are lost: `failed` counts them by
    its name, and the first error of each collector is logged. A SondeError is raised: it is meant
    for the user.
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
