# SPDX-License-Identifier: Apache-2.0
"""What the path of a control group tells, for every runtime's way of naming."""

from __future__ import annotations

import pytest

from sonde.resolve.cgroup_paths import MAX_PATH, place_of

ID = "4f2c" * 16
POD = "0a1b2c3d-1111-2222-3333-444455556666"
POD_SLICE = POD.replace("-", "_")
STATIC_POD = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("path", "runtime"),
    [
        (f"/docker/{ID}", "docker"),
        (f"/system.slice/docker-{ID}.scope", "docker"),
        (f"/user.slice/user-1000.slice/user@1000.service/app.slice/docker-{ID}.scope", "docker"),
        (f"/k8s.io/{ID}", "containerd"),
        (f"/default/{ID}", "containerd"),
        (f"/system.slice/nerdctl-{ID}.scope", "containerd"),
        (f"/system.slice/containerd.service/kubepods-x:cri-containerd:{ID}", "containerd"),
        (f"/machine.slice/libpod-{ID}.scope/container", "podman"),
        (f"/libpod_parent/libpod-{ID}", "podman"),
        (f"/kubepods.slice/kubepods-pod{POD_SLICE}.slice/crio-{ID}.scope", "crio"),
        (f"/kubepods/burstable/pod{POD}/crio-{ID}", "crio"),
        (f"/garden/{ID}", "container"),
        (f"/docker/{'9' * 64}/docker/{ID}", "docker"),
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
        (f"/system.slice/k.service/kubepods-burstable-pod{POD_SLICE}.slice:crio:{ID}", POD),
        (f"/kubepods/pod{POD}", POD),
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
        ("/user.slice/user-0.slice/user@0.service/app.slice/dbus.service", "dbus.service"),
        (r"/system.slice/dev-disk-by\x2duuid.mount", "dev-disk-by-uuid.mount"),
        (r"/system.slice/odd\x.service", r"odd\x.service".replace("\\x", "%")),
        ("/", ""),
        ("/user.slice", ""),
    ],
)
def test_a_unit_is_the_innermost_one(path, unit):
    assert place_of(path).unit == unit


@pytest.mark.parametrize(
    ("path", "runtime", "name"),
    [
        ("/lxc/web", "lxc", "web"),
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
