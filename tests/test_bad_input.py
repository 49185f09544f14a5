"""What users get wrong, and what they are told: a ValueError with value, reason and remedy, as early as possible.

The tables read: mistake → what is given → what is said.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLConfig,
    T5Config,
)
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.generation import vllm_generation

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.checks.arguments import check_async
from dash_trl.checks.prompts import check_dataset, check_prompt_lengths, long_prompt_lengths
from dash_trl.config import CHOICES
from dash_trl.sampling.weights.file import FileWeights
from tests.tiny import ScriptedReward, ScriptedRollouts, prompts, run


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


# ---------------------------------------------------------------------- in the config

AIPO, DECOUPLED = {"loss_type": "aipo"}, {"loss_type": "decoupled_ppo"}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    # DASH's own
    "a threshold below 0": ({"gradient_filter_threshold": -0.1}, "-0.1 is not a finite number >= 0.* Use 0.1"),
    "a threshold of infinity": ({"gradient_filter_threshold": float("inf")}, "inf is not a finite number .* Use 0.1"),
    "a threshold that is no number": ({"gradient_filter_threshold": float("nan")}, "nan is not a number.* is 0.1"),
    "an unknown denominator": ({"filter_denominator": "survivors"}, "'survivors' is unknown. Use 'all'"),
    "a token budget of 0": ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch=0 leaves no room"),
    "a batch that splits groups": (
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
        r"generation_batch_size \(6\) .* multiple of num_generations=4",
    ),
    "sampling that lags behind": ({"async_level": -1}, "async_level=-1 is not at least 0: .* run ahead of training"),
    "half a window ahead": ({"async_level": 0.5}, "async_level=0.5 is a float, where an int is needed"),
    "a truth value for a count": ({"async_level": True}, "async_level=True is a truth value, where an int is needed"),
    "no word about the lead": ({"async_level": None}, "async_level=None is not at least 0.* default is 0"),
    # servers
    "no server": ({"vllm_server_urls": []}, "vllm_server_urls is empty"),
    "no address": ({"vllm_server_urls": ["localhost:8000"]}, "'localhost:8000', which is not the address of a server"),
    "servers named twice": (
        {"vllm_server_urls": ["http://localhost:8000"], "vllm_server_base_url": "http://localhost:8001"},
        "both name servers",
    ),
    "an unknown way of weights": ({"vllm_weight_sync": "pickle"}, "'pickle' is unknown. Use 'file' or 'nccl'"),
    "no time to answer": ({"vllm_request_timeout": 0.0}, "vllm_request_timeout=0.0 gives no server time to answer"),
    # choices that TRL takes
    "a loss of other algorithms": (
        {"loss_type": "ppo"},
        "loss_type='ppo' is unknown. Use 'grpo', .*'aipo' or 'decoupled_ppo'",
    ),
    "a loss in capitals": ({"loss_type": "GRPO"}, "loss_type='GRPO' is unknown. Use 'grpo'"),
    "an unknown scale": ({"scale_rewards": "std"}, "scale_rewards='std' is unknown. Use 'group', 'batch' or 'none'"),
    "half a word": ({"importance_sampling_level": "seq"}, "level='seq' is unknown. Use 'token' or 'sequence'"),
    "an unknown sum": ({"multi_objective_aggregation": "sum"}, "'sum' is unknown. Use 'sum_then_normalize' or"),
    "an unknown mode": ({"vllm_mode": "servers"}, "vllm_mode='servers' is unknown. Use 'server' or 'colocate'"),
    "an unknown correction": ({"vllm_importance_sampling_mode": "token"}, "'token' is unknown. Use 'token_truncate', "),
    # text, where a dict from YAML or the environment is not parsed
    "YAML's 1e-6": ({"learning_rate": "1e-6"}, "learning_rate='1e-6' is text. Use a number; in YAML, .* 1.0e-6"),
    "a count as text": ({"num_generations": "8"}, "num_generations='8' is text. Use a number"),
    "a number as text": ({"beta": "0"}, "beta='0' is text. Use a number"),
    "a length as text": ({"max_completion_length": "256"}, "max_completion_length='256' is text"),
    "DASH's number as text": ({"gradient_filter_threshold": "0.1"}, "gradient_filter_threshold='0.1' is text"),
    "Transformers' number as text": ({"max_steps": "10"}, "max_steps='10' is text"),
    "a truth value as text": ({"use_vllm": "false"}, "use_vllm='false' is text. Use True or False"),
    "a count with a point": ({"num_generations": 4.0}, "num_generations=4.0 is a float, where an int is needed"),
    "a weight as text": ({"reward_weights": ["1.0"]}, r"reward_weights=\['1.0'\] is not a list of finite numbers"),
    "one weight without a list": ({"reward_weights": 1.0}, "reward_weights=1.0 is not a list of finite numbers"),
    "arguments as text": ({"model_init_kwargs": "revision=main"}, "'revision=main' is text, .* Use a dict or, .* JSON"),
    # numbers without sense
    "one completion per prompt": ({"num_generations": 1}, "num_generations=1 is not at least 2: .* default is 8"),
    "no completion per prompt": ({"num_generations": 0}, "num_generations=0 is not at least 2"),
    "no length": ({"max_completion_length": None}, "max_completion_length=None is not at least 1: .* default is 512"),
    "no iteration": ({"num_iterations": 0}, "num_iterations=0 is not at least 1: .* never would train on nothing"),
    "no row": ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 is not at least 1"),
    "no step": ({"steps_per_generation": 0}, "steps_per_generation=0 is not at least 1"),
    "greedy sampling": ({"temperature": 0.0}, "temperature=0.0 is not above 0: logits are divided by it"),
    "no token to sample": ({"top_p": 0.0}, "top_p=0.0 is not above 0 and at most 1"),
    "vLLM's word for all tokens": ({"top_k": -1}, "top_k=-1 is not at least 0: .* all with 0"),
    "a KL that drives away": ({"beta": -0.1}, "beta=-0.1 is not at least 0: .* away from the reference"),
    "a KL that is no number": ({"beta": float("nan")}, "beta=nan is not a number. The default is 0.0"),
    "an empty clipping range": ({"epsilon": -0.2}, "epsilon=-0.2 is not at least 0: the ratio is clipped"),
    "a weight of infinity": ({"reward_weights": [float("inf")]}, r"reward_weights=\[inf\] is not a list of finite"),
    # the losses for old rollouts
    "no ratio": ({**AIPO, "aipo_delta": 0.0}, "aipo_delta=0.0 is not at least 1: below it no token .* default is 8.0"),
    "a ratio below 0": ({**AIPO, "aipo_delta": -8.0}, "aipo_delta=-8.0 is not at least 1"),
    "a ratio that clips what is fresh": ({**AIPO, "aipo_delta": 0.5}, "aipo_delta=0.5 is not at least 1: .* gradient"),
    "a ratio that is no number": ({**AIPO, "aipo_delta": float("nan")}, "aipo_delta=nan is not a number"),
    "a ratio as text": ({**AIPO, "aipo_delta": "8"}, "aipo_delta='8' is text. Use a number"),
    "a ratio of another loss": ({"aipo_delta": 4.0}, "aipo_delta=4.0 does nothing with loss_type='dapo'. Leave"),
    "a form of another loss": ({"loss_type": "grpo", "aipo_detached": True}, "aipo_detached=True does nothing with"),
    "aipo with KL": ({**AIPO, "beta": 0.04}, "beta=0.04 has no place in loss_type='aipo': it has no KL term. Leave"),
    "aipo with an entropy bonus": ({**AIPO, "entropy_coef": 0.01}, "entropy_coef=0.01 .*: it has no entropy bonus"),
    "aipo with a controlled one": ({**AIPO, "use_adaptive_entropy": True}, "use_adaptive_entropy=True .* no entropy"),
    "aipo on some tokens": (
        {**AIPO, "top_entropy_quantile": 0.2},
        "top_entropy_quantile=0.2 .*: it counts every token",
    ),
    "aipo with a mask": ({**AIPO, "off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold=0.1 .* by its ratio"),
    "aipo on sequences": (
        {**AIPO, "importance_sampling_level": "sequence"},
        "level='sequence' .*: its ratio is one per",
    ),
    "aipo with dapo's range": ({**AIPO, "epsilon": 0.1}, "epsilon=0.1 .*: its ratio is bounded by aipo_delta only"),
    "aipo with its upper end": ({**AIPO, "epsilon_high": 0.3}, "epsilon_high=0.3 .* bounded by aipo_delta only"),
    "aipo with TRL's delta": (
        {**AIPO, "delta": 4.0},
        "delta=4.0 has no place .* bounded by aipo_delta only. Leave delta",
    ),
    "detached, with TRL's bound": (
        {**AIPO, "aipo_detached": True, "epsilon_high": 5.0},
        "epsilon_high=5.0 has no place",
    ),
    "decoupled by sequences": (
        {**DECOUPLED, "vllm_importance_sampling_mode": "sequence_truncate"},
        "mode='sequence_truncate' is another loss than loss_type='decoupled_ppo', .* with 'token_truncate'. Leave",
    ),
    "decoupled by a mask": (
        {**DECOUPLED, "vllm_importance_sampling_mode": "token_mask"},
        "'token_mask' is another loss",
    ),
    "decoupled, uncorrected": (
        {**DECOUPLED, "vllm_importance_sampling_correction": False},
        "correction=False leaves loss_type='decoupled_ppo' without its ratio .* use loss_type='dapo'",
    ),
    "decoupled on sequences": (
        {**DECOUPLED, "importance_sampling_level": "sequence"},
        "importance_sampling_level='sequence' has no place in loss_type='decoupled_ppo': its ratios are one per token",
    ),
}


@pytest.mark.parametrize("mistake", SETTINGS)
def test_settings(tmp_path, mistake):
    settings, said = SETTINGS[mistake]
    with pytest.raises(ValueError, match=said):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_rewards": False},
        {"scale_rewards": True},
        {"max_grad_norm": None, "max_steps": 3, "num_train_epochs": 2, "epsilon_high": 0.28, "delta": None},
        {"top_k": -1, "vllm_server_urls": ["http://localhost:8000"]},
        {"generation_kwargs": '{"top_p": 0.9}', "reward_weights": [1, 0.5], "logging_steps": 0.1},
        {"vllm_importance_sampling_clip_max": float("inf"), "learning_rate": 0.0, "filter_denominator": "kept"},
        {**AIPO, "aipo_delta": 1, "vllm_importance_sampling_mode": "token_mask", "router_aux_loss_coef": 0.01},
        {**AIPO, "aipo_delta": float("inf"), "aipo_detached": True, "vllm_importance_sampling_correction": False},
        {**DECOUPLED, "vllm_importance_sampling_mode": "token_truncate", "epsilon_high": 0.28, "beta": 0.04},
    ],
    ids=str,
)
def test_settings_that_are_right(tmp_path, settings):
    config(tmp_path, **settings)


def test_a_parser_turns_text_into_numbers(tmp_path):
    """YAML reads 1e-6 as text; TRL's parser knows that it is a number."""
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nlearning_rate: 1e-6\nbeta: '0.04'\nuse_cpu: true\n")
    parser = TrlParser(DASHConfig)
    (args,) = parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml"), "--bf16", "false"])
    assert (args.learning_rate, args.beta, args.bf16) == (1e-6, 0.04, False)


