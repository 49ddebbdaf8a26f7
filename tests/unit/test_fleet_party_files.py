# SPDX-License-Identifier: Apache-2.0
"""What somebody else may have put into a party's directory hangs and deceives nobody."""

import fcntl
import os
import signal
import time
from contextlib import contextmanager

import pytest

from sonde import ownership
from sonde.cli.main import main
from sonde.errors import SinkError, SondeError, UsageError
from sonde.fleet import clock, collector, party_files, provision, service
from sonde.fleet.evaluation.local_deployment import small_task
from sonde.fleet.roster import Roster
from sonde.fleet.store import Store
from sonde.fleet.task import Task

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@pytest.fixture
def fleet(tmp_path):
    tmp_path.chmod(0o755)
    provision.provision(tmp_path / "t", small_task(), ["a"])
    return tmp_path / "t"


@contextmanager
def within(seconds):
    """Fails where something hangs, as a pipe would make it."""

    def hangs(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def act(do):
    """As another user, for real; whether it went without an error."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            ownership.owners.cache_clear()
            do()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


READERS = {
    "leader/task.json": lambda home: Task.load(home / "leader/task.json"),
    "leader/roster.json": lambda home: Roster.load(home / "leader/roster.json"),
    "leader/keys.json": lambda home: provision.Credentials.load(home / "leader"),
    "leader/tls.crt": lambda home: provision.Credentials.load(home / "leader").server_tls(),
    "leader/tls.key": lambda home: provision.Credentials.load(home / "leader").server_tls(),
    "leader/ca.crt": lambda home: provision.client_tls(home / "leader"),
    "leader/clock.json": lambda home: clock.read(home / "leader"),
    "collector/releases.json": lambda home: collector.collected_batches(home / "collector"),
    "nodes/0000/node.key": lambda home: provision.load_node(home / "nodes/0000"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_in_place_of_a_partys_file_is_refused_and_hangs_nobody(fleet, name):
    path = fleet / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with within(5), pytest.raises(SondeError):
        READERS[name](fleet)
    path.unlink()
    path.symlink_to("/dev/zero")
    with within(5), pytest.raises(SondeError):
        READERS[name](fleet)


@pytest.mark.parametrize("name", [name for name in READERS if "tls" not in name])
def test_a_partys_file_is_read_only_as_far_as_an_honest_one_is_long(fleet, name):
    with (fleet / name).open("wb") as file:
        file.truncate(party_files.MAX_ROSTER_BYTES + 1)  # sparse
    with within(30), pytest.raises(SondeError) as refused:
        READERS[name](fleet)
    assert "longer than" in f"{refused.value} {refused.value.__cause__}"


def test_a_key_with_a_pass_phrase_asks_no_terminal(fleet):
    from cryptography.hazmat.primitives import serialization

    path = fleet / "leader/tls.key"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with within(5), pytest.raises(UsageError, match="no certificate and key"):
        provision.Credentials.load(fleet / "leader").server_tls()


@as_root
@pytest.mark.parametrize("name", ["leader/keys.json", "leader/tls.key", "nodes/0000/node.key"])
def test_root_takes_no_keys_that_others_can_change(fleet, name):
    path = fleet / name
    path.chmod(0o622)
    with pytest.raises(UsageError, match="others could change"):
        READERS[name](fleet)
    path.chmod(0o600)
    os.chown(path, OTHER, OTHER)
    with pytest.raises(UsageError, match="belongs to others"):
        READERS[name](fleet)
    os.chown(path, 0, 0)
    READERS[name](fleet)
    os.chown(fleet, OTHER, OTHER)  # who owns a directory above exchanges all of it
    with pytest.raises(UsageError, match="others could change"):
        READERS[name](fleet)


@as_root
def test_who_is_not_root_uses_keys_of_their_own_and_of_root(fleet):
    os.chown(fleet, OTHER, OTHER)
    for path in (fleet.parent, fleet, fleet / "nodes", fleet / "nodes/0000"):
        path.chmod(0o755)
    fleet.parent.parent.chmod(0o711)
    fleet.parent.parent.parent.chmod(0o711)
    own = fleet / "nodes/0000/node.key"
    for owner, mode, is_taken in ((0, 0o644, True), (OTHER, 0o600, True), (OTHER, 0o646, False)):
        os.chown(own, owner, owner)
        own.chmod(mode)
        assert act(lambda: provision.load_node(own.parent)) == is_taken
    os.chown(own, OTHER + 1, OTHER)
    own.chmod(0o644)
    assert not act(lambda: provision.load_node(own.parent))


# --- the state ------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_a_link_in_place_of_the_state_changes_nothing_behind_it(tmp_path, suffix):
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    victim.chmod(0o644)
    home = tmp_path / "leader"
    home.mkdir(0o700)
    (home / f"state.sqlite{suffix}").symlink_to(victim)
    with pytest.raises(SinkError, match="cannot open the state"):
        Store(home / "state.sqlite", small_task())
    assert victim.read_text() == "theirs"
    assert victim.stat().st_mode & 0o777 == 0o644


@as_root
def test_root_keeps_no_state_where_others_could_exchange_it(fleet, tmp_path, capsys):
    home = tmp_path / "shared"
    home.mkdir()
    home.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("")
    victim.chmod(0o644)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o711)
    assert act(lambda: (home / "state.sqlite").symlink_to(victim))
    for mode, owner in ((0o777, 0), (0o1777, 0), (0o775, 0), (0o755, OTHER)):
        home.chmod(mode)
        os.chown(home, owner, OTHER)
        with pytest.raises(UsageError, match="others could change"):
            Store(home / "state.sqlite", small_task())
    (home / "task.json").write_text(small_task().to_json())
    assert main(["fleet", "budget", "--state", str(home)]) == 2
    output = capsys.readouterr().err
    assert "others could change" in output
    assert "run as its owner" in output
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("", 0o644)


@as_root
def test_a_state_and_what_lies_beside_it_are_their_partys_alone(tmp_path):
    old = tmp_path / "state.sqlite"
    old.touch()
    old.chmod(0o644)
    store = Store(old, small_task())
    store.take_ownership()
    for path in tmp_path.iterdir():
        assert not path.stat().st_mode & 0o077, path
    store.close()
    spool = tmp_path / "state.sqlite-reports"
    os.chown(spool, OTHER, OTHER)
    store = Store(old, small_task())
    with pytest.raises(SinkError, match="others could change"):
        store.take_ownership()
    store.close()


@as_root
def test_root_runs_no_aggregator_out_of_another_users_directory(fleet):
    for path in (fleet / "leader", *(fleet / "leader").iterdir()):
        os.chown(path, OTHER, OTHER)
    with within(5), pytest.raises(UsageError, match="belongs to others"):
        service.open_aggregator(fleet / "leader", 1)


def test_who_locks_a_partys_directory_hangs_nobody(fleet, monkeypatch):
    monkeypatch.setattr(clock, "_LOCK_S", 0.2)
    held = os.open(fleet / "leader", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    start_s = time.monotonic()
    with within(5), pytest.raises(SinkError, match="another process holds"):
        clock.accept(fleet / "leader")
    with within(5):
        clock.examine(fleet / "leader")
    assert time.monotonic() - start_s < 3
    os.close(held)
    clock.accept(fleet / "leader")
