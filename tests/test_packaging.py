"""The package around the code: public names, honest requirements, a Makefile that explains itself."""

import configparser
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dash_trl

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**/*.md")


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


def test_constraints_satisfy_the_requirements():
    """And TRL is held to the minor version whose private methods we override."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}
    assert pins["torch"] == "2.13.0"
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    needed = [Requirement(line) for text in lists for line in text.splitlines() if line]
    pinned = [one for one in needed if canonicalize_name(one.name) in pins]
    assert {"torch", "trl", "transformers", "accelerate", "math-verify"} <= {one.name for one in pinned}
    for requirement in pinned:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    (trl,) = [one.specifier for one in pinned if one.name == "trl" and not one.extras]
    assert [trl.contains(version) for version in ("1.15.0", "1.16.0", "1.16.3", "1.17.0")] == [False, True, True, False]


def test_another_trl_than_was_run_is_refused(tmp_path, monkeypatch):
    for version, refused in (("1.16.3", False), ("1.17.0", True), ("1.15.0", True)):
        metadata = tmp_path / version / f"trl-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
        monkeypatch.syspath_prepend(metadata.parents[1])
        said = f"trl {version} is installed, but dash_trl .* needs trl.*<1.17.*pip install 'trl"
        with pytest.raises(ImportError, match=said) if refused else nullcontext():
            dash_trl.__getattr__("DASHConfig")


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(["peft", "deepspeed", "vllm", "ray", "openai", "trackio"]))  # importing one raises
import torch, dash_trl, dash_trl.serve, dash_trl.evaluation, dash_trl.toy
from dash_trl.sampling import ScaledLayers
for name in dash_trl.__all__ + dash_trl.evaluation.__all__ + dir(dash_trl.toy):
    assert any(getattr(room, name, None) for room in (dash_trl, dash_trl.evaluation, dash_trl.toy)), name
with ScaledLayers(layer := torch.nn.Sequential(torch.nn.Linear(1, 1))).outputs():
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
