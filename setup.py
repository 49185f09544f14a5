"""What setup.cfg cannot say: the folders that a wheel carries within `dash_trl`, and the description for PyPI."""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
# A wheel carries these folders within the package; an editable installation has them beside it, and is one path for
# Python to search. Otherwise setuptools would install an import hook, which any folder named `dash_trl` hides, such as
# a clone in the working directory.
EDITABLE = "editable_wheel" in sys.argv
PAGES = ("docs/concepts", "docs/howto", "docs/reference")  # messages name pages
FOLDERS = () if EDITABLE else ("examples", "accelerate_configs", *PAGES)
CARRIED = {f"dash_trl.{folder.replace('/', '.')}": folder for folder in FOLDERS}

setup(
    # A link to a page of the repository leads nowhere on PyPI: its text alone stays.
    long_description=re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", README),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["dash_trl*"]), *CARRIED],
    package_dir={"": "."} if EDITABLE else CARRIED,
    package_data={
        "dash_trl": ["py.typed"],
        "dash_trl.examples": ["configs/*.yaml"],
        "dash_trl.accelerate_configs": ["*.yaml"],
        "": ["*.md"],
    },
)
