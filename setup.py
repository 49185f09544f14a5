"""What setup.cfg cannot say: the folders that a wheel carries within `dash_trl`, for its command."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dash_trl*"]), "dash_trl.examples", "dash_trl.accelerate_configs"],
    package_dir={"dash_trl.examples": "examples", "dash_trl.accelerate_configs": "accelerate_configs"},
    package_data={
        "dash_trl": ["py.typed"],
        "dash_trl.examples": ["configs/*.yaml"],
        "dash_trl.accelerate_configs": ["*.yaml"],
    },
)
