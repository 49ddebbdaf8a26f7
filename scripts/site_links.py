# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: links from docs/ to files beside it become links to the repository.

The same Markdown is read in the repository and on the site, where only docs/ is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links of one page, changed where they leave docs/."""
    docs, here = Path(config["docs_dir"]), Path(page.file.abs_src_path).parent
    base = config["repo_url"] or ROOT.as_uri()

    def changed(link: re.Match[str]) -> str:
        target = (here / link["path"]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return link[0]
        return f"{base.rstrip('/')}/{target.relative_to(ROOT)}{link['anchor'] or ''}"

    return LINK.sub(changed, markdown)
