# SPDX-License-Identifier: Apache-2.0
"""Every setting of the recorder and the agent: one frozen Config, read once.

Later sources win: the command's own defaults, the file (SONDE_CONFIG, else
/etc/sonde/config.toml), the environment (SONDE_HZ and so on, one variable a field), then the
command's flags.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec

from sonde.errors import CaptureError, UsageError
from sonde.input_files import read_checked
from sonde.ownership import only_ours

DEVICE_TIME = ("off", "allow-list", "all")
_MAX_BYTES = 1 << 20
"""Of the file."""
DEFAULT_FILE = Path("/etc/sonde/config.toml")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything an operator may set for the agent."""

    hz: int = 99
    """On-CPU samples per second on each CPU."""
    pids: frozenset[int] | None = None
    """Processes to watch, with the children they get; None for the whole machine."""
    on_cpu: bool = True
    off_cpu: bool = True
    device_calls: bool = True
    launches: bool = False
    """Watch every kernel launch too: costs about a microsecond a launch."""
    device_metrics: bool = True
    """Read metrics of devices: utilization, memory, power, clocks, errors."""
    host_metrics: bool = False
    """Read metrics of the machine from the kernel. `sonde agent` does by default; beside a
    recording of stacks it would cost as much again."""
    host_hz: int = 100
    """Samples of the run queues a second, while something runs; 0: none."""
    group_pressure: bool = False
    """Pressure (PSI) of control groups of version 2 without a limit, too: those of the processes
    that are watched, or of the node."""
    traces: bool = False
    """Follow HTTP requests that have the W3C header `traceparent`: samples and waits of the threads
    that received them. Runs whenever a TCP socket is read, written to or closed."""
    syscalls: bool = False
    """Count the system calls of every process: costs some 0.2 microseconds a call."""
    memory: bool = False
    """Host memory by stack: mapped, unmapped, touched. Runs on every page fault."""
    kubelet: str = ""
    """Address of this node's kubelet, to name pods: https://127.0.0.1:10250, or the read-only
    http://127.0.0.1:10255. Empty: pods are not named."""
    kubelet_token_file: str = ""
    """File with the token for it: /var/run/secrets/kubernetes.io/serviceaccount/token in a pod."""
    kubelet_ca_file: str = ""
    """Certificate authorities that its certificate must be from; empty: the system's."""
    injected: bool = True
    """Read what Sonde's library times in processes that have it (attached, or started with it)."""
    device_budget: float = 0.01
    """By which share timing its launches may slow a process down; sets how many are timed."""
    prometheus: str = ""
    """HOST:PORT of a page for Prometheus; '' for none. Without a host: loopback alone."""
    dcgm_names: bool = False
    """On that page, also use the names of NVIDIA's dcgm-exporter."""
    otlp: str = ""
    """URL of an OpenTelemetry collector to push metrics to; '' for none."""
    otlp_period_s: float = 10.0
    server: str = ""
    """URL of a Sonde server to send everything to, stacks and waits too; '' for none."""
    server_token_file: str = ""
    """File with the token for it."""
    node: str = ""
    """Name of this machine at the server; '' for its host name."""
    spool: str = ""
    """Directory of chunks that the server has not acknowledged; '' for a default of the user."""
    spool_mb: int = 256
    """Its size at most, in MB; beyond that the oldest chunks are dropped and counted."""
    tick_s: float = 1.0
    """How often rows are read out of the kernel: the time resolution of totals."""
    rest_s: float = 5.0
    """The same for an agent that takes no stacks, while the machine does next to nothing: it rests,
    and is woken when that ends. 0: it never rests."""
    chunk_s: float = 5.0
    """How often a chunk is written: a killed recorder loses so much at most."""
    wait_span_ms: float = 10.0
    """Waits at least this long are kept one by one."""
    row_ms: float = 0.0
    """What a row of waits stands for at least: a stack of less time is kept by chance, and then
    stands for so much. Totals of less, and what a process used, are added up until it is so much,
    or a chunk ends. 0: rows of any time."""
    stack_gap_ms: float = 10.0
    """About how far apart stacks of a thread's waits, and of its calls, are taken; each stands for
    the others since the last one."""
    device_time: str = "off"
    """Processes whose device time is taken: off (none), allow-list, or all. Brings a library into
    them."""
    device_time_allow: tuple[str, ...] = ()
    """The allow-list, of KIND:PATTERN with unit, job, pod or user, as unit:train-*.service;
    opted-in for users whose processes may ask for it themselves; exe for any user's program of
    that name."""
    probe_budget: float = 0.01
    """Share of one core that calls of a probed function by one user may cost before some are left
    out."""

    def __post_init__(self) -> None:
        """Refuse values that make no sense, by name. Raises UsageError."""
        _between("hz", self.hz, 1, 10_000)
        _between("tick_s", self.tick_s, 0.05, 60)
        _between("rest_s", self.rest_s, 0, 10)
        _between("chunk_s", self.chunk_s, self.tick_s, 600)
        _between("otlp_period_s", self.otlp_period_s, 1, 3600)
        _between("wait_span_ms", self.wait_span_ms, 0.1, 60_000)
        _between("row_ms", self.row_ms, 0, 60_000)
        _between("stack_gap_ms", self.stack_gap_ms, 0, 60_000)
        _between("device_budget", self.device_budget, 0.0001, 0.5)
        _between("probe_budget", self.probe_budget, 0, 1)
        _between("spool_mb", self.spool_mb, 1, 1 << 20)
        _between("host_hz", self.host_hz, 0, 1_000)
        if self.kubelet and not self.kubelet.startswith(("http://", "https://")):
            raise UsageError(
                f"kubelet is {self.kubelet!r}", "give its address: https://127.0.0.1:10250"
            )
        if self.device_time not in DEVICE_TIME:
            raise UsageError(
                f"device_time is {self.device_time!r}", f"choose one of {', '.join(DEVICE_TIME)}"
            )
        if self.pids is not None and not self.pids:
            raise UsageError("no process to watch", "name at least one pid, or none at all")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} is {value:g}", f"choose a value from {low:g} to {high:g}")


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """The configuration of this process: `flags` win over `environ`, that over the file, that over
    the command's `defaults`. Raises UsageError for an unknown setting or a bad value, and for a
    file that cannot be read or that others can change."""
    settings = {**_from_file(environ), **_from_environment(environ)}
    merged: dict[str, Any] = {**defaults, **settings, **flags}
    known = {field.name for field in fields(Config)}
    for name in merged:
        if name not in known:
            raise UsageError(
                f"no setting is called {name}", f"settings: {', '.join(sorted(known))}"
            )
    if merged.get("pids") is not None:
        merged["pids"] = frozenset(merged["pids"])
    return Config(**merged)


