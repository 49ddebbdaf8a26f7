# SPDX-License-Identifier: Apache-2.0
"""Base classes of collectors that consist of one BPF object and its attached programs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from sonde import _native
from sonde.collect.collector import Collector
from sonde.collect.kernel import Iterators


class Attached(Collector):
    """Holds the object, and in `_links` what `start` attaches: programs that see an operation end
    before those that see it begin, so that none is begun and never ended."""

    def __init__(self, bpf: _native.Bpf) -> None:
        self._bpf = bpf
        self._iterators = Iterators(bpf)
        self._links: list[int] = []

    @abstractmethod
    def start(self) -> None:
        """Attach. Raises HostError where this machine cannot."""

    def stop(self) -> None:
        """Detach, last attached first; what was summed stays readable."""
        for link in reversed(self._links):
            self._bpf.detach(link)
        self._links = []

    def pause(self) -> None:
        """Detach; what was summed stays readable."""
        self.stop()

    def resume(self) -> None:
        """Attach again. Raises HostError."""
        self.start()

    def losses(self) -> Mapping[str, int]:
        """Losses so far by name."""
        return self._iterators.losses()

    def memory_bytes(self) -> int:
        """Kernel memory held."""
        return self._bpf.map_bytes()


class Scanning(Attached):
    """One that reads the kernel's own counters by a BPF iterator over all tasks or files,
    `on_scan`, and counts by how much they grew since the scan before."""

    def __init__(self, bpf: _native.Bpf) -> None:
        super().__init__(bpf)
        self._first: int | None = None
        """`on_first_scan`, until it has come to its end once."""
        self._scan: int | None = None

    def _begin_scans(self) -> None:
        """Take the counters as they are now as the beginning (`on_first_scan`), and attach
        `on_scan`. Raises OSError."""
        self._first = self._bpf.attach("on_first_scan")
        if self._scan is None:
            self._scan = self._bpf.attach("on_scan")
        self._run_scan()

    def _run_scan(self) -> None:
        """Count since the scan before. Where the first one did not come to its end, it is made
        again: what it did not see would count from its beginning. Raises OSError."""
        if self._first is not None:
            if self._iterators.run(self._first):
                self._bpf.detach(self._first)
                self._first = None
        elif self._scan is not None:
            self._iterators.run(self._scan)
