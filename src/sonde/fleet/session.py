# SPDX-License-Identifier: Apache-2.0
"""Sessions of nodes: public-key operations once a week, symmetric keys for the reports in between.

Public-key operations limit authenticated reports to some thousand per second and core. A session
needs them once: the node creates a key for each aggregator, seals it (HPKE) and signs both; each of
its reports is then encrypted and authenticated with AES-128-GCM under these keys. Neither
aggregator has the other's key, so neither can read the other's share or forge a report of the node.

```
hello       task 32, session 16, node 32, opened_s u64, leader lp, helper lp, signature 64
            leader, helper: the key of 16 bytes for that party, sealed by HPKE
sealed      AES-128-GCM(key of role, nonce = first 12 bytes of the report's id, share)
            bound to role, task, session, id, time
```

Lengths are in bytes, `lp` is a length-prefixed field. Only reports without proofs (`unproved`) use
sessions.
"""

from __future__ import annotations

import os
import struct
from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sonde._fleet import Keyring, signed_by
from sonde.fleet import hpke
from sonde.fleet.roster import Identity
from sonde.fleet.task import Task
from sonde.fleet.wire import SIGNATURE_BYTES, Malformed, Reader, length_prefixed

SESSION_S = 7 * 86_400  # as long as a TLS 1.3 ticket may live (RFC 8446, 4.6.1)
CLOCK_SKEW_S = 300  # how far a node's clock may be ahead of the aggregator's
SESSION_ID_BYTES = KEY_BYTES = 16
MAX_SESSIONS_PER_NODE = 2  # sessions of a node at a time: the one in use, and the one after it
_HEAD = struct.Struct(">32s16s32sQ")


def _hello_binding(role: bytes, head: bytes) -> bytes:
    return b"sonde fleet session 1" + role + head


def binding(role: bytes, task: bytes) -> bytes:
    """The prefix of the associated data of sealed shares; the report's session, id and time
    follow.
    """
    return b"sonde fleet session share 1" + role + task


@dataclass(frozen=True)
class Session:
    """The node's side of a session: its keys with both aggregators. `hello` opens it there; both
    get the same one.
    """

    id: bytes
    leader: AESGCM
    helper: AESGCM
    hello: bytes

    @staticmethod
    def open(task: Task, node: Identity, now_s: int) -> Session:
        keys = [os.urandom(KEY_BYTES) for _ in range(2)]
        id_ = os.urandom(SESSION_ID_BYTES)
        head = _HEAD.pack(task.id, id_, node.public, now_s)
        parts = [
            length_prefixed(hpke.seal(key, public, _hello_binding(role, head)))
            for key, public, role in zip(
                keys, (task.leader_key, task.helper_key), (hpke.LEADER, hpke.HELPER), strict=True
            )
        ]
        signed = b"".join((head, *parts))
        hello = signed + node.sign(signed)
        return Session(id_, AESGCM(keys[0]), AESGCM(keys[1]), hello)


class Sessions:
    """The sessions of one aggregator: the newest `MAX_SESSIONS_PER_NODE` of each node."""

    def __init__(self, task: Task, role: bytes, hpke_private: str) -> None:
        self.task, self.role = task, role
        self._hpke_private = hpke_private
        self.keyring = Keyring()
        # Per node: (end, id) of its sessions, the oldest first.
        self._of_node: defaultdict[bytes, list[tuple[int, bytes]]] = defaultdict(list)

    def admit(self, hello: bytes, enrolled: Callable[[bytes], bool], now_s: float) -> str:
        """Opens a session. Returns "" or the reason of refusal. A repeated hello changes
        nothing.
        """
        try:
            reader = Reader(hello)
            task, id_, node, opened_s = reader.unpack(_HEAD)
            sealed = reader.length_prefixed(), reader.length_prefixed()
            signature = reader.take(SIGNATURE_BYTES)
            reader.end()
        except Malformed:
            return "malformed"
        if task != self.task.id:
            return "unknown task"
        if opened_s > now_s + CLOCK_SKEW_S or now_s > opened_s + SESSION_S:
            return "late"
        if not signed_by(node, signature, hello[:-SIGNATURE_BYTES]):
            return "forged"
        if not enrolled(node):  # checked last: only the holder of the node's key learns it
            return "unknown node"
        own_key = sealed[0] if self.role == hpke.LEADER else sealed[1]
        try:
            opener = hpke.Opener(self._hpke_private)
            key = opener.open(own_key, _hello_binding(self.role, hello[: _HEAD.size]))
        except hpke.DecryptionError:
            return "malformed"
        if len(key) != KEY_BYTES:
            return "malformed"
        return self._store(id_, (node, key, opened_s + SESSION_S))

    def _store(self, id_: bytes, session: tuple[bytes, bytes, int]) -> str:
        """Stores a session: its node, its key and its end. Returns "" or the reason of refusal: a
        replayed hello does not evict a newer session.
        """
        node, _, until_s = session
        stored = self.keyring.get(id_)
        if stored is not None:
            return "" if stored == session else "replayed"
        live = self._of_node[node]
        if len(live) == MAX_SESSIONS_PER_NODE:
            if until_s < live[0][0]:
                return "replayed"
            self.keyring.drop(live.pop(0)[1])
        insort(live, (until_s, id_), key=itemgetter(0))
        self.keyring.put(id_, *session)
        return ""
