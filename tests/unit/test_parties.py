# SPDX-License-Identifier: Apache-2.0
"""Whose share a process takes: of a user with all their ids and namespaces, or of a container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sonde import procfs
from sonde.attach.policy import Facts, Policy
from sonde.collect.carriers import same_tids
from sonde.procfs import parties

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


def test_a_container_whose_processes_have_every_group_is_the_same_container() -> None:
    """The list of groups stands ahead of the namespaces in `status`, and takes 0.4 MB."""
    groups = (
        "import os; os.setgroups(range(65536)); os.setuid(1); os.execv('/bin/sh', ['sh', '-c', %r])"
    )
    with shell("unshare", "--pid", "--fork", sys.executable, "-c", groups % SLEEPS) as pid:
        assert procfs.party_of(pid) < procfs.NOBODY
        owner = procfs.read_owner(pid)
        assert owner is not None
        assert owner.levels == 2
        assert not same_tids(pid)


def test_what_is_not_known_of_a_process_makes_it_nobody_in_particular(monkeypatch) -> None:
    status = b"Name:\tx\nPPid:\t1\nUid:\t7\t7\t7\t7\n"
    monkeypatch.setattr(parties, "read_status", lambda pid: status)
    assert procfs.party_of(4711) == parties._UNKNOWN
    monkeypatch.setattr(parties, "read_status", lambda pid: status + b"NSpid:\t9\t1\n")
    assert procfs.party_of(2**22 + 1) == parties._UNKNOWN
    assert "not known" in procfs.name_of(parties._UNKNOWN)


def test_a_container_that_takes_a_users_id_is_not_that_user() -> None:
    allowed = Policy("allow-list", ["user:nobody"])
    with shell(user=USER) as pid:
        assert allowed.allows(Facts.of(pid))
    drop = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    with shell("unshare", "--pid", "--fork", *drop) as pid:
        assert procfs.party_of(pid) < procfs.NOBODY
        assert not allowed.allows(Facts.of(pid))
