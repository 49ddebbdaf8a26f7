# SPDX-License-Identifier: Apache-2.0
"""What Sonde costs and how right it is, each figure beside a peer's from the same run."""
