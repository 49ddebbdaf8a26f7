# SPDX-License-Identifier: Apache-2.0
"""Where chunks go: a file today, a server tomorrow."""
