# SPDX-License-Identifier: Apache-2.0
"""Whose share a process takes: of a user with all their ids and namespaces, or of a container."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sonde import procfs
from sonde.attach.policy import Policy, ProcessFacts
from sonde.collect.carriers import same_tids
from sonde.procfs import parties
from sonde.procfs.ids import Ids, read_status

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


@contextmanager
def beneath_a_shell(command: str, user: int = 0, *around: str) -> Iterator[list[int]]:
    """A shell that runs `command`, and all that it started: their pids, the oldest first."""
    with subprocess.Popen(
        [*around, "/bin/sh", "-c", f"{command}; :"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        user=user, group=user, extra_groups=[], cwd="/",
    ) as started:  # fmt: skip
        assert started.stdout is not None
        assert started.stdout.readline() == "there\n"
        yield sorted(procfs.family([started.pid]))
        assert started.stdin is not None
        started.stdin.close()


def test_a_process_of_no_container_is_its_users() -> None:
    with shell(user=USER) as pid:
        assert procfs.party_of(pid) == USER
    with shell() as pid:
        assert procfs.party_of(pid) == 0
    assert procfs.party_of(2**22 + 1) == procfs.NOBODY


def test_a_users_namespaces_are_all_that_users() -> None:
    one = "unshare --user --map-root-user --pid --fork"
    for command in (one, f"unshare --user --map-root-user {one}"):
        with beneath_a_shell(f"{command} /bin/sh -c '{SLEEPS}'", USER) as family:
            assert {procfs.party_of(pid) for pid in family} == {USER}
            assert len(family) >= 3


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


@pytest.mark.parametrize("first", [True, False], ids=["its first process", "a later one"])
def test_a_container_that_begins_user_namespaces_as_others_is_one_party(first: bool) -> None:
    """Its root takes any id; who begins a user namespace with it is not that user."""
    forge = "setpriv --reuid={0} --regid={0} --clear-groups unshare --user --map-root-user sleep 9"
    forged = " & ".join(forge.format(uid) for uid in (1, OTHER, 300000))
    inside = f"{forged} & {SLEEPS}"
    if first:
        inside = f"exec {forge.format(OTHER).removesuffix('sleep 9')} sh -c 'sleep 8 & {SLEEPS}'"
    with beneath_a_shell(
        f"unshare --pid --fork --mount-proc /bin/sh -c {shlex.quote(inside)}"
    ) as family:
        inner = [pid for pid in family if b"NSpid" in read_status(pid)]
        inner = [
            pid for pid in inner if (owner := procfs.read_credentials(pid)) and owner.levels == 2
        ]
        until_s = time.monotonic() + 20
        while not first and not all(
            b" 4294967295" not in Path(f"/proc/{pid}/uid_map").read_bytes() for pid in inner[1:]
        ):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        parties_seen = {procfs.party_of(pid) for pid in inner}
        assert len(inner) >= (2 if first else 4)
        assert len(parties_seen) == 1
        assert parties_seen.pop() < procfs.NOBODY
        allowed = Policy("allow-list", ["user:daemon", "user:root"])
        assert not any(allowed.allows(ProcessFacts.of(pid)) for pid in inner)
        for pid in inner:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def test_a_user_far_below_the_first_of_many_namespaces_is_still_that_user() -> None:
    """A chain that is too long to climb is not the party of those of whom nothing is known."""
    deep = (
        "import os, sys, time\n"
        "for _ in range(70):\n"
        "    if os.fork(): os.wait(); os._exit(0)\n"
        "print('there', flush=True); sys.stdin.read()"
    )
    with beneath_a_shell(f"unshare --user /usr/bin/python3 -c {shlex.quote(deep)}", USER) as family:
        assert len(family) > 70
        assert {procfs.party_of(pid) for pid in family} == {USER}


def test_what_was_entered_into_a_container_is_a_party_by_its_control_group(monkeypatch) -> None:
    """Its parent is outside. Those of others' containers are other parties."""
    with (
        shell("unshare", "--pid", "--fork") as container,
        shell("nsenter", f"--target={container}", "--pid") as entered,
    ):
        groups = {it: f"0::/docker/{it * 64}" for it in "ab"}
        found = []
        for name in ("a", "b", "a"):
            monkeypatch.setattr(parties, "_read_groups", lambda _, it=name: groups[it].encode())
            found.append(procfs.party_of(entered))
        assert found[0] == found[2] != found[1]
        assert max(found) < procfs.party_of(container) < procfs.NOBODY
        assert "b" * 64 in procfs.name_of(found[1])


def test_a_container_whose_processes_have_every_group_is_the_same_container() -> None:
    """The list of groups stands ahead of the namespaces in `status`, and takes 0.4 MB."""
    groups = (
        "import os; os.setgroups(range(65536)); os.setuid(1); os.execv('/bin/sh', ['sh', '-c', %r])"
    )
    with shell("unshare", "--pid", "--fork", sys.executable, "-c", groups % SLEEPS) as pid:
        assert procfs.party_of(pid) < procfs.NOBODY
        owner = procfs.read_credentials(pid)
        assert owner is not None
        assert owner.levels == 2
        assert not same_tids(pid)


