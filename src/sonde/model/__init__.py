# SPDX-License-Identifier: Apache-2.0
"""Frozen records that packages hand to one another. They import nothing of ours and do nothing."""
