# SPDX-License-Identifier: Apache-2.0
"""What collectors share that are one BPF object and the links of its programs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from sonde import _native
from sonde.collect.collector import Collector
from sonde.collect.kernel import Iterators


class Attached(Collector):
    """A collector that is a BPF object whose programs `start` attaches, entries after returns."""

    def __init__(self, bpf: _native.Bpf) -> None:
        self._bpf = bpf
        self._iterators = Iterators(bpf)
        self._links: list[int] = []

    @abstractmethod
    def start(self) -> None:
        """Attach. Raises HostError where this machine cannot."""

    def stop(self) -> None:
        """Let go, last attached first; what was summed stays readable."""
        for link in reversed(self._links):
            self._bpf.detach(link)
        self._links = []

    def pause(self) -> None:
        """Let go; what was summed stays readable."""
        self.stop()

    def resume(self) -> None:
        """Follow again. Raises HostError."""
        self.start()

    def losses(self) -> Mapping[str, int]:
        """Losses so far by name."""
        return self._iterators.losses()

    def memory_bytes(self) -> int:
        """Kernel memory held."""
        return self._bpf.map_bytes()


class Scanning(Attached):
    """One that also scans all there is, by `on_scan`, and takes what was counted since."""

    def __init__(self, bpf: _native.Bpf) -> None:
        super().__init__(bpf)
        self._scan: int | None = None

    def _begin_scans(self) -> None:
        """Note what was counted before. Raises OSError."""
        first = self._bpf.attach("on_first_scan")
        self._bpf.walk(first)
        self._bpf.detach(first)
        if self._scan is None:
            self._scan = self._bpf.attach("on_scan")
