# SPDX-License-Identifier: Apache-2.0
"""What resolving did, and what it could not do: for the agent to report."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Since the start. None of these loses a frame: an unnamed one keeps binary and offset."""

    frames_new: int = 0
    """Code locations looked up in a file, the kernel's table or a perf map."""
    frames_unnamed: int = 0
    """Of those, without a symbol that covers them."""
    frames_unmapped: int = 0
    """Addresses that lie in no mapping known of their process."""
    frames_evicted: int = 0
    """Frames forgotten to make room; they are looked up again when they return."""
    files_opened: int = 0
    files_unopened: int = 0
    """Mapped files that could not be opened: the process was gone, or access was denied."""
    files_copied: int = 0
    """Mapped files read whole into memory, since reading them later might wait for a user."""
    files_evicted: int = 0
    perf_maps_refused: int = 0
    """Perf maps that belong to somebody else than their process, or are no plain file."""
    perf_map_lines_left_out: int = 0
    processes_unknown: int = 0
    """Processes that were gone before anything was learnt about them."""
    processes_evicted: int = 0
    threads_evicted: int = 0
    mappings_left_out: int = 0

    def as_dict(self) -> dict[str, int]:
        """By name, for metrics."""
        return asdict(self)