def test_the_choices_are_trls():
    """A choice that TRL's code compares with, and that is not in the table, would be refused."""
    compared: dict[str, set[str]] = {name: set() for name in CHOICES}
    for module in (inspect.getmodule(GRPOTrainer), vllm_generation):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            name = getattr(node.left, "attr", None) if isinstance(node, ast.Compare) else None
            if name in compared:
                constants = [one for other in node.comparators for one in ast.walk(other)]
                compared[name] |= {one.value for one in constants if isinstance(one, ast.Constant)}
    assert {name: found - set(CHOICES[name]) for name, found in compared.items()} == dict.fromkeys(CHOICES, set())
    assert compared["loss_type"] == set(CHOICES["loss_type"]) - {"aipo", "decoupled_ppo"}


# ---------------------------------------------------------------------- in the data, before a weight is loaded

USER = {"role": "user", "content": "1 + 1"}
PROMPTS: dict[str, tuple[list, str]] = {
    "None": (["a", None], "Row 1 of train_dataset has the prompt None, which is neither a text nor a list of messages"),
    "a number": ([1, 2], "Row 0 of train_dataset has the prompt 1, which is neither a text nor a list of messages"),
    "an empty text": (["a", "b", ""], "Row 2 of train_dataset has the prompt '', which is empty"),
    "an empty conversation": ([[USER], []], "Row 1 .* empty list of messages. Write it as .*'role': 'user'"),
    "a missing conversation": ([[USER], None], "Row 1 of train_dataset has the prompt None, which is neither"),
    "no roles": ([[{"content": "1 + 1"}]], "Row 0 .* has a message without role or content"),
    "no contents": ([[{"role": "user"}]], "Row 0 .* has a message without role or content"),
    "one role missing": ([[USER], [USER, {"role": None, "content": "2"}]], "Row 1 .* without role or content"),
    "a message alone": ([USER], "Row 0 .* neither a text nor a list of messages"),
    "texts in a list": ([["1 + 1"]], "Row 0 .* has a message without role or content"),
}


