"""No pass of DASH computes the logits of all its tokens at once: forward, backward and V(prefix) work in chunks."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trl.kernels import chunked_logprob

from dash_trl import DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import AnswerLogProbValue
from tests.tiny import pad, run, save_tiny_model

POSITIONS, VOCABULARY = 32, 3001  # of a chunk; of the model, so large that nothing else comes near


class TooLarge(BaseException):
    """No `Exception`: a layout whose trial raises one is not used, and another one is."""


class Limited(TorchDispatchMode):
    """Raises `TooLarge` if a tensor has more elements than a chunk's positions × vocabulary."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.numel() > POSITIONS * VOCABULARY:
                raise TooLarge(f"{function} made {tuple(one.shape)}")
        return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("large"), vocab_size=VOCABULARY, hidden_size=16)


@pytest.fixture
def small_chunks(monkeypatch):
    """A chunk of TRL's is of 4,096 positions and 32,768 tokens of the vocabulary, for large models."""
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", POSITIONS)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", VOCABULARY)


@pytest.mark.parametrize("way", ["padded", "packed, and values"])
def test_no_tensor_is_as_large_as_the_logits(way, model, tmp_path, small_chunks):
    """Old and reference log-probs, the loss and its backward pass, and V(prefix)."""
    estimator = AnswerLogProbValue(" = ", max_tokens_per_pass=32 * POSITIONS)  # 32 per scored token
    episodes = {"markers": lambda text: range(0, len(text), 3), "min_episode_tokens": 2, "max_episode_tokens": 8}
    settings = {"num_iterations": 2, "max_steps": 2, "beta": 0.04, "max_tokens_per_microbatch": 256}
    ways = {
        "padded": {"prepare": pad},
        "packed, and values": {"callbacks": [ProcessRewardCallback(estimator, **episodes)]},
    }
    with Limited():
        assert run(DASHTrainer, model, tmp_path, **settings, **ways[way]).state.global_step == 2
