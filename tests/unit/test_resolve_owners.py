# SPDX-License-Identifier: Apache-2.0
"""Whose processes are: alive, gone, moved, inherited; by /proc, by notes, by the kubelet."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sonde import procfs
from sonde.attach.policy import ProcessFacts
from sonde.model.owner import GroupNote, Owner, ProcessNote, step_of
from sonde.procfs.cgroup_paths import place_of
from sonde.resolve.cgroup_index import MAX_GROUPS, CgroupIndex, _groups
from sonde.resolve.owners import OwnerResolver, UserNames
from sonde.resolve.pods import Pod, Pods, by_id, parse
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.tracked_process import TrackedProcess

NOBODY = 500_000_001
"""A pid that no kernel gives out."""
ID = "c0de" * 16
ANSWER = (Path(__file__).parents[1] / "data/kubelet_pods.json").read_bytes()
POD = "7c4f2b9a-3d55-4f0e-9a41-0b6f2d1c8e77"
STATIC = "3f1d9c0e8b7a6f5e4d3c2b1a09f8e7d6"
TRAINER = "9d" * 32


def process(
    pid: int = NOBODY, ppid: int = 1, comm: str = "worker", dead: bool = True
) -> TrackedProcess:
    found = procfs.read_stat(pid)
    it = TrackedProcess(
        pid, found.start_ns if found else 10_000_000, ppid, comm, ProcessImage(pid, "exec")
    )
    it.dead_ns = 1 if dead else 0
    return it


def note(group: tuple[int, int] = (0, 77), time_ns: int = 1, uid: int = 0) -> ProcessNote:
    return ProcessNote(time_ns, NOBODY, 10_000_000, 1, uid, 5, (group,), "exit")


def orphan(_: TrackedProcess) -> None:
    return None


def now() -> int:
    return time.monotonic_ns()


# --- the living and the dead ----------------------------------------------------------------------


def test_a_living_process_is_asked_of_proc():
    owner = OwnerResolver().of(process(os.getpid(), dead=False), orphan, now())

    assert owner.user == UserNames().name(os.getuid())
    inner = Path("/proc/self/status").read_text().partition("NSpid:")[2].splitlines()[0].split()
    assert owner.inner_pid == int(inner[-1])
    paths = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    assert owner.cgroup in [path[:256] for path in paths]


def test_one_that_is_gone_is_known_by_its_note_and_the_group_that_was_made():
    owners = OwnerResolver()
    owners.add_notes([note()], [GroupNote(0, 77, f"/system.slice/docker-{ID}.scope")])

    owner = owners.of(process(), orphan, now())

    assert (owner.runtime, owner.container, owner.inner_pid) == ("docker", ID, 5)
    assert owner.user == UserNames().name(0)


def test_the_last_note_holds():
    owners = OwnerResolver()
    groups = [GroupNote(0, 77, f"/docker/{ID}"), GroupNote(0, 78, "/system.slice/cron.service")]
    owners.add_notes([note((0, 77), time_ns=5), note((0, 78), time_ns=9)], groups)
    owners.add_notes([note((0, 77), time_ns=7)], [])

    assert owners.of(process(), orphan, now()).unit == "cron.service"


def test_a_note_after_the_answer_changes_it():
    owners = OwnerResolver()
    gone = process()
    owners.add_notes([note((0, 77), time_ns=5)], [GroupNote(0, 77, "/a"), GroupNote(0, 78, "/b")])
    assert owners.of(gone, orphan, 10).cgroup == "/a"

    owners.add_notes([note((0, 78), time_ns=20)], [])

    assert owners.of(gone, orphan, 30).cgroup == "/b"


def test_of_several_hierarchies_the_path_with_most_facts_stands_for_it():
    owners = OwnerResolver()
    note = ProcessNote(1, NOBODY, 10_000_000, 1, 0, 0, ((0, 1), (4, 9), (6, 3)), "exec")
    groups = [GroupNote(0, 1, "/"), GroupNote(4, 9, "/x"), GroupNote(6, 3, "/slurm/job_7/step_2")]
    owners.add_notes([note], groups)

    owner = owners.of(process(), orphan, now())

    assert (owner.cgroup, owner.job, owner.step) == ("/slurm/job_7/step_2", "7", "2")
    assert owner.label == "job 7.2"


def test_a_process_without_a_note_is_its_parents():
    owners = OwnerResolver()
    parent = process()
    parent.owner = Owner(container=ID, runtime="docker", inner_pid=3)
    child = process(NOBODY + 1, NOBODY)

    owner = owners.of(child, lambda _: parent, now())

    assert (owner.container, owner.inner_pid) == (ID, 0)


@pytest.mark.parametrize(("user", "shown"), [("root", ""), ("ada", "ada")])
def test_a_child_of_root_that_is_gone_may_have_been_anybodys(tmp_path, user, shown):
    """As setpriv, runuser and sshd start programs: only root can take another user's id."""
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh\n")
    owners = OwnerResolver()
    owners._users = UserNames(passwd)
    parent = process()
    parent.owner = Owner(user=user, cgroup="/a", inner_pid=3)
    child = process(NOBODY + 1, NOBODY)
    assert owners.of(child, lambda _: parent, now()) == Owner(user=shown, cgroup="/a")


