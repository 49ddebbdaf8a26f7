# SPDX-License-Identifier: Apache-2.0
"""Two real aggregator processes and a collector over TLS, 1,000 clients, kills in the middle."""

import asyncio
import contextlib
import http.client
import json
import random
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from parties import Party, free_ports, run
from sonde.errors import SinkError
from sonde.fleet import node, provision
from sonde.fleet.evaluation.simulated_nodes import overstated_report
from sonde.fleet.roster import Identity
from sonde.fleet.store import Store
from sonde.fleet.task import Privacy, Task
from sonde.fleet.wire import length_prefixed

CLIENTS = 1000
FEW = 50
BUCKETS = 256


@contextmanager
def running(directory, nodes):
    """(directory, task, parties) of a fleet with `nodes` nodes."""
    leader, helper = free_ports(2)
    task = Task(
        name="trial",
        kind="histogram",
        buckets=BUCKETS,
        max_samples=1,
        period_s=10,
        release_s=10,
        grace_s=60,  # for a thousand clients, two restarts, and other tests at the same time
        min_batch=500,
        privacy=Privacy("gpu", "laplace", 1.0, 1e-6, 1.0),
        leader_url=f"https://127.0.0.1:{leader}",
        helper_url=f"https://127.0.0.1:{helper}",
    )
    task = provision.provision(directory, task, [f"t{n % 50}" for n in range(nodes)])
    parties = {name: Party(directory / name) for name in ("helper", "leader")}
    yield directory, task, parties
    for party in parties.values():
        if party.process.poll() is None:
            party.stop()


@pytest.fixture
def fleet(tmp_path):
    with running(tmp_path, FEW) as it:
        yield it


@pytest.fixture
def large_fleet(tmp_path):
    with running(tmp_path, CLIENTS + 10) as it:
        yield it


