"""Configuration of the documentation site: `make site` builds it with Sphinx, furo and MyST."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext")]

from serverless_gpu.version import __version__  # noqa: E402 - Sphinx runs this file outside of a package

project = "serverless-gpu"
author = "the serverless-gpu authors"
version = release = __version__
language = "en"
smartquotes = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "product_reference",
]
root_doc = "index"

myst_heading_anchors = 4

autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"serverless-gpu {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["../../versions.js", "versions_menu.js"]  # the first one stands beside the versions
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
