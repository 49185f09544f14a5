"""Families of models with windows, with recurrent or convolutional layers, or with a vision tower, trained on text."""

from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from trl import GRPOTrainer

from dash_trl import DASHTrainer
from dash_trl.process_rewards import AnswerLogProbValue
from dash_trl.serve import vllm_servers
from tests.models import FAMILIES, MULTIMODAL, config_of, fla
from tests.prefix_values import check_values, random_requests
from tests.tiny import (
    ScriptedRollouts,
    assert_same_update,
    conversations,
    load,
    on_varlen,
    parameters,
    run,
    save_tiny_model,
    with_flash_stand_in,
)

PROBLEMS = Dataset.from_dict({"prompt": [f"{'1 + ' * (i % 5)}{i} = " for i in range(64)]})  # of different lengths


def with_processor(directory: Path) -> str:
    """Saves a tiny model with the processor of Qwen3.5 in place of its tokenizer."""
    pytest.importorskip("torchvision")
    folder = save_tiny_model(directory, config=config_of("qwen3_5"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"], special_tokens=True)
    parts = Qwen2VLImageProcessor(), tokenizer, Qwen3VLVideoProcessor()
    template = "{% for one in messages %}{{ one.content[0].text }}{% endfor %}"  # contents are lists of parts
    Qwen3VLProcessor(*parts, chat_template=template).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [*FAMILIES, *MULTIMODAL])
def test_the_update_is_trls(name, tmp_path):
    """In packed passes, in which the rows of a group share their prompt. Texts do not change a vision tower."""
    model = save_tiny_model(tmp_path / "model", config=config_of(name))
    settings = {"router_aux_loss_coef": 0.0} if name in ("qwen3_next", "kimi_linear") else {}
    settings |= {
        "learning_rate": 0.1,
        "beta": 0.04,
        "gradient_checkpointing": True,
        "dataset": PROBLEMS,
        "constant": 0.0,
    }
    longest = 24
    if name == "qwen3_5_text":  # prompts and completions of several chunks of 64 tokens, so in several batches
        longest = 200
        settings["shuffle_dataset"] = False
        settings["dataset"] = Dataset.from_dict(
            {"prompt": [f"{'1 + ' * (100 * (i % 3 > 0))}{i} = " for i in range(64)]}
        )
    trl = run(GRPOTrainer, model, tmp_path, rollouts=ScriptedRollouts(longest=longest), **settings)
    settings |= {"rollouts": ScriptedRollouts(longest=longest), "gradient_filter_threshold": None}
    settings["max_tokens_per_microbatch"] = 9000  # all groups in one pass
    dash = run(DASHTrainer, model, tmp_path, **settings)
    figures = dash.state.log_history[0]
    is_packed = dash.model.config.get_text_config()._attn_implementation == "sdpa"
    assert is_packed or name == "gemma2"  # SDPA leaves out its softcap, so transformers 5.24 takes eager attention
    assert figures["packing/padding_free"] == is_packed == (figures["packing/shared_tokens"] > 0)
    start = parameters(model)
    end = parameters(dash)
    assert_same_update(start, trl, end, tolerance=1e-4)
    towers = [one for one in start if "visual" in one or "vision" in one]
    assert bool(towers) == (name in MULTIMODAL) and all(torch.equal(start[one], end[one]) for one in towers)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
def test_kernels_of_a_gpu(name, tmp_path, monkeypatch):
    """Windows and states with FlashAttention, SDPA's varlen kernel, and a delta rule with FLA's signature."""
    model = save_tiny_model(tmp_path / "model", config=config_of(name))
    states = []
    noting = lambda *args, **kwargs: fla(states, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", noting)
    trl = run(GRPOTrainer, model, tmp_path, learning_rate=0.1)
    states.clear()
    flash = run(DASHTrainer, model, tmp_path, learning_rate=0.1, loaded=with_flash_stand_in(model))
    with on_varlen(torch.float32):
        sdpa = run(DASHTrainer, model, tmp_path, learning_rate=0.1)
    for one in (flash, sdpa):
        assert one.state.log_history[0]["packing/shared_tokens"] > 0
        assert_same_update(model, trl, one, tolerance=1e-4)
    assert any(one is not None for one in states) == (name == "qwen3_5_text")


def test_values_of_prefixes_in_tree_passes(tmp_path, caplog):
    """V(prefix) of models with windows and with states is the one of each prefix by itself."""
    estimator = AnswerLogProbValue(" = ")
    for name in ("gemma3_text", "qwen3_5_text", "lfm2", "falcon_h1"):
        folder = save_tiny_model(tmp_path / name, config=config_of(name))
        model = load(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        requests = random_requests(2)
        values = estimator.score(requests, model, tokenizer)
        assert "cannot do tree passes" not in caplog.text, name
        check_values(values, model, tokenizer, requests, near=1e-4)


@pytest.mark.usefixtures("python")  # it starts a server, so `make test` leaves it out
@pytest.mark.xdist_group("vllm")
def test_a_multimodal_model_is_served(tmp_path, caplog):
    """Qwen3.5 with its processor: an adapter that is sent alone, then the model; vLLM's kernels for a CPU take bf16."""
    folder = with_processor(tmp_path / "model")
    more = {"processing_class": AutoProcessor.from_pretrained(folder)}
    more["train_dataset"] = conversations(PROBLEMS)
    options = ["--dtype", "bfloat16", "--max-model-len", "256", "--enable-lora", "--max-lora-rank", "8"]
    with vllm_servers(folder, options=options) as urls:
        train = partial(run, DASHTrainer, folder, vllm_server_urls=urls, max_steps=2, constant=0.0, more=more)
        adapted = train(tmp_path / "adapted", peft_config=LoraConfig(r=8, target_modules="all-linear"))
        whole = train(tmp_path / "whole")
    assert "merged" not in caplog.text
    for one in (whole, adapted):
        logs = one.state.log_history[:2]
        assert all(log["sampling/sampling_logp_difference/mean"] < 0.01 for log in logs)
        one.save_model(str(tmp_path / "saved"))
        assert type(AutoProcessor.from_pretrained(tmp_path / "saved")).__name__ == "Qwen3VLProcessor"
    assert not any("visual" in name for name, _ in adapted.model.named_parameters() if "lora" in name)


def test_only_the_language_model_of_a_checkpoint(tmp_path):
    """`AutoModelForCausalLM` loads it; its checkpoint's processor is not used."""
    folder = with_processor(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = run(DASHTrainer, folder, tmp_path, loaded=model, more={"processing_class": None})
    assert type(trainer.model).__name__ == "Qwen3_5ForCausalLM"
    assert trainer.state.log_history[0]["packing/padding_free"] == 1