@pytest.mark.parametrize("mistake", PROMPTS)
def test_prompts(tmp_path, tiny_model, unloadable, mistake):
    column, said = PROMPTS[mistake]
    good = column[:1] if "Row 0" not in said else []
    with pytest.raises(ValueError, match=said):
        build(tmp_path, tiny_model, dataset=Dataset.from_dict({"prompt": column + good * 16}))


def test_the_row_is_that_of_the_shuffled_dataset():
    dataset = Dataset.from_dict({"prompt": ["a", "", "b", "c"]})
    with pytest.raises(ValueError, match="Row 2 of"):
        check_dataset(dataset.select([3, 0, 1]), "d")
    check_dataset(dataset.select([3, 0, 2]), "d")


@pytest.mark.parametrize("prompt", [None, "", 7, [], [{"content": "x"}]], ids=str)
def test_prompts_that_are_made_as_they_are_sampled(tmp_path, tiny_model, prompt):
    dataset = prompts(64)
    dataset.set_transform(lambda rows: {**rows, "prompt": [prompt] * len(rows["prompt"])})
    trainer = build(
        tmp_path,
        AutoModelForCausalLM.from_pretrained(tiny_model),
        dataset=dataset,
        processing_class=PreTrainedTokenizerFast.from_pretrained(tiny_model),
    )
    with pytest.raises(ValueError, match="A row has the prompt"):
        trainer.train()


