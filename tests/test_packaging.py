"""The package around the code: links of its documents, the TRL that it needs, and an install without extras."""

import os
import re

import dash_trl
from tests.launching import ROOT
from tests.tiny import refused

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


def test_another_trl_than_was_run_is_refused(tmp_path, monkeypatch):
    for version, is_refused in (("1.16.3", False), ("1.17.0", True), ("1.15.0", True)):
        metadata = tmp_path / version / f"trl-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
        monkeypatch.syspath_prepend(metadata.parents[1])
        said = f"trl {version} is installed, but dash_trl .* needs trl.*<1.17.*pip install 'trl"
        refused(said if is_refused else "^$", dash_trl.__getattr__, "DASHConfig", error=ImportError)


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(["peft", "deepspeed", "vllm", "ray", "trackio"]))  # importing one raises
import torch, dash_trl, dash_trl.serve, dash_trl.evaluation, dash_trl.toy
from dash_trl.sampling import ScaledLayers
assert all(getattr(dash_trl, name) for name in dash_trl.__all__)
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
    python("-c", WITHOUT_EXTRAS, cwd=tmp_path, env=environment)
