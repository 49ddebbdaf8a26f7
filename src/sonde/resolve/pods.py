# SPDX-License-Identifier: Apache-2.0
"""Pods of this node, from the kubelet's GET /pods.

Off unless an address is configured. A separate thread sends the request, and only when an unknown
pod appears, so a slow or missing kubelet delays nothing. The token is sent to the configured
address alone, and only over TLS beyond this machine. The size of a response is checked before it
is parsed.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from sonde import http_client, procfs
from sonde.errors import UsageError

MAX_PODS: Final = 4_096
"""Of one response, and requested at a time: more than a node runs."""
MAX_RESPONSE_BYTES: Final = 32 << 20
"""A longer response is an error."""
MAX_VALUES: Final = 1_000_000
"""Objects, lists and elements of a response: each takes some 100 bytes once it is parsed."""
MAX_LABELS_BYTES: Final = 4_096
"""Of a pod's labels as JSON; longer ones are left out."""
MAX_NAME: Final = 253
"""Characters of the name of a Kubernetes object."""
MIN_INTERVAL_S: Final = 1.0
"""Between two requests."""
GIVE_UP_S: Final = 30.0
"""A pod is no longer requested after this: the kubelet does not know it."""
TIMEOUT_S: Final = 5.0
"""Of one request."""
STATUSES: Final = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")
CONFIG_HASH: Final = "kubernetes.io/config.hash"
"""Annotation of static pods: the id in their control groups' names, in place of the uid that their
mirrors have. Anybody may give it to a pod …"""
CONFIG_SOURCE: Final = "kubernetes.io/config.source"
"""… but this one the kubelet overwrites in every pod that it takes from anywhere: "api", or …"""
STATIC_SOURCES: Final = frozenset({"file", "http"})
"""… of pods that the machine's root set up."""
CONFIG_MIRROR: Final = "kubernetes.io/config.mirror"
"""Annotation of a mirror: again the hash. It is no proof, as the API server takes it from anybody
who may create pods; nodes alone may create no other pods."""
_HASH: Final = re.compile(r"[0-9a-f]{32}")
"""As the kubelet makes them: no uid of the API server's looks like it."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the kubelet describes it."""

    uid: str
    name: str
    namespace: str
    labels: str
    """A JSON object; '' where it is too long."""
    containers: Mapping[str, str] = field(default_factory=dict)
    """Container id to the container's name in the pod."""
    config_hash: str = ""
    """Another id of a static pod; '' of other pods."""


