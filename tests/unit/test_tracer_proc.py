# SPDX-License-Identifier: Apache-2.0
"""Whether a process sees /proc is found by the links of its root directory, not by ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.attach import tracer

ROOTED = "import os, sys; os.chroot(sys.argv[1]); print(flush=True); sys.stdin.read()"


@pytest.mark.skipif(os.geteuid() != 0, reason="changes a root directory")
def test_a_link_in_a_processs_root_leads_to_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "proc").symlink_to("/proc")
    assert tracer._sees_proc(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", ROOTED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as started:
        assert started.stdout is not None
        assert started.stdin is not None
        assert started.stdout.readline() == b"\n"
        assert Path(f"/proc/{started.pid}/root/proc/self").is_symlink()
        assert not tracer._sees_proc(started.pid)
        (tmp_path / "proc").unlink()
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "self").symlink_to("1")
        (tmp_path / "proc").symlink_to("/real")
        assert tracer._sees_proc(started.pid)
        started.stdin.close()
