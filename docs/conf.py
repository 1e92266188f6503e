"""Configuration of the documentation site: `make site` builds it with Sphinx, furo and MyST."""

from __future__ import annotations

import os
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
exclude_patterns = ["_build", "decisions/0000-*"]
root_doc = "index"
nitpicky = False

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"serverless-gpu {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["../versions.js", "versions_menu.js"]
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 10
os.environ["NO_COLOR"] = "1"
