# SPDX-License-Identifier: Apache-2.0
"""The injected library as a file.

Its bytes are in the native module. Programs that Sonde starts load it from a file, which must
outlive Sonde: their children load it, too. So it is kept under a name with a hash of its content,
where only its owner can change it and everyone can read it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from sonde import _native
from sonde.errors import MissingDependency, SinkError

SYSTEM_FOLDER: Final = Path("/var/cache/sonde")


def path() -> Path:
    """The file of this version, made if need be.

    Raises MissingDependency where the library was not built, SinkError where no file can be made.
    """
    import hashlib  # and OpenSSL with it: an agent that attaches to nobody needs neither

    content = _native.inject_library()
    if not content:
        raise MissingDependency(
            "this build of Sonde has no library for device time", "Use it on x86-64 Linux."
        )
    name = f"sonde-inject-{hashlib.sha256(content).hexdigest()[:16]}.so"
    problems = []
    for folder in _folders():
        try:
            return _kept(folder, name, content)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    raise SinkError(
        f"no folder can keep the library for device time ({'; '.join(problems)})",
        "Make one of them writable.",
    )


def _folders() -> list[Path]:
    if os.geteuid() == 0:
        return [SYSTEM_FOLDER, Path("/run/sonde")]
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folders = [Path(cache) / "sonde"] + ([Path(runtime) / "sonde"] if runtime else [])
    return [*folders, Path(tempfile.gettempdir()) / f"sonde-{os.geteuid()}"]


def runtime_folders() -> list[Path]:
    """Folders for files that need not outlast a reboot, the best first."""
    if os.geteuid() == 0:
        return [Path("/run/sonde"), SYSTEM_FOLDER]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return ([Path(runtime) / "sonde"] if runtime else []) + _folders()


def require_own(folder: Path) -> None:
    """Make the folder if missing. Raises OSError where others than this user can change it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(1, "others may write there")


def _kept(folder: Path, name: str, content: bytes) -> Path:
    """The file in such a folder, written if it is missing or differs. Raises OSError."""
    require_own(folder)
    target = folder / name
    with suppress(FileNotFoundError):
        if not target.is_symlink() and target.read_bytes() == content:
            return target
    fd, draft = tempfile.mkstemp(dir=folder, prefix=".draft-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        Path(draft).chmod(0o555)
        Path(draft).rename(target)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise
    return target
