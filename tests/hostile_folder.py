# SPDX-License-Identifier: Apache-2.0
"""A folder of an unprivileged user who waits there for root to run something."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def hostile_folder() -> Iterator[Hostile]:
    """Where every module and program that is looked for can be found; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="sonde-hostile-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield Hostile(folder)
    finally:
        shutil.rmtree(folder)


class Hostile:
    MODULES = ("json", "ctypes", "runpy", "signal", "numpy", "duckdb", "sitecustomize", "_native")
    PROGRAMS = ("ldconfig", "gcc", "cc", "objdump", "ld", "nvidia-smi", "addr2line", "uname", "git")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ran = folder / "ran"
        note = f"open({str(self._ran)!r}, 'a').write(f'{{os.geteuid()}} {{__name__}}\\n')"
        code = f"import os\n{note}\n"
        (folder / "sonde").mkdir()
        (folder / "sonde" / "__init__.py").write_text(code)
        for name in (*self.MODULES, "usercustomize"):
            (folder / f"{name}.py").write_text(code)
        for name in self.PROGRAMS:
            program = folder / name
            program.write_text(f"#!/bin/sh\necho $(id -u) {name} >> {self._ran}\n")
            program.chmod(0o755)
        self._ran.write_text("")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        self._ran.chmod(0o666)

    def forget(self) -> list[str]:
        """What ran, as which user, since it was asked last."""
        ran = self._ran.read_text().splitlines()
        self._ran.write_text("")
        return ran
