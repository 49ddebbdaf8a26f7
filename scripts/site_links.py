# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: links from docs/ to files outside of it become links to the repository.

The same Markdown is read in the repository and on the site, which has only docs/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The Markdown of a page, with its links changed where they lead out of docs/."""
    docs, here = Path(config["docs_dir"]), Path(page.file.abs_src_path).parent
    base = config["repo_url"] or ROOT.as_uri()

    def changed(link: re.Match[str]) -> str:
        target = (here / link["path"]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return link[0]
        return f"{base.rstrip('/')}/{target.relative_to(ROOT)}{link['anchor'] or ''}"

    return LINK.sub(changed, markdown)
