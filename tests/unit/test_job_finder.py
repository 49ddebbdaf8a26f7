# SPDX-License-Identifier: Apache-2.0
"""What finding the jobs of a node may cost, whatever its processes are."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from sonde import procfs
from sonde.agent import job_finder, rank_owners, ras_client
from sonde.agent.job_finder import MAX_CANDIDATES, MIN_NEWCOMERS, JobFinder

COSTS = job_finder._Costs()


def process(pid, **its):
    return job_finder._Process(pid, 1, 5, (0, "python"), **its)


def owned(pid, owner, **its):
    return process(pid, owner=owner, party=-pid, **its)


def test_a_process_without_a_library_is_read_seldom(monkeypatch):
    now, read = [100.0], []
    monkeypatch.setattr(job_finder.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(job_finder.procfs, "read_maps", lambda pid: read.append(now[0]) or b"")
    finder = JobFinder()
    for _ in range(250):
        assert not finder._has_library(process(7))
        now[0] += 4
    assert [at - 100 for at in read] == [0, 4, 12, 28, 60, 124, 252, 508, 764]


def test_shares_of_a_process_are_bounded(monkeypatch):
    lines = b"\n".join(b"1-2 rw-s 0 00:1a %d   /dev/shm/nccl-%d" % (n, n) for n in range(500))
    monkeypatch.setattr(job_finder.procfs, "read_maps", lambda pid: lines)
    one = process(7)
    JobFinder()._has_library(one)
    assert len(one.shm_files) == job_finder.MAX_SHM_FILES


def test_known_ranks_come_first_and_then_each_user_in_turn(monkeypatch):
    owners = dict.fromkeys(range(1, 900), 1000) | {900: 7, 901: 7, 902: 1000}
    monkeypatch.setattr(
        job_finder.procfs, "read_credentials", lambda pid: SimpleNamespace(uids=(owners[pid],))
    )
    looked = []
    monkeypatch.setattr(job_finder, "_read", looked.append)
    finder = JobFinder()
    assert finder.find(owners, str, {902}) == []
    assert len(looked) == MAX_CANDIDATES
    assert looked[0] == 902
    assert {900, 901} <= set(looked)
    assert finder.left_out == len(owners) - MAX_CANDIDATES


def test_jobs_that_are_known_keep_no_other_users_job_from_being_found(monkeypatch):
    known = range(1, 2 * MAX_CANDIDATES)
    owner_of = lambda pid: SimpleNamespace(uids=(1000 if pid < 900 else 7,))  # noqa: E731
    monkeypatch.setattr(job_finder.procfs, "read_credentials", owner_of)
    looked = []
    monkeypatch.setattr(job_finder, "_read", looked.append)
    finder = JobFinder()
    finder.find([*range(1, 800), 900, 901], str, known)
    assert {900, 901} <= set(looked)
    assert len(looked) == MAX_CANDIDATES
    assert sum(pid in known for pid in looked) == MAX_CANDIDATES - MIN_NEWCOMERS
    looked.clear()
    finder.find([*known, 900, 901], str, known)
    assert {900, 901} <= set(looked)
    assert len(looked) == MAX_CANDIDATES


def test_tables_are_read_once_for_a_namespace(monkeypatch):
    read = []
    monkeypatch.setattr(job_finder, "sockets_of", lambda pid: {str(pid)})
    monkeypatch.setattr(job_finder.procfs, "read_inode", lambda path: 5)
    whole = [("a:1", "a:2", "01", "10"), ("a:2", "a:1", "01", "11")]
    monkeypatch.setattr(job_finder, "connections", lambda pid: read.append(pid) or whole)
    links = job_finder._links([process(10), process(11), process(12)], COSTS)
    assert read == [10]
    assert links == {10: {11}, 11: {10}}


def test_who_listens_is_read_once_for_a_namespace(monkeypatch):
    read = []
    monkeypatch.setattr(job_finder, "sockets_of", lambda pid: {str(pid)})
    monkeypatch.setattr(job_finder.procfs, "read_inode", lambda path: 5)
    whole = [("a:1", "0:0", "0A", "10"), ("a:2", "a:1", "01", "11")]
    monkeypatch.setattr(job_finder, "connections", lambda pid: read.append(pid) or whole)
    assert job_finder.listening([10, 11, 12]) == {10}
    assert read == [10]
    assert ras_client.ask([11, 12, 13]) is None
    assert read == [10, 11]


def test_ends_in_another_network_namespace_connect_nobody(monkeypatch):
    """Where a process has made one, it may have any address there."""
    monkeypatch.setattr(job_finder, "sockets_of", lambda pid: {str(pid)})
    monkeypatch.setattr(
        job_finder.procfs, "read_inode", lambda path: 6 if path == "/proc/12/ns/net" else 5
    )
    tables = {
        10: [("a:1", "a:2", "01", "10"), ("a:2", "a:1", "01", "11")],
        12: [("a:1", "a:2", "01", "12"), ("a:2", "a:1", "01", "12")],
    }
    monkeypatch.setattr(job_finder, "connections", lambda pid: tables[pid])
    links = job_finder._links([process(10), process(11), process(12)], COSTS)
    assert links == {10: {11}, 11: {10}}


def test_shared_memory_is_the_same_by_its_file_not_by_its_name(monkeypatch):
    line = b"7f00-7f10 rw-s 0 00:%s 77                         /dev/shm/nccl-AbCdEf\n"
    maps = {10: line % b"1a", 11: line % b"1a", 12: line % b"9f"}
    monkeypatch.setattr(job_finder.procfs, "read_maps", maps.__getitem__)
    monkeypatch.setattr(job_finder, "sockets_of", lambda pid: set())
    monkeypatch.setattr(job_finder, "connections", lambda pid: [])
    members = [process(pid) for pid in maps]
    finder = JobFinder()
    for one in members:
        finder._has_library(one)
    (part,) = job_finder._connected(members, COSTS)
    assert {one.pid for one in part} == {10, 11}


def test_a_path_forges_no_shared_memory(monkeypatch):
    real = b"7f00-7f10 rw-s 00000000 00:1a 77                     "
    forged = real + b"/tmp/x 00:1a 78 /dev/shm/nccl-AbCdEf\n" + real + b"/dev/shm/nccl-AbCdEf\n"
    monkeypatch.setattr(job_finder.procfs, "read_maps", lambda _: forged)
    one = process(7)
    JobFinder()._has_library(one)
    assert one.shm_files == {b"00:1a 77"}


def test_who_has_many_processes_with_low_numbers_hides_nobody(monkeypatch):
    monkeypatch.setattr(job_finder, "USERS_READ", 300)
    owner_of = lambda pid: SimpleNamespace(uids=(1000 if pid < 900 else 7,))  # noqa: E731
    monkeypatch.setattr(job_finder.procfs, "read_credentials", owner_of)
    looked = set()
    monkeypatch.setattr(job_finder, "_read", looked.add)
    finder = JobFinder()
    for _ in range(60):
        finder.find(range(1, 903), str)
    assert {900, 901, 902} <= looked


def test_processes_with_one_share_are_connected(monkeypatch):
    monkeypatch.setattr(job_finder, "sockets_of", lambda pid: set())
    monkeypatch.setattr(job_finder, "connections", lambda pid: [])
    members = [process(pid, shm_files={b"x", b"%d" % pid}) for pid in (10, 11, 12)]
    (part,) = job_finder._connected(members, COSTS)
    assert {one.pid for one in part} == {10, 11, 12}


def test_ranks_beyond_those_of_one_job_are_counted(monkeypatch):
    count = job_finder.MAX_RANKS + 3
    monkeypatch.setattr(job_finder, "_read", process)
    monkeypatch.setattr(job_finder, "_connected", lambda members, costs: [list(members)])
    monkeypatch.setattr(job_finder.procfs, "party_of", lambda pid: 1)
    monkeypatch.setattr(JobFinder, "_has_library", lambda self, one: True)
    finder = JobFinder()
    (job,) = finder.find(range(1, count + 1), str)
    assert len(job.ranks) == job_finder.MAX_RANKS
    assert finder.left_out == 3


@pytest.mark.parametrize("count", [3])
def test_sockets_of_this_process(count):
    its = [socket.socket() for _ in range(count)]
    try:
        inodes = {str(os.fstat(one.fileno()).st_ino) for one in its}
        assert inodes <= job_finder.sockets_of(os.getpid())
    finally:
        for one in its:
            one.close()


def test_looking_into_one_party_costs_no_more_than_its_time(monkeypatch):
    """However many processes, descriptors and connections it has."""
    costs = {"time": 0.0}
    monkeypatch.setattr(job_finder.time, "thread_time", lambda: costs["time"])
    monkeypatch.setattr(
        job_finder, "_read", lambda pid: process(pid, shm_files={b"%d" % (pid // 2)})
    )
    monkeypatch.setattr(job_finder.procfs, "party_of", lambda pid: 1000 if pid < 900 else 1001)
    monkeypatch.setattr(job_finder.procfs, "descends", lambda *_: False)
    monkeypatch.setattr(job_finder.procfs, "read_inode", lambda path: 5)
    monkeypatch.setattr(job_finder, "number_of", lambda _: (None, ""))
    monkeypatch.setattr(job_finder, "connections", lambda pid: [])
    monkeypatch.setattr(JobFinder, "_has_library", lambda *_: True)
    asked = []

    def sockets(pid):
        asked.append(pid)
        costs["time"] += 0.05 if pid < 900 else 0.0
        return {str(pid)}

    monkeypatch.setattr(job_finder, "sockets_of", sockets)
    finder = JobFinder()
    for _ in range(5):
        jobs = finder.find([*range(2, 100), 900, 901], str)
    greedy = [pid for pid in asked if pid < 900]
    assert len(greedy) * 0.05 * job_finder._COST_FACTOR <= job_finder.BURST_S + 0.3
    assert [rank.pid for job in jobs for rank in job.ranks] == [900, 901]
    assert finder.left_out == 4 * 98


def test_tables_of_few_namespaces_are_read_in_a_look(monkeypatch):
    read = []
    monkeypatch.setattr(job_finder, "sockets_of", lambda pid: {str(pid)})
    monkeypatch.setattr(job_finder.procfs, "read_inode", lambda path: int(path.split("/")[2]))
    monkeypatch.setattr(job_finder, "connections", lambda pid: read.append(pid) or [])
    job_finder.listening(range(1, 60))
    assert read == list(range(1, 1 + job_finder.MAX_NAMESPACES))


TCP = [("a:1", "a:2", "01", "10"), ("a:2", "a:1", "01", "11"), ("a:1", "a:3", "01", "12")]


@pytest.fixture
def tcp(monkeypatch):
    """10 and 11 are connected to each other in one network namespace."""
    monkeypatch.setattr(job_finder, "sockets_of", lambda pid: {str(pid)})
    monkeypatch.setattr(job_finder.procfs, "read_inode", lambda path: 5)
    monkeypatch.setattr(job_finder, "connections", lambda pid: TCP)


@pytest.mark.parametrize(
    ("owners", "links"),
    [
        (("docker a", "docker a"), {10: {11}, 11: {10}}),
        (("docker a", "docker b"), {}),
        (("pod u", "0 /system.slice/x.service"), {}),
        ((rank_owners.STRANGER, rank_owners.STRANGER), {}),
    ],
)
def test_a_connection_makes_no_stranger_a_rank(tcp, owners, links):
    members = [owned(10, owners[0]), owned(11, owners[1])]
    assert job_finder._links(members, COSTS) == links


class Maps:
    """What processes map now, and when that is read."""

    def __init__(self, monkeypatch, **files):
        self.files = {int(pid[1:]): file for pid, file in files.items()}
        self.now_s, self.read = 100.0, []
        monkeypatch.setattr(job_finder.procfs, "read_maps", self.maps)
        monkeypatch.setattr(job_finder.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(job_finder, "sockets_of", lambda pid: set())
        self.costs = job_finder._Costs()

    def maps(self, pid):
        self.read.append(pid)
        self.now_s += 0.1
        line = b"7f00-7f10 rw-s 00000000 00:1a %d                     /dev/shm/nccl-AbCdEf\n"
        return line % self.files[pid] if pid in self.files else b""


def test_memory_that_both_map_connects_containers(monkeypatch):
    maps = Maps(monkeypatch, p10=77, p11=77, p12=78)
    members = [owned(pid, f"docker {pid}") for pid in (10, 11, 12)]
    finder = JobFinder()
    for one in members:
        finder._has_library(one)
    assert job_finder._links(members, maps.costs) == {10: {11}, 11: {10}}
    assert maps.read == [10, 11, 12, 10]  # the one that was read before the other began
    maps.read.clear()
    assert job_finder._links(members, maps.costs) == {10: {11}, 11: {10}}
    assert maps.read == []


def test_a_device_number_of_a_mount_that_is_gone_connects_no_stranger(monkeypatch):
    """Its tmpfs had the number and inode that the memory of a container's library has later."""
    maps = Maps(monkeypatch, p10=77)
    stranger, rank = owned(10, "docker a"), owned(11, "docker b")
    finder = JobFinder()
    finder._has_library(stranger)
    maps.files = {11: 77}
    finder._has_library(rank)
    assert job_finder._links([stranger, rank], maps.costs) == {}
    assert maps.read == [10, 11, 10]  # the rank is not read for it
    assert job_finder._links([stranger, rank], maps.costs) == {}
    assert len(maps.read) == 3


