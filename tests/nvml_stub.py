# SPDX-License-Identifier: Apache-2.0
"""A stub of libnvidia-ml.so.1 that tests compile and steer: tests/programs/nvml/stub.c."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

LOOKS_S = 0.025
"""The stub looks at its answers after 20 ms again."""
SOURCE = Path(__file__).parent / "programs" / "nvml" / "stub.c"


@cache
def header_folder() -> Path:
    """Where nvml.h is, of the package nvidia-nvml-dev."""
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for header in Path(place).glob("*/include/nvml.h"):
            return header.parent
    pytest.skip("needs the package nvidia-nvml-dev")


class Stub:
    """The library in a separate folder, and the file that holds what it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "nvml"
        self.folder.mkdir()
        self.library = self.folder / "libnvidia-ml.so.1"
        self._answers = folder / "nvml.answers"
        self._values: dict[str, object] = {}
        command = ["cc", "-D_GNU_SOURCE", "-O1", "-Wall", "-shared", "-fPIC"]
        command += ["-Wno-deprecated-declarations", f"-I{header_folder()}"]
        subprocess.run([*command, str(SOURCE), "-o", str(self.library)], check=True)
        self.set_answers()

    def set_answers(self, **answers: object) -> None:
        """Change answers; __ stands for a dot."""
        self.answers({name.replace("__", "."): value for name, value in answers.items()})

    def answers(self, answers: Mapping[str, object]) -> None:
        """Change answers by their keys; None takes one back."""
        self._values |= answers
        lines = [f"{key}={value}\n" for key, value in self._values.items() if value is not None]
        fresh = self._answers.with_suffix(".new")
        fresh.write_text("".join(lines))
        fresh.replace(self._answers)
        time.sleep(LOOKS_S)

    def forget(self) -> None:
        """Take all answers back."""
        self._values.clear()
        self.set_answers()

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process find the stub."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.folder),
            "NVML_STUB": str(self._answers),
        }