def test_a_rollout_function_makes_of_prompts_what_it_likes():
    check_dataset(Dataset.from_dict({"prompt": [1, 2]}), "train_dataset", True)


DATASETS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": (
        {"dataset": Dataset.from_dict({"question": ["1 + 1"], "solution": ["2"]})},
        r"columns \['question', 'solution'\], but no 'prompt'",
    ),
    "no row": ({"dataset": prompts(0)}, "train_dataset is empty"),
    "an empty evaluation split": ({"eval_dataset": {"easy": prompts(0)}}, r"eval_dataset\['easy'\] is empty"),
    "no prompts to evaluate": (
        {"eval_dataset": {"easy": Dataset.from_dict({"prompt": [""]})}},
        r"Row 0 of eval_dataset\['easy'\] has the prompt ''",
    ),
    "fewer prompts than a batch": (
        {"dataset": prompts(3), "settings": {"gradient_accumulation_steps": 2}},
        "3 prompts, but one generation batch takes 4",
    ),
    "images": (
        {"dataset": Dataset.from_dict({"prompt": ["a"] * 16, "image": ["b"] * 16})},
        "column 'image', but DASHTrainer trains text",
    ),
}


@pytest.mark.parametrize("mistake", DATASETS)
def test_datasets(tmp_path, tiny_model, unloadable, mistake):
    given, said = DATASETS[mistake]
    with pytest.raises(ValueError, match=said):
        build(tmp_path, tiny_model, **given)


