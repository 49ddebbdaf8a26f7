# SPDX-License-Identifier: Apache-2.0
"""Counters of what was resolved, and of what could not be."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Counts since the start. No frame is lost: an unnamed one keeps binary and offset, one outside
    all mappings its address.

    Each field is a metric, `sonde.resolve.FIELD`.
    """

    frames_new: int = 0
    """Code locations looked up in a file, the kernel's symbols, the memory of a language's runtime
    (such as CPython), or a perf map."""
    frames_unnamed: int = 0
    """Of those, locations that no symbol covers."""
    frames_unmapped: int = 0
    """Addresses outside all known mappings of their process."""
    frames_without_offset: int = 0
    """Addresses of code in no file that became one frame a mapping, as their user or container had
    used up the time for names or what new frames it may have."""
    frames_evicted: int = 0
    """Frames dropped from the caches; they are looked up again when they return."""
    files_opened: int = 0
    """Mapped files with code that were opened, to name frames."""
    files_unopened: int = 0
    """Mapped files that could not be opened or read: the process was gone, or access was denied."""
    files_copied: int = 0
    """Mapped files copied into memory, because later reads might block on another user."""
    files_evicted: int = 0
    """Open files that were closed to make room; they are opened again when they are needed."""
    links_left_out: int = 0
    """Files without a link by build id, by which source lines are found later
    (`build_id_links`), as their user brought too many new ones, or as disputes fill all room."""
    perf_maps_refused: int = 0
    """Perf maps that are no regular file, or belong to another user than their process."""
    perf_map_lines_left_out: int = 0
    """Lines of perf maps beyond the limit of entries."""
    perf_maps_evicted: int = 0
    """Perf maps forgotten to make room, each time."""
    names_put_off: int = 0
    """Code locations left without a name, as their user or container had used up the time for
    names; they are looked up again later."""
    files_put_off: int = 0
    """Newly mapped files not opened in advance, as their user or container had used up the time for
    that; code of processes that end before it is sampled has no names then."""
    processes_unknown: int = 0
    """Processes that ended before anything was known of them."""
    processes_evicted: int = 0
    """Processes forgotten to make room."""
    threads_evicted: int = 0
    """Threads forgotten to make room."""
    thread_names_left_out: int = 0
    """Names that Python gives its threads, beyond the limit of all processes, or of one user or
    container."""
    mappings_left_out: int = 0
    """Mappings beyond the limits of one process, or of all together."""

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)
