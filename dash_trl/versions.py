"""Which versions of other packages this one was run with: what its installed metadata asks for."""

import warnings
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def bounds(package: str = "dash_trl", extra: str = "") -> dict[str, SpecifierSet]:
    """The versions that an installed package asks for, by name; with `extra`, those of that extra alone."""
    try:
        asked = [Requirement(one) for one in requires(package) or ()]
    except PackageNotFoundError:
        return {}
    without = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    if extra:
        added = [one for one in asked if one.marker is not None and one.marker.evaluate({"extra": extra})]
        asked = [one for one in added if one not in without]
    else:
        asked = without
    return {one.name: one.specifier for one in asked if not one.extras}


def fits(found: str, asked: SpecifierSet) -> bool:
    """Whether a version is one of those asked for. Its local part (+cpu, +cu130) does not count."""
    return asked.contains(found.partition("+")[0], prereleases=True)


def warn_of_trl() -> None:
    """Warn if the installed TRL is another than was run: private methods of its trainer are overridden here."""
    found, asked = installed("trl"), bounds().get("trl")
    if found is not None and asked is not None and not fits(found, asked):
        warnings.warn(
            f"trl {found} is installed, and dash_trl was run with trl{asked}: DASHTrainer overrides private methods of "
            f"GRPOTrainer, which another TRL may have changed. If something fails, run `pip install 'trl{asked}'`.",
            RuntimeWarning,
            stacklevel=3,
        )
