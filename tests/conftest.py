"""Shared fixtures: a tiny model on disk, scripted rollouts, and TRL beside DASH."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no look-ups, no telemetry

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # the tests' models are so small that a second thread only waits


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a 2-layer Qwen2 of 32 dimensions and its tokenizer."""
    from tests.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
