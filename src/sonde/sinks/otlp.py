# SPDX-License-Identifier: Apache-2.0
"""Pushes series to an OpenTelemetry collector: OTLP over HTTP, in its JSON encoding.

Off unless a URL is configured. A push that fails is counted and not repeated; the next one has
newer values. Whatever the endpoint does, a push takes `PUSH_S` and reads `ANSWER_BYTES` at most.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from sonde.errors import UsageError
from sonde.metrics import Metric
from sonde.sinks.series import Series

_log = logging.getLogger(__name__)

PATH = "/v1/metrics"
PUSH_S = 5.0
"""For a whole push, from the name lookup to the last byte of the answer."""
ANSWER_BYTES = 64 << 10
"""Limit of a response; only its status is used."""
CUMULATIVE = 2
"""AGGREGATION_TEMPORALITY_CUMULATIVE"""


def endpoint_of(url: str) -> str:
    """The URL to post to, with OTLP's default path where it has none. Raises UsageError."""
    # Imported only where a URL is configured: TLS takes a few MB.
    from sonde import http_client

    try:
        parts = http_client.split_url(url)
    except ValueError as error:
        raise UsageError(
            f"{http_client.shown(url)!r} is not a URL to push to: {error}",
            "write http://HOST:4318, as of a collector",
        ) from error
    return url if parts.path.strip("/") else url.rstrip("/") + PATH


def request(
    families: list[tuple[Metric, list[Series]]],
    resource: Mapping[str, str],
    started_ns: int,
    now_ns: int,
) -> dict[str, object]:
    """An ExportMetricsServiceRequest; times are ns since 1970."""
    metrics: list[dict[str, object]] = []
    for metric, series in families:
        points = [
            {
                "attributes": _attributes(one.attributes),
                "startTimeUnixNano": str(started_ns),
                "timeUnixNano": str(now_ns),
                "asDouble": _double(one.value),
            }
            for one in series
        ]
        about: dict[str, object] = {
            "name": metric.name,
            "unit": metric.unit,
            "description": metric.brief,
        }
        if metric.kind == "gauge":
            metrics.append(about | {"gauge": {"dataPoints": points}})
        else:
            total = {
                "aggregationTemporality": CUMULATIVE,
                "isMonotonic": metric.monotonic,
                "dataPoints": points,
            }
            metrics.append(about | {"sum": total})
    scope = {"name": "sonde", "version": resource.get("service.version", "")}
    return {
        "resourceMetrics": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeMetrics": [{"scope": scope, "metrics": metrics}],
            }
        ]
    }


def _double(value: float) -> float | str:
    """A number in protobuf's JSON encoding, where NaN and infinities are strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _attributes(attributes: Mapping[str, str]) -> list[dict[str, object]]:
    return [
        {"key": name, "value": {"stringValue": value}} for name, value in sorted(attributes.items())
    ]


def _encoded(body: Mapping[str, object]) -> bytes:
    """The body as JSON in valid UTF-8: strict receivers refuse anything else."""
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


class OtlpPusher:
    """Pushes what `families` gives, every `period_s`, in a separate thread."""

    def __init__(
        self,
        url: str,
        period_s: float,
        families: Callable[[], list[tuple[Metric, list[Series]]]],
        resource: Mapping[str, str],
        started_ns: int = 0,
    ) -> None:
        """`started_ns`: since when the counters count (ns since 1970), 0: from now on. Raises
        UsageError for an invalid URL."""
        self._url = endpoint_of(url)
        self._period_s = period_s
        self._families = families
        self._resource = resource
        self._started_ns = started_ns or time.time_ns()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sonde-otlp", daemon=True)
        self.pushed = 0
        self.failed = 0
        self.error = ""
        """Why the last push failed; '' after a successful one."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Have the thread push a last time and stop; returns at once."""
        self._ended.set()

    def close(self) -> None:
        """Push a last time, then stop; waits at most 1 s longer than one push may take. Where
        another push is under way, the last one may not be finished by then."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(PUSH_S + 1)

    def push(self) -> None:
        """One push. Counts a failure instead of raising."""
        from sonde import http_client

        try:
            body = request(self._families(), self._resource, self._started_ns, time.time_ns())
            answer = http_client.request(
                "POST",
                self._url,
                body=gzip.compress(_encoded(body), 1),
                headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
                deadline_s=PUSH_S,
                max_bytes=ANSWER_BYTES,
            )
        except (OSError, ValueError) as error:
            self._count_failure(str(error))
            return
        except Exception as error:  # a bug in one metric must not end the pushes
            self._count_failure(f"{type(error).__name__}: {error}")
            return
        if 200 <= answer.status < 300:
            if self.error:
                _log.info("the collector takes metrics again, after %s", self.error)
            self.pushed += 1
            self.error = ""
        else:
            self._count_failure(f"HTTP status {answer.status}")

    def _count_failure(self, error: str) -> None:
        """Count a failed push; the first of several failures in a row is logged."""
        if not self.error:
            _log.warning("the collector takes no metrics: %s", error)
        self.failed += 1
        self.error = error

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self.push()
        self.push()
