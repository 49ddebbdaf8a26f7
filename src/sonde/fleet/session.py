# SPDX-License-Identifier: Apache-2.0
"""Sessions: a node signs and seals once a week, and one symmetric key a party serves until then.

Public-key work bounds authenticated reports to some thousand a second and core. A session does it
once: the node seals a key of its own making to each aggregator (HPKE) and signs both; each of its
reports is then sealed and authenticated by AES-128-GCM under these keys. Neither aggregator has the
other's key, so neither can read the other's share nor invent a report of the node.

```
hello       task 32, session 16, node 32, opened_s u64, leader lp, helper lp, signature 64
sealed      AES-128-GCM(key of role, nonce = first 12 bytes of the report's id, share)
            bound to role, task, session, id, time
```
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

from sonde._native import Keyring, signed_by
from sonde.fleet import seal
from sonde.fleet.roster import Identity
from sonde.fleet.task import Task
from sonde.fleet.wire import SIGNATURE_BYTES, Malformed, Reader, lp

SESSION_S = 7 * 86_400  # as long as a TLS 1.3 ticket may live (RFC 8446, 4.6.1)
CLOCK_SKEW_S = 300
SESSION_BYTES = KEY_BYTES = 16
LIVE = 2  # sessions of a node at a time: the one in use, and the one after it
_HEAD = struct.Struct(">32s16s32sQ")


def _hello_binding(role: bytes, head: bytes) -> bytes:
    return b"sonde fleet session 1" + role + head


def binding(role: bytes, task: bytes) -> bytes:
    """What sealed shares are bound to, before the report's own session, id and time."""
    return b"sonde fleet session share 1" + role + task


@dataclass(frozen=True)
class Session:
    """A node's side. `hello` opens the session at both parties, through the leader."""

    id: bytes
    leader: AESGCM
    helper: AESGCM
    hello: bytes

    @staticmethod
    def open(task: Task, node: Identity, now_s: int) -> Session:
        keys = [os.urandom(KEY_BYTES) for _ in range(2)]
        id_ = os.urandom(SESSION_BYTES)
        head = _HEAD.pack(task.id, id_, node.public, now_s)
        parts = [
            lp(seal.seal(key, public, _hello_binding(role, head)))
            for key, public, role in zip(
                keys, (task.leader_key, task.helper_key), (seal.LEADER, seal.HELPER), strict=True
            )
        ]
        signed = b"".join((head, *parts))
        hello = signed + node.sign(signed)
        return Session(id_, AESGCM(keys[0]), AESGCM(keys[1]), hello)


class Sessions:
    """The sessions that one aggregator knows, the `LIVE` newest of each node."""

    def __init__(self, task: Task, role: bytes, hpke_private: str) -> None:
        self.task, self.role = task, role
        self._hpke_private = hpke_private
        self.held = Keyring()
        self._of_node: defaultdict[bytes, list[tuple[int, bytes]]] = defaultdict(list)

    def admit(self, hello: bytes, enrolled: Callable[[bytes], bool], now_s: float) -> str:
        """Opens a session; "" or the reason why not. A hello that comes twice changes nothing."""
        try:
            reader = Reader(hello)
            task, id_, node, opened_s = reader.unpack(_HEAD)
            sealed = reader.lp(), reader.lp()
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
        if not enrolled(node):  # told only to who has the key
            return "unknown node"
        own = sealed[0] if self.role == seal.LEADER else sealed[1]
        try:
            opener = seal.Opener(self._hpke_private)
            key = opener.open(own, _hello_binding(self.role, hello[: _HEAD.size]))
        except seal.Unreadable:
            return "malformed"
        if len(key) != KEY_BYTES:
            return "malformed"
        return self._hold(id_, (node, key, opened_s + SESSION_S))

    def _hold(self, id_: bytes, session: tuple[bytes, bytes, int]) -> str:
        """A hello that was recorded and comes again pushes no newer session out."""
        node, _, until_s = session
        known = self.held.get(id_)
        if known is not None:
            return "" if known == session else "replayed"
        live = self._of_node[node]
        if len(live) == LIVE:
            if until_s < live[0][0]:
                return "replayed"
            self.held.drop(live.pop(0)[1])
        insort(live, (until_s, id_), key=itemgetter(0))
        self.held.put(id_, *session)
        return ""
