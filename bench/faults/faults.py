# SPDX-License-Identifier: Apache-2.0
"""The faults, each with the victims that it can be done to, and the changes that are no fault."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.faults.stage import GROUPS, NAMESPACE, Stage

Action = Callable[[Stage, int], None]
CPUS = sorted(os.sched_getaffinity(0))
ROOT_DEVICE = f"{os.major(Path('/').stat().st_dev)}:{os.minor(Path('/').stat().st_dev)}"


@dataclass(frozen=True)
class Fault:
    """One kind of fault, or of benign change."""

    name: str
    """A FaultCause; 'benign: …' for what is none."""
    victims: tuple[str, ...]
    begin: Action
    end: Action | None = None
    prepare: Action | None = None
    """Before the victim starts."""
    has_culprit: bool = False
    intensities: int = 3


def _nothing(_stage: Stage, _level: int) -> None:
    """Needs nothing."""


def _burners(stage: Stage, level: int) -> None:
    count = len(CPUS) * (1, 2, 3)[level]
    stage.culprits = [
        stage.start("peers", "burn", group=f"culprit{number}").pid for number in range(count)
    ]


def _end_culprits(stage: Stage, _level: int) -> None:
    for pid in stage.culprits:
        os.kill(pid, signal.SIGKILL)


def _quota(stage: Stage, level: int) -> None:
    group = stage.group("cpu", "victim")
    (group / "cpu.cfs_period_us").write_text("50000" if stage.chance.random() < 0.5 else "100000")
    period = int((group / "cpu.cfs_period_us").read_text())
    share = (0.5, 0.3, 0.15)[level] * float(str(stage.values.get("cpu", 1.0)))
    (group / "cpu.cfs_quota_us").write_text(str(max(1000, int(period * share))))


def _no_quota(stage: Stage, _level: int) -> None:
    (stage.group("cpu", "victim") / "cpu.cfs_quota_us").write_text("-1")


def _crowd_one_cpu(stage: Stage, level: int) -> None:
    cpus = {stage.chance.choice(CPUS)}
    stage.values["crowded"] = cpus
    for number in range((1, 2, 3)[level]):
        stage.start("peers", "burn", group=f"tenant{number}", cpus=cpus)


def _pin(stage: Stage, _level: int) -> None:
    cpus = stage.values["crowded"]
    assert isinstance(cpus, set)
    for task in Path(f"/proc/{stage.pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)


def _in_memory_group(stage: Stage, _level: int) -> None:
    stage.group("memory", "victim")


def _shrink(stage: Stage, level: int) -> None:
    group = GROUPS / "memory/sonde-faults/victim"
    megabytes = (64, 32, 16)[level]
    for _ in range(8):
        try:
            (group / "memory.limit_in_bytes").write_text(str(megabytes << 20))
            return
        except OSError:
            continue


def _throttle(stage: Stage, level: int) -> None:
    group = stage.group("blkio", "victim")
    (group / "cgroup.procs").write_text(str(stage.pid))
    rate = (24, 12, 6)[level] << 20
    (group / "blkio.throttle.read_bps_device").write_text(f"{ROOT_DEVICE} {rate}")


def _no_throttle(stage: Stage, _level: int) -> None:
    group = stage.group("blkio", "victim")
    (group / "blkio.throttle.read_bps_device").write_text(f"{ROOT_DEVICE} 0")
    (GROUPS / "blkio/cgroup.procs").write_text(str(stage.pid))


def _crowd_disk(stage: Stage, level: int) -> None:
    kilobytes = ("512", "1024", "1024")[level]
    copy = stage.folder / "other.data"
    if not copy.exists():
        subprocess.run(["cp", "--reflink=never", str(stage.data()), str(copy)], check=True)
    stage.culprits = [
        stage.start("peers", "disk", str(copy), kilobytes, group=f"culprit{number}").pid
        for number in range((2, 3, 6)[level])
    ]


def _copy_data(stage: Stage, _level: int) -> None:
    subprocess.run(
        ["cp", "--reflink=never", str(stage.data()), str(stage.folder / "other.data")], check=True
    )
    os.sync()


def _say(*texts: str) -> Action:
    def action(stage: Stage, level: int) -> None:
        stage.send(stage.victim, texts[min(level, len(texts) - 1)])

    return action


def _say_to(helper: str, *texts: str) -> Action:
    def action(stage: Stage, level: int) -> None:
        stage.send(stage.helpers[helper], texts[min(level, len(texts) - 1)])

    return action


def _freeze(stage: Stage, level: int) -> None:
    if level == 1:
        group = stage.group("freezer", "victim")
        for pid in stage.family():
            (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        return
    for pid in stage.family():
        os.kill(pid, signal.SIGSTOP)


def _thaw(stage: Stage, level: int) -> None:
    if level == 1:
        (stage.group("freezer", "victim") / "freezer.state").write_text("THAWED")
        return
    for pid in stage.family():
        os.kill(pid, signal.SIGCONT)


def _slow_path(stage: Stage, level: int) -> None:
    rate, queue = (("2mbit", "6kb"), ("1mbit", "6kb"), ("600kbit", "8kb"))[level]
    command = ["ip", "netns", "exec", NAMESPACE, "tc", "qdisc", "replace", "dev", "sf1", "root",
               "tbf", "rate", rate, "burst", "3kb", "limit", queue]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)


def _fast_path(stage: Stage, _level: int) -> None:
    command = ["ip", "netns", "exec", NAMESPACE, "tc", "qdisc", "del", "dev", "sf1", "root"]
    subprocess.run(command, check=False, capture_output=True)


ANY = ("train", "opencl", "serve", "loader")
FAULTS: tuple[Fault, ...] = (
    Fault("cpu-contention", ANY, _burners, _end_culprits, has_culprit=True),
    Fault("cpu-quota", ANY, _quota, _no_quota),
    Fault("bad-pinning", ("train", "opencl"), _pin, prepare=_crowd_one_cpu),
    Fault("reclaim", ("read-cached",), _shrink, prepare=_in_memory_group),
    Fault("disk-throttle", ("read-disk",), _throttle, _no_throttle),
    Fault("disk-contention", ("read-disk",), _crowd_disk, _end_culprits, _copy_data, True),
    Fault("fsync", ("train", "serve", "opencl"), _say("fsync 4", "fsync 64", "fsync 512"),
          _say("fsync 0")),
    Fault("slow-file-system", ("read-slow-files",),
          _say_to("files", "delay 0.005", "delay 0.02", "delay 0.06"),
          _say_to("files", "delay 0"), has_culprit=True),
    Fault("slow-loader", ("loader",),
          _say("slow-worker 0.02", "slow-sleep 0.02", "slow-worker 0.08"),
          _say("slow-worker 0", "slow-sleep 0", "slow-worker 0")),
    Fault("interpreter-lock", ("train", "opencl", "serve"), _say("gil 1", "gil 2", "gil 3"),
          _say("gil 0")),
    Fault("lock", ("train", "opencl", "serve"), _say("lock 0.5", "lock 0.8", "lock 0.95"),
          _say("lock 0")),
    Fault("frozen", ANY, _freeze, _thaw),
    Fault("garbage-collection", ("train", "opencl", "serve"),
          _say("gc 50000", "gc 200000", "gc 600000"), _say("gc 0")),
    Fault("slow-network", ("serve-backend",), _slow_path, _fast_path),
    Fault("remote-dependency", ("serve-backend",),
          _say_to("backend", "sleep 0.03", "sleep 0.08", "sleep 0.2"),
          _say_to("backend", "sleep 0")),
)  # fmt: skip
BENIGN: tuple[Fault, ...] = (
    Fault("benign: batch size", ("train", "opencl"), _say("batch 160", "batch 48", "batch 250")),
    Fault("benign: checkpoint", ("train", "loader"),
          _say("checkpoint 20", "checkpoint 50", "checkpoint 100")),
    Fault("benign: evaluation", ("train", "opencl"),
          _say("evaluate 1", "evaluate 2", "evaluate 3")),
    Fault("benign: more requests", ("serve", "serve-backend"),
          _say_to("client", "rate 70", "rate 90", "rate 110")),
    Fault("benign: nothing", ANY, _nothing),
)  # fmt: skip
EVERY = {fault.name: fault for fault in (*FAULTS, *BENIGN)}
