# SPDX-License-Identifier: Apache-2.0
"""Fuzz targets for everything that reads what others wrote. `make fuzz`; fuzz/README.md."""
