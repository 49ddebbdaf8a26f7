# SPDX-License-Identifier: Apache-2.0
"""Packages of any Debian suite and architecture, unpacked; apt here stays as it is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
ARCHIVE = "http://deb.debian.org/debian"


class Suite:
    """One suite for one architecture, with a separate state of apt below `folder`."""

    def __init__(self, folder: Path, suite: str, arch: str) -> None:
        self._folder = folder / f"apt-{suite}-{arch}"
        self._arch = arch
        for name in ("state/lists/partial", "cache/archives/partial"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._status = self._folder / "status"
        self._status.touch()
        self._sources = self._folder / "sources.list"
        line = f"deb [signed-by={KEYS}] {ARCHIVE} {suite} main\n"
        if not self._sources.exists() or self._sources.read_text() != line:
            self._sources.write_text(line)
            # A mirror may be weeks behind: what it has is signed all the same.
            self._apt("apt-get", "-qq", "update")

    def kernel(self) -> str:
        """The package that the suite's `linux-image-ARCH` stands for."""
        shown = self._apt("apt-cache", "show", f"linux-image-{self._arch}")
        found = re.search(r"^Depends: .*?(linux-image-[^\s,]+)", shown, re.MULTILINE)
        if found is None:
            raise SystemExit(f"no kernel for {self._arch} in {self._sources.read_text()}")
        return found[1]

    def kernel_packages(self) -> list[str]:
        """The packages that hold the kernel itself; newer suites have it apart from its modules."""
        name = self.kernel()
        apart = name.replace("linux-image-", "linux-binary-", 1)
        known = self._apt("apt-cache", "pkgnames", apart).split()
        return [apart] if apart in known else [name]

    def closure(self, *packages: str) -> list[str]:
        """The packages with all that they depend on."""
        shown = self._apt("apt-get", "-qq", "--print-uris", "install", *packages)
        return sorted({line.split()[1].split("_")[0] for line in shown.splitlines()})

    def unpack(self, into: Path, *packages: str) -> list[str]:
        """Download and unpack; returns the packages' file names, which carry their versions."""
        into.mkdir(parents=True, exist_ok=True)
        debs = self._folder / "debs" / into.name
        shutil.rmtree(debs, ignore_errors=True)
        debs.mkdir(parents=True)
        self._apt("apt-get", "-qq", "download", *packages, where=debs)
        found = sorted(debs.glob("*.deb"))
        for deb in found:
            subprocess.run(["dpkg", "-x", deb, into], check=True)
        shutil.rmtree(debs)
        return [deb.name for deb in found]

    def _apt(self, program: str, *words: str, where: Path | None = None) -> str:
        options = {
            "Dir::Etc::sourcelist": self._sources,
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State": self._folder / "state",
            "Dir::State::status": self._status,
            "Dir::Cache": self._folder / "cache",
            "APT::Sandbox::User": "root",
            "APT::Architecture": self._arch,
            "APT::Architectures": self._arch,
            "APT::Install-Recommends": "false",
            "Acquire::Check-Valid-Until": "false",
            "Acquire::Languages": "none",
            "Acquire::PDiffs": "false",
        }
        flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        command = [program, *flags, *words]
        return subprocess.run(
            command, check=True, cwd=where or self._folder, stdout=subprocess.PIPE, text=True
        ).stdout