CHAT = [[{"role": "system", "content": "s" * 4}, {"role": "user", "content": "é" * length}] for length in (700, 3, 600)]
TYPED = [[{"role": "user", "content": [{"type": "text", "text": "x" * length}]}] for length in (700, 3, 600)]
LONG = {
    "texts": (["x" * 700, "é" * 3, "x" * 600], [700, 600]),
    "conversations": (CHAT, [704, 604]),
    "contents in parts": (TYPED, [730, 630]),
}


@pytest.mark.parametrize("kind", LONG)
def test_the_longest_prompts_are_tokenised_and_no_others(kind):
    """Here a token is a character."""
    column, expected = LONG[kind]

    def tokenize(prompts):
        return ([list("".join(str(one["content"]) for one in p)) if isinstance(p, list) else list(p) for p in prompts],)

    dataset = Dataset.from_dict({"prompt": column, "row": [0, 1, 2]})
    assert long_prompt_lengths(dataset, tokenize, 1100) == expected
    assert long_prompt_lengths(dataset.select([2, 1]), tokenize, 1100) == expected[1:]
    assert long_prompt_lengths(dataset.select(range(1, 3)), tokenize, 1100) == expected[1:]
    assert long_prompt_lengths(dataset.select([1]), tokenize, 1100) == []
    assert long_prompt_lengths(concatenate_datasets([dataset, dataset]), tokenize, 1100) == sorted(2 * expected)[::-1]
    assert long_prompt_lengths(dataset.with_format("torch"), tokenize, 1100) == expected


# ---------------------------------------------------------------------- in the model, before its weights are loaded

OWN_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


def with_config(source: str, directory: Path, **changes: Any) -> str:
    """A copy of a model with other entries in its config.json; None removes one."""
    shutil.copytree(source, directory)
    entries = json.loads((directory / "config.json").read_text()) | changes
    kept = {name: value for name, value in entries.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    return str(directory)


@pytest.fixture(scope="module")
def checkpoints(tiny_model, tmp_path_factory) -> dict[str, str]:
    where = tmp_path_factory.mktemp("checkpoints")
    Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"]).save_pretrained(where / "vlm")
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(where / "t5")
    with_config(tiny_model, where / "folder" / "inner")
    own = with_config(tiny_model, where / "own", model_type="own", architectures=["OwnModel"], auto_map=AUTO_MAP)
    Path(own, "own.py").write_text(OWN_CODE)
    return {
        "vision": str(where / "vlm"),
        "encoder": str(where / "t5"),
        "folder": str(where / "folder"),
        "own code": own,
        "classifier": with_config(tiny_model, where / "cls", architectures=["Qwen2ForSequenceClassification"]),
        "headless": with_config(tiny_model, where / "base", architectures=["Qwen2Model"]),
        "nameless": with_config(tiny_model, where / "nameless", architectures=None),
    }


CHECKPOINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a directory that is not there": ("./no/such/directory", {}, "model='./no/such/directory' cannot be loaded: that"),
    "another": ("/nowhere", {}, "model='/nowhere' cannot be loaded: that directory"),
    "a hub name that is not there": (
        "nobody/no-such-model",
        {},
        "model='nobody/no-such-model' cannot be loaded: a dir",
    ),
    "images": ("vision", {}, r"vision-language model \(qwen2_vl\)"),
    "an encoder": ("encoder", {}, "a T5ForConditionalGeneration, which is no decoder .*AutoModelForCausalLM"),
    "a classifier": ("classifier", {}, "a Qwen2ForSequenceClassification, which is no decoder"),
    "no head": ("headless", {}, "a Qwen2Model, which is no decoder with a language modeling head"),
    "no architecture": ("nameless", {}, "names no architecture, so TRL cannot tell its class. Add"),
    "code of its own": ("own code", {}, "comes with code of its own.* set trust_remote_code=True in the DASHConfig"),
    "a folder within": (
        "folder",
        {"subfolder": "inner"},
        r"found with model_init_kwargs \(subfolder='inner'\), but TRL",
    ),
}