def test_whose_a_process_is_is_read_again_when_it_executes_a_program():
    owners, one = OwnerResolver(), process(os.getpid(), dead=False)
    first = owners.of(one, orphan, now())
    one.owner = replace(first, user="another")
    assert owners.of(one, orphan, now()).user == "another"
    one.on_exec(now())
    assert owners.of(one, orphan, now()) == first


def test_a_pid_used_again_is_not_the_one_that_is_gone():
    it = TrackedProcess(os.getpid(), 10_000_000, 1, "former", ProcessImage(os.getpid(), "exec"))

    assert OwnerResolver().of(it, orphan, now()) == Owner()


def test_what_runs_in_a_container_is_of_no_job_that_its_root_names():
    owners = OwnerResolver()
    note = ProcessNote(1, NOBODY, 10_000_000, 1, 0, 5, ((0, 77),), "exec", ("4711", "0"))
    owners.add_notes([note], [GroupNote(0, 77, f"/system.slice/docker-{ID}.scope")])
    owner = owners.of(process(), orphan, now())

    assert (owner.container, owner.job, owner.step) == (ID, "", "")


@pytest.mark.parametrize(
    ("number", "step"),
    [("0", "0"), ("", "batch"), ("4294967291", "batch"), ("4294967292", "extern"),
     ("4294967290", "interactive")],
)  # fmt: skip
def test_steps_with_a_name_have_that(number, step):
    assert step_of(b"SLURM_JOB_ID=7\0SLURM_STEP_ID=%s\0" % number.encode()) == ("7", step)


def step_of_a_child(
    folder: Path, user: int, program: str = "slurmstepd", own_pids: bool = False
) -> tuple[str, str]:
    """What is recorded as the job and step of a program below a keeper that a user runs."""
    title = "slurmstepd: [123.batch]"
    copy = folder / program
    copy.write_bytes(Path("/usr/bin/sleep").read_bytes())
    for path in (copy, folder, *folder.parents[:2]):
        path.chmod(0o755)
    command = ["/bin/bash", "-c", 'exec -a "$0" "$1" 60', title, str(copy)]
    if own_pids:
        command = ["unshare", "--pid", "--fork", "--kill-child", *command]
    with subprocess.Popen(command, user=user, group=user, extra_groups=[]) as keeper:
        try:
            deadline = time.monotonic() + 10
            pid = keeper.pid
            while title.encode() not in (procfs.read_file(f"/proc/{pid}/cmdline") or b"")[:40]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
                pid = next(iter(set(procfs.family([keeper.pid])) - {keeper.pid}), keeper.pid)
            stepd = process(pid, comm="slurmstepd", dead=False)
            shell = process(NOBODY, pid)
            OwnerResolver.on_step_started(shell, stepd)
            task = process(NOBODY + 1, NOBODY)
            parents = {task.pid: shell, shell.pid: stepd}

            owner = OwnerResolver().of(task, lambda it: parents.get(it.pid), now())
        finally:
            keeper.kill()
    return owner.job, owner.step


