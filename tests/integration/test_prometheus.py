# SPDX-License-Identifier: Apache-2.0
"""The real Prometheus scrapes a real agent; its own tools judge the page and the alert rules."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from nvml_stub import Stub
from sonde.metrics import catalogue
from sonde.sinks.exposition import dcgm_fields, name_of
from sonde.sinks.series import MAX_OWNED, PROGRAM

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
WAIT_S = 60

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs prometheus")


def promtool(*arguments, page="", cwd=ROOT):
    return subprocess.run(
        ["promtool", *arguments], input=page, cwd=cwd, capture_output=True, text=True
    )


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def wait_for(ask):
    """The first answer that is not empty."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        try:
            if found := ask():
                return found
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise AssertionError("nothing came")


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    stub = Stub(tmp_path_factory.mktemp("stub"))
    stub.set_answers(utilization=73, power=250000, processes=f"{os.getpid()}:1073741824:73")
    return stub


@pytest.fixture(scope="module")
def agent(stub):
    """The address of an agent's page; its GPU is the stub's."""
    command = [sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--dcgm-names"], env=stub.environment, stderr=subprocess.PIPE, text=True
    )
    line = process.stderr.readline()
    address = re.search(r"http://\S+/metrics", line)
    assert address, line + process.stderr.read()
    yield address[0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.fixture(scope="module")
def page(agent):
    return wait_for(lambda: text if "hw_energy" in (text := get(agent)) else "")


@needs_promtool
@pytest.mark.bpf
def test_the_page_passes_promtools_judgement(page):
    ours = page.partition("# HELP DCGM")[0]
    judged = promtool("check", "metrics", page=ours)
    assert (judged.returncode, judged.stdout, judged.stderr) == (0, "", "")
    # dcgm-exporter's own names break these rules; nothing but names may be amiss.
    judged = promtool("check", "metrics", page=page)
    for line in judged.stderr.splitlines():
        assert re.search(r"_total|camelCase|should not include type", line), line


@needs_promtool
@pytest.mark.bpf
def test_prometheus_scrapes_it(agent, page, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = urllib.parse.urlsplit(agent).netloc
    config = tmp_path / "prometheus.yml"
    example = (DEPLOY / "prometheus/prometheus.yml").read_text()
    config.write_text(
        example.replace("127.0.0.1:9400", target)
        .replace("15s", "1s")
        .replace("[alerts.yml]", f"[{DEPLOY}/prometheus/alerts.yml]")
    )
    server = subprocess.Popen(
        [
            *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"),
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )

    def ask(query):
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        return json.loads(get(url))["data"]["result"]

    try:
        (up,) = wait_for(lambda: ask('up{job="sonde"} == 1'))
        assert up["metric"]["instance"] == target
        (power,) = wait_for(lambda: ask("hw_power_watts"))
        assert float(power["value"][1]) == 250
        (dcgm,) = ask("DCGM_FI_DEV_GPU_UTIL")
        assert float(dcgm["value"][1]) == 73
        assert dcgm["metric"]["UUID"] == power["metric"]["hw_id"]
        (held,) = ask("sonde_process_gpu_memory_bytes")
        assert float(held["value"][1]) == 2**30
        assert not {"process_pid", "sonde_process_start"} & held["metric"].keys()
        assert held["metric"]["process_executable_name"]
    finally:
        server.terminate()
        server.wait()


@pytest.mark.bpf
def test_ten_thousand_short_lived_processes_of_a_thousand_programs(agent, page, tmp_path):
    programs = []
    for number in range(1000):
        program = tmp_path / f"short-{number}"
        if number:
            program.hardlink_to(programs[0])
        else:
            shutil.copy("/bin/true", program)
        programs.append(program)
    script = tmp_path / "all.sh"
    script.write_text("\n".join(map(str, programs)) + "\n")
    for _ in range(10):
        subprocess.run(["/bin/sh", script], check=True)

    def folded():
        return re.search(r'process_cpu_time_seconds_total{\S*="other"\S*} (\S+)', get(agent))

    wait_for(folded)
    by_metric = {}
    for line in get(agent).splitlines():
        if line and not line.startswith("#"):
            name = re.split(r"[ {]", line, maxsplit=1)[0]
            by_metric[name] = by_metric.get(name, 0) + 1
    assert sum("process_" in name for name in by_metric) >= 3
    for name, count in by_metric.items():
        if "process_" in name:  # with a few more where an attribute has several values
            assert count <= 2 * (MAX_OWNED + 2), (name, count)
    assert sum(by_metric.values()) < 5_000


@pytest.mark.bpf
def test_health_and_an_index_are_served_and_nothing_else(agent, page):
    assert get(agent.replace("/metrics", "/healthz")) == "ok\n"
    assert 'href="/metrics"' in get(agent.replace("/metrics", "/"))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(agent.replace("/metrics", "/debug"))


@needs_promtool
def test_alert_rules_hold():
    folder = DEPLOY / "prometheus"
    checked = promtool("check", "rules", "alerts.yml", cwd=folder)
    assert checked.returncode == 0, checked.stderr
    tested = promtool("test", "rules", "alerts_test.yml", cwd=folder)
    assert tested.returncode == 0, tested.stderr


def names_in(text):
    """Names of our metrics that a text uses."""
    return set(re.findall(r"\b(?:sonde|hw|process|system|k8s)_[a-z0-9_]+(?![a-z0-9_]*\s*[=!]~?\")",
                          re.sub(r"\{[^}]*\}", "", text)))  # fmt: skip


def label_names():
    used = {label.replace(".", "_") for m in catalogue().values() for label in m.attributes}
    return used | {PROGRAM.replace(".", "_")}  # what stands for processes


def known_names():
    return {name_of(metric) for metric in catalogue().values()}


def test_alerts_speak_of_metrics_that_there_are():
    rules = (DEPLOY / "prometheus/alerts.yml").read_text()
    expressions = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*))", rules)
    labels = label_names()
    used = set().union(*(names_in(a or b) for a, b in expressions)) - labels
    assert used
    assert used <= known_names()


def test_each_alert_has_a_runbook():
    runbooks = (ROOT / "docs/guide/runbooks.md").read_text()
    headings = {
        line.lstrip("# ").lower().replace(" ", "-")
        for line in runbooks.splitlines()
        if line.startswith("## ")
    }
    rules = (DEPLOY / "prometheus/alerts.yml").read_text()
    links = re.findall(r"docs/guide/runbooks.md#(\S+)", rules)
    assert len(links) == len(
        re.findall(r"- alert:", (DEPLOY / "prometheus/alerts.yml").read_text())
    )
    assert set(links) <= headings


def test_the_dashboard_speaks_of_metrics_that_there_are():
    board = json.loads((DEPLOY / "grafana/sonde-node.json").read_text())
    labels = label_names()
    expressions = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", ())
    ]
    assert len(expressions) >= 12
    for expression in expressions:
        used = names_in(expression) - labels
        assert used, expression
        assert used <= known_names(), expression