def test_ranks_of_two_containers_are_found_beside_a_stranger(monkeypatch):
    maps = Maps(monkeypatch, p10=77)
    members = [owned(pid, f"docker {pid}") for pid in (10, 11, 12)]
    finder = JobFinder()
    finder._has_library(members[0])
    maps.files = {11: 77, 12: 77}
    for one in members[1:]:
        finder._has_library(one)
    assert job_finder._links(members, maps.costs) == {11: {12}, 12: {11}}


DOCKER = "c0de" * 16
POD = "12345678-1234-1234-1234-123456789abc"


@pytest.mark.parametrize(
    ("cgroup", "party", "owner"),
    [
        (f"0::/system.slice/docker-{DOCKER}.scope", 0, f"docker {DOCKER}"),
        (f"0::/system.slice/docker-{DOCKER}.scope", -7, f"docker {DOCKER}"),
        (f"0::/kubepods/burstable/pod{POD}/{DOCKER}", 0, "namespace team"),
        ("0::/user.slice/user-7.slice/session-3.scope", 7, "7"),
        ("0::/user.slice/user-7.slice/user@7.service/app.slice/a.scope", 7, "7"),
        ("0::/system.slice/run-1.service", 7, "7"),
        ("0::/system.slice/run-1.service", 0, "0 /system.slice/run-1.service"),
        (
            f"0::/system.slice/web.service/libpod-payload-{DOCKER}", 0,
            "0 /system.slice/web.service",
        ),
        ("0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_0", 7, "7"),
        ("0::/", procfs.UNKNOWN_PARTY, rank_owners.STRANGER),
    ],
)  # fmt: skip
def test_whose_a_rank_is_shows_what_root_named(monkeypatch, cgroup, party, owner):
    monkeypatch.setattr(rank_owners.procfs, "read_file", lambda _: cgroup.encode() + b"\n")
    namespace = lambda pid, uid: "team" if (pid, uid) == (9, POD) else ""  # noqa: E731
    assert rank_owners.owner_of_rank(9, party, namespace) == owner


def test_a_pod_without_a_name_is_its_own_owner(monkeypatch):
    path = f"0::/kubepods/burstable/pod{POD}/{DOCKER}".encode()
    monkeypatch.setattr(rank_owners.procfs, "read_file", lambda _: path)
    assert rank_owners.owner_of_rank(9, 0) == f"pod {POD}"
