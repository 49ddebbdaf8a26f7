# SPDX-License-Identifier: Apache-2.0
"""The sink of an agent that only serves metrics: what is not asked for is let go."""

from __future__ import annotations


class Nowhere:
    """Takes chunks and keeps none."""

    written_bytes = 0

    def write(self, chunk: bytes) -> None:
        """Let it go."""

    def close(self) -> None:
        """Nothing to do."""
