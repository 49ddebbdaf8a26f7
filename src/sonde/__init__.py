# SPDX-License-Identifier: Apache-2.0
"""Sonde: always-on, zero-code profiler and telemetry for Linux machines with GPUs."""

__version__ = "0.1.0"
