# SPDX-License-Identifier: Apache-2.0
"""Metrics of devices: NVIDIA's through NVML, AMD's through AMD SMI, others through DRM.

Each vendor's library is loaded in a separate subprocess (`sonde.collect.subprocess_runner`), so
modules here import only what they need.

Terms:
- part: a MIG instance of a GPU
- GPM: NVML's counters of how busy SMs, tensor cores and memory were
- reading: one query to a device, with a separate gap where it has no answer
- me, tags: labels that identify a device, and labels of a series
- at rest: no process holds the device and it did nothing when it was queried last; pace: to query
  it less often then
- client: an open DRM file of a process
"""
