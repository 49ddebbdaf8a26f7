# SPDX-License-Identifier: Apache-2.0
"""Faults that are injected for real, and what diagnosis reports of them: docs/lab/faults.md."""
