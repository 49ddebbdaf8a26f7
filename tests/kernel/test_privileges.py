# SPDX-License-Identifier: Apache-2.0
"""The units in deploy/systemd: what each right they give is for, shown by taking it away."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import units
from privileges import SETTINGS, attaches, observe, workload
from served import Server
from stored_chunks import as_of, recorded

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((units.UNITS / "privileges.toml").read_text())
HIGHEST = {"sonde.service": 4.5, "sonde-metrics.service": 3.0}
SERVER = "sonde-server.service"
RUNS = 5
CAPABILITIES = {it["name"]: it for it in TABLE["capability"]}
SHOWN = {
    *("host metrics", "metrics of processes", "samples", "stacks", "kernel frames", "waits"),
    *("device calls", "Python frames", "names in deleted files", "attach"),
    "names in files that only their owner may read",
}

analyzed = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)
for_real = pytest.mark.skipif(
    not units.can_run() or shutil.which("cc") is None, reason="needs root, systemd and a compiler"
)
pytestmark = pytest.mark.bpf


def given(unit: str) -> set[str]:
    return set(dict(units.settings(unit))["CapabilityBoundingSet"].split())


def kptr_restrict() -> int:
    return int(Path("/proc/sys/kernel/kptr_restrict").read_text())


# ---- the table ----


@pytest.mark.parametrize("unit", HIGHEST)
def test_the_table_names_every_capability_of_a_unit_and_no_other(unit):
    assert given(unit) == {name for name, it in CAPABILITIES.items() if unit in it["units"]}


@analyzed
@pytest.mark.parametrize(("unit", "highest"), HIGHEST.items())
def test_every_exposure_has_a_feature_that_needs_it(unit, highest):
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager"]
    path = str(units.UNITS / unit)
    done = subprocess.run([*command, "--json=short", path], capture_output=True, text=True)
    exposed = {it["json_field"] for it in json.loads(done.stdout) if it["set"] is False}
    threshold = f"--threshold={highest * 10:.0f}"

    assert subprocess.run([*command, threshold, path], capture_output=True).returncode == 0
    assert exposed <= {it["setting"] for it in TABLE["exposed"]}


@analyzed
def test_the_table_excuses_nothing_that_no_unit_needs():
    exposed = set()
    for unit in HIGHEST:
        command = ["systemd-analyze", "security", "--offline=true", "--json=short"]
        done = subprocess.run([*command, str(units.UNITS / unit)], capture_output=True, text=True)
        exposed |= {it["json_field"] for it in json.loads(done.stdout) if it["set"] is False}

    assert {it["setting"] for it in TABLE["exposed"]} == exposed


@pytest.mark.parametrize("unit", HIGHEST)
def test_no_end_by_a_hang_up_is_taken_for_a_clean_one(unit):
    settings = dict(units.settings(unit))

    assert settings["Restart"] == "on-failure"
    # systemd.service(5): these four signals would be a clean end.
    forced = settings["RestartForceExitStatus"].split()
    assert {"SIGHUP", "SIGINT", "SIGPIPE", "129", "130", "141"} <= set(forced)
    assert "SuccessExitStatus" not in settings


def test_the_documentation_shows_the_table():
    text = (ROOT / "docs" / "guide" / "deployment.md").read_text()
    for it in TABLE["capability"]:
        lost = ", ".join(it["lost"]) + (f" ({it['only_where']})" if "only_where" in it else "")
        where = ", ".join(f"`{unit}`" for unit in it["units"]) or "none"
        assert f"| {it['name']} | {where} | {lost} |" in text
    for it in TABLE["exposed"]:
        assert f"| {it['setting']} | {it['needs']} |" in text


# ---- for real ----


@pytest.fixture(scope="module")
def folder():
    """Not below /tmp, of which the units have a private one."""
    path = Path(tempfile.mkdtemp(prefix="sonde-test-", dir="/var/lib"))
    path.chmod(0o777)  # the metrics unit runs as a separate user
    yield path
    shutil.rmtree(path)


@for_real
def test_the_servers_unit_takes_chunks_and_answers(folder):
    prefix = units.under(SERVER, folder, {}, daemon=False)
    sonde = str(Path(sys.executable).with_name("sonde"))
    command = [sonde, "serve", "--store", "/tmp/store", "--listen", "127.0.0.1:0", "--open"]
    process = subprocess.Popen(
        [*prefix, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        server = Server(folder)
        server.port = int(process.stdout.readline().rsplit(":", 1)[1])
        assert server.send("one", as_of(recorded()[0], "one", 0, time.time_ns()))[0] == 200
        assert [node["node"] for node in server.wait_for(1)] == ["one"]
        assert server.ask("top", **{"from": 0})
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()


@for_real
@pytest.mark.parametrize("unit", HIGHEST)
def test_a_unit_writes_nowhere_but_into_its_own_folders(unit, folder):
    script = (
        "for place in /etc /usr/local/bin /var/lib /var/spool/cron /root /boot /proc/sys/kernel "
        "/sys/kernel; do touch $place/sonde-was-here 2>/dev/null && echo $place; done; "
        "echo 1 2>/dev/null > /proc/sys/kernel/sysrq && echo sysrq; "
        "cat /etc/shadow >/dev/null 2>&1 && echo shadow; "
        "unshare --user true 2>/dev/null && echo namespace; "
        "grep NoNewPrivs /proc/self/status"
    )
    prefix = units.under(unit, folder, {})
    done = subprocess.run([*prefix, "bash", "-c", script], capture_output=True, text=True)

    may_read_all = ["shadow"] if unit == "sonde.service" else []
    # /root is a folder of the test's own where this Python lies below it.
    assert [it for it in done.stdout.splitlines() if it != "/root"] == [
        *may_read_all,
        "NoNewPrivs:\t1",
    ], done.stderr
    assert not Path("/root/sonde-was-here").exists()


# Programs to observe keep the CPUs busy from here to the end of the file.


@pytest.fixture(scope="module")
def beside(folder):
    with workload(folder) as programs:
        yield programs


def expected(capability: str) -> set[str]:
    """What shows itself without a capability; '': without none."""
    if not capability:
        return SHOWN
    lost = set(CAPABILITIES[capability]["lost"])
    if lost == {"everything"}:
        lost = SHOWN
    if "only_where" in CAPABILITIES[capability] and kptr_restrict() != 1:
        lost = set()
    return SHOWN - lost


def seen(folder, beside, capability: str) -> set[str]:
    """All that shows itself in a few short runs: on a busy machine one may have no sample of a
    program that runs seldom. What a right is needed for shows itself in none."""
    folder = folder / (capability or "all")
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    without = [capability] if capability else []
    prefix = units.under("sonde.service", folder, SETTINGS, without)
    found: set[str] = set()
    for run in range(RUNS):
        features, printed = observe(prefix, folder, beside, 2.5 * (1 + run))
        if not features:
            assert not without or without[0] in printed, printed
            return set()
        found |= features
        if found >= expected(capability) - {"attach"}:
            break
    worked, _ = attaches(units.under("sonde.service", folder, {}, without, daemon=False))
    return found | ({"attach"} if worked else set())


@pytest.fixture(scope="module")
def seen_without(request, folder, beside) -> Iterator[Callable[[str], set[str]]]:
    """What shows itself without a capability. All that the chosen tests ask for is looked at in
    advance, two at a time: agents mostly wait."""
    chosen = [it.callspec.params if hasattr(it, "callspec") else {} for it in request.session.items
              if "seen_without" in it.fixturenames and it.path == request.path]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        begun = {
            name: pool.submit(seen, folder, beside, name)
            for name in (it.get("capability", "") for it in chosen)
        }

        def result(name: str) -> set[str]:
            look = begun.pop(name, None)  # one for each attempt of a test
            return look.result() if look else seen(folder, beside, name)

        yield result
        pool.shutdown(cancel_futures=True)


@for_real
def test_the_unit_that_may_attach_shows_everything(seen_without):
    assert seen_without("") == SHOWN


@for_real
@pytest.mark.parametrize("capability", sorted(given("sonde.service")))
def test_without_a_capability_the_features_of_the_table_go_and_no_others(capability, seen_without):
    assert seen_without(capability) == expected(capability)


@for_real
def test_the_metrics_unit_shows_metrics_as_a_user_of_its_own(folder, beside):
    prefix = units.under("sonde-metrics.service", folder, {})
    features, printed = observe(prefix, folder, beside, captures=False)

    assert features == {"host metrics", "metrics of processes"}, printed


@analyzed
def test_the_servers_unit_exposes_little():
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=15"]

    assert (
        subprocess.run([*command, str(units.UNITS / SERVER)], capture_output=True).returncode == 0
    )
    assert given(SERVER) == set()
