# SPDX-License-Identifier: Apache-2.0
"""Write (or, with --check, compare) LICENSES/THIRD-PARTY.md: licences of linked Rust crates.

The crates come from `cargo metadata`: those that are linked into the wheel's native module for
x86-64 Linux, without dependencies of the build and of tests. Licence texts are taken from the
crates themselves, each distinct text once. The C libraries that libbpf-sys compiles in are named in
NOTICE, which is written by hand.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

TARGET = "x86_64-unknown-linux-gnu"
OUT = Path("LICENSES/THIRD-PARTY.md")
LOCK = Path("native/Cargo.lock")
TEXT_NAMES = re.compile(r"(?i)^(licen[cs]e|copying|copyright|notice)")

INTRODUCTION = """\
# Rust crates inside the native module

Written by `scripts/licences.py` from `native/Cargo.lock`; `make check` compares. Where a crate
offers a choice, Sonde takes Apache-2.0, else MIT, else the BSD licence.

"""


def linked_packages() -> list[dict[str, Any]]:
    """Packages that Sonde's native module links: its normal dependencies and theirs, without
    procedural macros."""
    command = ["cargo", "metadata", "--format-version", "1", "--filter-platform", TARGET]
    command += ["--locked", "--manifest-path", "native/Cargo.toml"]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    edges = {node["id"]: node["deps"] for node in metadata["resolve"]["nodes"]}
    root = metadata["resolve"]["root"]
    reached: set[str] = set()
    waiting = [root]
    while waiting:
        current = waiting.pop()
        if current in reached or is_macro(packages[current]):
            continue
        reached.add(current)
        waiting += [
            edge["pkg"]
            for edge in edges[current]
            if any(kind["kind"] is None for kind in edge["dep_kinds"])
        ]
    others = [packages[i] for i in reached if packages[i]["source"]]  # Sonde's crates have none
    return sorted(others, key=lambda p: (p["name"], p["version"]))


def is_macro(package: dict[str, Any]) -> bool:
    """Whether a package is a procedural macro, which runs in the compiler and is not linked."""
    return any("proc-macro" in target["kind"] for target in package["targets"])


def texts_of(package: dict[str, Any]) -> list[str]:
    """The texts of the licence that Sonde chooses; for Apache-2.0, whose text is in LICENSE, only a
    NOTICE file."""
    folder = Path(package["manifest_path"]).parent
    files = [p for p in sorted(folder.iterdir()) if TEXT_NAMES.match(p.name) and p.is_file()]
    choices = re.split(r" OR |/", package["license"])
    if any("Apache-2.0" in choice and "AND" not in choice for choice in choices):
        files = [path for path in files if path.name.upper().startswith("NOTICE")]
    else:
        for name in ("mit", "bsd"):
            files = [path for path in files if name in path.name.lower()] or files
    return [path.read_text(errors="replace").strip() for path in files]


def document() -> str:
    """The file's contents."""
    packages = linked_packages()
    lines = [INTRODUCTION, "| crate | version | licence |", "|---|---|---|"]
    lines += [f"| {p['name']} | {p['version']} | {p['license']} |" for p in packages]
    carriers: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        for text in texts_of(package):
            carriers[text].append(package["name"])
    lines += ["", "# Texts and notices", ""]
    for text, names in sorted(carriers.items(), key=lambda item: item[1]):
        lines += [f"## {', '.join(dict.fromkeys(names))}", "", "```", text, "```", ""]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


def main() -> int:
    """Write the file, or report that it is stale."""
    contents = document()
    if "--check" not in sys.argv:
        OUT.write_text(contents)
        return 0
    if OUT.exists() and OUT.read_text() == contents:
        return 0
    print(f"{OUT} is stale: run .venv/bin/python scripts/licences.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
