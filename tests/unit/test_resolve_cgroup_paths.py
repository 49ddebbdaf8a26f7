# SPDX-License-Identifier: Apache-2.0
"""What the path of a control group shows, for every runtime's way of naming."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.attach.policy import ProcessFacts
from sonde.procfs.cgroup_paths import MAX_PATH, place_of

ID = "4f2c" * 16
POD = "0a1b2c3d-1111-2222-3333-444455556666"
POD_SLICE = POD.replace("-", "_")
STATIC_POD = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("path", "runtime"),
    [
        (f"/docker/{ID}", "docker"),
        (f"/system.slice/docker-{ID}.scope", "docker"),
        (f"/k8s.io/{ID}", "containerd"),
        (f"/default/{ID}", "containerd"),
        (f"/system.slice/nerdctl-{ID}.scope", "containerd"),
        (f"/system.slice/containerd.service/kubepods-x:cri-containerd:{ID}", "containerd"),
        (f"/machine.slice/libpod-{ID}.scope/container", "podman"),
        (f"/libpod_parent/libpod-{ID}", "podman"),
        (f"/kubepods.slice/kubepods-pod{POD_SLICE}.slice/crio-{ID}.scope", "crio"),
        (f"/kubepods/burstable/pod{POD}/crio-{ID}", "crio"),
        (f"/garden/{ID}", "container"),
        (f"/docker/{ID}/docker/{'9' * 64}", "docker"),
        (f"/ecs/a-task/{ID}", "container"),
        (f"/ecs/cluster/a-task/{ID}", "container"),
        (f"/../docker-{ID}.scope", "docker"),
        (f"/../{ID}", "container"),
        (f"/machine.slice/machine-libpod_pod_{'a' * 64}.slice/libpod-{ID}.scope", "podman"),
        (f"/libpod_parent/libpod_pod_{'a' * 64}/libpod-{ID}", "podman"),
        (f"/system.slice/k3s.service/kubepods/besteffort/pod{POD}/{ID}", "containerd"),
    ],
)
def test_a_container_has_its_id_and_its_runtime(path, runtime):
    place = place_of(path)

    assert place.container == ID
    assert place.runtime == runtime


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (f"/kubepods/pod{POD}/{ID}", POD),
        (f"/kubepods/besteffort/pod{POD}/{ID}", POD),
        (f"/kubepods/burstable/pod{STATIC_POD}/{ID}", STATIC_POD),
        (
            "/kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{POD_SLICE}.slice/cri-containerd-{ID}.scope",
            POD,
        ),
        (
            "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
            f"kubelet-kubepods-burstable-pod{POD_SLICE}.slice/cri-containerd-{ID}.scope",
            POD,
        ),
        (f"/system.slice/crio.service/kubepods-burstable-pod{POD_SLICE}.slice:crio:{ID}", POD),
        (f"/kubepods/pod{POD}", POD),
        (f"/kubelet/kubepods/burstable/pod{POD}/{ID}", POD),
        (f"/../../pod{POD}/{ID}", POD),
        (f"/../../burstable/pod{POD}/{ID}", POD),
        (f"/../../kubepods-burstable-pod{POD_SLICE}.slice/cri-containerd-{ID}.scope", POD),
        (f"/kubepods.slice/kubepods-pod{POD_SLICE}.slice/crio-{ID}.scope/container", POD),
    ],
)
def test_a_pod_has_the_uid_that_the_api_knows(path, uid):
    assert place_of(path).pod_uid == uid


@pytest.mark.parametrize(
    ("path", "job", "step"),
    [
        ("/slurm/uid_1000/job_42/step_0/task_3", "42", "0"),
        ("/slurm_node1/uid_1000/job_42/step_batch", "42", "batch"),
        ("/system.slice/slurmstepd.scope/job_42/step_extern/user/task_0", "42", "extern"),
        ("/system.slice/node1_slurmstepd.scope/job_42/step_interactive/slurm", "42", "interactive"),
        ("/slurm/uid_1000/job_42", "42", ""),
        ("/ci/job_42/step_0", "", ""),
    ],
)
def test_a_slurm_step_has_its_job(path, job, step):
    place = place_of(path)

    assert (place.job, place.step) == (job, step)


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice/ssh.service", "ssh.service"),
        ("/user.slice/user-1000.slice/session-3.scope", "session-3.scope"),
        ("/user.slice/user-0.slice/user@0.service/app.slice/dbus.service", "user@0.service"),
        ("/system.slice/web.service/init.scope", "web.service"),
        (f"/system.slice/docker-{ID}.scope/system.slice/ssh.service", f"docker-{ID}.scope"),
        (r"/system.slice/dev-disk-by\x2duuid.mount", "dev-disk-by-uuid.mount"),
        (r"/system.slice/odd\x.service", r"odd\x.service".replace("\\x", "%")),
        ("/", ""),
        ("/user.slice", ""),
    ],
)
def test_a_unit_is_the_first_service_or_scope(path, unit):
    assert place_of(path).unit == unit


@pytest.mark.parametrize(
    ("path", "runtime", "name"),
    [
        ("/lxc/web", "lxc", "web"),
        ("/lxc.payload/web", "lxc", "web"),
        ("/lxc.payload.web/system.slice/ssh.service", "lxc", "web"),
        ("/lxc.payload.web", "lxc", "web"),
        (r"/machine.slice/machine-my\x2dbox.scope", "nspawn", "my-box"),
    ],
)
def test_a_system_container_has_its_name(path, runtime, name):
    place = place_of(path)

    assert (place.runtime, place.container) == (runtime, name)


def test_the_keeper_beside_a_container_is_not_in_it():
    assert not place_of(f"/machine.slice/libpod-conmon-{ID}.scope").container
    assert not place_of(f"/kubepods/pod{POD}/crio-conmon-{ID}").container


@pytest.mark.parametrize("path", ["", "/", "a", "//", "/\x00/\xff", "/" + "x/" * 5000, "/docker/"])
def test_any_text_is_a_path(path):
    place = place_of(path)

    assert not place.container
    assert len(place.path) <= MAX_PATH


# --- what those make who were given a control group -------------------------------------------

OTHER_POD = "99999999-2222-3333-4444-555555555555"
OTHER_ID = "e11e" * 16
OTHER_SLICE = f"kubepods-pod{OTHER_POD.replace('-', '_')}.slice"
DELEGATED = {
    "user manager": "/user.slice/user-20001.slice/user@20001.service/app.slice",
    "own slice of a user manager": "/user.slice/user-20001.slice/user@20001.service/kubepods.slice",
    "service": "/system.slice/train.service",
    "session": "/user.slice/user-20001.slice/session-3.scope",
    "pam_cgfs": "/user/mallory/0",
    "libcgroup": "/mallory",
    "docker, systemd": f"/system.slice/docker-{ID}.scope",
    "docker, cgroupfs": f"/docker/{ID}",
    "podman": f"/machine.slice/libpod-{ID}.scope/container",
    "quadlet": f"/system.slice/web.service/libpod-payload-{ID}",
    "rootless podman": f"/user.slice/user-7.slice/user@7.service/user.slice/libpod-{ID}.scope",
    "ctr": "/default/by-name",
    "lxc": "/lxc.payload.web",
    "lxc of old": "/lxc/web",
    "nspawn": "/machine.slice/machine-box.scope/payload",
    "ecs": f"/ecs/a-task/{ID}",
    "pod, cgroupfs, guaranteed": f"/kubepods/pod{POD}/{ID}",
    "pod, cgroupfs, burstable": f"/kubepods/burstable/pod{POD}/{ID}",
    "pod, systemd, guaranteed":
        f"/kubepods.slice/kubepods-pod{POD_SLICE}.slice/cri-containerd-{ID}.scope",
    "pod, systemd, besteffort":
        "/kubepods.slice/kubepods-besteffort.slice/"
        f"kubepods-besteffort-pod{POD_SLICE}.slice/crio-{ID}.scope/container",
    "pod, other driver than kubelet's":
        f"/system.slice/containerd.service/kubepods-pod{POD_SLICE}.slice:cri-containerd:{ID}",
    "pod, no container yet": f"/kubepods/pod{POD}/some",
    "kind": f"/system.slice/docker-{ID}.scope/kubelet.slice/kubelet-kubepods.slice",
    "slurm 1": "/slurm/uid_20001/job_42/step_0/task_3",
    "slurm 2": "/system.slice/slurmstepd.scope/job_42/step_0/user/task_0",
    "slurm 2, other user's step": "/system.slice/slurmstepd.scope/job_42/step_0/slurm",
    "seen from beside": f"/../../docker-{ID}.scope",
}  # fmt: skip
FORGED = (
    f"kubepods/burstable/pod{OTHER_POD}/{OTHER_ID}",
    f"pod{OTHER_POD}",
    f"pod{OTHER_POD}/{OTHER_ID}",
    f"kubepods.slice/{OTHER_SLICE}/cri-containerd-{OTHER_ID}.scope",
    f"{OTHER_SLICE}:crio:{OTHER_ID}",
    f"containerd.service/{OTHER_SLICE}:cri-containerd:{OTHER_ID}",
    "slurm/job_4711/step_7",
    "slurm/uid_0/job_4711/step_7/task_0",
    "slurmstepd.scope/job_4711/step_7/user",
    "job_4711/step_7",
    "system.slice/train-1.service",
    "train-1.service",
    f"docker/{OTHER_ID}",
    f"system.slice/docker-{OTHER_ID}.scope",
    OTHER_ID,
    "lxc.payload.other",
    "lxc/other",
    "machine.slice/machine-other.scope",
    "user.slice/user-0.slice/session-1.scope",
)


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("base", DELEGATED.values(), ids=DELEGATED)
def test_a_group_made_in_ones_own_changes_nobodys_owner(base: str, forged: str, tmp_path: Path):
    honest, posed = place_of(base), place_of(f"{base}/{forged}")

    for field in ("runtime", "container", "pod_uid", "job", "step", "unit", "units"):
        assert getattr(posed, field) == getattr(honest, field), field
    assert facts(tmp_path, base) == facts(tmp_path, f"{base}/{forged}")


def facts(folder: Path, path: str) -> tuple[object, ...]:
    (folder / "7").mkdir(exist_ok=True)
    (folder / "7/cgroup").write_text(f"0::{path}\n")
    found = ProcessFacts.of(7, folder)
    return found.units, found.job, found.pod


@pytest.mark.parametrize(
    ("path", "outer"),
    [
        (f"/docker/{OTHER_ID}/docker/{ID}", OTHER_ID),
        (f"/user.slice/user-7.slice/user@7.service/user.slice/libpod-{ID}.scope/container", ""),
        (f"/system.slice/web.service/libpod-payload-{ID}", ""),
        (
            f"/system.slice/docker-{OTHER_ID}.scope/kubelet.slice/kubelet-kubepods.slice/"
            f"kubelet-kubepods-pod{POD_SLICE}.slice/cri-containerd-{ID}.scope",
            OTHER_ID,
        ),
        (f"/slurm/uid_1/job_42/step_0/task_3/docker/{ID}", ""),
    ],
)
def test_a_container_below_another_ones_or_a_users_group_is_named_beside_the_owner(path, outer):
    place = place_of(path)

    assert (place.container, place.inner_container) == (outer, ID)
    assert not place.pod_uid


def test_a_container_that_is_the_owner_is_not_named_twice():
    assert place_of(f"/docker/{ID}").inner_container == ""


def test_the_first_pod_of_a_guaranteed_ones_path_is_the_one_for_the_policy(tmp_path: Path):
    path = f"/kubepods.slice/kubepods-pod{POD_SLICE}.slice/cri-{ID[:4]}.scope/pod{OTHER_POD}"

    assert facts(tmp_path, path)[2] == POD