@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's keepers are root's")
def test_a_slurm_step_without_control_groups_is_known_by_its_keeper(tmp_path):
    assert step_of_a_child(tmp_path, user=0) == ("123", "batch")


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_nobody_but_root_speaks_for_a_step_of_slurm(tmp_path):
    assert step_of_a_child(tmp_path, user=65534) == ("", "")
    assert step_of_a_child(tmp_path, user=0, program="other") == ("", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a pid namespace")
def test_root_in_a_pid_namespace_of_its_own_speaks_for_no_step_of_slurm(tmp_path):
    assert step_of_a_child(tmp_path, user=0, own_pids=True) == ("", "")


def test_a_control_group_named_with_a_carriage_return_is_no_step_of_slurm():
    mount = next((mount for _, mount in CgroupIndex().mounts()), None)
    own = Path(mount or "/nowhere") / f"sonde-{os.getpid()}\r0::"
    groups = [own, own / "slurm", own / "slurm/job_4711"]
    try:
        for group in groups:
            group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        with subprocess.Popen(["sleep", "60"]) as it:
            (groups[-1] / "cgroup.procs").write_text(str(it.pid))
            facts, owner = (
                ProcessFacts.of(it.pid),
                OwnerResolver().of(process(it.pid, dead=False), orphan, now()),
            )
            it.kill()
    finally:
        for group in reversed(groups):
            group.rmdir()
    assert facts.job == ""
    assert "\r" not in owner.cgroup
    assert owner.cgroup.startswith(rf"/sonde-{os.getpid()}\x0d0::/")


def test_every_control_group_of_the_machine_has_a_number_and_a_path():
    groups = CgroupIndex()
    groups.scan()
    for hierarchy, mount in groups.mounts():
        assert groups.path(hierarchy, Path(mount).stat().st_ino) == "/"
        for child in list(Path(mount).iterdir())[:50]:
            if child.is_dir():
                assert groups.path(hierarchy, child.stat().st_ino) == f"/{child.name}"


def test_the_many_groups_of_a_user_put_nobody_elses_out():
    groups = CgroupIndex()
    own = "/user.slice/user-7.slice/user@7.service"
    groups.add(GroupNote(0, 1, f"/system.slice/docker-{ID}.scope"))
    for number in range(2, MAX_GROUPS + 10):
        groups.add(GroupNote(0, number, f"{own}/{number}"))

    assert groups.path(0, 1) == f"/system.slice/docker-{ID}.scope"
    assert groups.path(0, MAX_GROUPS) == f"{own}/{MAX_GROUPS}"


def test_groups_of_a_users_own_are_looked_at_after_all_others(tmp_path):
    for name in ("user.slice/user@7.service/a/b", "user.slice/user@7.service/c", "z/y", "lxc/web"):
        (tmp_path / name).mkdir(parents=True)
    left = {False: 100, True: 2}
    found = [(path, below) for _, path, below in _groups(str(tmp_path), left)]

    # Of the four below, those that were found first.
    assert len([below for _, below in found if below]) == 2
    assert {path for path, below in found if not below} == {
        *("/", "/user.slice", "/user.slice/user@7.service", "/z", "/lxc", "/lxc/web"),
    }


def test_users_have_names_and_those_without_keep_their_number(tmp_path):
    file = tmp_path / "passwd"
    file.write_text("root:x:0:0::/:/bin/sh\nada:x:1000:1000::/:\nbroken\nalso:x:1000:1:::\n")
    users = UserNames(file)

    assert [users.name(uid) for uid in (0, 1000, 4242)] == ["root", "ada", "4242"]

    file.write_text("eve:x:4242:1::/:\n")
    os.utime(file, (1, 1))
    assert users.name(4242) == "eve"


# --- pods -----------------------------------------------------------------------------------------


class Kubelet:
    """Answers GET /pods as it is set to."""

    def __init__(self) -> None:
        self.answer = ANSWER
        self.status = 200
        self.questions: list[tuple[str, str]] = []
        kubelet = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kubelet.questions.append((self.path, self.headers.get("Authorization", "")))
                self.send_response(kubelet.status)
                self.end_headers()
                self.wfile.write(kubelet.answer)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    it = Kubelet()
    yield it
    it.server.shutdown()
    it.server.server_close()


def test_pods_of_a_kubelets_answer():
    pods = parse(ANSWER)

    assert pods[POD].name == "trainer-0"
    assert pods[POD].namespace == "research"
    assert json.loads(pods[POD].labels) == {"app": "trainer", "statefulset": "trainer"}
    assert pods[POD].containers[TRAINER] == "train"
    assert pods[STATIC].name == "kube-proxy-node1"  # by the hash its control group is called by


def test_pods_as_answers_of_real_kubelets_have_them():
    """In the shape of published answers: a static pod before its mirror is there, whose uid is its
    hash and which has no containers yet; ids of docker's; a container that waits, one that ended.
    """
    pods = parse(ANSWER)
    etcd = pods[place_of("/kubepods/besteffort/podc0ffee00c0ffee00c0ffee00c0ffee00").pod_uid]
    assert (etcd.name, etcd.namespace, etcd.containers) == ("etcd-node1", "kube-system", {})
    group = "/kubepods.slice/kubepods-besteffort.slice/"
    old = pods[
        place_of(
            f"{group}kubepods-besteffort-pode42b42ec_0749_11e8_a2b8_000c29dea4aa.slice"
        ).pod_uid
    ]
    assert old.containers == {"ab" * 32: "tool"}


HASH = "kubernetes.io/config.hash"
SOURCE = "kubernetes.io/config.source"
MIRROR = "kubernetes.io/config.mirror"


def parsed(*pods: tuple[str, dict[str, str]]) -> dict[str, str]:
    """Uids of the pods in an answer, each (uid, annotations), by each of their ids."""
    items = [{"metadata": {"uid": uid, "annotations": them}} for uid, them in pods]
    return {it: pod.uid for it, pod in parse(json.dumps({"items": items}).encode()).items()}


@pytest.mark.parametrize(
    "annotations",
    [
        {HASH: STATIC},
        {HASH: STATIC, SOURCE: "api"},
        {HASH: STATIC, MIRROR: STATIC, SOURCE: "api"},
        {HASH: STATIC, MIRROR: STATIC},
        {HASH: STATIC, MIRROR: "f" * 32, SOURCE: "file"},
        {HASH: POD, SOURCE: "file"},
        {HASH: [STATIC], SOURCE: "file"},
    ],
)
def test_no_pod_takes_another_id_by_what_anybody_may_write_of_it(annotations):
    assert parsed(("mine", annotations)) == {"mine": "mine"}


def test_a_pods_uid_is_no_other_pods_hash():
    static = {HASH: STATIC, SOURCE: "file"}
    for pods in ((("a", static), (STATIC, {})), ((STATIC, {}), ("a", static))):
        assert parsed(*pods) == {"a": "a", STATIC: STATIC}


def test_a_hash_that_two_pods_have_is_neither_s():
    static = {HASH: STATIC, SOURCE: "http"}
    assert parsed(("a", static), ("b", static)) == {"a": "a", "b": "b"}


def test_a_mirror_that_was_made_again_has_its_hash_from_the_one_that_is_gone():
    first, second, third = (
        Pod(uid, uid, "", "", config_hash=STATIC) for uid in ("first", "second", "third")
    )
    known = by_id([second], by_id([first]).values())
    assert (known[STATIC], known["first"]) == (second, first)
    assert by_id([], known.values()).get(STATIC) is None  # both are gone
    assert STATIC not in by_id([second, third], by_id([first]).values())
    real = Pod(STATIC, "real", "", "")
    assert by_id([first], [real])[STATIC] == real


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"items": {}}', b"Unauthorized", b"\xff"])
def test_what_is_no_list_of_pods_is_refused(answer):
    with pytest.raises(ValueError):
        parse(answer)


