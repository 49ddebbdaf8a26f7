# SPDX-License-Identifier: Apache-2.0
"""The composition root of a node: the only package that joins collectors, resolver and sinks."""

from sonde.agent.agent import Agent
from sonde.agent.diagnosis_agent import DiagnosisAgent
from sonde.agent.protocols import Live, Observer, Sink

__all__ = ["Agent", "DiagnosisAgent", "Live", "Observer", "Sink"]
