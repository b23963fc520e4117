"""The page within a notebook's output: ``<iframe srcdoc>``, which VS Code, Lab and Colab show."""

from __future__ import annotations

from html import escape

HEIGHT = 640
MOST = 2_000_000
"""The most characters that a page in a notebook may have: it is saved with every output."""


def frame(page: str, title: str) -> str:
    """A page in a frame of its own, that can run scripts and reach nothing outside it.

    >>> frame('<p class="a">', "x")
    '<iframe srcdoc="&lt;p class=&quot;a&quot;&gt;" ... title="x" ...></iframe>'
    """
    style = "width:100%;border:1px solid rgba(128,128,128,.35);border-radius:6px"
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts allow-downloads" '
        f'title="{escape(title)}" width="100%" height="{HEIGHT}" style="{style}"></iframe>'
    )


def words(text: str) -> str:
    """A sentence in place of a page."""
    return f"<p>{escape(text)}</p>"