def test_what_is_not_known_of_a_process_makes_it_nobody_in_particular(monkeypatch) -> None:
    monkeypatch.setattr(parties, "ids_of", lambda pid: Ids(7, 7, 1, ()))
    assert procfs.party_of(4711) == parties.UNKNOWN_PARTY
    monkeypatch.setattr(parties, "ids_of", lambda pid: Ids(7, 7, 1, (9, 1)))
    assert procfs.party_of(2**22 + 1) == parties.UNKNOWN_PARTY
    assert "not known" in procfs.name_of(parties.UNKNOWN_PARTY)


@pytest.mark.parametrize(
    ("user", "ids", "party"),
    [(12345, "0 12345 1\n1 300000 65536\n", 12345), (0, "0 300000 65536\n", 300000)],
    ids=["a user's", "root's"],
)
def test_ids_that_a_user_namespace_was_given_are_one_party(user, ids, party) -> None:
    """No file names their owner: who began the namespace, or its first id, does."""
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
        assert allowed.allows(ProcessFacts.of(pid))
    drop = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    with shell("unshare", "--pid", "--fork", *drop) as pid:
        assert procfs.party_of(pid) < procfs.NOBODY
        assert not allowed.allows(ProcessFacts.of(pid))


def test_in_a_container_the_machines_own_list_of_subordinate_ids_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image's is empty, or another's; nor are its users the machine's."""
    etc = tmp_path / "1/root/etc"
    etc.mkdir(parents=True)
    (tmp_path / "1/ns").mkdir()
    (tmp_path / "1/ns/mnt").symlink_to("mnt:[1]")
    (etc / "subuid").write_text("ann:700000:1000\n4711:800000:1000\nnobody-here:900000:10\n")
    (etc / "passwd").write_text("root:x:0:0::/:\nann:x:1234:1234::/:\nbroken\n")
    monkeypatch.setattr(parties, "_FIRST", tmp_path / "1")
    holders = parties._Holders()
    assert [holders.of(uid) for uid in (700_005, 800_999, 900_001, 5)] == [1234, 4711, 900_001, 5]
    (tmp_path / "1/ns/mnt").unlink()
    (tmp_path / "1/ns/mnt").symlink_to(Path("/proc/self/ns/mnt").readlink())
    assert parties._Holders()._root() is None


@pytest.mark.parametrize("how", ["0x10000000", "0x30000000"], ids=["a user's", "with pids"])
def test_an_orphan_is_not_of_the_user_whose_process_adopts_it(how: str) -> None:
    """Somebody ran a program as USER beneath a subreaper of OTHER, such as a user's systemd."""
    adopts = f"""if True:
        import ctypes, os, signal, sys
        libc = ctypes.CDLL(None)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps
        libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        if os.fork() == 0:
            os.setgroups([])
            os.setgid({USER})
            os.setuid({USER})
            libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
            if os.fork() == 0:
                libc.unshare({how})  # CLONE_NEWUSER, CLONE_NEWPID
                open("/proc/self/setgroups", "w").write("deny")
                open("/proc/self/uid_map", "w").write("0 {USER} 1")
                if {how} > 0x10000000 and os.fork() != 0:
                    os._exit(0)
                print("there", flush=True)
                sys.stdin.read()
            os._exit(0)
        os.setgroups([])
        os.setgid({OTHER})
        os.setuid({OTHER})
        sys.stdin.read()
        """
    with subprocess.Popen(
        [sys.executable, "-c", adopts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "there\n"
        until_s = time.monotonic() + 20
        while len(orphans := procfs.family([started.pid]) - {started.pid}) != 1 or (
            procfs.read_stat(min(orphans)).ppid != started.pid  # type: ignore[union-attr]
            or Path(f"/proc/{started.pid}").stat().st_uid != OTHER
        ):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        (orphan,) = orphans
        party = procfs.party_of(orphan)
        assert party == USER if how == "0x10000000" else party != OTHER
        assert started.stdin is not None
        started.stdin.close()


@pytest.mark.parametrize(("uid", "party"), [(1001, 1001), (0, 4242)])
def test_an_orphan_in_a_user_namespace_without_a_map_is_its_creators(monkeypatch, uid, party):
    """Another user's subreaper adopted it."""
    ids = {700: Ids(uid, uid, 600, (700,)), 600: Ids(4242, 4242, 1, (600,))}
    maps = {700: [], 600: parties._IDENTITY}
    monkeypatch.setattr(parties, "ids_of", ids.get)
    monkeypatch.setattr(parties, "_uid_map", maps.get)
    assert procfs.party_of(700) == party
