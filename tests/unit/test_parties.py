# SPDX-License-Identifier: Apache-2.0
"""Whose share a process takes: of a user with all their ids and namespaces, or of a container."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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
    assert procfs.party_of(4711) == parties.UNKNOWN_PARTY
    monkeypatch.setattr(parties, "read_status", lambda pid: status + b"NSpid:\t9\t1\n")
    assert procfs.party_of(2**22 + 1) == parties.UNKNOWN_PARTY
    assert "not known" in procfs.name_of(parties.UNKNOWN_PARTY)


@pytest.mark.parametrize(
    ("user", "ids", "party"),
    [(12345, "0 12345 1\n1 300000 65536\n", 12345), (0, "0 300000 65536\n", 300000)],
    ids=["a user's", "root's"],
)
def test_ids_that_a_user_namespace_was_given_are_one_party(user, ids, party) -> None:
    """No file says whose they are: who began the namespace, or its first id, does."""
    main = """if True:
        import ctypes, os, subprocess, sys
        ctypes.CDLL(None).unshare(0x10000000)  # CLONE_NEWUSER
        print(flush=True)
        sys.stdin.readline()
        os.setuid(0)
        take = "import os, sys; os.setuid(int(sys.argv[1])); os.execv('/bin/sleep', ['-', '60'])"
        kids = [subprocess.Popen([sys.executable, "-c", take, uid]) for uid in "567"]
        print(*(it.pid for it in kids), flush=True)
        sys.stdin.read()
        for it in kids:
            it.kill()
        """
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", main],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        user=user, group=user, extra_groups=[], cwd="/",
    ) as started:  # fmt: skip
        assert started.stdout is not None
        assert started.stdin is not None
        started.stdout.readline()
        Path(f"/proc/{started.pid}/uid_map").write_text(ids)
        started.stdin.write("\n")
        started.stdin.flush()
        kids = [int(word) for word in started.stdout.readline().split()]
        until_s = time.monotonic() + 20
        while len({Path(f"/proc/{pid}").stat().st_uid for pid in kids}) < 3:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert {procfs.party_of(pid) for pid in (started.pid, *kids)} == {party}
        started.stdin.close()


def test_a_container_that_takes_a_users_id_is_not_that_user() -> None:
    allowed = Policy("allow-list", ["user:nobody"])
    with shell(user=USER) as pid:
        assert allowed.allows(Facts.of(pid))
    drop = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    with shell("unshare", "--pid", "--fork", *drop) as pid:
        assert procfs.party_of(pid) < procfs.NOBODY
        assert not allowed.allows(Facts.of(pid))
