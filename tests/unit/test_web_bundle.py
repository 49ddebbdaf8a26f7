# SPDX-License-Identifier: Apache-2.0
"""What a browser loads of the page, compressed, stays small."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parents[2] / "src/sonde/server/static/assets"
MAX_BYTES = 500_000


def test_the_page_is_small() -> None:
    sizes = {path.name: path.stat().st_size for path in ASSETS.glob("*.gz")}

    assert {name.rsplit(".", 2)[-2] for name in sizes} == {"js", "css"}
    assert sum(sizes.values()) <= MAX_BYTES