def get(bundle, url, path, token=None, body=None):
    parts = urlsplit(url)
    connection = http.client.HTTPSConnection(
        parts.hostname, parts.port, context=bundle.client_tls(), timeout=30
    )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("POST" if body is not None else "GET", path, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


def status(directory, task, name):
    bundle = provision.Credentials.load(directory / name)
    url = task.leader_url if name == "leader" else task.helper_url
    code, body = get(bundle, url, f"/tasks/{task.id.hex()}/status", bundle.operator_token)
    assert code == 200
    return json.loads(body)


def raw_sums(directory, task, start_s):
    shares = []
    for name in ("leader", "helper"):
        store = Store(directory / name / "state.sqlite", task)
        shares.append(store.batch(start_s).share)
        store.close()
    return task.aggregation().unshard(shares)


@pytest.mark.timeout(300)
def test_a_thousand_clients_two_kills_and_not_one_report_lost_or_doubled(large_fleet):
    directory, task, parties = large_fleet
    rng = random.Random(7)
    nodes = [provision.load_node(directory / "nodes" / f"{n:04}") for n in range(CLIENTS + 10)]
    tls = provision.client_tls(directory / "nodes" / "0000")
    samples = [[rng.randrange(20)] for _ in nodes]
    time_s = int(time.time()) + 5
    start_s = task.batch_of(time_s)
    reports = [r.encode() for r in node.make_reports(task, nodes, samples, time_s, 2)]
    honest = reports[:CLIENTS]
    expected = [sum(s[0] == b for s in samples[:CLIENTS]) for b in range(BUCKETS)]

    async def clients():
        done = 0
        loop = asyncio.get_running_loop()

        async def client(report):
            nonlocal done
            await asyncio.sleep(rng.random() * 2)
            receipt = await asyncio.to_thread(node.upload_with_retry, task, report, tls, 60)
            done += 1
            return receipt

        async def killer():
            for at, name in ((300, "leader"), (600, "helper")):
                while done < at:
                    await asyncio.sleep(0.01)
                parties[name].kill()
                await asyncio.sleep(0.5)
                await loop.run_in_executor(apart, parties[name].start)

        apart = ThreadPoolExecutor(1)  # not to wait behind clients that wait for the party
        loop.set_default_executor(ThreadPoolExecutor(16))
        _, *receipts = await asyncio.gather(killer(), *(client(report) for report in honest))
        return receipts

    receipts = asyncio.run(clients())
    assert [r.reason for r in receipts if not r.accepted] == []

    # the unwelcome, each with its reason
    def send(body):
        return node.upload(task, body, tls).reason

    good = node.Report.decode(reports[CLIENTS])
    assert send(honest[0]) == "replayed"
    assert send(honest[1][:-7]) == "malformed"
    assert send(b"") == "malformed"
    assert send(bytes(task.max_report_bytes + 1)) == "oversized"
    assert send(replace(good, signature=bytes(64)).encode()) == "forged"
    stranger = Identity()
    unknown = node.sign(stranger, replace(good, node=stranger.public))
    assert send(unknown.encode()) == "unknown node"
    lie = overstated_report(task, nodes[CLIENTS], good)
    assert send(lie.encode()) == ""  # taken, and found out by the proof
    stale = node.make_report(task, nodes[CLIENTS + 1], [1], time_s - 3600)
    assert send(stale.encode()) == "late"

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = status(directory, task, "leader")
        settled = found["refused"].get("forged", 0) == 2
        if settled and found["verified"].get(str(start_s)) == CLIENTS:
            break
        time.sleep(0.2)
    assert found["verified"] == {str(start_s): CLIENTS}
    assert status(directory, task, "helper")["verified"] == {str(start_s): CLIENTS}
    refused = found["refused"]
    again = refused.pop("replayed")  # clients without the killed leader's answer
    assert again >= 1
    assert refused == {"malformed": 2, "oversized": 1, "forged": 2, "unknown node": 1, "late": 1}
    assert raw_sums(directory, task, start_s) == expected

    # releases: not before its time, once, within the budget
    early = run("collect", "--state", directory / "collector", "--batch", start_s)
    assert early.returncode == 2
    assert "still open" in early.stderr
    time.sleep(max(0.0, start_s + task.release_s + task.grace_s + 1.5 - time.time()))
    out = directory / "totals.csv"
    collect = ("collect", "--state", directory / "collector", "--batch", start_s)
    done = run(*collect, "--json", "-o", out)
    assert done.returncode == 0, done.stderr
    release = json.loads(done.stdout)
    assert all(abs(r["count"] - e) < 60 for r, e in zip(release["rows"], expected, strict=True))
    assert any(r["count"] != e for r, e in zip(release["rows"], expected, strict=True))
    assert "ε = 1 per gpu" in release["privacy"]
    assert out.read_text().startswith("# trial from ")
    assert json.loads(run(*collect, "--json").stdout)["rows"] == release["rows"]
    parquet = directory / "totals.parquet"
    assert run(*collect, "-o", parquet).returncode == 0
    assert parquet.read_bytes()[:4] == b"PAR1"
    spent = run("budget", "--state", directory / "helper", "--json")
    assert json.loads(spent.stdout)["spent"]["gpu"] == pytest.approx(1.0, abs=1e-6)
    other = run("collect", "--state", directory / "collector", "--batch", start_s - 10)
    assert other.returncode == 2
    assert "too few" in other.stderr


def test_a_relay_hands_on_many_reports_and_each_is_judged_for_itself(fleet):
    directory, task, _ = fleet
    nodes = [provision.load_node(directory / "nodes" / f"{n:04}") for n in range(40)]
    tls = provision.client_tls(directory / "nodes" / "0000")
    time_s = int(time.time())
    reports = [r.encode() for r in node.make_reports(task, nodes, [[3]] * len(nodes), time_s, 2)]
    bad = [reports[0], b"no report", bytes(task.max_report_bytes + 1)]
    with node.UploadConnection(task, tls) as uplink:
        receipts = uplink.send(b"".join(length_prefixed(body) for body in reports + bad))
        assert [r.reason for r in receipts] == [""] * 40 + ["replayed", "malformed", "oversized"]
        deadline = time.monotonic() + 30
        while status(directory, task, "leader")["waiting"] and time.monotonic() < deadline:
            time.sleep(0.05)
        found = status(directory, task, "leader")
        assert sum(found["verified"].values()) == 40
        assert found["refused"] == {"malformed": 1, "oversized": 1, "replayed": 1}
        with pytest.raises(SinkError, match="refuses the whole request"):
            uplink.send(b"")


def test_strangers_are_turned_away(fleet):
    directory, task, _ = fleet
    bundle = provision.Credentials.load(directory / "helper")
    for url in (task.leader_url, task.helper_url):
        path = f"/tasks/{task.id.hex()}"
        assert get(bundle, url, f"{path}/status")[0] == 401
        assert get(bundle, url, f"{path}/releases", "wrong", b"x" * 16)[0] == 401
        assert get(bundle, url, "/tasks/other/reports", None, b"x")[0] == 404
    assert get(bundle, task.helper_url, f"{path}/jobs", None, b"x")[0] == 401
    assert get(bundle, task.helper_url, f"{path}/jobs", bundle.token, b"x")[:2] == (
        400,
        b"malformed",
    )
    assert get(bundle, task.helper_url, f"{path}/jobs", "\xe9", b"x")[0] == 401
    collector = provision.Credentials.load(directory / "collector")
    assert get(bundle, task.leader_url, f"{path}/status", collector.token)[0] == 401
    assert status(directory, task, "helper")["refused"]["unauthorised"] == 4
    for name in ("", "keys.json", "tls.key", "state.sqlite", "state.sqlite-reports"):
        assert (directory / "leader" / name).stat().st_mode & 0o077 == 0


def test_only_tls_1_3_and_only_the_right_party(fleet, tmp_path):
    directory, task, _ = fleet
    parts = urlsplit(task.leader_url)
    old = provision.client_tls(directory / "nodes" / "0000")
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    other = replace(task, leader_url="https://127.0.0.1:1", helper_url="https://127.0.0.1:2")
    provision.provision(tmp_path / "other", other, ["a"])
    foreign = provision.client_tls(tmp_path / "other" / "nodes" / "0000")
    # The server answers which protocol it wants, or has hung up before that is read.
    for tls, words in ((old, "protocol|closed"), (foreign, "certificate verify failed")):
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, context=tls)
        with pytest.raises(ssl.SSLError, match=f"(?i){words}"):
            connection.request("GET", "/")
    plain = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.request("GET", "/")
        plain.getresponse()