def _from_file(environ: Mapping[str, str]) -> dict[str, Any]:
    named = environ.get("SONDE_CONFIG")
    path = Path(named) if named else DEFAULT_FILE
    if not named and not path.exists():
        return {}

    def check(path: Path) -> None:
        if os.geteuid() == 0 and not only_ours(path, _trusted_writers(environ)):
            raise UsageError(
                f"others than root can change the configuration {path}",
                "Give it and its folders to root: chown root, chmod go-w.",
            )

    try:
        table = tomllib.loads(read_checked(path, _MAX_BYTES, check).decode())
    except CaptureError as error:
        raise UsageError(f"the configuration {error.cause}", "name a file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read the configuration {path}: {error}", "fix or remove it"
        ) from error
    return {name: _of_file(name, value, path) for name, value in table.items()}


def _trusted_writers(environ: Mapping[str, str]) -> set[int]:
    """Root, and the user who called sudo, who chose this command and its environment."""
    caller = environ.get("SUDO_UID", "")
    return {0, int(caller)} if caller.isdecimal() else {0}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for field in fields(Config):
        text = environ.get(f"SONDE_{field.name.upper()}")
        if text is not None:
            found[field.name] = _of_environment(field.name, text)
    return found


_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= {"0": False, "false": False, "no": False, "off": False}


def _of_file(name: str, value: object, path: Path) -> object:
    """A value of the file, which must be of the setting's own type: 99.7 is no rate in whole Hz."""
    try:
        return _converted(name, value, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path} sets {name} to {value!r}: {error}", "give it a value of its type"
        ) from error


def _of_environment(name: str, text: str) -> object:
    """A value of the environment, where all is text: lists are separated by commas, a bool is a
    word of `_SWITCH`."""
    annotation = _types()[name]
    try:
        if annotation is bool:
            return _SWITCH[text.lower()]
        is_text = annotation is str
        value = text if is_text or annotation in (int, float) else _parts(text)
        return _converted(name, value, strict=False)
    except (KeyError, msgspec.ValidationError) as error:
        raise UsageError(
            f"SONDE_{name.upper()} sets {name} to {text!r}", "give it a value of its type"
        ) from error


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _converted(name: str, value: object, *, strict: bool) -> object:
    """`value` as the type of the field `name`. An unknown name passes: `load` refuses it.

    Raises msgspec.ValidationError.
    """
    annotation = _types().get(name)
    if annotation is None:
        return value
    return msgspec.convert(value, annotation, strict=strict)


@functools.cache
def _types() -> dict[str, Any]:
    return get_type_hints(Config)
