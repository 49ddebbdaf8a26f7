# SPDX-License-Identifier: Apache-2.0
"""Whether the tests notice when the code is wrong."""
