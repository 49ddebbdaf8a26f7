# SPDX-License-Identifier: Apache-2.0
"""The composition root of a node: the only package that joins collectors, resolver and sinks."""

from sonde.agent.agent import Agent
from sonde.agent.protocols import Live, Observer, Sink
from sonde.agent.watching import WatchAgent

__all__ = ["Agent", "Live", "Observer", "Sink", "WatchAgent"]
