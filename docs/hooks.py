"""What the site needs besides mkdocs: links that leave docs/, and examples in docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.[^)#\s]*)(?:#[^)\s]*)?\)")
"""A Markdown link to a relative path that goes up: its text and its path."""
DOCTEST = re.compile(r"(?:^|(?<=\n\n))>>> .+?(?=\n\n(?!>>> )|\Z)", re.DOTALL)
"""A session of Python in a docstring, up to the empty line after it."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Keep the text alone of links to files of the repository that the site does not have.

    On GitHub these links open the file.
    """
    folder = Path(page.file.abs_src_path).parent

    def shorten(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        outside = target.exists() and not target.is_relative_to(Path(config.docs_dir).resolve())
        return link[1] if outside else link[0]

    return LINK.sub(shorten, markdown)


class FenceDoctests(griffe.Extension):
    """Show sessions of Python in docstrings as code, also below other paragraphs."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put fences around the sessions in the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)


def fence(docstring: str) -> str:
    """Return a docstring with its sessions of Python in fenced blocks."""
    return DOCTEST.sub(lambda session: f"```pycon\n{session[0]}\n```", docstring)
