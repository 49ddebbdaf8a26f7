# SPDX-License-Identifier: Apache-2.0
"""A driver's library is loaded only where nobody else can change it; nothing else loads any."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sonde import interpreter, system_libraries
from sonde.collect import mapped_files
from sonde.collect.devices.nvml_library import Nvml, NvmlError
from sonde.collect.discovery import Discovery
from sonde.collect.entry_points import entry_points
from sonde.collect.probes import Probes
from sonde.health import bandwidth

NOBODY = 65534
PACKAGE = Path(system_libraries.__file__).parent
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
CODE = """
#include <fcntl.h>
__attribute__((constructor)) static void run(void) { creat(MARK, 0600); }
int cuGetProcAddress_v2(const char *n, void **p, int v, unsigned long f, int *s) { return 1; }
int cuLaunchKernel(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int cuInit(int flags) { return 0; }
"""
HOSTILE = ("file", "folder", "group", "everybody", "link")


class Library:
    """A library that makes a file when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "ran"
        self.folder = folder / "lib"
        self.folder.mkdir(mode=0o755)
        self.path = self.folder / "libcuda.so.1"
        code = folder / "library.c"
        code.write_text(CODE)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-w", f'-DMARK="{self.mark}"', "-o", self.path, code],
            check=True,
        )

    def give(self, how: str) -> None:
        """Let somebody else change what is loaded."""
        if how == "file":
            os.chown(self.path, NOBODY, 0)
        elif how == "folder":
            os.chown(self.folder, NOBODY, 0)
        elif how == "group":
            os.chown(self.folder, 0, NOBODY)
            self.folder.chmod(0o775)
        elif how == "everybody":
            self.path.chmod(0o757)
        elif how == "link":
            real = self.folder.with_name("real")
            shutil.copytree(self.folder, real)
            os.chown(real, NOBODY, NOBODY)
            self.path.unlink()
            self.path.symlink_to(real / self.path.name)


@pytest.fixture
def library() -> Iterator[Library]:
    with TemporaryDirectory(prefix="sonde-library-") as name:
        Path(name).chmod(0o755)
        yield Library(Path(name))


def test_what_root_alone_can_change_is_loaded(library):
    system_libraries.load(str(library.path))

    assert library.mark.exists()


@ROOT_ONLY
@pytest.mark.parametrize("how", HOSTILE)
def test_what_others_can_change_is_not_loaded_by_path(library, how):
    library.give(how)

    with pytest.raises(system_libraries.UntrustedLibraryError, match="users other than root"):
        system_libraries.load(str(library.path))
    assert not library.mark.exists()


@ROOT_ONLY
@pytest.mark.parametrize("how", HOSTILE)
def test_what_others_can_change_is_not_asked_for_its_functions(library, how):
    library.give(how)
    with library.path.open("rb") as file:
        assert entry_points(file.fileno(), ["cuLaunchKernel"]) == []

    assert not library.mark.exists()


def test_what_root_alone_can_change_is_asked_for_its_functions(library):
    with library.path.open("rb") as file:
        entry_points(file.fileno(), ["cuLaunchKernel"])

    assert library.mark.exists()


@ROOT_ONLY
def test_a_library_of_the_linkers_cache_that_a_user_owns_is_refused_and_counted(
    library, monkeypatch
):
    library.give("file")
    monkeypatch.setattr(system_libraries, "in_cache", lambda: [("libcuda.so.1", str(library.path))])
    reports: list[tuple[str, float, str]] = []
    trusted: list[bool] = []

    class Noted(Probes):
        def __init__(self) -> None:
            self._files = {}

        def report(self, name: str, value: float, text: str) -> None:
            reports.append((name, value, text))

        def examine(self, *_: object) -> bool:
            trusted.append(bool(_[3]))
            return False

    class Api:
        libraries = ("libcuda.so.1",)

    discovery = Discovery([Api()], Noted())  # type: ignore[list-item]
    for path in mapped_files.installed(discovery._is_library):
        discovery._examine_installed(path)

    assert trusted == [False]  # read for its symbols, not run
    assert discovery.refused == 1
    [(name, value, text)] = reports
    assert (name, value) == ("library_refused", 1)
    assert str(library.path) in text


@ROOT_ONLY
def test_nvml_that_a_user_owns_is_a_source_lost_with_its_reason(library, monkeypatch):
    library.give("folder")
    monkeypatch.setattr(system_libraries, "in_cache", lambda: [("libnvml.x", str(library.path))])

    with pytest.raises(NvmlError, match="users other than root can change it"):
        Nvml("libnvml.x")
    assert not library.mark.exists()


@ROOT_ONLY
def test_the_callers_library_path_has_root_load_nothing_of_a_users(library, monkeypatch):
    library.give("folder")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library.folder}:.:")
    monkeypatch.setattr(system_libraries, "in_cache", list)

    assert system_libraries.find("libcuda.so.1") != str(library.path)
    interpreter.run(interpreter.command("sonde.health.bandwidth", "x"), 30)
    assert not library.mark.exists()


def test_the_callers_library_path_is_searched_where_nobody_else_can_write(library, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.folder))

    assert system_libraries.find("libcuda.so.1") == str(library.path)


@ROOT_ONLY
@pytest.mark.parametrize("what", ["module", "folder", "library"])
def test_a_vendors_module_that_others_can_change_is_not_imported(tmp_path, what, monkeypatch):
    folder, mark = tmp_path / "share", tmp_path / "ran"
    package = folder / "vendors_own"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libvendor.so").touch()
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = {
        "module": package / "__init__.py",
        "folder": folder,
        "library": tmp_path / "lib/libvendor.so",
    }
    os.chown(given[what], NOBODY, NOBODY)

    with pytest.raises(system_libraries.UntrustedLibraryError):
        system_libraries.import_checked("vendors_own", "libvendor.so", folder)
    assert not mark.exists()


def test_the_linkers_own_choice_is_found():
    script = "import ctypes; ctypes.CDLL('libz.so.1'); print(open('/proc/self/maps').read())"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = system_libraries.find("libz.so.1")

    assert found is not None
    assert os.path.realpath(found) in done.stdout


def test_no_other_place_loads_a_library() -> None:
    """`ctypes.CDLL(None)`, the process itself, is no library that is loaded."""
    loading = {}
    for path in PACKAGE.rglob("*.py"):
        calls = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2]
            in {"CDLL", "PyDLL", "LoadLibrary", "find_library", "dlopen", "ExtensionFileLoader"}
            and not (node.args and ast.unparse(node.args[0]) == "None")
        ]
        if calls:
            loading[str(path.relative_to(PACKAGE))] = calls

    assert set(loading) == {"system_libraries.py"}
    assert bandwidth.LIBRARY == "libcuda.so.1"