def test_a_body_is_bounded_by_its_bytes_and_not_by_its_header(fleet):
    directory, task, _ = fleet
    tls = provision.client_tls(directory / "nodes" / "0000")
    parts = urlsplit(task.leader_url)
    connection = http.client.HTTPSConnection(parts.hostname, parts.port, context=tls, timeout=30)
    piece = bytes(16_384)
    pieces = (piece for _ in range(task.max_report_bytes // len(piece) + 2))  # without a length
    with contextlib.suppress(OSError):  # the answer may be there before the last piece
        connection.request("POST", f"/tasks/{task.id.hex()}/reports", pieces)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (413, b"oversized")
    assert answer.headers["Server"] == "sonde"
    assert status(directory, task, "leader")["refused"] == {"oversized": 1}


def test_one_node_from_kernels_to_report(fleet, tmp_path):
    directory, _, _ = fleet
    kernels = tmp_path / "kernels.csv"
    kernels.write_text("name,start_ns,duration_ns\nsecret_gemm,0,1000\n")
    home = directory / "nodes" / "0005"
    dry = run("report", "--node", home, "--kernels", kernels, "--dry-run")
    assert dry.returncode == 0
    assert "nothing was sent" in dry.stdout
    sent = run("report", "--node", home, "--kernels", kernels)
    assert (sent.returncode, sent.stdout) == (0, "1 samples sent as secret shares\n"), sent.stderr
    assert "secret_gemm" not in dry.stdout + sent.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("report", "--node", "/nowhere", "--kernels", "x.csv"), 2, "no task"),
        (("aggregate", "--state", "/nowhere"), 2, "no fleet party"),
        (("collect", "--state", "/nowhere"), 2, "no task"),
        (("budget", "--state", "/nowhere"), 2, "no task"),
        (("simulate", "--nodes", "0"), 2, "needs nodes"),
    ],
)
def test_wrong_use_is_one_line_and_its_exit_code(args, code, words):
    done = run(*args)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_small_simulation_from_the_command_line():
    done = run("simulate", "--nodes", 300, "--buckets", 64, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["simulation"]
    assert figures["exact_before_noise"]
    assert figures["parties_agree"]
    assert figures["verified"] > 100
