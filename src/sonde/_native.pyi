# SPDX-License-Identifier: Apache-2.0

# --- prio: secret-shared sums with proofs --------------------------------------------------------

class Aggregation:
    """A scheme bound to a context: histogram, l1boundsum, sumvec (proved) or plain (not)."""

    length: int
    def __init__(
        self, kind: str, length: int, max_samples: int, chunk_length: int, context: bytes
    ) -> None: ...
    def shard(
        self, nonces: list[bytes], samples: list[list[int]], threads: int
    ) -> list[tuple[bytes, bytes, bytes]]:
        """(public, leader, helper) shares of each report."""

    @staticmethod
    def shard_dishonestly(
        length: int, chunk_length: int, context: bytes, nonce: bytes, vector: list[int]
    ) -> tuple[bytes, bytes, bytes]:
        """A histogram report of any vector, proved as well as can be; for attacks."""

    def begin(
        self,
        verify_key: bytes,
        nonces: list[bytes],
        publics: list[bytes],
        shares: list[bytes],
        threads: int,
    ) -> Pending: ...
    def check(
        self,
        verify_key: bytes,
        nonces: list[bytes],
        publics: list[bytes],
        shares: list[bytes],
        messages: list[bytes],
        threads: int,
    ) -> tuple[list[bytes | None], list[str | None], bytes]:
        """(replies, faults, sum of the accepted)."""

    def zero(self) -> bytes: ...
    def merge(self, shares: list[bytes]) -> bytes: ...
    def add_noise(self, share: bytes, noise: list[int]) -> bytes: ...
    def unshard(self, shares: list[bytes]) -> list[int]: ...

class Pending:
    """The leader's reports between its message to the helper and the helper's reply."""

    messages: list[bytes | None]
    faults: list[str | None]
    def finish(
        self, replies: list[bytes | None], threads: int
    ) -> tuple[list[str | None], bytes]: ...