def test_dcgm_names_are_filled_from_metrics_that_there_are():
    for field in dcgm_fields():
        assert field.series in catalogue()
        assert set(field.where) <= set(catalogue()[field.series].attributes)


@pytest.mark.bpf
@pytest.mark.parametrize(
    ("source", "broken"),
    [
        pytest.param("nvml.0.power", {"fail.nvmlDeviceGetPowerUsage": 4}, id="permission denied"),
        pytest.param("nvml.0.fast", {"lost": 1}, id="device lost"),
        pytest.param(
            "nvml", {"fail.nvmlDeviceGetPowerUsage": 9, "fail.nvmlInit_v2": 9}, id="driver gone"
        ),
        pytest.param("nvml", {"hang.nvmlDeviceGetMemoryInfo_v2": 1}, id="a call that hangs"),
    ],
)
def test_the_rest_goes_on_and_the_signal_returns(agent, page, stub, source, broken):
    up = re.compile(rf'^sonde_source_up{{sonde_source="{re.escape(source)}"}} (\S+)$', re.M)

    def page_when(condition):
        return wait_for(lambda: text if condition(text := get(agent)) else "")

    def interrupts(text):
        return sum(map(float, re.findall(r"^sonde_host_softirqs_total{.*} (\S+)$", text, re.M)))

    stub.answers(broken)
    before = interrupts(page_when(lambda text: "0.0" in up.findall(text)))
    page_when(lambda text: interrupts(text) > before)
    stub.answers(dict.fromkeys(broken))
    page_when(lambda text: "1.0" in up.findall(text))
