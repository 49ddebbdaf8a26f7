# SPDX-License-Identifier: Apache-2.0
"""CPythons of other Debian suites with numpy, each in a folder that it is started in by chroot."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_SUITES = {"trixie": "3.13", "sid": "3.14"}
_LIBRARIES = ("libc6", "libexpat1", "zlib1g", "libgcc-s1", "libstdc++6", "libffi8", "libzstd1")


@dataclass(frozen=True, slots=True)
class OfSuite:
    """An interpreter in its folder."""

    name: str
    version: str
    root: Path

    def command(self, script: str) -> tuple[str, ...]:
        """To run a script, which is copied into the folder."""
        shutil.copy(script, self.root / "tmp")
        inside = f"/tmp/{Path(script).name}"
        python = f"/usr/bin/python{self.version}"
        return ("env", "PYTHONPATH=/site", "chroot", str(self.root), python, inside)


def with_numpy(folder: Path) -> Iterator[OfSuite]:
    """Those that can be had; what was unpacked before is taken as it is."""
    for suite, version in _SUITES.items():
        root = folder / f"debian-{suite}" / "root"
        found = OfSuite(f"CPython {version} of Debian {suite}", version, root)
        if _works(found) or (_unpack(root.parent, suite, version) and _works(found)):
            yield found


def _works(it: OfSuite) -> bool:
    if not (it.root / "tmp").is_dir():
        return False
    probe = it.root.parent / "probe.py"
    probe.write_text("from importlib.util import find_spec; exit(not find_spec('numpy'))")
    return subprocess.run(it.command(str(probe)), capture_output=True, check=False).returncode == 0


def _unpack(folder: Path, suite: str, version: str) -> bool:
    packages = [f"python{version}-minimal", f"libpython{version}-minimal"]
    packages += [f"libpython{version}-stdlib", *_LIBRARIES]
    unpack = [str(_ROOT / "scripts" / "pythons"), str(folder), suite, *packages]
    number = version.replace(".", "")
    wheel = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    wheel += ["--implementation", "cp", "--python-version", version, "--abi", f"cp{number}"]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64"):
        wheel += ["--platform", platform]
    for command in (unpack, [*wheel, "-d", str(folder), "numpy"]):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
    for path in folder.glob("numpy-*.whl"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder / "root" / "site")
    return True
