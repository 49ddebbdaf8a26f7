# SPDX-License-Identifier: Apache-2.0
"""What devices say of themselves: NVIDIA's through NVML, AMD's through AMD SMI, others through DRM.

Each vendor's library lives in a process of its own (`sonde.collect.apart`), so nothing in here may
import more than it needs.
"""
