# SPDX-License-Identifier: Apache-2.0
"""The Debian package: its fields, modes and places, and that it starts nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

import sonde

ROOT = Path(__file__).parents[2]
PACKAGE = Path(sonde.__file__).parent
PLACES = ("./usr/lib/sonde/", "./usr/bin/sonde", "./etc/sonde/", "./lib/systemd/system/sonde",
          "./usr/share/doc/sonde/")  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")


def wheel(path: Path, package: Path) -> Path:
    """The files of an installed package, as a wheel holds them."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(package.parent))
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deb")
    wheels = [
        wheel(
            folder / f"sonde-{sonde.__version__}-cp311-abi3-linux.whl", Path(sonde.__file__).parent
        ),
        wheel(folder / "msgspec-0-cp-linux.whl", Path(msgspec.__file__).parent),
    ]
    command = [sys.executable, ROOT / "scripts" / "deb", *wheels, "--into", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.deb"))


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_fields(package):
    text = output("dpkg-deb", "--field", package)
    fields = dict(re.findall(r"(?m)^([\w-]+): (.*)$", text))
    assert fields["Package"] == "sonde" and fields["Version"] == sonde.__version__
    assert "python3 (>= 3." in fields["Depends"] and int(fields["Installed-Size"]) > 1000


def test_every_file_is_root_s_in_its_place_and_with_the_usual_mode(package):
    for line in output("dpkg-deb", "--contents", package).splitlines():
        mode, owner, _, _, _, name, *_ = line.split()
        assert owner == "root/root"
        if mode[0] == "d":
            assert mode == "drwxr-xr-x", line
            continue
        assert name.startswith(PLACES), line
        program = name == "./usr/bin/sonde"
        assert mode[0] == "l" or mode == ("-rwxr-xr-x" if program else "-rw-r--r--"), line
        assert "__pycache__" not in name


def test_scripts_start_nothing_and_are_right(package, tmp_path):
    output("dpkg-deb", "--control", package, tmp_path)
    assert (tmp_path / "conffiles").read_text() == "/etc/sonde/config.toml\n"
    for name in ("postinst", "prerm", "postrm"):
        text = (tmp_path / name).read_text()
        assert subprocess.run(["sh", "-n", tmp_path / name]).returncode == 0
        assert text.splitlines()[1] == "set -e"
        assert not re.search(r"systemctl (start|restart|enable)\b", text)


def test_units_run_the_program_of_the_package(package, tmp_path):
    output("dpkg-deb", "--extract", package, tmp_path)
    for unit in tmp_path.glob("lib/systemd/system/*"):
        assert "ExecStart=/usr/bin/sonde " in unit.read_text()
        assert "/usr/local" not in unit.read_text()
