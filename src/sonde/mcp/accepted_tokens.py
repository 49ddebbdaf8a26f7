# SPDX-License-Identifier: Apache-2.0
"""Which tokens of requests the server accepts, and whose they are: those get most places, strangers
few."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

ACCEPTED_S, REFUSED_S = 60.0, 2.0
"""For so long the server is not asked again."""
ASK_S = 5.0
"""For the server to answer; later, the token counts as not accepted."""
MAX_TOKENS = 4_096
"""Of each kind, that are remembered."""
MAX_ASKED = 32
"""Tokens that the server is asked about, or is to be; beyond, only those that it accepted before
count: anybody can send random ones."""
_AT_ONCE = 4


class AcceptedTokens:
    """Asks the server, and remembers the answer for some time. For use in one event loop."""

    def __init__(self, ask: Callable[[str], str | None]) -> None:
        """`ask`: the tenant of a token that the server accepts, '' where that is not known; None
        where it does not accept it. Called in threads."""
        self._ask = ask
        self._threads = ThreadPoolExecutor(_AT_ONCE, "sonde-token")
        self._known: dict[bool, OrderedDict[bytes, tuple[float, str]]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        """By whether it is accepted and digest of the token: until when that counts (monotonic),
        and whose it is."""
        self._asked = 0

    async def party_of(self, token: str) -> str | None:
        """Whose token it is: the same for all tokens of a tenant, as far as that is known, and not
        ''. None where the server does not accept it. It may still not be one for reading."""
        digest = hashlib.blake2b(token.encode(), digest_size=32).digest()
        now = time.monotonic()
        for is_accepted, known in self._known.items():
            until, party = known.get(digest, (0.0, ""))
            if until > now:
                return party if is_accepted else None
        if self._asked >= MAX_ASKED:
            return self._known[True].get(digest, (0.0, None))[1]
        loop = asyncio.get_running_loop()
        self._asked += 1
        try:
            async with asyncio.timeout(ASK_S):
                tenant = await loop.run_in_executor(self._threads, self._ask, token)
        except TimeoutError:
            tenant = None
        finally:
            self._asked -= 1
        found = tenant is not None
        party = f"tenant {tenant}" if tenant else f"token {digest.hex()}"
        self._known[not found].pop(digest, None)
        known = self._known[found]
        known[digest] = time.monotonic() + (ACCEPTED_S if found else REFUSED_S), party
        known.move_to_end(digest)
        if len(known) > MAX_TOKENS:
            known.popitem(last=False)
        return party if found else None
