# SPDX-License-Identifier: Apache-2.0
"""Runs a program under exactly the restrictions of a unit in deploy/systemd.

A systemd manager of our own applies them: one that is nobody's init, in a mount namespace of its
own and the host's pid namespace. What control groups decide (memory, devices, addresses) it applies
as far as this machine's groups are its own to change.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

UNITS = Path(__file__).parents[1] / "deploy" / "systemd"
MANAGER = Path("/lib/systemd/systemd")

_SCRIPT = """
set -u
mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system /run/manager
# The hierarchies as seen from our own group, which is their root for us.
mount -t cgroup | while read -r _ _ point _ _ options; do
  kind=$(sed 's/.*,//' <<<"${options%)}")
  umount "$point" && mount -t cgroup -o "$kind" cgroup "$point"
done
mount -t cgroup2 | while read -r _ _ point _; do
  umount "$point" && mount -t cgroup2 cgroup2 "$point"
done
export XDG_RUNTIME_DIR=/run/manager HOME=/run/manager
"$MANAGER" --user --log-target=null & manager=$!
for _ in $(seq 100); do systemctl --user show-environment >/dev/null 2>&1 && break; sleep 0.05; done
cp -a /run/manager/systemd/inaccessible /run/systemd/
trap 'systemctl --user stop tested.service' TERM
systemd-run --user --quiet --wait --pipe --unit=tested.service "$@" & ran=$!
wait $ran; wait $ran; status=$?
kill $manager; wait $manager
exit $status
"""
_APART = """
# A manager moves everything in the group that it finds itself in. So it gets a separate one, in
# each hierarchy, before the namespace that makes this group its root.
groups=() name=sonde-test-$$
mapfile -t memberships </proc/self/cgroup
for line in "${memberships[@]}"; do
  IFS=: read -r _ kinds path <<<"$line"
  if [ -n "$kinds" ]; then kind=${kinds#name=}; else kind=unified; fi
  for top in "/sys/fs/cgroup/$kind" /sys/fs/cgroup; do
    [ -w "$top/cgroup.procs" ] || continue
    group=${top}${path%/}/$name
    mkdir "$group" 2>/dev/null || break
    # A group of CPUs has none at first, and takes nobody in.
    if { echo $$ >"$group/cgroup.procs"; } 2>/dev/null; then
      groups+=("$group:$top$path")
    else
      rmdir "$group"
    fi
    break
  done
done
trap ':' TERM
unshare --mount --cgroup bash -c "$1" bash "${@:2}" & inner=$!
trap 'kill -TERM $inner' TERM
wait $inner; wait $inner; status=$?
for it in "${groups[@]}"; do
  echo $$ >"${it#*:}/cgroup.procs"
  for _ in $(seq 50); do
    find "${it%%:*}" -depth -mindepth 1 -type d -exec rmdir {} + 2>/dev/null
    rmdir "${it%%:*}" 2>/dev/null && break
    sleep 0.02
  done
done
exit $status
"""
_OF_THE_RUN = {"ExecReload", "ExecStart", "Restart", "WorkingDirectory"}
_OF_A_DAEMON = {"Type", "WatchdogSec"}
_UNKNOWN_TO_RUN = {"RestartSteps", "RestartMaxDelaySec"}


def settings(unit: str) -> list[tuple[str, str]]:
    """(name, value) of its section Service."""
    section, found = "", []
    for line in (UNITS / unit).read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.append((name, value))
    return found


def can_run() -> bool:
    return os.geteuid() == 0 and MANAGER.exists() and shutil.which("systemd-run") is not None


def under(
    unit: str,
    folder: Path,
    environ: Mapping[str, str],
    without: Sequence[str] = (),
    *,
    daemon: bool = True,
) -> list[str]:
    """What to put before a command; `folder` is one it may write to, `without`: capabilities that
    the unit gives and this run does not have. `daemon`: whether the command reports to systemd, as
    the unit's own does."""
    properties = [f"ReadWritePaths={folder}"]
    for name, value in settings(unit):
        if name in _OF_THE_RUN | _UNKNOWN_TO_RUN or name.startswith("Restart"):
            continue
        if name in _OF_A_DAEMON and not daemon:
            continue
        if name == "ProtectHome" and sys.base_prefix.startswith(("/home/", "/root/")):
            properties += ["ProtectHome=tmpfs", f"BindReadOnlyPaths={sys.base_prefix}"]
            continue
        if name in ("CapabilityBoundingSet", "AmbientCapabilities"):
            value = " ".join(cap for cap in value.split() if cap not in without)
        properties.append(f"{name}={value}")
    properties += [f"Environment={name}={value}" for name, value in environ.items()]
    flags = [flag for setting in properties for flag in ("-p", setting)]
    script = _SCRIPT.replace("$MANAGER", str(MANAGER))
    return ["bash", "-c", _APART, "bash", script, *flags, "--"]
