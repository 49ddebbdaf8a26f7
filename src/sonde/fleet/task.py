# SPDX-License-Identifier: Apache-2.0
"""A task: everything the parties agree on before the first report.

It is public. Proofs, shares and signatures are bound to its `id`, a hash of all fields: under
another task none of them holds.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from sonde._fleet import Aggregation
from sonde.errors import UsageError
from sonde.fleet.noise import Mechanism, MechanismKind
from sonde.fleet.party_files import MAX_TASK_FILE_BYTES, read_text
from sonde.fleet.wire import JOB_HEAD_BYTES, JOB_REPORTS

Kind = Literal["histogram", "l1boundsum", "sumvec", "plain"]
"""What a report proves: one sample (Prio3Histogram), up to `max_samples` in total
(Prio3L1BoundSum), up to that in each bucket (Prio3SumVec); nothing.
"""
Unit = Literal["gpu", "tenant"]

DEFAULT_KEEP_S = 7 * 86_400


@dataclass(frozen=True)
class Privacy:
    """The privacy guarantee of a release, and the yearly budget.

    unit         whose presence is hidden: one GPU's (node's) reports, or all reports of one tenant
    mechanism    noise that *each* aggregator adds, so that one honest one suffices
    scale        Laplace: b; Gaussian: sigma; in counts
    delta        of the yearly (epsilon, delta); a Laplace release alone has epsilon at delta 0
    budget       the yearly epsilon that may be spent
    tenant_cap   maximum nodes of a tenant that count in a release; None: tenants unbounded
    """

    unit: Unit
    mechanism: MechanismKind
    scale: float
    delta: float
    budget: float
    tenant_cap: int | None = None

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise UsageError(f"no such unit of privacy: {self.unit}", "use gpu or tenant")
        if self.mechanism not in get_args(MechanismKind):
            raise UsageError(f"no such noise: {self.mechanism}", "use laplace or gaussian")
        for name in ("scale", "budget"):
            value = getattr(self, name)
            _require(_is_number(value) and 0 < value < math.inf, name, value, "above 0")
        low, high = _SCALES
        _require(low <= self.scale <= high, "scale", self.scale, f"from {low:g} to {high:g}")
        _require(_is_number(self.delta) and 0 < self.delta < 1, "delta", self.delta, "from 0 to 1")
        cap = self.tenant_cap
        _require(cap is None or (_is_int(cap) and cap > 0), "tenant_cap", cap, "from 1 on")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_int(value)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise UsageError(f"a task with {name} = {value!r}", f"write a number {wanted}")


_MAX_BUCKETS = 1 << 20
_MAX_SAMPLES = 1 << 16
_SCALES = (1e-6, 1e12)
"""Bounds: a task file comes from another party, and must not cause any amount of memory and time.
"""


@dataclass(frozen=True)
class Task:
    """The agreement. Moments are in seconds since 1970; keys are public, hexadecimal (HPKE).

    buckets          length of the vector that is summed
    max_samples      samples in one report (1 for a histogram), or of a sumvec in one bucket
    period_s         one report a node and period
    release_s        length of a batch: batches begin at its multiples, each has one release
    grace_s          how long after the end of its batch a report is still admitted
    min_batch        a batch of fewer reports is not released
    space            the fields of `BucketSpace`; empty: none; of `discovery`: its purpose
    keep_s           how long after it is due a batch can be collected; then it expires
    """

    name: str
    kind: Kind
    buckets: int
    max_samples: int
    period_s: int
    release_s: int
    grace_s: int
    min_batch: int
    privacy: Privacy
    leader_url: str = ""
    helper_url: str = ""
    leader_key: str = ""
    helper_key: str = ""
    collector_key: str = ""
    space: dict[str, Any] = field(default_factory=dict)
    keep_s: int = DEFAULT_KEEP_S

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"no such aggregation: {self.kind}", f"use one of {get_args(Kind)}")
        if not (isinstance(self.name, str) and self.name.isprintable() and len(self.name) <= 200):
            raise UsageError(
                "a task's name is one line of at most 200 printable characters",
                "give the task another name",
            )
        for name in ("buckets", "max_samples", "period_s", "release_s", "min_batch", "keep_s"):
            _require(_is_int(value := getattr(self, name)) and value > 0, name, value, "from 1 on")
        for name, most in (("buckets", _MAX_BUCKETS), ("max_samples", _MAX_SAMPLES)):
            _require((value := getattr(self, name)) <= most, name, value, f"up to {most:,}")
        _require(_is_int(self.grace_s) and self.grace_s >= 0, "grace_s", self.grace_s, "from 0 on")
        if self.release_s % self.period_s:
            raise UsageError("a release must hold whole periods")
        if self.kind == "histogram" and self.max_samples != 1:
            raise UsageError("a histogram report holds one sample", "use l1boundsum for several")
        if self.privacy.unit == "tenant" and self.privacy.tenant_cap is None:
            raise UsageError("per-tenant privacy needs a bound", "set tenant_cap")
        self._check_addresses()

    def _check_addresses(self) -> None:
        """Raises UsageError for invalid URLs and keys; empty ones are not known yet."""
        for name in ("leader_url", "helper_url"):
            if url := getattr(self, name):
                try:
                    parts = urlsplit(url)
                    good = parts.scheme == "https" and parts.hostname and parts.port != 0
                except (ValueError, AttributeError):
                    good = False
                if not good:
                    raise UsageError(f"{name} is no address: {url}", "write https://HOST:PORT")
        for name in ("leader_key", "helper_key", "collector_key"):
            if (key := getattr(self, name)) and not re.fullmatch("[0-9a-f]{64}", str(key)):
                raise UsageError(f"{name} is no public key", "write its 32 bytes in hexadecimal")

    @cached_property
    def id(self) -> bytes:
        """32 bytes: a hash of all fields."""
        return sha256(self.to_json().encode()).digest()

    @property
    def mechanism(self) -> Mechanism:
        """The noise of a release."""
        return Mechanism(self.privacy.mechanism, self.privacy.scale)

    def sensitivity(self, unit: Unit) -> int | None:
        """The largest change of a release by one unit, in counts: L1, which also bounds L2.

        None if it is unbounded (tenants without a cap, or reports without proofs).
        """
        if self.kind == "plain":
            return None
        per_node = self.release_s // self.period_s * self.max_samples
        if self.kind == "sumvec":  # what is proved bounds each element, not the norm
            per_node *= self.buckets
        if unit == "gpu":
            return per_node
        cap = self.privacy.tenant_cap
        return None if cap is None else per_node * cap

    def batch_of(self, time_s: int) -> int:
        """Start of the batch that a report of this time belongs to."""
        return time_s - time_s % self.release_s

    def due_s(self, start_s: int) -> int:
        """When the batch that begins at start_s can be collected."""
        return start_s + self.release_s + self.grace_s + 1

    def expires_s(self, start_s: int) -> int:
        """When the batch that begins at start_s expires."""
        return self.due_s(start_s) + self.keep_s

    def expired_before(self, now_s: float) -> int:
        """Batches that begin before this have expired."""
        return self.batch_of(int(now_s) - self.expires_s(0)) + self.release_s

    def last_due(self, now_s: float) -> int:
        """Start of the newest batch whose release is due."""
        return self.batch_of(int(now_s) - self.release_s - self.grace_s - 1)

    def aggregation(self) -> Aggregation:
        """The native aggregation scheme, bound to this task."""
        return _aggregation(self.kind, self.buckets, self.max_samples, self.id)

    @property
    def max_report_bytes(self) -> int:
        """Upper bound of an honest report in bytes; a longer one is refused unread."""
        # Its longest part is the leader's share: 16 bytes an element, of the encoded samples (a
        # bucket takes several bits where it can count above 1) and of the proof, which grows with
        # the root.
        bits = max(1, self.max_samples.bit_length()) if self.kind in ("l1boundsum", "sumvec") else 1
        elements = self.buckets * bits + 16 * math.isqrt(self.buckets * bits) + 256
        return 16 * elements + 4096

    @property
    def max_job_bytes(self) -> int:
        """Upper bound of a job in bytes: an item is shorter than its report, because it lacks the
        leader's share.
        """
        return JOB_HEAD_BYTES + JOB_REPORTS * self.max_report_bytes

    @property
    def max_sealed_bytes(self) -> int:
        """Upper bound of a sealed, noised share in bytes."""
        return 16 * self.buckets + 1024

    def to_json(self) -> str:
        """As `from_json` reads it: the same bytes for the same task."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Task:
        """The task that a text holds. Raises UsageError."""
        try:
            fields = json.loads(text)
            return Task(**{**fields, "privacy": Privacy(**fields["privacy"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UsageError(
                f"not a fleet task: {error}", "put task.json back as it was made"
            ) from error

    @staticmethod
    def load(path: Path) -> Task:
        """The task that a file holds. Raises UsageError."""
        try:
            return Task.from_json(read_text(path, MAX_TASK_FILE_BYTES))
        except OSError as error:
            raise UsageError(
                f"no task at {path}: {error.strerror}",
                "name a directory that 'sonde fleet aggregate --new' has made",
            ) from error
        except UnicodeDecodeError as error:
            raise UsageError(f"not a fleet task: {path}: not text") from error


def chunk_length(elements: int) -> int:
    """The chunk length of a proof's gadget: about 2·√n, so that it is called 2^k - 1 times.

    A gadget is the part of a VDAF's validity circuit that is called on one chunk of the elements
    after the other. The proof's polynomials have one point more than the gadget has calls and are
    padded to a power of two: 31 calls fill 32 points, 32 calls need 64. At 4,096 buckets a proof
    takes a fifth less to verify and half as long to make as with a chunk of 256
    (docs/lab/fleet.md).
    """
    calls = (1 << max(1, math.ceil(math.log2(math.sqrt(elements) / 2)))) - 1
    return -(-elements // calls)


@lru_cache(maxsize=8)
def _aggregation(kind: Kind, buckets: int, max_samples: int, context: bytes) -> Aggregation:
    bits = max_samples.bit_length() if kind in ("l1boundsum", "sumvec") else 1
    return Aggregation(kind, buckets, max_samples, chunk_length(buckets * bits), context)
