# SPDX-License-Identifier: Apache-2.0
"""Maps kernel names to classes on the node. A report holds an index into a public table, never a
name.

A mix of kernels identifies an application as well as its name does. The node therefore evaluates
the mix itself and reports only the class.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

IDLE, OTHER = 0, 1
"""The first two classes, of kernels and of applications."""


@dataclass(frozen=True)
class Classes:
    """The tables of classes.toml; a class is an index into its tuples.

    kernels, applications   names of the classes
    patterns                per kernel class: what names of its kernels contain; None: set otherwise
    conditions              per application class: the least share of busy time of kernel classes
    """

    kernels: tuple[str, ...]
    patterns: tuple[re.Pattern[str] | None, ...]
    applications: tuple[str, ...]
    conditions: tuple[dict[str, float], ...]

    @staticmethod
    @lru_cache(maxsize=1)
    def shipped() -> Classes:
        """The table that is installed with Sonde."""
        table = tomllib.loads(files("sonde.fleet").joinpath("classes.toml").read_text())
        return Classes(
            tuple(row["name"] for row in table["kernels"]),
            tuple(
                re.compile("|".join(row["patterns"]), re.IGNORECASE) if row["patterns"] else None
                for row in table["kernels"]
            ),
            tuple(row["name"] for row in table["applications"]),
            tuple(row["least"] for row in table["applications"]),
        )

    def kernel(self, name: str) -> int:
        """Class of a kernel by its name; `other` if no pattern matches."""
        for number, pattern in enumerate(self.patterns):
            if pattern is not None and pattern.search(name):
                return number
        return OTHER

    def application(self, mix: Mapping[int, float]) -> int:
        """Class of an application by the share of busy time in each kernel class (sum at most 1):
        the first whose condition holds, else `other`.
        """
        by_name = {self.kernels[number]: share for number, share in mix.items()}
        for number, least in enumerate(self.conditions):
            if least and all(by_name.get(name, 0.0) >= share for name, share in least.items()):
                return number
        return OTHER

    def kernel_name(self, number: int) -> str:
        return self.kernels[number] if number < len(self.kernels) else f"reserved {number}"

    def application_name(self, number: int) -> str:
        known = number < len(self.applications)
        return self.applications[number] if known else f"reserved {number}"
