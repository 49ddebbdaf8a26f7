# SPDX-License-Identifier: Apache-2.0
"""Databases in memory, one for each question, which sets its limits."""

from __future__ import annotations

import threading
from contextlib import suppress

import duckdb


class Databases:
    """Databases in memory for questions, the next of which is made ahead: that takes 20 ms."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[duckdb.DuckDBPyConnection] = []
        self._is_making = False

    def take(self) -> duckdb.DuckDBPyConnection:
        """A new one, and have another made."""
        with self._lock:
            found = self._made.pop() if self._made else None
            starts, self._is_making = not self._is_making, True
        if starts:
            try:
                threading.Thread(target=self._make, name="sonde-database").start()
            except RuntimeError:  # there is no room for a thread
                self._is_making = False
        return found or database()

    def _make(self) -> None:
        try:
            with suppress(duckdb.Error):  # who asks next meets it, too
                found = database()
                with self._lock:
                    self._made.append(found)
        finally:
            self._is_making = False

    def close(self) -> None:
        """Release what was made ahead."""
        with self._lock:
            while self._made:
                self._made.pop().close()


def database() -> duckdb.DuckDBPyConnection:
    """A new one."""
    return duckdb.connect(
        config={
            "threads": 2,
            "max_temp_directory_size": "2GiB",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
    )