@pytest.mark.parametrize("items", [[None], [{}], [{"metadata": None}], [{"metadata": {"uid": 5}}]])
def test_what_is_no_pod_is_left_out(items):
    assert parse(json.dumps({"items": items}).encode()) == {}


def test_a_process_in_a_pod_has_its_name_namespace_labels_and_container(kubelet, tmp_path):
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    owners = OwnerResolver(Pods(kubelet.url, token))
    path = f"/kubepods/burstable/pod{POD}/{TRAINER}"
    owners.add_notes([note()], [GroupNote(0, 77, path)])
    owners.wait_for_pods(10)

    owner = owners.of(process(), orphan, now())
    owners.close()

    assert (owner.pod, owner.namespace, owner.container_name) == ("trainer-0", "research", "train")
    assert owner.label == "research/trainer-0"
    assert kubelet.questions == [("/pods", "Bearer s3cret")]


def test_a_kubelet_that_refuses_leaves_the_uid(kubelet):
    kubelet.status = 401
    pods = Pods(kubelet.url)
    owners = OwnerResolver(pods)
    owners.add_notes([note()], [GroupNote(0, 77, f"/kubepods/pod{POD}/{TRAINER}")])

    owner = owners.of(process(), orphan, now())
    owners.wait_for_pods(0.5)

    assert (owner.pod_uid, owner.pod) == (POD, "")
    assert pods.failures
    assert "401" in pods.last_failure
    kubelet.status = 200
    owners.wait_for_pods(10)
    assert owners.of(process(), orphan, now()).pod == "trainer-0"
    owners.close()


def test_nobody_is_asked_where_no_pod_turns_up(kubelet):
    owners = OwnerResolver(Pods(kubelet.url))
    owners.add_notes([note()], [GroupNote(0, 77, "/system.slice/cron.service")])
    owners.of(process(), orphan, now())
    time.sleep(0.1)
    owners.close()

    assert kubelet.questions == []
