"""Checks the wheel and the sdist of `make release` before an upload: required files, foreign files and links.

python tools/release.py dist
"""

import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

# Files that both archives must contain, and folders that they must not contain.
CARRIED = (
    *("py.typed", "__main__.py", "docs/howto/vllm.md"),
    *("examples/train_math.py", "examples/sft.py", "accelerate_configs/zero3.yaml"),
)
FOREIGN = ("tests/", "benchmarks/", "tools/", "outputs/")


def faults(names: Iterable[str], wheel: bool) -> list[str]:
    """Return the faults of an archive's list of files.

    Args:
        names: names of the files; for an sdist, without the top folder.
        wheel: True = wheel, False = sdist.
    """
    found = set(names)
    carried = [f"dash_trl/{name}" if wheel or name in CARRIED[:2] else name for name in CARRIED]
    missing = [f"{name} is missing" for name in carried if name not in found]
    if not any(Path(name).name == "LICENSE" for name in found):
        missing.append("LICENSE is missing")
    return missing + [f"{name} does not belong into it" for name in sorted(found) if name.startswith(FOREIGN)]


def names_of(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as file:
        return [one.name.partition("/")[2] for one in file.getmembers() if one.isfile()]


def description_faults(metadata: str) -> list[str]:
    """Return the faults of the description on PyPI: links that are no https:// URLs, which lead nowhere there.

    Args:
        metadata: text of a wheel's METADATA, which ends with the README.
    """
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    if not links:
        return ["its description is missing"]
    return [f"{link} leads nowhere on PyPI" for link in links if not link.startswith("https://")]


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return file.read(name).decode()


def main(folder: str) -> int:
    wheels = [*Path(folder).glob("*.whl")]
    archives = [*wheels, *Path(folder).glob("*.tar.gz")]
    wrong = [f"{one.name}: {fault}" for one in archives for fault in faults(names_of(one), one.suffix == ".whl")]
    wrong += [f"{one.name}: {fault}" for one in wheels for fault in description_faults(metadata_of(one))]
    if len(archives) != 2:
        wrong.append(f"{folder} has {len(archives)} archives, not one wheel and one sdist")
    print("\n".join(wrong or [f"{one.name}: fit" for one in archives]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
