# SPDX-License-Identifier: Apache-2.0
"""The manifests in deploy/ and what `sonde deploy` prints: valid, equal, and with the rights of the
systemd units alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from sonde import __version__
from sonde.cli.main import main

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "sonde"
PRIVILEGES = tomllib.loads((DEPLOY / "systemd" / "privileges.toml").read_text())["capability"]
UNITS = {"metrics-only": "sonde-metrics.service", "may-attach": "sonde.service"}
VERSIONS = ("1.32", "1.37")
# A helm that `go install` built takes Kubernetes for 1.20.
KUBERNETES = ("--kube-version", "1.33.0")
TOOLS = os.pathsep.join((str(ROOT / "build" / "tools"), os.environ["PATH"]))  # scripts/setup
HELM = shutil.which("helm", path=TOOLS)
KUSTOMIZE = None
if program := shutil.which("kustomize", path=TOOLS):
    KUSTOMIZE = [program, "build"]
elif program := shutil.which("kubectl"):
    KUSTOMIZE = [program, "kustomize"]

helm = pytest.mark.skipif(HELM is None, reason="needs helm")
kustomize = pytest.mark.skipif(KUSTOMIZE is None, reason="needs kustomize or kubectl")
overlays = pytest.mark.parametrize("overlay", UNITS)


def objects(text: str) -> dict[tuple[str, str], dict]:
    found = [one for one in yaml.safe_load_all(text) if one]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


def printed(capsys, *arguments: str) -> str:
    assert main(["deploy", "k8s", *arguments]) == 0
    return capsys.readouterr().out


def rendered(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [HELM, "template", "sonde", str(CHART), "-n", "sonde", *KUBERNETES, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def pods(found: dict) -> list[dict]:
    return [
        one["spec"]["template"]["spec"]
        for one in found.values()
        if "template" in one.get("spec", {})
    ]


def unordered(value):
    if isinstance(value, dict):
        return {name: unordered(one) for name, one in value.items()}
    if isinstance(value, list):
        return sorted(map(unordered, value), key=lambda one: json.dumps(one, sort_keys=True))
    return value


@overlays
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(capsys, overlay, version):
    for one in objects(printed(capsys, "--overlay", overlay)).values():
        kubernetes_validate.validate(one, version, strict=True)


@overlays
@kustomize
def test_what_is_printed_is_what_kustomize_makes(capsys, overlay):
    folder = DEPLOY / "kubernetes" / "kustomize" / "overlays" / overlay
    made = subprocess.run([*KUSTOMIZE, folder], capture_output=True, text=True, check=True)
    assert objects(printed(capsys, "--overlay", overlay)) == objects(made.stdout), (
        "scripts/manifests"
    )


@overlays
@helm
def test_the_chart_makes_what_kustomize_makes(capsys, overlay):
    done = rendered("--set", f"mode={overlay}")
    assert done.returncode == 0, done.stderr
    expected = objects(printed(capsys, "--overlay", overlay))
    del expected["Namespace", "sonde"]  # the chart goes into one that exists
    assert unordered(objects(done.stdout)) == unordered(expected)


@helm
@pytest.mark.parametrize(
    "setting",
    ["mode=all", "server.keepDays=0", "agent.server=http://host:1", "agent.privileged=true"],
)
def test_the_chart_refuses_wrong_values(setting):
    done = rendered("--set", setting)
    assert done.returncode != 0
    assert setting.partition("=")[0].rpartition(".")[2] in done.stderr


@helm
def test_everything_that_the_chart_can_add_is_valid():
    done = rendered(
        *("--set", "mode=may-attach,agent.runtimeClassName=nvidia,server.storageClass=fast"),
        *("--set", "imagePullSecrets[0].name=pull,networkPolicy.extraEgress[0].ports[0].port=443"),
    )
    assert done.returncode == 0, done.stderr
    for one in objects(done.stdout).values():
        kubernetes_validate.validate(one, VERSIONS[-1], strict=True)


@overlays
def test_the_agent_has_the_capabilities_of_its_unit_and_no_other(capsys, overlay):
    agent = objects(printed(capsys, "--overlay", overlay))["DaemonSet", "sonde-agent"]
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    rights = container["securityContext"]
    expected = {it["name"] for it in PRIVILEGES if UNITS[overlay] in it["units"]}

    assert {f"CAP_{name}" for name in rights["capabilities"]["add"]} == expected
    assert rights["capabilities"]["drop"] == ["ALL"]


@overlays
def test_no_container_has_more_rights_than_it_needs(capsys, overlay):
    for pod in pods(objects(printed(capsys, "--overlay", overlay))):
        assert pod["automountServiceAccountToken"] is False
        assert not pod.get("hostNetwork") and not pod.get("hostIPC")
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            rights = container["securityContext"]
            assert rights["privileged"] is rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
            assert {"cpu", "memory"} == set(container["resources"]["limits"])
            if container["name"] != "agent":
                assert rights["capabilities"] == {"drop": ["ALL"]}
                assert rights["runAsNonRoot"] is True and not pod.get("hostPID")


@overlays
def test_of_the_host_only_the_spool_is_writable(capsys, overlay):
    pod = objects(printed(capsys, "--overlay", overlay))["DaemonSet", "sonde-agent"]["spec"][
        "template"
    ]["spec"]
    of_host = {it["name"]: it["hostPath"]["path"] for it in pod["volumes"] if "hostPath" in it}
    writable = {
        of_host[it["name"]]
        for it in pod["containers"][0]["volumeMounts"]
        if it["name"] in of_host and not it.get("readOnly")
    }
    assert writable == ({"/var/lib/sonde"} if overlay == "may-attach" else set())


@overlays
def test_the_agent_may_ask_for_the_pods_of_a_node_alone(capsys, overlay):
    found = objects(printed(capsys, "--overlay", overlay))
    rules = [one["rules"] for (kind, _), one in found.items() if kind.endswith("Role")]
    assert rules == [[{"apiGroups": [""], "resources": ["nodes/pods"], "verbs": ["get"]}]]


def test_image_server_and_namespace_are_filled_in(capsys):
    text = printed(
        capsys,
        *("--overlay", "may-attach", "--namespace", "gpu", "--server", "https://example.org:7373"),
        *(
            "--node-image",
            "registry.example:5000/a/node:1",
            "--server-image",
            "s@sha256:" + 64 * "a",
        ),
    )
    found = objects(text)
    images = {it["image"] for pod in pods(found) for it in pod["containers"]}
    assert images == {"registry.example:5000/a/node:1", "s@sha256:" + 64 * "a"}
    assert ("Namespace", "gpu") in found
    spaces = {one["metadata"].get("namespace", "gpu") for one in found.values()}
    assert spaces == {"gpu"}
    assert found["ClusterRoleBinding", "sonde-agent"]["subjects"][0]["namespace"] == "gpu"
    assert "value: https://example.org:7373" in text and "sonde.svc" not in text
    for one in found.values():
        kubernetes_validate.validate(one, VERSIONS[-1], strict=True)


def test_a_server_of_another_namespace_stays_the_one_that_was_given(capsys):
    url = "https://sonde-server.sonde.svc:7373"

    text = printed(capsys, "--overlay", "may-attach", "--namespace", "gpu", "--server", url)

    assert f"value: {url}" in text


@pytest.mark.parametrize("namespace", ["1", "true", "on"])
def test_a_namespace_stays_text(capsys, namespace):
    assert ("Namespace", namespace) in objects(printed(capsys, "--namespace", namespace))


@pytest.mark.parametrize(
    "arguments",
    [
        ["k8s", "--overlay", "all"],
        ["k8s", "--overlay", ""],
        ["k8s", "--namespace", "Not One"],
        ["k8s", "--node-image", "a b\nc: d"],
        ["k8s", "--node-image", "a\n"],
        ["k8s", "--server-image", "s:1"],
        ["k8s", "--server", "https://host:1"],
        ["k8s", "--overlay", "may-attach", "--server", "http://host:1"],
        ["k8s", "--overlay", "may-attach", "--server", "https://host:x"],
        ["slurm", "--namespace", "a"],
    ],
)
def test_wrong_use_has_a_cause_and_a_remedy(capsys, arguments):
    assert main(["deploy", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("sonde: ") and "\n  remedy: " in shown.err


def test_the_health_check_for_slurm_is_that_of_the_repository(capsys):
    assert main(["deploy", "slurm"]) == 0
    assert capsys.readouterr().out == (DEPLOY / "slurm" / "sonde-healthcheck").read_text()


def test_versions_are_the_project_s():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    for folder in ("base", "server"):
        path = DEPLOY / "kubernetes" / "kustomize" / folder / "kustomization.yaml"
        assert yaml.safe_load(path.read_text())["images"][0]["newTag"] == __version__
