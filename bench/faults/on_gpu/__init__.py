# SPDX-License-Identifier: Apache-2.0
"""Faults injected into programs on GPUs: `python -m bench.faults run --gpu`."""
