# SPDX-License-Identifier: Apache-2.0
"""The composition root of a node: the only room that joins collectors, resolver and sinks."""

from sonde.agent.agent import Agent, Live, Observer, Sink

__all__ = ["Agent", "Live", "Observer", "Sink"]
