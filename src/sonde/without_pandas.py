# SPDX-License-Identifier: Apache-2.0
"""Keeps pandas out of Sonde's own processes, which need none of it.

Arrow imports pandas, where it is installed, with the first value that it converts: a quarter to
half a second of CPU time and 30 MB for each command. Programs that import `sonde` are not touched:
`recording.pandas(…)` is theirs.
"""

from __future__ import annotations

import sys


def keep_pandas_out() -> None:
    """Let this process find no pandas from now on, unless it has imported it already."""
    if "pandas" not in sys.modules and _NoPandas not in sys.meta_path:
        sys.meta_path.insert(0, _NoPandas)


class _NoPandas:
    """Makes the import of pandas fail, as if it were not installed."""

    @classmethod
    def find_spec(cls, name: str, *_: object) -> None:
        """Raises ModuleNotFoundError for pandas."""
        if name == "pandas":
            raise ModuleNotFoundError("Sonde's own processes need no pandas", name=name)
