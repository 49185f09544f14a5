"""Compares the versions of installed packages with the version ranges in the metadata of dash_trl."""

import warnings
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def installed(package: str) -> str | None:
    """Return the version of an installed package; `None` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def bounds() -> dict[str, SpecifierSet]:
    """Return the tested version range of each package that dash_trl or one of its extras requires."""
    try:
        asked = map(Requirement, requires("dash_trl") or ())
        return {one.name: one.specifier for one in asked if not one.extras}
    except PackageNotFoundError:  # a source tree that is not installed
        return {}


def fits(found: str, asked: SpecifierSet) -> bool:
    """Whether a version lies in a range. The version's local part (+cpu, +cu130) is ignored.

    Args:
        found: the version.
        asked: the range.
    """
    return asked.contains(found.partition("+")[0], prereleases=True)


def warn_of_trl() -> None:
    """Warn if the installed version of TRL is outside the tested range.

    DASHTrainer overrides private methods of TRL's trainer, which may change with any version.
    """
    found, asked = installed("trl"), bounds().get("trl")
    if found is not None and asked is not None and not fits(found, asked):
        warnings.warn(
            f"trl {found} is installed, but dash_trl was tested with trl{asked} only. DASHTrainer overrides private "
            f"methods of GRPOTrainer, which may differ here. If something fails, run `pip install 'trl{asked}'`.",
            RuntimeWarning,
            stacklevel=3,
        )