def parse(response: bytes) -> dict[str, Pod]:
    """The pods of a v1 PodList by uid, static ones also by their config hash (`by_id`).

    Raises ValueError for another document, or one with too many values.
    """
    if sum(map(response.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise ValueError("the response has too many values")
    try:
        document = json.loads(response)
    except RecursionError:
        raise ValueError("the response is nested too deeply") from None
    items = document.get("items") if isinstance(document, dict) else None
    if not isinstance(items, list):
        raise ValueError("no list of pods")
    pods: list[Pod] = []
    for item in items[:MAX_PODS]:
        meta = item.get("metadata") or {} if isinstance(item, dict) else {}
        uid = meta.get("uid")
        if not isinstance(uid, str) or len(uid) > MAX_NAME:
            continue
        status = item.get("status") or {}
        labels = json.dumps(meta.get("labels") or {}, sort_keys=True)
        pod = Pod(
            uid=uid,
            name=_name(meta.get("name")),
            namespace=_name(meta.get("namespace")),
            labels=labels if len(labels) <= MAX_LABELS_BYTES else "",
            containers={
                _name(container.get("containerID")).rpartition("://")[2]: _name(container["name"])
                for kind in STATUSES
                for container in status.get(kind) or ()
                if container.get("containerID") and container.get("name")
            },
            config_hash=_config_hash(meta.get("annotations") or {}),
        )
        pods.append(pod)
    return by_id(pods)


def by_id(pods: Iterable[Pod], gone: Iterable[Pod] = ()) -> dict[str, Pod]:
    """Pods by uid and by config hash. A hash counts for nobody where it is another pod's uid, or
    where two pods have it; of pods that are `gone`, where a later one has it."""
    now, before = ({pod.uid: pod for pod in them} for them in (pods, gone))
    before = {uid: pod for uid, pod in before.items() if uid not in now}
    found: dict[str, Pod] = {}
    for them in (before, now):
        counts = Counter(pod.config_hash for pod in them.values())
        for pod in them.values():
            if counts[pod.config_hash] == 1:
                found[pod.config_hash] = pod
            else:
                found.pop(pod.config_hash, None)
    found.pop("", None)
    return {**found, **before, **now}


def _config_hash(annotations: Mapping[str, Any]) -> str:
    """That of a static pod or its mirror; '' of others."""
    found = annotations.get(CONFIG_HASH)
    is_static = annotations.get(CONFIG_SOURCE) in STATIC_SOURCES
    is_kubelets = isinstance(found, str) and _HASH.fullmatch(found) is not None
    if not (is_static and is_kubelets and annotations.get(CONFIG_MIRROR, found) == found):
        return ""
    return str(found)


def _name(value: Any) -> str:
    return procfs.printable(value)[:MAX_NAME] if isinstance(value, str) else ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Pods:
    """Pods by uid. `request` and `find` never block."""

    def __init__(
        self, url: str, token_file: Path | None = None, ca_file: Path | None = None
    ) -> None:
        """Raises UsageError for a bad address, or one to which the token would go unencrypted."""
        try:
            parts = http_client.split_url(url)
        except ValueError as error:
            raise UsageError(
                f"kubelet is {http_client.shown(url)!r}: {error}",
                "give its address: https://127.0.0.1:10250",
            ) from error
        if token_file and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            raise UsageError(
                f"the kubelet's token would be sent to {http_client.shown(url)} unencrypted",
                "use https, or remove kubelet_token_file",
            )
        self._url = url.rstrip("/") + "/pods"
        self._token_file = token_file
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        self._pods: dict[str, Pod] = {}
        self._requested: dict[str, float] = {}
        """When each unknown uid was first requested, CLOCK_MONOTONIC in seconds."""
        self._lock = threading.Condition()
        self._closed = False
        self.failures = 0
        self.last_failure = ""
        self._thread = threading.Thread(target=self._run, name="sonde-pods", daemon=True)
        self._thread.start()

    def request(self, uid: str) -> None:
        """Have the thread look up a pod, unless it is known."""
        with self._lock:
            if (
                uid not in self._pods
                and uid not in self._requested
                and len(self._requested) < MAX_PODS
            ):
                self._requested[uid] = time.monotonic()
                self._lock.notify_all()

    def find(self, uid: str) -> Pod | None:
        """The pod; None where the kubelet has not reported it (yet), and it is then requested."""
        pod = self._pods.get(uid)
        if pod is None:
            self.request(uid)
        return pod

    def wait_for_requested(self, timeout_s: float) -> None:
        """Wait until all requested pods are known or given up, or for `timeout_s`."""
        with self._lock:
            self._lock.wait_for(lambda: not self._requested or self._closed, timeout_s)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._requested or self._closed)
                if self._closed:
                    return
            try:
                found = parse(self._fetch())
            except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
                self.failures += 1
                self.last_failure = str(error)
                found = {}
            with self._lock:
                if found:
                    # Pods that the kubelet has dropped are kept while there is room: their last
                    # processes may still be resolved.
                    merged = by_id(found.values(), self._pods.values())
                    self._pods = found if len(merged) > 2 * MAX_PODS else merged
                now = time.monotonic()
                self._requested = {
                    uid: since
                    for uid, since in self._requested.items()
                    if uid not in self._pods and now - since < GIVE_UP_S
                }
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._closed, MIN_INTERVAL_S)

    def _fetch(self) -> bytes:
        headers = {}
        if self._token_file is not None:
            token = (
                self._token_file.read_text().strip()
            )  # read each time: the kubelet renews it every hour
            headers["Authorization"] = f"Bearer {token}"
        response = http_client.request(
            "GET",
            self._url,
            headers=headers,
            deadline_s=TIMEOUT_S,
            max_bytes=MAX_RESPONSE_BYTES,
            tls=self._tls,
        )
        if response.status != 200:
            raise ValueError(f"HTTP status {response.status}")
        return response.body
