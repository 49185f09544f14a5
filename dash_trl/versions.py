"""Which versions of other packages dash_trl was run with, as its installed metadata says."""

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


def bounds(package: str = "dash_trl", extra: str = "") -> dict[str, SpecifierSet]:
    """Return the version ranges that an installed package requires of others.

    Args:
        package: name of the package.
        extra: return the requirements of this extra only. Empty: the requirements without extras.
    Returns:
        Name of each required package → its range; empty if `package` is not installed.
    """
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
    """Whether a version lies in a range. Its local part (+cpu, +cu130) does not count.

    Args:
        found: the version.
        asked: the range.
    """
    return asked.contains(found.partition("+")[0], prereleases=True)


def warn_of_trl() -> None:
    """Warn if the installed TRL is outside the tested range, because DASHTrainer overrides private methods of TRL's
    trainer.
    """
    found, asked = installed("trl"), bounds().get("trl")
    if found is not None and asked is not None and not fits(found, asked):
        warnings.warn(
            f"trl {found} is installed, but dash_trl was tested with trl{asked} only. DASHTrainer overrides private "
            f"methods of GRPOTrainer, which may differ here. If something fails, run `pip install 'trl{asked}'`.",
            RuntimeWarning,
            stacklevel=3,
        )
