# SPDX-License-Identifier: Apache-2.0
"""Gather in dist/bundle everything that installs Sonde on a host without a network.

    dist/bundle/install.sh      makes a virtual environment and installs from wheels/
    dist/bundle/wheels/         Sonde, its dependencies for each Python below, pip
    dist/bundle/sources/        the sources that licences of linked libraries demand (see NOTICE)

The wheel is checked first: of the host's libraries it may need only glibc's and libgcc_s.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
GLIBC_MAXIMUM = (2, 36)  # Debian 12; Ubuntu 24.04 has 2.39
# Libraries that every host has.
HOST_LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d|ld-linux-.*\.so\.\d")

DIST = Path("dist")
BUNDLE = DIST / "bundle"
WHEELS = BUNDLE / "wheels"
SOURCES = BUNDLE / "sources"

INSTALL = """\
#!/bin/sh
# sh install.sh [FOLDER]: install Sonde into a virtual environment (default: /opt/sonde).
# Needs python3 (3.11 or newer) and nothing else: no network, no compiler, no pip.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${1:-/opt/sonde}
python3 -m venv --without-pip "$to"
pip=$(echo "$here"/wheels/pip-*.whl)
"$to/bin/python" "$pip/pip" install -q --no-index --find-links "$here/wheels" sonde
"$to/bin/sonde" --version
echo "installed: $to/bin/sonde (try: $to/bin/sonde doctor)"
"""


def run(*command: str | Path) -> str:
    """Run a command. Returns its output; its errors go to the terminal."""
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def build_wheel() -> Path:
    """Build the abi3 wheel in dist/. Returns its path."""
    for old in DIST.glob("sonde-*.whl"):
        old.unlink()
    maturin = Path(sys.executable).with_name("maturin")
    run(maturin, "build", "--release", "--strip", "--locked", "--out", DIST)
    return next(DIST.glob("sonde-*.whl"))


def check_wheel(wheel: Path) -> str:
    """Exit where the wheel's native module needs too much of a host. Returns what it needs, as
    text."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".so"))
        module = archive.extract(member, folder)
        dynamic = run("readelf", "--dynamic", "--wide", module)
        versions = run("readelf", "--version-info", "--wide", module)
    needed = re.findall(r"\(NEEDED\).*\[(.+)]", dynamic)
    foreign = [name for name in needed if not HOST_LIBRARIES.fullmatch(name)]
    glibc = max(
        (int(major), int(minor))
        for major, minor in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", versions)
    )
    if foreign:
        sys.exit(f"{wheel.name} needs {', '.join(foreign)}, which a host may lack")
    if glibc > GLIBC_MAXIMUM:
        sys.exit(f"{wheel.name} needs glibc {glibc[0]}.{glibc[1]}, newer than Debian 12's")
    return f"{member} needs {', '.join(needed)}; glibc {glibc[0]}.{glibc[1]} or newer"


def gather_dependencies() -> None:
    """Download wheels of every dependency for every Python, and that of pip."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    common = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check")
    for version in PYTHONS:
        platforms = [
            argument
            for glibc in ("2_17", "2_27", "2_28", "2_34")
            for argument in ("--platform", f"manylinux_{glibc}_{platform_machine()}")
        ]
        run(
            *(*common, "--only-binary", ":all:", "--implementation", "cp"),
            *("--python-version", version, *platforms, "--platform", manylinux2014()),
            *("--dest", WHEELS, *project["dependencies"]),
        )
    run(*common, "--no-deps", "--dest", WHEELS, "pip")


def platform_machine() -> str:
    """This machine's architecture, as wheel tags spell it."""
    return run("uname", "-m").strip()


def manylinux2014() -> str:
    """The older name of manylinux_2_17, which is the only tag of some wheels."""
    return f"manylinux2014_{platform_machine()}"


def gather_sources() -> None:
    """Archive Sonde's committed source, and the crate with the sources of libbpf, libelf, zlib."""
    run("git", "archive", "--prefix=sonde/", "-o", SOURCES / "sonde.tar.gz", "HEAD")
    lock = tomllib.loads(Path("native/Cargo.lock").read_text())
    version = next(p["version"] for p in lock["package"] if p["name"] == "libbpf-sys")
    cargo = Path(run("cargo", "metadata", "--format-version", "1", "--manifest-path",
                     "native/Cargo.toml", "--locked").partition(f"/libbpf-sys-{version}/")[0]
                 .rpartition('"')[2])  # fmt: skip
    folder = cargo / f"libbpf-sys-{version}"
    with tarfile.open(SOURCES / f"libbpf-sys-{version}.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname=folder.name)


def main() -> int:
    """Build and check the wheel, gather the rest. Prints sizes."""
    wheel = build_wheel()
    needs = check_wheel(wheel)
    shutil.rmtree(BUNDLE, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    SOURCES.mkdir()
    shutil.copy(wheel, WHEELS)
    gather_dependencies()
    gather_sources()
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(name, BUNDLE)
    shutil.copytree("LICENSES", BUNDLE / "LICENSES")
    script = BUNDLE / "install.sh"
    script.write_text(INSTALL)
    script.chmod(0o755)
    size = sum(path.stat().st_size for path in BUNDLE.rglob("*") if path.is_file())
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB; {needs}")
    print(f"{BUNDLE}: {size / 2**20:.0f} MiB for CPython {', '.join(PYTHONS)}")
    print("copy the folder to the host, then: sh install.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