@pytest.mark.parametrize("mistake", CHECKPOINTS)
def test_checkpoints(tmp_path, checkpoints, unloadable, mistake):
    model, arguments, said = CHECKPOINTS[mistake]
    with pytest.raises(ValueError, match=said):
        build(tmp_path, checkpoints.get(model, model), settings={"model_init_kwargs": arguments})


@pytest.mark.parametrize("settings", [{"trust_remote_code": True}, {"model_init_kwargs": {"trust_remote_code": True}}])
def test_code_that_is_trusted_is_run(tmp_path, checkpoints, tiny_model, settings):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    trainer = build(tmp_path, checkpoints["own code"], settings=settings, processing_class=tokenizer)
    assert type(trainer.model).__name__ == "OwnModel"


def frozen(model: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model).requires_grad_(False)


def inference_adapter(model: str) -> torch.nn.Module:
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], inference_mode=True)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora)


MODELS = {
    "a path": (Path, "which has no config. Pass the path or hub name of a causal language model as a str"),
    "a module": (lambda model: torch.nn.Linear(2, 2), "model is a Linear, which has no config"),
    "a classifier": (
        AutoModelForSequenceClassification.from_pretrained,
        "a Qwen2ForSequenceClassification, which is no",
    ),
    "no head": (AutoModel.from_pretrained, "a Qwen2Model, which is no decoder"),
    "frozen": (frozen, "No parameter of the Qwen2ForCausalLM requires a gradient.* model.requires_grad_"),
    "an adapter for inference": (inference_adapter, "No parameter of the PeftModel.* is_trainable=True"),
}


@pytest.mark.parametrize("mistake", MODELS)
def test_models(tmp_path, tiny_model, mistake):
    make, said = MODELS[mistake]
    with pytest.raises(ValueError, match=said):
        build(tmp_path, make(tiny_model))


def test_a_frozen_model_is_right_for_a_new_adapter(tmp_path, tiny_model):
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    assert isinstance(build(tmp_path, frozen(tiny_model), peft_config=lora).model, PeftModel)


# ---------------------------------------------------------------------- in the other arguments


class Processor(ProcessorMixin):
    def __init__(self):
        pass


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a processor": ({"processing_class": Processor()}, "Processor, a multimodal processor"),
    "tools": ({"tools": [print]}, "tools is set, but DASHTrainer trains single-turn"),
    "an environment": (
        {"environment_factory": [print]},
        "environment_factory is set, but DASHTrainer trains single-turn",
    ),
    "sampling ahead on the trainer's device": (
        {"settings": {"async_level": 1}},
        "async_level=1 lets servers sample while the trainer trains, .* Name servers .*, or leave async_level at 0",
    ),
    "sampling ahead by a rollout_func": (
        {
            "settings": {"async_level": 2, "vllm_server_urls": ["http://127.0.0.1:9"]},
            "rollout_func": lambda prompts, trainer: {},
        },
        "async_level=2 with a rollout_func: it samples when it is called",
    ),
    "aipo without a sampler's log-probs": (
        {"settings": AIPO},
        "loss_type='aipo' compares the policy with the sampler, .* Sample with vLLM .*, or with a rollout_func",
    ),
    "decoupled PPO without them": ({"settings": DECOUPLED}, "loss_type='decoupled_ppo' compares the policy with"),
}


@pytest.mark.parametrize("mistake", ARGUMENTS)
def test_arguments(tmp_path, tiny_model, unloadable, mistake):
    given, said = ARGUMENTS[mistake]
    with pytest.raises(ValueError, match=said):
        build(tmp_path, tiny_model, **given)


def test_a_misspelt_estimator():
    with pytest.raises(
        ValueError, match="Own.compute_advantage would never be called. Rename it to compute_advantages"
    ):
        type("Own", (DASHTrainer,), {"compute_advantage": lambda self, rewards: rewards})
    helpers = {"compute_advantage", "_compute_advantages"}  # of an estimator, and of another method
    type("Own", (DASHTrainer,), dict.fromkeys({*helpers, "compute_advantages"}, print))
    type("Own", (DASHTrainer,), {"_compute_advantages": print})


