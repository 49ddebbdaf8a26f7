# SPDX-License-Identifier: Apache-2.0
"""Resolves addresses to frames, pids to processes, and processes to their owners.

`Resolver` is the public interface: it takes process events, and returns processes, threads and
frames. Everything it keeps is bounded; `Counters` counts what was evicted or could not be named.
Full paths never leave this package: frames show file names.
"""

from sonde.model.code import KnownFrame
from sonde.resolve.counters import Counters
from sonde.resolve.resolver import Resolver

__all__ = ["Counters", "KnownFrame", "Resolver"]
