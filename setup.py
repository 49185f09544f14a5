"""What setup.cfg cannot say: the folders that a wheel carries within `dash_trl`, and the description for PyPI."""

import re
from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    # A link to a page of the repository leads nowhere on PyPI: its text alone stays.
    long_description=re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", README),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["dash_trl*"]), "dash_trl.examples", "dash_trl.accelerate_configs"],
    package_dir={"dash_trl.examples": "examples", "dash_trl.accelerate_configs": "accelerate_configs"},
    package_data={
        "dash_trl": ["py.typed"],
        "dash_trl.examples": ["configs/*.yaml"],
        "dash_trl.accelerate_configs": ["*.yaml"],
    },
)
