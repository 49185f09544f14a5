"""One test per rule: a user's mistake is a ValueError with value, reason and remedy, as early as possible."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.checks import check_prompt_lengths
from dash_trl.sampling.weight_sync import FileWeights
from tests.tiny import ScriptedReward, prompts, run


def config(tmp_path, **settings) -> DASHConfig:
    defaults = {"use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4, "max_completion_length": 8}
    return DASHConfig(str(tmp_path), **{**defaults, **settings})


def build(tmp_path, model, *, dataset=None, settings=None, **kwargs) -> DASHTrainer:
    return DASHTrainer(
        model=model,
        reward_funcs=ScriptedReward(),
        args=config(tmp_path, **(settings or {})),
        train_dataset=prompts(16) if dataset is None else dataset,
        **kwargs,
    )


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_threshold(tmp_path, value):
    with pytest.raises(ValueError, match=rf"gradient_filter_threshold={value} .* Use 0.1"):
        config(tmp_path, gradient_filter_threshold=value)


def test_denominator(tmp_path):
    with pytest.raises(ValueError, match="filter_denominator='survivors' is unknown. Use 'all'"):
        config(tmp_path, filter_denominator="survivors")


def test_token_budget(tmp_path):
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=0 leaves no room"):
        config(tmp_path, max_tokens_per_microbatch=0)


def test_batch_that_splits_groups(tmp_path):
    with pytest.raises(ValueError, match=r"generation_batch_size \(6\) .* multiple of num_generations=4"):
        config(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2)


def test_plain_grpo_config(tmp_path, tiny_model, unloadable):
    from trl import GRPOConfig

    with pytest.raises(ValueError, match="GRPOConfig, which lacks DASH's options"):
        DASHTrainer(tiny_model, ScriptedReward(), GRPOConfig(str(tmp_path), bf16=False, use_cpu=True), prompts(8))


def test_dataset_without_prompt(tmp_path, tiny_model, unloadable):
    dataset = Dataset.from_dict({"question": ["1 + 1"], "solution": ["2"]})
    with pytest.raises(ValueError, match=r"columns \['question', 'solution'\], but no 'prompt'"):
        build(tmp_path, tiny_model, dataset=dataset)


def test_empty_dataset(tmp_path, tiny_model, unloadable):
    with pytest.raises(ValueError, match="train_dataset is empty"):
        build(tmp_path, tiny_model, dataset=prompts(0))


def test_empty_evaluation_split(tmp_path, tiny_model, unloadable):
    with pytest.raises(ValueError, match=r"eval_dataset\['easy'\] is empty"):
        build(tmp_path, tiny_model, eval_dataset={"easy": prompts(0)})


def test_fewer_prompts_than_a_batch(tmp_path, tiny_model, unloadable):
    with pytest.raises(ValueError, match="3 prompts, but one generation batch takes 4"):
        build(tmp_path, tiny_model, dataset=prompts(3), settings={"gradient_accumulation_steps": 2})


def test_images(tmp_path, tiny_model, unloadable):
    with pytest.raises(ValueError, match="column 'image', but DASHTrainer trains text"):
        build(tmp_path, tiny_model, dataset=Dataset.from_dict({"prompt": ["a"] * 16, "image": ["b"] * 16}))


@pytest.mark.parametrize("model", ["./no/such/directory", "/nowhere", "nobody/no-such-model"])
def test_model_that_does_not_exist(tmp_path, model, unloadable):
    with pytest.raises(ValueError, match=f"model='{model}' cannot be loaded"):
        build(tmp_path, model)


def test_vision_language_model(tmp_path, unloadable):
    from transformers import Qwen2VLConfig

    Qwen2VLConfig().save_pretrained(tmp_path / "vlm")
    with pytest.raises(ValueError, match=r"vision-language model \(qwen2_vl\)"):
        build(tmp_path, str(tmp_path / "vlm"))


def test_processor(tmp_path, tiny_model, unloadable):
    from transformers import ProcessorMixin

    class Processor(ProcessorMixin):
        def __init__(self):
            pass

    with pytest.raises(ValueError, match="Processor, a multimodal processor"):
        build(tmp_path, tiny_model, processing_class=Processor())


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_tools_and_environments(tmp_path, tiny_model, name, unloadable):
    with pytest.raises(ValueError, match=f"{name} is set, but DASHTrainer trains single-turn"):
        build(tmp_path, tiny_model, **{name: [print]})


def test_vllm_that_is_not_installed(tmp_path, tiny_model, unloadable, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "vllm" else find_spec(name, *a))
    with pytest.raises(
        ValueError, match=r"use_vllm=True with vllm_mode='colocate', but .*pip install dash_trl\[vllm\]"
    ):
        build(tmp_path, tiny_model, settings={"use_vllm": True})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_server_urls": []}, "vllm_server_urls is empty"),
        ({"vllm_server_urls": ["localhost:8000"]}, "'localhost:8000', which is not the address of a server"),
        (
            {"vllm_server_urls": ["http://localhost:8000"], "vllm_server_base_url": "http://localhost:8001"},
            "both name servers",
        ),
        ({"vllm_weight_sync": "pickle"}, "vllm_weight_sync='pickle' is unknown. Use 'file' or 'nccl'"),
        ({"vllm_request_timeout": 0.0}, "vllm_request_timeout=0.0 gives no server time to answer"),
    ],
)
def test_impossible_servers(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        DASHConfig(str(tmp_path), use_cpu=True, **settings)


def test_named_servers_are_used(tmp_path):
    args = DASHConfig(str(tmp_path), use_cpu=True, bf16=False, vllm_server_urls=["http://localhost:8000"])
    assert args.use_vllm and args.vllm_mode == "server"


def test_a_server_that_is_not_there(tmp_path, tiny_model):
    """vLLM need not be installed here; the server has to answer."""
    args = config(tmp_path, vllm_server_urls=["http://127.0.0.1:9"], vllm_server_timeout=0.5)
    other_run = FileWeights(tmp_path / "_vllm_weights", torch.float32)
    weights = other_run.write([], 1)
    for _ in range(2):  # a notebook's cell, run once more
        with pytest.raises(RuntimeError, match=r"1 of 1 vLLM servers did not answer within vllm_server_timeout=0.5 s"):
            DASHTrainer(tiny_model, ScriptedReward(), args, prompts(16))
    assert Path(weights.path).is_dir()


def test_prompt_longer_than_the_context(tmp_path, tiny_model):
    long = Dataset.from_dict({"prompt": ["1 + 1 = "] * 15 + ["x" * 3000]})
    with pytest.raises(ValueError, match="tokens, but the model's context is 512"):
        build(tmp_path, tiny_model, dataset=long, settings={"bf16": False})


def test_prompt_longer_than_the_context_in_a_stream(tmp_path, tiny_model):
    def stream():
        yield from ({"prompt": "x" * 3000} for _ in range(64))

    with pytest.raises(ValueError, match="tokens, but the model's context is 512"):
        run(DASHTrainer, tiny_model, tmp_path, dataset=IterableDataset.from_generator(stream))


def test_completion_that_leaves_the_context_is_a_warning(caplog):
    with caplog.at_level("WARNING"):
        check_prompt_lengths([500], 512, 100)
    assert "exceed the model's context of 512" in caplog.text


def test_wrong_number_of_rewards(tmp_path, tiny_model):
    def short(completion_ids, **kwargs):
        return [1.0]

    with pytest.raises(ValueError, match="'short' returned 1 rewards for 16 completions"):
        run(DASHTrainer, tiny_model, tmp_path, reward=short)


def test_what_is_right_passes(tmp_path, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    assert build(tmp_path, model, processing_class=tokenizer)._padding_free
    assert build(tmp_path, tiny_model, settings={"beta": 0.1})._padding_free


def test_continuous_batching_keeps_the_attention_of_the_model(tmp_path, tiny_model):
    """It samples with paged variants of it."""
    trainer = build(tmp_path, tiny_model, settings={"use_transformers_continuous_batching": True, "beta": 0.1})
    assert not trainer._padding_free
    for model in (trainer.model, trainer.ref_model):
        assert model.config._attn_implementation == "sdpa"
