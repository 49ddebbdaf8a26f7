"""Sonde: always-on, zero-code profiler and telemetry for Linux machines with GPUs."""
