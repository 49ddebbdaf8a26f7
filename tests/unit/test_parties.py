# SPDX-License-Identifier: Apache-2.0
"""Whose share a process takes: of a user with all their ids and namespaces, or of a container."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sonde import procfs
from sonde.attach.policy import Facts, Policy

USER, OTHER = 65534, 12345
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")
SLEEPS = "echo there; read -r _"


@contextmanager
def shell(*command: str, user: int = 0) -> Iterator[int]:
    """A process that a command ends up in, its shell: its pid in the machine's own numbers."""
    with subprocess.Popen(
        [*command, "/bin/sh", "-c", SLEEPS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        user=user, group=user, extra_groups=[], cwd="/",
    ) as started:  # fmt: skip
        assert started.stdout is not None
        assert started.stdout.readline() == "there\n"
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        yield int(children[0]) if children else started.pid
        assert started.stdin is not None
        started.stdin.close()


def test_a_process_of_no_container_is_its_users() -> None:
    with shell(user=USER) as pid:
        assert procfs.party_of(pid) == USER
    with shell() as pid:
        assert procfs.party_of(pid) == 0
    assert procfs.party_of(2**22 + 1) == procfs.NOBODY


def test_a_users_namespaces_are_all_that_users() -> None:
    with shell("unshare", "--user", "--map-root-user", "--pid", "--fork", user=USER) as pid:
        assert procfs.party_of(pid) == USER
    nested = ("unshare", "--user", "--map-root-user", "unshare", "--user", "--pid", "--fork")
    with shell(*nested, user=USER) as pid:
        assert procfs.party_of(pid) == USER


def test_a_container_is_one_party_whatever_ids_it_takes() -> None:
    container = ("unshare", "--pid", "--fork", "--mount-proc")
    ids = [("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups") for user in (1, 2)]
    inside = f"{' '.join(ids[0])} sleep 9 & {' '.join(ids[1])} sleep 9 & {SLEEPS}"
    with subprocess.Popen(
        [*container, "/bin/sh", "-c", inside],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as started:  # fmt: skip
        assert started.stdout is not None
        assert started.stdout.readline() == "there\n"
        members = [pid for pid in procfs.family([started.pid]) if pid != started.pid]
        parties = {procfs.party_of(pid) for pid in members}
        assert len(members) >= 3
        assert len(parties) == 1
        assert parties.pop() < procfs.NOBODY
        assert started.stdin is not None
        started.stdin.close()


def test_a_container_that_takes_a_users_id_is_not_that_user() -> None:
    allowed = Policy("allow-list", ["user:nobody"])
    with shell(user=USER) as pid:
        assert allowed.allows(Facts.of(pid))
    drop = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    with shell("unshare", "--pid", "--fork", *drop) as pid:
        assert procfs.party_of(pid) < procfs.NOBODY
        assert not allowed.allows(Facts.of(pid))
