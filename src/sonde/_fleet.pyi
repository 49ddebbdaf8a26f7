# SPDX-License-Identifier: Apache-2.0
"""Secret-shared sums with proofs: the fleet's cryptography (native/fleet)."""

class Aggregation:
    """A scheme bound to a context: histogram, l1boundsum, sumvec (proved) or plain (not)."""

    length: int
    def __init__(
        self, kind: str, length: int, max_samples: int, chunk_length: int, context: bytes
    ) -> None: ...
    def shard(
        self, nonces: list[bytes], samples: list[list[int]], threads: int
    ) -> list[tuple[bytes, bytes, bytes]]:
        """(public, leader, helper) shares of each report; `samples`: bucket indices per report.
        Raises ValueError where the lists differ in length, or one report's id or sample does not
        fit.
        """

    @staticmethod
    def shard_dishonestly(
        length: int, chunk_length: int, context: bytes, nonce: bytes, vector: list[int]
    ) -> tuple[bytes, bytes, bytes]:
        """A histogram report of any vector, with the best possible proof; for attacks."""

    def begin(
        self,
        verify_key: bytes,
        nonces: list[bytes],
        publics: list[bytes],
        shares: list[bytes],
        threads: int,
    ) -> Pending:
        """The leader's first step: what it sends to the helper. Raises ValueError where the lists
        differ in length, or a report's id has not 16 bytes.
        """

    def check(
        self,
        verify_key: bytes,
        nonces: list[bytes],
        publics: list[bytes],
        shares: list[bytes],
        messages: list[bytes],
        threads: int,
    ) -> tuple[list[bytes | None], list[str | None], bytes]:
        """The helper's only step: (replies to the leader's messages, faults, aggregate share of the
        accepted reports). A fault is why a report does not count. Raises ValueError as `begin`
        does.
        """

    def zero(self) -> bytes: ...
    def merge(self, shares: list[bytes]) -> bytes: ...
    def add_noise(self, share: bytes, noise: list[int]) -> bytes: ...
    def unshard(self, shares: list[bytes]) -> list[int]: ...

class Pending:
    """The leader's reports between its message to the helper and the helper's reply."""

    messages: list[bytes | None]
    faults: list[str | None]
    def finish(self, replies: list[bytes | None], threads: int) -> tuple[list[str | None], bytes]:
        """The leader's last step, once: (faults, aggregate share of the accepted reports)."""

class Keyring:
    """The open sessions of one party, for reports without proofs. Thread-safe."""

    def __init__(self) -> None: ...
    def put(self, session: bytes, node: bytes, key: bytes, until_s: int) -> None: ...
    def drop(self, session: bytes) -> None: ...
    def get(self, session: bytes) -> tuple[bytes, bytes, int] | None:
        """(node, key, until_s)"""

    def __contains__(self, session: bytes) -> bool: ...
    def __len__(self) -> int: ...

class Intake:
    """One aggregator's side of a batch of reports without proofs. Thread-safe."""

    def __init__(
        self,
        aggregation: Aggregation,
        keyring: Keyring,
        leader: bool,
        prefix: bytes,
        layout: tuple[int, int, int],
        batch: tuple[int, int],
        period_s: int,
    ) -> None:
        """`layout`: bytes before the first record, of a record, of its sealed part, which lies
        behind the record's head of 40 bytes; `batch`: the first time that counts and the first
        that does not. The sealed part is bound to `prefix` and the head.
        """

    def add(self, body: bytes) -> Taken:
        """Decrypts, registers and adds the records of a bundle."""

class Taken:
    """The outcome of a bundle."""

    verdicts: bytes
    """A byte per record: 0 counted, 1 unknown session, 2 late, 3 forged, 4 quota."""

    def share(self) -> bytes:
        """The aggregate share of the counted records."""

    def leave_out(self, records: list[int]) -> None:
        """Removes records, by number, from the sum; frees their nodes' quotas."""

def unfit_keys(keys: list[bytes]) -> list[int]:
    """Indices of the Ed25519 public keys that are not a point in its canonical encoding, or have
    small order, so that anyone can sign under them.
    """

def signed_by(key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the owner of this Ed25519 public key signed the message.

    False also for an invalid key or signature, or a key of small order.
    """
