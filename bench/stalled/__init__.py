# SPDX-License-Identifier: Apache-2.0
"""Stalls in real NCCL jobs: is the missing rank named, and how soon? docs/lab/stalled.md."""
