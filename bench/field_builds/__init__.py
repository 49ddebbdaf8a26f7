# SPDX-License-Identifier: Apache-2.0
"""What `sonde attach` finds in builds of frameworks as they are on PyPI: `__main__`."""
