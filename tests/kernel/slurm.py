# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of one node, in a folder, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "sbatch")
PATIENCE_S = 30

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacks() -> str:
    """What is missing to run it, '' for nothing."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return ", ".join(missing)


class Slurm:
    """Its commands, with its configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "".join(
            f"\n--- {log}\n{log.read_text()[-3000:]}" for log in self.folder.glob("*.log")
        )


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Key, controller and node daemon; ended with the block."""
    it = Slurm(folder)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    host = socket.gethostname().partition(".")[0]
    config = CONFIG.format(
        host=host, folder=folder, port=ports[0], slurmd_port=ports[1], cpus=os.cpu_count()
    )
    (folder / "slurm.conf").write_text(config)
    daemons = [
        subprocess.Popen(command, env=it.environment, stdout=log, stderr=log)
        for name, command in (
            ("munged", [
                *("munged", "--foreground", "--force", f"--key-file={key}"),
                *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
                *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
            ]),
            ("slurmctld", ["slurmctld", "-D", "-c"]),
            ("slurmd", ["slurmd", "-D", "-N", host]),
        )
        for log in [(folder / f"{name}.out.log").open("w")]
        if _ready(folder, name)
    ]  # fmt: skip
    try:
        wait_idle(it)
        yield it
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _ready(folder: Path, name: str) -> bool:
    """Slurm's daemons want munge's socket first."""
    deadline = time.monotonic() + PATIENCE_S
    while name != "munged" and not (folder / "munge.socket").exists():
        assert time.monotonic() < deadline, "munged does not start"
        time.sleep(0.05)
    return True


def wait_idle(it: Slurm) -> None:
    """Until no job has the node: one that has to wait is shown as root's, whichever user asked."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%t"],
            env=it.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.strip() == "idle":
            return
        assert time.monotonic() < deadline, f"{done.stdout}{done.stderr}{it.logs()}"
        time.sleep(0.2)
