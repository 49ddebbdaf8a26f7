# SPDX-License-Identifier: Apache-2.0
"""From recordings to the Fleet view: real aggregators, releases when due, a real browser."""

import json
import subprocess
import time

import pytest
from selenium.webdriver.common.by import By

from captures import SECOND_NS, START_NS, Writer
from parties import Party, command, free_ports, run
from sonde.fleet import provision
from sonde.fleet.discovery import DISCOVERY_SPACE
from sonde.fleet.task import Privacy, Task

pytestmark = pytest.mark.timeout(300)

RELEASE_S = 6
GRACE_S = 60  # for the reports, beside other tests: each is a process that reads a recording
NODES = 4


def trial(directory, name, space, scale):
    leader, helper = free_ports(2)
    task = Task(
        name=name,
        kind="histogram",
        buckets=4096,
        max_samples=1,
        period_s=RELEASE_S,
        release_s=RELEASE_S,
        grace_s=GRACE_S,
        min_batch=2,
        privacy=Privacy("gpu", "laplace", scale, 1e-6, 1e7),
        leader_url=f"https://127.0.0.1:{leader}",
        helper_url=f"https://127.0.0.1:{helper}",
        space=space,
    )
    task = provision.provision(directory, task, ["t"] * NODES)
    return task, [Party(directory / party) for party in ("helper", "leader")]


@pytest.fixture
def recording(tmp_path):
    """A recording that ends now, of one kernel that runs nearly all the time."""

    def make(name):
        writer = Writer()
        key = writer.process(100, "train")
        writer.add(
            "device_run",
            key,
            kind="kernel",
            weight=1.0,
            name=name,
            tid=100,
            start_time_ns=START_NS,
            end_time_ns=START_NS + 10 * SECOND_NS,
        )
        path = tmp_path / f"{name}.sonde"
        writer.write(path)
        return path

    return make


def moved_to_now(monkeypatch):
    now_ns = time.time_ns()
    monkeypatch.setattr("captures.WALL_OFFSET_NS", now_ns - START_NS - 10 * SECOND_NS)
    return now_ns


def start_of_a_batch():
    """Waits until a batch has just begun, so that all reports fall into it."""
    left = RELEASE_S - time.time() % RELEASE_S
    if left < RELEASE_S - 3:
        time.sleep(left + 0.2)
    return int(time.time()) // RELEASE_S * RELEASE_S


@pytest.mark.browser
def test_recordings_become_a_page_that_shows_counts_errors_and_epsilon(
    tmp_path, recording, monkeypatch, chromium
):
    space = {"applications": 64, "kernels": 64, "levels": 1}
    directory = tmp_path / "fleet"
    _, parties = trial(directory, "trial", space, 0.01)
    try:
        start_s = start_of_a_batch()
        moved_to_now(monkeypatch)
        path = recording("sm90_xmma_gemm_bf16")
        for number in range(NODES):
            home = directory / "nodes" / f"{number:04}"
            sent = run("report", "--node", home, path)
            assert (sent.returncode, sent.stdout) == (0, "1 samples sent as secret shares\n"), (
                sent.stderr
            )
            assert "kernels that ran on devices" in sent.stderr
        state = directory / "collector"
        due = json.loads(run("collect", "--state", state, "--schedule", "--json").stdout)
        batch = next(b for b in due["batches"] if b["batch"] == start_s)
        assert batch["due"] == start_s + RELEASE_S + GRACE_S + 1
        out = tmp_path / "releases"
        follow = ("collect", "--state", state, "--batch", start_s, "--follow", "--releases", 1)
        done = run(*follow, "-o", out)
        assert done.returncode == 0, done.stderr
        assert time.time() >= batch["due"]
        (page,) = out.glob("*.html")
        assert str(page) in done.stdout
    finally:
        for party in parties:
            party.stop()

    chromium.get_log("browser")
    chromium.get(f"file://{page}")
    assert chromium.find_element(By.TAG_NAME, "h1").text == "trial: fleet totals"
    assert "ε = 100 per gpu" in chromium.find_element(By.ID, "guarantee").text
    first = chromium.find_elements(By.CSS_SELECTOR, "#largest tbody tr")[0]
    cells = [cell.text for cell in first.find_elements(By.TAG_NAME, "td")]
    assert cells[:3] == ["dense_compute", "gemm", str(NODES)]
    bar = first.find_element(By.CSS_SELECTOR, "rect.bar")
    assert bar.size["width"] > 200
    assert bar.value_of_css_property("fill") == "rgb(76, 139, 214)"
    assert first.find_element(By.CSS_SELECTOR, "path.whisker").is_displayed()
    kernels = chromium.find_elements(By.CSS_SELECTOR, "#kernels tbody tr")
    assert kernels[0].text.startswith("gemm")
    ledger = chromium.find_element(By.ID, "ledger").text
    assert "per gpu (the unit of this task) 100 100" in ledger
    assert "per tenant not bounded" in ledger
    wide = chromium.execute_script(
        "return document.documentElement.scrollWidth <= window.innerWidth"
    )
    assert wide
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


def test_an_unknown_kernel_is_discovered_by_who_has_its_name(tmp_path, recording, monkeypatch):
    directory = tmp_path / "fleet"
    task, parties = trial(directory, "unknown", DISCOVERY_SPACE, 0.1)
    names = tmp_path / "names.txt"
    names.write_text("something_else\nbrand_new_op\n")
    try:
        start_s = start_of_a_batch()
        moved_to_now(monkeypatch)
        path = recording("brand_new_op")
        for number in range(NODES):
            sent = run("report", "--node", directory / "nodes" / f"{number:04}", path)
            assert sent.returncode == 0, sent.stderr
        time.sleep(max(0.0, task.due_s(start_s) + 0.5 - time.time()))
        ask = ("discover", "--state", directory / "collector", "--batch", start_s)
        found = run(*ask, "--names", names, "--json")
        assert found.returncode == 0, found.stderr
        answer = json.loads(found.stdout)
        assert [f["names"] for f in answer["found"]] == [["brand_new_op"]]
        assert answer["least"] <= NODES
        assert "brand_new_op" in run(*ask, "--names", names).stdout
    finally:
        for party in parties:
            party.stop()


def test_a_recording_is_taken_by_its_best_source_and_names_it(tmp_path):
    made = run("aggregate", "--new", tmp_path / "fleet", "--nodes", 1)
    assert made.returncode == 0
    report = command("report", "--node", tmp_path / "fleet/nodes/0000", "--dry-run")
    recorded = "tests/data/h200_training.sonde"
    for more, code, words in (
        ((), 0, "calls of device APIs"),
        (("--source", "cpu"), 0, "functions on the CPUs"),
        (("--source", "kernel"), 2, "holds no kernel"),
    ):
        done = subprocess.run(
            [*report, recorded, *more], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
