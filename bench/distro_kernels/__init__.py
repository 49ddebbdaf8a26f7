# SPDX-License-Identifier: Apache-2.0
"""Sonde on kernels other than the running one: Debian's, each booted under qemu without KVM.

The user space is Debian 12 in a file system in memory, with Sonde in it; the programs know what
they did, the captures come out over the console and are read here. `python -m bench.distro_kernels`
downloads, boots and judges; results.json holds what was seen, docs/reference/kernels.md is written
from it.
"""
