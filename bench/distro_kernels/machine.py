# SPDX-License-Identifier: Apache-2.0
"""One boot: qemu without KVM, a kernel, a root in memory, and what comes over the console."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.distro_kernels.guest import MARK
from bench.distro_kernels.image import Target

MEMORY_MB = 2048
CPUS = 2


@dataclass(slots=True)
class Boot:
    """What a machine printed."""

    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    release: str = ""
    seconds: float = 0.0
    init_s: float | None = None
    ended: bool = False
    """It went through all its steps; else it hung, or the kernel died."""
    log: list[str] = field(default_factory=list)


def boot(
    target: Target, kernel: Path, initrd: Path, captures: Path, limit_s: float, words: str = ""
) -> Boot:
    """Boot, read until it powers off or `limit_s` are over; captures land in `captures`."""
    captures.mkdir(parents=True, exist_ok=True)
    command = [
        *target.qemu, "-accel", "tcg,thread=multi", "-m", str(MEMORY_MB), "-smp", str(CPUS),
        "-nographic", "-no-reboot", "-nic", "none", "-kernel", str(kernel), "-initrd", str(initrd),
        "-append", f"console={target.console} panic=-1 mitigations=off {words}",
    ]  # fmt: skip
    began = time.monotonic()
    found = Boot()
    files: dict[str, list[str]] = {}
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(
            subprocess.Popen(
                ["nice", "-n", "10", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        assert machine.stdout is not None
        fd = machine.stdout.fileno()
        rest = b""
        log = stack.enter_context((captures / "console.log").open("wb"))
        while (left := began + limit_s - time.monotonic()) > 0:
            if not select.select([fd], [], [], left)[0]:
                break
            data = os.read(fd, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for raw in lines:
                log.write(raw + b"\n")
                log.flush()
                _receive(found, files, raw.decode(errors="replace").rstrip("\r"), began)
        machine.kill()
    for name, parts in files.items():
        with contextlib.suppress(ValueError):
            (captures / name).write_bytes(base64.b64decode("".join(parts), validate=True))
    found.seconds = time.monotonic() - began
    return found


def _receive(found: Boot, files: dict[str, list[str]], line: str, began: float) -> None:
    at = line.find(MARK + " ")
    if at < 0:
        found.log.append(line)
        return
    if found.init_s is None:
        found.init_s = time.monotonic() - began
    kind, _, body = line[at + len(MARK) + 1 :].partition(" ")
    if kind == "file":
        files[body] = []
    elif kind == "data":
        name, _, part = body.partition(" ")
        files.setdefault(name, []).append(part)
    elif kind == "step":
        step = json.loads(body)
        found.steps[step.pop("name")] = step
    elif kind == "end":
        found.release = json.loads(body)["release"]
        found.ended = True
