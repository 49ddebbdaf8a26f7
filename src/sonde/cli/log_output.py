# SPDX-License-Identifier: Apache-2.0
"""Log output of daemons and services on stderr: text for people, JSON for journald."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from sonde.export.layout import one_line

FORMATS = ("auto", "text", "json")
LEVELS = ("debug", "info", "warning", "error")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --log-format and --log-level."""
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default="auto",
        help="format of the log on stderr (default auto: json under journald, else text)",
    )
    parser.add_argument(
        "--log-level", choices=LEVELS, default="info", help="lowest level that is logged"
    )


def is_json(log_format: str) -> bool:
    """Whether this choice of --log-format means JSON here."""
    return log_format == "json" or (log_format == "auto" and _stderr_is_journal())


@contextmanager
def to_stderr(as_json: bool, level: str) -> Iterator[None]:
    """Log to stderr while the block runs: Sonde from `level` on, libraries from warnings on."""
    root, sonde = logging.getLogger(), logging.getLogger("sonde")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    level_before = sonde.level
    root.addHandler(handler)
    sonde.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(handler)
        sonde.setLevel(level_before)


class TextFormatter(logging.Formatter):
    """`TIME LOGGER LEVEL MESSAGE`, with a traceback if any. Control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.name} {record.levelname} {one_line(record.getMessage())}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message and, if any, exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _stderr_is_journal() -> bool:
    """Whether stderr is the stream that systemd connected to journald (systemd.exec(5))."""
    try:
        stat = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"
