# SPDX-License-Identifier: Apache-2.0
"""Which tokens of requests the server accepts: those get most places, strangers few."""

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

    def __init__(self, ask: Callable[[str], bool]) -> None:
        """`ask`: whether the server accepts a token; called in threads."""
        self._ask = ask
        self._threads = ThreadPoolExecutor(_AT_ONCE, "sonde-token")
        self._until: dict[bool, OrderedDict[bytes, float]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        """By answer and digest of the token: until when it counts (monotonic)."""
        self._asked = 0

    async def accepts(self, token: str) -> bool:
        """Whether the server accepts the token, which may still not be one for reading."""
        digest = hashlib.blake2b(token.encode(), digest_size=32).digest()
        now = time.monotonic()
        for answer, known in self._until.items():
            if known.get(digest, 0.0) > now:
                return answer
        if self._asked >= MAX_ASKED:
            return digest in self._until[True]
        loop = asyncio.get_running_loop()
        self._asked += 1
        try:
            async with asyncio.timeout(ASK_S):
                found = await loop.run_in_executor(self._threads, self._ask, token)
        except TimeoutError:
            found = False
        finally:
            self._asked -= 1
        self._until[not found].pop(digest, None)
        known = self._until[found]
        known[digest] = time.monotonic() + (ACCEPTED_S if found else REFUSED_S)
        known.move_to_end(digest)
        if len(known) > MAX_TOKENS:
            known.popitem(last=False)
        return found
