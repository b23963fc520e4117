"""The site: ``make docs`` builds it into out/docs, from what is here and without the network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from sphinx.ext.autodoc.mock import mock  # noqa: E402

import gradtrace  # noqa: E402

project = "gradtrace"
author = "the authors of gradtrace"
copyright = "the authors of gradtrace, Apache-2.0"
version = release = gradtrace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_mock_imports = ["lightning", "pytorch_lightning", "transformers"]  # slow, and optional
MOCKED = mock(autodoc_mock_imports)  # until the end: autodoc's search for sources imports, too
MOCKED.__enter__()
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = f"gradtrace {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#2b59c3",
        "color-brand-content": "#2b59c3",
        "color-brand-visited": "#2b59c3",
        "color-api-name": "#2b59c3",
        "color-api-pre-name": "#5a6470",
        "color-code-background": "#f5f6f8",
    },
    "dark_css_variables": {
        "color-brand-primary": "#8fb0ff",
        "color-brand-content": "#8fb0ff",
        "color-brand-visited": "#8fb0ff",
        "color-api-name": "#8fb0ff",
        "color-api-pre-name": "#a3acb6",
    },
}

LITERAL = re.compile(r"(``.*?``)")


def escaped(line: str) -> str:
    r"""``|weight|`` in a docstring is an absolute value, and something else to reStructuredText.

    >>> escaped("greatest |weight| of ``|w|``")
    'greatest \\|weight\\| of ``|w|``'
    """
    parts = LITERAL.split(line)
    parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
    return "".join(parts)


def plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are simple text; what they do not mean is taken out of the way."""
    code = False
    for n, line in enumerate(lines):
        code = code and (not line.strip() or line.startswith(" "))
        if line.startswith(">>>"):
            code = True
        elif not line.strip():
            code = False
        if not code:
            lines[n] = escaped(line)


SOURCES = "\n\n---\n\nThe chapter, the slides, the lecture ...: [sources](../sources.md).\n"
EXPERIMENTS = "\n\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def completed(app: Any, docname: str, source: list[str]) -> None:
    """The command line's page says what ``--help`` says, at the time the site is built; pages
    of experiments, which they write themselves, say where their sources are cited.
    """
    if docname == "commands":
        from commands import reference

        source[0] = source[0].replace("<!-- commands -->", reference())
    if docname.startswith("experiments/"):
        source[0] += SOURCES
    if docname == "experiments/index":
        source[0] += EXPERIMENTS


def inlined(app: Any, tree: Any, docname: str) -> None:
    """Pictures of our own become part of the page, so that they follow its light and dark."""
    from docutils import nodes

    for image in list(tree.findall(nodes.image)):
        path = HERE / image["uri"]
        if path.parent.name == "pictures" and path.suffix == ".svg":
            drawn = f'<div class="picture">{path.read_text()}</div>'
            image.parent.replace(image, nodes.raw("", drawn, format="html"))


def setup(app: Any) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", plain)
    app.connect("source-read", completed)
    app.connect("doctree-resolved", inlined)
