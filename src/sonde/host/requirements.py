# SPDX-License-Identifier: Apache-2.0
"""What a machine must have for anything to be recorded on it."""

from __future__ import annotations

from sonde.errors import KernelUnsupported, MissingDependency
from sonde.host import capabilities, kernel, machine, namespaces
from sonde.host.finding import Status


def require_recording() -> None:
    """Raise HostError when this machine, or this user on it, cannot record at all."""
    for finding, error in (
        (machine.architecture(), KernelUnsupported),
        (machine.native_module(), MissingDependency),
        (kernel.btf(), KernelUnsupported),
        (kernel.lockdown(), KernelUnsupported),
        *((finding, KernelUnsupported) for finding in kernel.bpf_programs()),
    ):
        if finding.status is Status.FAIL:
            raise error(f"{finding.name}: {finding.detail}", finding.remedy)
    capabilities.require()
    namespaces.require_host_pids()
