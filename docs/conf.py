"""Sphinx builds the documentation site with these settings: `make docs`.

The pages are Markdown that GitHub shows, too: links are relative, and a heading is an anchor by GitHub's rule.
"""

import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the build needs no network

import dash_trl  # noqa: E402

project = "dash_trl"
copyright = "the authors of dash_trl"
version = release = dash_trl.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "extension"]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!dash_trl\b).*"),  # other projects' names: their indexes are not at hand offline
    ("py:class", r"dash_trl\.\w+\.\w+\.\w+"),  # types of internal modules, which signatures name
]
# A folder without a page yet; Sphinx 9 gives this warning no type that suppress_warnings could name.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(lambda one: getattr(one, "subtype", "") != "empty_glob")

smartquotes = False  # messages and flags stay as they are typed

myst_heading_anchors = 4
nb_execution_mode = "off"  # a notebook shows the outputs that it is saved with

autodoc_inherit_docstrings = False  # those of other projects are theirs
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = f"dash_trl {release}"
html_show_sphinx = False
html_copy_source = False
