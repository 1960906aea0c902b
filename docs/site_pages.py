"""A hook of mkdocs: pages that lie outside of docs/ join the site, and links between all pages follow them."""

import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deployment.md",
    "specahead/models/README.md": "bundled-models.md",
}
"""Paths within the repository, and the paths of their pages within the site."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of OUTSIDE."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=posixpath.abspath(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite relative links and images, which name files of the repository, to paths within the site."""
    sources = {inside: source for source, inside in OUTSIDE.items()}
    here = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    start = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        named = posixpath.normpath(posixpath.join(here, path))
        target = OUTSIDE.get(named, named.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, start or '.')}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", rewritten, markdown)
