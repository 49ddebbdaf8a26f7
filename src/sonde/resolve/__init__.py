# SPDX-License-Identifier: Apache-2.0
"""Addresses to frames, pids to processes.

`Resolver` is the door: feed it what processes do, ask it for processes, threads and frames.
Everything it keeps is bounded; `Counters` tells what did not fit or could not be named. Full paths
stay in here: what leaves are file names.
"""

from sonde.model.code import KnownFrame
from sonde.resolve.counters import Counters
from sonde.resolve.frames import Resolver

__all__ = ["Counters", "KnownFrame", "Resolver"]
