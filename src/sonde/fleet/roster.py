# SPDX-License-Identifier: Apache-2.0
"""The enrolled nodes: public keys, each with its tenant's opaque tag.

Both aggregators hold the same roster. A tag should be a random label, not a name. By it the
aggregators bound how many nodes of a tenant count, though they see no node's samples.
"""

from __future__ import annotations

import json
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sonde._fleet import unfit_keys
from sonde.errors import UsageError
from sonde.fleet.party_files import MAX_ROSTER_BYTES, read_text
from sonde.private_files import replacing


class Identity:
    """A node's Ed25519 key pair. `public` (32 bytes) is what a roster has of the node."""

    def __init__(self, private_key: bytes | None = None) -> None:
        self._key = (
            Ed25519PrivateKey.generate()
            if private_key is None
            else Ed25519PrivateKey.from_private_bytes(private_key)
        )
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def private(self) -> bytes:
        """The secret key, 32 bytes."""
        return self._key.private_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


class Roster:
    """Enrolled nodes and their tenants' tags."""

    def __init__(self, tenants: dict[bytes, str]) -> None:
        self._tag_of = tenants
        self._nodes_of: dict[str, list[bytes]] = defaultdict(list)
        for node, tag in tenants.items():
            self._nodes_of[tag].append(node)
        self._counted: dict[tuple[int, int, str], frozenset[bytes]] = {}  # see `counts`

    def __contains__(self, node: bytes) -> bool:
        return node in self._tag_of

    def tenant_of(self, node: bytes) -> str:
        """The tag of an enrolled node."""
        return self._tag_of[node]

    def __len__(self) -> int:
        return len(self._tag_of)

    def sizes(self) -> list[int]:
        """Nodes of each tenant."""
        return [len(nodes) for nodes in self._nodes_of.values()]

    def counts(self, node: bytes, batch_s: int, cap: int | None) -> bool:
        """Whether this node is among the `cap` nodes of its tenant that count in this batch.

        The choice is a hash of node and batch: both aggregators make the same choice, it changes
        with each batch, and reporting early gives no advantage.
        """
        tag = self._tag_of.get(node)
        if tag is None:
            return False
        nodes = self._nodes_of[tag]
        if cap is None or len(nodes) <= cap:
            return True
        key = (batch_s, cap, tag)
        if key not in self._counted:
            if len(self._counted) > 2 * len(self._nodes_of):  # most are of old batches
                self._counted.clear()
            ranked = sorted(nodes, key=lambda n: sha256(batch_s.to_bytes(8, "big") + n).digest())
            self._counted[key] = frozenset(ranked[:cap])
        return node in self._counted[key]

    def save(self, path: Path) -> None:
        """Writes the roster as JSON. Raises SinkError."""
        with replacing(path) as out:
            out.write(self.to_json().encode())

    def to_json(self) -> str:
        """As `load` reads it."""
        return json.dumps({node.hex(): tag for node, tag in self._tag_of.items()})

    @staticmethod
    def load(path: Path) -> Roster:
        """Reads a roster. Raises UsageError, also for a key that is not a point of the curve or has
        small order: under such a key anyone can sign.
        """
        try:
            entries = json.loads(read_text(path, MAX_ROSTER_BYTES))
            tenants = {bytes.fromhex(node): str(tag) for node, tag in entries.items()}
            unfit = unfit_keys(list(tenants))
        except OSError as error:
            raise UsageError(
                f"no roster at {path}: {error.strerror}", "both aggregators need the same one there"
            ) from error
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise UsageError(
                f"not a roster: {path}: {error}",
                "write public keys, each with its tenant's tag",
            ) from error
        if unfit:
            raise UsageError(
                f"{len(unfit)} of {len(tenants)} keys in {path} are invalid or weak, "
                f"the first is {list(tenants)[unfit[0]].hex()}",
                "leave them out, and enrol those nodes with new keys",
            )
        return Roster(tenants)
