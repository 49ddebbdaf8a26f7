# SPDX-License-Identifier: Apache-2.0
"""Text statistics in plain Python on the main thread."""

import re

from kit import Kit, work

WORD = re.compile(r"[a-z]+")


def count_words(text: str) -> int:
    seen: dict[str, int] = {}
    for word in WORD.findall(text.lower()):
        seen[word] = seen.get(word, 0) + 1
    return len(seen)


def main(kit: Kit) -> None:
    text = " ".join(f"Word{kit.random.choice('abcdef')} item" for _ in range(4000))
    kit.cause("host_code", count_words)
    for _ in kit.steps():
        work(20_000)
        if kit.on:
            count_words(text)


if __name__ == "__main__":
    main(Kit())
