"""Compares the versions of installed packages with the version ranges in the metadata of dash_trl."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

# The metadata has lower bounds. Newer versions than these were not run; see docs/reference/compatibility.md.
BELOW = {"torch": "<2.16", "transformers": "<5.25", "accelerate": "<1.16", "datasets": "<5.3", "peft": "<0.22"}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def bounds() -> dict[str, SpecifierSet]:
    """Return the tested version range of each package that dash_trl or one of its extras requires."""
    # A source tree that is not installed has no metadata.
    asked = map(Requirement, installed("dash_trl") and requires("dash_trl") or ())
    return {one.name: one.specifier & SpecifierSet(BELOW.get(one.name, "")) for one in asked if not one.extras}


def refuse_other_trl() -> None:
    """Raise an `ImportError` if the installed version of TRL is outside the tested range.

    DASHTrainer overrides private methods of TRL's trainer, which may change with any minor version.
    """
    found = installed("trl")
    asked = bounds().get("trl")
    if found is not None and asked is not None and not asked.contains(found, prereleases=True):
        raise ImportError(
            f"trl {found} is installed, but dash_trl {installed('dash_trl')} needs trl{asked}: DASHTrainer overrides "
            f"private methods of GRPOTrainer, which may differ in every minor version. Run `pip install 'trl{asked}'`, "
            "or install a dash_trl for your TRL (docs/reference/compatibility.md)."
        )
