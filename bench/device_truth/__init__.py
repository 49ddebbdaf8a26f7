# SPDX-License-Identifier: Apache-2.0
"""Whether intervals of a recording's device shares hold what CUPTI measures: `__main__`."""