def test_plain_grpo_config(tmp_path, tiny_model, unloadable):
    with pytest.raises(ValueError, match="GRPOConfig, which lacks DASH's options"):
        DASHTrainer(tiny_model, ScriptedReward(), GRPOConfig(str(tmp_path), bf16=False, use_cpu=True), prompts(8))


def test_vllm_that_is_not_installed(tmp_path, tiny_model, unloadable, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "vllm" else find_spec(name, *a))
    with pytest.raises(
        ValueError, match=r"use_vllm=True with vllm_mode='colocate', but .*pip install dash_trl\[vllm\]"
    ):
        build(tmp_path, tiny_model, settings={"use_vllm": True})


def test_named_servers_are_used(tmp_path):
    args = DASHConfig(str(tmp_path), use_cpu=True, bf16=False, vllm_server_urls=["http://localhost:8000"])
    assert args.use_vllm and args.vllm_mode == "server"


@pytest.mark.parametrize(
    "settings, said",
    [
        ({}, "'sequence_mask', TRL's default: it leaves out every sequence whose probability is 3 times"),
        ({"vllm_importance_sampling_correction": False}, "=False: rollouts of older weights are trained on as if"),
        ({"vllm_importance_sampling_mode": "token_truncate"}, None),
        ({"loss_type": "decoupled_ppo"}, None),
    ],
)
def test_stale_rollouts_with_a_loss_for_fresh_ones_are_warned_of(settings, said, tmp_path, caplog):
    check_async(config(tmp_path, async_level=1, vllm_server_urls=["http://localhost:8000"], **settings), False, False)
    assert said in caplog.text if said else not caplog.records


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


class Rollouts(ScriptedRollouts):
    def __init__(self, log_probs):
        super().__init__(0)
        self.log_probs = log_probs

    def __call__(self, prompts, trainer):
        output = super().__call__(prompts, trainer)
        return {**output, "logprobs": self.log_probs(output["completion_ids"])}


def corrected(trainer):
    """As if it sampled from vLLM."""
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(sync_weights=lambda: None)


LOG_PROBS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "none, with aipo": (
        lambda ids: None,
        AIPO,
        "loss_type='aipo' needs the sampler's .* none: return .* as 'logprobs'",
    ),
    "none, with decoupled PPO": (
        lambda ids: None,
        DECOUPLED,
        "loss_type='decoupled_ppo' needs the sampler's log-probs",
    ),
    "none to correct": (lambda ids: None, {"prepare": corrected}, "vllm_importance_sampling_correction=True needs the"),
    "of too few tokens": (
        lambda ids: [[-1.0] * len(ids[0][1:]), *([-1.0] * len(row) for row in ids[1:])],
        AIPO,
        r"returned \d+ logprobs for the \d+ completion_ids of row 0: return one for each token, NaN where",
    ),
    "of too few rows": (
        lambda ids: [[-1.0] * len(row) for row in ids[:15]],
        {},
        "returned 0 logprobs for .* of row 15",
    ),
}


@pytest.mark.parametrize("mistake", LOG_PROBS)
def test_log_probs_of_a_rollout_function(tmp_path, tiny_model, mistake):
    """Said before a reward is asked for."""
    log_probs, settings, said = LOG_PROBS[mistake]

    def reward(**kwargs):
        raise AssertionError("it came too late")

    with pytest.raises(ValueError, match=said):
        run(DASHTrainer, tiny_model, tmp_path, rollouts=Rollouts(log_probs), reward=reward, **settings)


def test_what_is_right_passes(tmp_path, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    assert build(tmp_path, model, processing_class=tokenizer)._passes.padding_free
    assert build(tmp_path, tiny_model, settings={"beta": 0.1})._passes.padding_free


def test_continuous_batching_keeps_the_attention_of_the_model(tmp_path, tiny_model):
    """It samples with paged variants of it."""
    trainer = build(tmp_path, tiny_model, settings={"use_transformers_continuous_batching": True, "beta": 0.1})
    assert not trainer._passes.padding_free
    for model in (trainer.model, trainer.ref_model):
        assert model.config._attn_implementation == "sdpa"
