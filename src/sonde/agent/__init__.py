# SPDX-License-Identifier: Apache-2.0
"""The composition root of a node: the only room that joins collectors, resolver and sinks."""

from sonde.agent.agent import Agent, Live, Sink
from sonde.agent.watching import Observer, WatchAgent

__all__ = ["Agent", "Live", "Observer", "Sink", "WatchAgent"]
