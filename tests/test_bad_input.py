"""Mistakes of users, and the errors that they get: a ValueError with value, reason and remedy, as early as possible.

A row of a table is what the user passes, and part of the error message.
"""

import inspect
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModel, AutoTokenizer, BloomConfig, Qwen2Config, T5Config, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.checks import (
    check_arguments,
    check_model,
    check_prompt_ids,
    check_rewards,
    check_rounding,
    check_subclass,
    check_trainable,
    checked_rollouts,
    context_of,
    plain_prompt,
)
from dash_trl.config import CHOICES, TEXTS
from dash_trl.sampling import FileWeights
from tests.doubles import Penalised, Replaced
from tests.tiny import ScriptedReward, assistant, load, prompts, refusal, refused, save_tiny_model, user

SERVER = {"vllm_server_urls": ["http://localhost:8000"]}


def config(**settings) -> DASHConfig:
    defaults = {"use_cpu": True, "bf16": False, "num_generations": 4, "max_completion_length": 8}
    return DASHConfig("dash-output", **{**defaults, **settings})


def build(model, *, settings: dict[str, Any] | None = None, **given) -> DASHTrainer:
    defaults = {"args": config(**(settings or {})), "train_dataset": prompts(16)}
    return DASHTrainer(model, ScriptedReward(), **{**defaults, **given})


def checked(model, *, eval_dataset=None, train_dataset=None, **settings) -> None:
    """The checks of arguments before weights are loaded."""
    others = {"rollout_func": settings.pop("rollout_func", None)}
    dataset = prompts(16) if train_dataset is None else train_dataset
    check_arguments(model, None, config(**settings), dataset, eval_dataset, others)


# ---------------------------------------------------------------------- in the config

EACH_STEP = {"eval_strategy": "steps", "save_strategy": "steps"}
AIPO = {"loss_type": "aipo"}
DECOUPLED = {"loss_type": "decoupled_ppo"}
SETTINGS = [
    ({"gradient_filter_threshold": -0.1}, "threshold=-0.1 is not at least 0: .* None keeps all"),
    ({"gradient_filter_threshold": float("nan")}, "nan is not at least 0"),
    ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch=0 is not at least 1"),
    ({"async_level": -1}, "async_level=-1 is not at least 0: .* ahead of training"),
    ({"vllm_request_timeout": 0.0}, "vllm_request_timeout=0.0 is not at least"),
    ({"temperature": 0.0}, "temperature=0.0 is not at least 1e-05: logits are divided by it"),
    ({"beta": -0.1}, "beta=-0.1 is not at least 0: .* from the reference model"),
    ({"max_grad_norm": None}, "max_grad_norm=None is not at least 0: .* 0 does not clip"),
    *(
        ({**settings, option: value}, f"{option}=.* does not work here: {why}")
        for option, value, settings, why in (
            ("remove_unused_columns", True, {}, "the columns are for the reward functions. Leave it out"),
            ("metric_for_best_model", None, {"load_best_model_at_end": True, **EACH_STEP}, "the loss is about 0"),
            ("metric_for_best_model", "eval_easy_loss", {}, "the loss .* Name another figure, such as 'eval_reward'"),
            ("label_smoothing_factor", 0.1, {}, "sampled tokens are no labels"),
            ("train_sampling_strategy", "sequential", {}, ".*set shuffle_dataset=False"),
            ("optim", "galore_adamw_layerwise", {}, "it makes a step in each backward pass"),
            ("optim", "adalomo", {}, ".*Use 'adamw_torch'"),
        )
    ),
    *(
        ({"accelerator_config": {option: True}}, f"{option}=True does not work here: {why}")
        for option, why in (("dispatch_batches", "rows are texts"), ("split_batches", "each rank takes its own rows"))
    ),
    ({"num_iterations": 0}, "num_iterations=0 is not at least 1: .* trained on"),
    # choices
    ({"loss_type": "ppo"}, "'ppo' is unknown. Use one of 'grpo', .*'decoupled_ppo'"),
    *(
        ({option: "std"}, f"{option}='std' is unknown. Use one of '")
        for option in (
            "scale_rewards",
            "importance_sampling_level",
            "multi_objective_aggregation",
            "vllm_importance_sampling_mode",
            "filter_denominator",
        )
    ),
    ({"advantage_estimator": "ppo"}, "'ppo' is unknown. Use one of 'grpo', 'rloo'"),
    # what the losses for old rollouts would ignore
    ({**AIPO, "aipo_delta": 0.5}, "aipo_delta=0.5 is not at least 1: .* gradient"),
    (
        {"aipo_delta": 4.0},
        "aipo_delta=4.0 does not go with loss_type='dapo': only 'aipo' has it. Leave one of the two out",
    ),
    *(
        ({**AIPO, option: value}, f"{option}={value!r} does not go with loss_type='aipo': {why}")
        for option, value, why in (
            ("beta", 0.04, "it has no KL term"),
            ("entropy_coef", 0.01, "it has no entropy bonus"),
            ("use_adaptive_entropy", True, "it has no entropy bonus"),
            ("top_entropy_quantile", 0.2, "it counts every token"),
            ("off_policy_mask_threshold", 0.1, "it counts every token, an old one by its ratio"),
            ("importance_sampling_level", "sequence", "its ratio is one per token"),
            ("epsilon", 0.1, "its ratio is bounded by aipo_delta only"),
            ("epsilon_high", 0.3, "its ratio is bounded by aipo_delta only"),
            ("delta", 4.0, "its ratio is bounded by aipo_delta only"),
        )
    ),
    *(
        ({**DECOUPLED, option: value}, f"{option}={value!r} does not go with .*{why}")
        for option, value, why in (
            ("vllm_importance_sampling_mode", "sequence_truncate", "it is 'dapo' with 'token_truncate'"),
            ("vllm_importance_sampling_correction", False, "without the ratio to the sampler"),
            ("importance_sampling_level", "sequence", "its ratios are one per token"),
        )
    ),
    (
        {"advantage_estimator": "rloo", "scale_rewards": False},
        "scale_rewards='none' does not go with advantage_estimator='rloo': the estimator has a scale of its own",
    ),
    (
        {"advantage_estimator": "rloo", "multi_objective_aggregation": "normalize_then_sum"},
        "multi_objective_aggregation='normalize_then_sum' does not go with advantage_estimator='rloo'",
    ),
]


def test_settings():
    for settings, said in SETTINGS:
        refused(said, config, **settings)


def test_settings_that_are_right():
    for settings in (
        {"scale_rewards": False, "temperature": 1e-5, "gradient_filter_threshold": 0, "max_tokens_per_microbatch": 1},
        {**AIPO, "aipo_delta": 1, "vllm_importance_sampling_mode": "token_mask", "router_aux_loss_coef": 0.01},
        {**AIPO, "aipo_delta": float("inf"), "vllm_importance_sampling_correction": False},
        {**DECOUPLED, "vllm_importance_sampling_mode": "token_truncate", "epsilon_high": 0.28, "beta": 0.04},
        {**DECOUPLED, "gradient_filter_threshold": None, "filter_denominator": "kept"},
        {"metric_for_best_model": "eval_reward", "load_best_model_at_end": True, "optim": "galore_adamw", **EACH_STEP},
    ):
        config(**settings)
    paths = config(vllm_weight_dir="weights")  # a reward function may change the current folder
    assert [paths.output_dir, paths.vllm_weight_dir] == [os.path.abspath("dash-output"), os.path.abspath("weights")]


@pytest.mark.parametrize("limit", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("clipping", [{}, {"gradient_clipping": "auto"}])
def test_a_limit_that_deepspeed_would_ignore(monkeypatch, limit, clipping):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")  # Transformers sets it to "true", for later runs, too
    said = refusal(config, max_grad_norm=limit, deepspeed={"zero_optimization": {"stage": 2}, **clipping})
    assert ("DeepSpeed's configuration has no gradient_clipping" in said) == (limit != 1 and not clipping)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU may know bf16")
def test_a_machine_without_bf16_trains_in_float32():
    assert DASHConfig("out").mixed_precision == "no" and DASHConfig("out").use_cpu  # for several processes, too
    assert DASHConfig("out", use_cpu=True, bf16=True).bf16


def test_the_choices_are_trls():
    """A choice that TRL's code compares with, and that is not in the table, would be refused."""
    source = "".join(inspect.getsource(one) for one in (inspect.getmodule(GRPOTrainer), vllm_generation))
    for name in (one for one in CHOICES if hasattr(GRPOConfig, one)):
        compared = "".join(re.findall(rf"\.{name} (?:==|!=|in|not in) (\"\w+\"|[\[(][^\])]*)", source))
        found = set(re.findall(r'"(\w+)"', compared))
        assert found <= set(CHOICES[name]), name
        assert name != "loss_type" or found == set(CHOICES[name]) - {"aipo", "decoupled_ppo"}


def test_the_help_names_all_losses():
    assert {*CHOICES["loss_type"]} <= {*re.findall(r"\w+", TEXTS["loss_type"])}


# ---------------------------------------------------------------------- in the arguments, before a weight is loaded


def of(*column) -> Dataset:
    return Dataset.from_dict({"prompt": list(column) * 16})


NEITHER = "which is neither a text nor a conversation. Write it as"
VIRTUAL = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
ARGUMENTS = [
    # virtual tokens
    ({"peft_config": VIRTUAL}, "PrefixTuningConfig: virtual tokens cannot be trained .* LoraConfig"),
    # a reference that is trained
    ({"peft_config": LoraConfig(bias="all"), "settings": {"beta": 0.1}}, "needs a reference .beta=0.1.* bias='all'"),
    # TRL's config
    ({"args": GRPOConfig("x", bf16=False, use_cpu=True)}, "GRPOConfig, which lacks DASH's options"),
    # environments for texts
    (
        {"environment_factory": dict},
        "train_dataset has texts as prompts .* Write each prompt as",
    ),
    # tools and own rollouts
    (
        {"tools": [print], "rollout_func": lambda prompts, trainer: {}},
        "rollout_func is set, and so is tools=.* Leave one of the two out",
    ),
    # sampling ahead on the trainer's device
    (
        {"settings": {"async_level": 1}},
        "async_level=1 lets servers sample while the trainer trains, .* Name servers .*, or leave async_level at 0",
    ),
    # sampling ahead by a rollout_func
    (
        {"settings": {"async_level": 2}, "rollout_func": lambda prompts, trainer: {}},
        "async_level=2 does not work with a rollout_func: the function gets the trainer",
    ),
    # aipo without a sampler's log-probs
    (
        {"settings": AIPO},
        "loss_type='aipo' compares the policy with the sampler, .* Sample with vLLM .*, or with a rollout_func",
    ),
    # vLLM in a process without a GPU
    (
        {"settings": {"use_vllm": True}},
        "runs vLLM in the trainer's process, which needs a GPU, .* leave use_vllm out, .*vllm_server_urls",
    ),
    # an event that never comes
    (
        {"callbacks": [type("Late", (TrainerCallback,), {"on_rewards": print})]},
        "Late.on_rewards would never be called",
    ),
    # data
    # no column of prompts
    (
        {"train_dataset": Dataset.from_dict({"question": ["1 + 1"], "solution": ["2"]})},
        r"columns \['question', 'solution'\], but no 'prompt'",
    ),
    # columns that hide arguments
    (
        {"train_dataset": of("1").add_column("completions", [""] * 16)},
        r"train_dataset has the columns \['completions'\], but the trainer itself passes .*Rename them",
    ),
    # no row
    ({"train_dataset": prompts(0)}, "train_dataset is empty"),
    # fewer prompts than a batch
    (
        {"train_dataset": prompts(3), "settings": {"gradient_accumulation_steps": 2}},
        "3 prompts, but one generation batch takes 4",
    ),
    # a number as a prompt
    ({"train_dataset": of(1, 2)}, f"Row 0 of train_dataset has the prompt 1, {NEITHER}"),
    # an image to look at
    (
        {"eval_dataset": of(user([{"type": "text", "text": "1"}, {"type": "image"}]))},
        f"Row 0 of eval_dataset has the prompt .*'image'.*{NEITHER}",
    ),
    # no prompt to evaluate
    (
        {"eval_dataset": {"easy": of("1", "")}},
        rf"Row 1 of eval_dataset\['easy'\] has the prompt '', {NEITHER}",
    ),
    # an answer that has begun
    (
        {"train_dataset": of(user("1") + assistant("<think>"))},
        "Row 0 of train_dataset has the prompt .*, which ends with a message .* continue_final_message=True",
    ),
    # models
    # a directory that is not there
    ({"model": "./no/directory"}, "model='./no/directory' cannot be loaded: neither"),
    # images to look at
    (
        {"train_dataset": Dataset.from_dict({"prompt": ["1 + 1 ="] * 8, "image": [0] * 8})},
        "train_dataset has the column 'image', but DASHTrainer trains on text only",
    ),
    # an encoder
    (
        {"model": "encoder"},
        "a T5ForConditionalGeneration, but .* decoders of text .*AutoModelForCausalLM",
    ),
    # a classifier
    ({"model": "classifier"}, "a Qwen2ForSequenceClassification, but DASHTrainer"),
    # code of its own
    ({"model": "own code"}, "(?s)custom code.*trust_remote_code=True"),
]

OWN_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


def with_config(source: str, directory: Path, **changes) -> str:
    """A copy of a model with other entries in its config.json."""
    shutil.copytree(source, directory)
    entries = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(entries))
    return str(directory)


@pytest.fixture(scope="module")
def checkpoints(tiny_model, tmp_path_factory) -> dict[str, str]:
    where = tmp_path_factory.mktemp("checkpoints")
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(where / "t5")
    own = with_config(tiny_model, where / "own", model_type="own", architectures=["OwnModel"], auto_map=AUTO_MAP)
    Path(own, "own.py").write_text(OWN_CODE)
    with_config(tiny_model, where / "folder" / "inner")
    return {
        "encoder": str(where / "t5"),
        "own code": own,
        "folder": str(where / "folder"),
        "classifier": with_config(tiny_model, where / "cls", architectures=["Qwen2ForSequenceClassification"]),
    }


def test_arguments(tiny_model, checkpoints, unloadable):
    for given, said in ARGUMENTS:
        model = checkpoints.get(given.get("model"), given.get("model", tiny_model))
        others = {name: value for name, value in given.items() if name != "model"}
        refused(said, build, model, **others)


def test_models(tiny_model):
    frozen_lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], inference_mode=True, bias="all")
    for make, said in (
        (AutoModel.from_pretrained, "a Qwen2Model, but .* with a language modeling head"),
        (lambda name: torch.compile(load(name)), "is compiled.* torch_compile=True"),
        (lambda name: get_peft_model(load(name), VIRTUAL), "PrefixTuningConfig: virtual tokens cannot be trained"),
        (
            lambda name: get_peft_model(load(name), LoraConfig(init_lora_weights="olora")),
            "changes the base model .init_lora_weights='olora'",
        ),
    ):
        refused(said, check_model, make(tiny_model), config(beta=0.1))
    nothing = "No parameter of the (Qwen2ForCausalLM|PeftModel).* requires a gradient.* model.requires_grad_"
    hooked = load(tiny_model)
    hooked.lm_head.weight.register_post_accumulate_grad_hook(print)
    refused("register_post_accumulate_grad_hook, as optimizers have that", build, hooked)
    trainer = build(tiny_model)
    trainer.model.requires_grad_(False)
    refused(nothing, trainer.train)
    refused(nothing, build, tiny_model, peft_config=frozen_lora)


def test_models_that_are_right(tiny_model, checkpoints):
    check_model(load(tiny_model).requires_grad_(False), config(), LoraConfig(task_type="CAUSAL_LM"))
    check_model(checkpoints["own code"], config(trust_remote_code=True))
    check_model(checkpoints["own code"], config(model_init_kwargs={"trust_remote_code": True}))
    check_model(checkpoints["folder"], config(model_init_kwargs={"subfolder": "inner", "dtype": "float32"}))


def test_data_that_are_right(tiny_model):
    checked(tiny_model, train_dataset=of(1, 2), rollout_func=print)
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": 1}]))
    checked(tiny_model, eval_dataset={"stream": stream})


class AsInTRL(DASHTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self._compute_loss(model, inputs)


def test_a_term_of_the_loss_without_its_weight_is_warned_of(caplog):
    for kind, is_said in ((AsInTRL, True), (Replaced, True), (Penalised, False)):
        caplog.clear()
        check_subclass(kind, DASHTrainer)
        assert ("may add to the loss depends" in caplog.text) == is_said
    for name in ("_generate", "_generate_and_score_completions", "_tool_call_loop"):
        refused(
            f"Own.{name} would not be called", check_subclass, type("Own", (DASHTrainer,), {name: print}), DASHTrainer
        )


def test_what_is_warned_of(tiny_model, caplog):
    """Stale rollouts with a loss for fresh ones; truncated sampling with a ratio to the sampler in the loss."""
    stale = "async_level=1 trains on rollouts of older weights"
    spread = "0.98 per token gives 0.00004 for 500"
    servers = {"use_vllm": True, "vllm_mode": "server"}
    off = {"vllm_importance_sampling_correction": False}
    mode = "vllm_importance_sampling_mode"
    for said, settings, is_said in (
        (stale, {"async_level": 1, **SERVER}, True),
        (stale, {"async_level": 1, **SERVER, **off, mode: "token_mask"}, True),
        (stale, {"async_level": 1, **SERVER, mode: "token_truncate"}, False),
        (stale, {"async_level": 1, **SERVER, "loss_type": "decoupled_ppo"}, False),
        (spread, {**servers, "top_p": 0.9}, True),
        (spread, {**servers, "generation_kwargs": {"top_k": 5, "stop": ["x"]}}, True),
        (spread, {**servers, "min_p": 0.1}, True),
        (spread, {**servers, "top_p": 0.9, **off}, False),
        (spread, {**servers, "top_p": 0.9, "loss_type": "aipo", **off}, True),
        (spread, {"top_p": 0.9, "loss_type": "vespo"}, False),
        (spread, {**servers, "top_p": 0.9, "generation_kwargs": {"top_p": 1.0}}, False),
        (spread, {**servers, "temperature": 0.7}, False),
    ):
        caplog.clear()
        checked(tiny_model, **settings)
        assert (said in caplog.text) == is_said, (said, settings)
        assert is_said or said != stale or not caplog.records
    caplog.clear()
    for trained, has_copies in ((True, True), (False, False)):  # of 16 bits, but with copies, or not trained
        model = load(tiny_model, dtype=torch.bfloat16).requires_grad_(trained)
        check_rounding(model, config(), has_copies=has_copies)
    assert not caplog.records
    model.config.attn_logit_softcapping = 50.0
    check_trainable(model.requires_grad_())
    assert "attn_implementation='sdpa' leaves out attn_logit_softcapping=50.0" in caplog.text


def test_what_servers_would_ignore_or_spoil_is_refused(tiny_model):
    ours = {"skip_special_tokens": False, "truncate_prompt_tokens": 8}
    for settings, message in (
        ({"generation_kwargs": {"suppress_tokens": [3]}}, r"has \['suppress_tokens'\], which vLLM does not use"),
        ({"generation_kwargs": ours}, "from another prompt than the loss has; rewards never see special tokens"),
        ({"generation_kwargs": {"stop": ["x"]}, "mask_truncated_completions": True}, r"has stop=\['x'\], but mask_tr"),
        ({"loss_type": "vespo"}, "loss_type='vespo' with vllm_importance_sampling_mode='sequence_mask'"),
    ):
        refused(message, checked, tiny_model, **SERVER, **settings)
    refused("loss_type='vespo' with", checked, tiny_model, loss_type="vespo", async_level=1)
    refused(
        "sampling shares the trainer's device", check_rewards, None, config(use_vllm=True, async_level=1), {}, False
    )
    refused("'truncate_prompt_tokens'], which transformers' generate does", checked, tiny_model, generation_kwargs=ours)


def test_a_tokenizer_without_an_end(tiny_model):
    """Or with another one, at which generate ends."""
    assert build(tiny_model, settings={"generation_kwargs": {"eos_token_id": 5}}).eos_token_ids == [5]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.eos_token = None
    refused(
        "has no eos_token, so no completion could end. Set one", build, load(tiny_model), processing_class=tokenizer
    )


@pytest.mark.parametrize("by_model", [False, True])
def test_what_generate_cannot_do_in_training_is_refused(tiny_model, tokenizer, by_model):
    for name, value, use in (
        ("stop_strings", ["\n"], "Use eos_token_id, or vLLM's option stop"),
        ("num_return_sequences", 2, "Use num_generations"),
        ("num_beams", 2, "Use temperature and top_p"),
        ("do_sample", False, "Use a low temperature"),
        ("return_dict_in_generate", True, "Use log_completions"),
    ):
        model = load(tiny_model)
        if by_model:
            setattr(model.generation_config, name, value)
        settings = {} if by_model else {"generation_kwargs": {name: value}}
        found = refusal(build, model, settings=settings, processing_class=tokenizer)
        said = rf"{name}={re.escape(repr(value))} cannot be used in training\..*{use}"
        assert re.search(said, found) or (by_model and name == "do_sample"), (name, found)  # TRL sets do_sample itself


@pytest.mark.parametrize(
    ("option", "dtype", "logged"),
    [
        ({}, torch.float32, r"\A\Z"),
        ({"no_repeat_ngram_size": 3}, torch.float32, "takes completions for samples of the model, but .*NoRepeat"),
        ({}, torch.bfloat16, "The weights that are trained have 16 bits"),
    ],
)
def test_what_makes_samples_or_updates_others_than_the_models_is_warned_of(
    tiny_model, tokenizer, caplog, option, dtype, logged
):
    model = load(tiny_model, dtype=dtype)
    model.generation_config.update(**option)
    build(model, processing_class=tokenizer)
    assert re.search(logged, "".join(one.getMessage() for one in caplog.records if one.name.startswith("dash_trl")))


def test_generation_kwargs_that_the_loss_does_not_know_are_refused(tiny_model):
    own = {"generation_kwargs": {"temperature": 0.7}}
    refused("has temperature=0.7, but the loss uses temperature=1.0", checked, tiny_model, **own)
    checked(tiny_model, temperature=0.7, **own)


def test_an_adapter_that_vllm_could_not_follow(tmp_path):
    """It parts tied embeddings, or cannot be merged. The server, which is looked for afterwards, is not there."""
    path = save_tiny_model(tmp_path, tie_word_embeddings=True)
    args = config(vllm_server_urls=["http://127.0.0.1:9"], vllm_server_timeout=0.1)
    for settings, error, said in (
        ({"modules_to_save": ["embed_tokens"]}, ValueError, "set modules_to_save="),
        ({"modules_to_save": ["lm_head"]}, ValueError, "set modules_to_save="),
        ({"target_modules": ["embed_tokens"]}, ValueError, "set modules_to_save="),
        ({"trainable_token_indices": [5]}, ValueError, r"trainable_token_indices=\[5\]: PEFT cannot merge"),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, RuntimeError, "did not answer"),
        ({"modules_to_save": ["norm"]}, RuntimeError, "did not answer"),
    ):
        lora = LoraConfig(**{"target_modules": ["q_proj"], **settings})
        adapted = get_peft_model(load(path), lora)
        refused(said, build, adapted, error=error, args=args, processing_class=AutoTokenizer.from_pretrained(path))


def test_a_server_that_is_not_there(tmp_path, tiny_model):
    """vLLM need not be installed here; the server has to answer. The weights of another run stay where they are."""
    args = config(vllm_server_urls=["http://127.0.0.1:9"], vllm_server_timeout=0.2)
    args.output_dir = str(tmp_path)
    other_run = FileWeights(tmp_path / "_vllm_weights", torch.float32)
    weights = other_run.write([], 1)
    for _ in range(2):  # a notebook's cell, run once more
        refused(
            r"1 of 1 vLLM servers did not answer within vllm_server_timeout=0.2 s",
            build,
            tiny_model,
            error=RuntimeError,
            args=args,
        )
    assert Path(weights.path).is_dir()


# ---------------------------------------------------------------------- in what a run samples


@pytest.fixture(scope="module")
def trainer(tiny_model):
    return build(tiny_model)


def test_prompts_are_looked_at_as_they_are_sampled(trainer):
    messages = [["1 + 1"], [{"content": "x"}], [{"role": "user"}], [{"role": None, "content": ""}]]
    contents = None, 1, [], ["1"], [{"type": "text"}], [{"type": "image", "text": "1"}]
    messages += [[{"role": "system", "content": "x"}, {"role": "user", "content": content}] for content in contents]
    for prompt in (None, "", 7, [], *messages):
        refused(f"A row has the prompt .*{NEITHER}", trainer._tokenize_prompts, ["1 + 1", prompt])
    call = {"role": "assistant", "tool_calls": [{"type": "function", "id": None}]}  # `datasets` adds such keys
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1", "image": None}],
        "tool_calls": None,
    }
    plain = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]},
        {"role": "user", "content": "1 + 1"},
    ]
    assert plain_prompt([{**call, "content": None}, parts], "A row") == plain_prompt(plain, "A row") == plain


def test_a_prompt_that_fills_the_context(trainer, monkeypatch):
    """Each of the 20 characters is a token of its own."""
    config = trainer.model.config
    monkeypatch.setattr(config, "max_position_embeddings", 20)
    refused("has 20 tokens, but the model's context is 20", trainer._tokenize_prompts, ["x", "x" * 20])
    monkeypatch.setattr(config, "max_position_embeddings", 21)
    assert len(trainer._tokenize_prompts(["x", "x" * 20])[0][1]) == 20
    monkeypatch.setattr(trainer.model, "config", BloomConfig())  # of a model without positions
    assert len(trainer._tokenize_prompts(["x", "x" * 3000])[0][1]) == 3000


def test_a_text_that_begins_twice_or_ends(trainer, monkeypatch):
    """With `bos_token`, as texts do that a chat template has made, if the tokenizer adds this token, too."""
    trainer._tokenize_prompts(["<|im_end|>", "1<|im_end|>1"])  # alone, GPT-2 has it as the beginning
    refused("A prompt has no token", check_prompt_ids, [[4], []], trainer._tokenizer, [1])
    refused(r"ends with an end token \(\[1\]; eos_token\)", trainer._tokenize_prompts, ["1", "1<|im_end|>\n"])
    monkeypatch.setattr(trainer.model.config, "vocab_size", 100)
    refused("has the token 267, but the model has 100 embeddings", trainer._tokenize_prompts, ["12 + 34"])
    monkeypatch.undo()
    monkeypatch.setattr(trainer._tokenizer, "bos_token", "<|endoftext|>")
    trainer._tokenize_prompts(["<|endoftext|>1 + 1", "1<|endoftext|><|endoftext|>"])
    refused(r"the token 0 \(bos_token\) twice", trainer._tokenize_prompts, ["1 + 1", "<|endoftext|>" * 2 + "1"])


def test_the_context_of_a_model():
    """Model cards extend it by YaRN and leave `max_position_embeddings` as it is."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    for rope, length in ((None, 32), ({"rope_type": "default", "rope_theta": 1e4}, 32), (yarn, 128)):
        assert context_of(Qwen2Config(max_position_embeddings=32, rope_parameters=rope)) == length
    assert context_of(Qwen2Config(max_position_embeddings=256, rope_parameters=yarn)) == 256


IDS = [[5], [6, 7]]
# what a function returns, settings, part of the error message
ROLLOUTS = [
    # a prompt without tokens
    ({"prompt_ids": [[], [4]]}, {}, "2 prompt_ids for 2 prompts, or an empty one"),
    # a completion too few
    ({"completion_ids": [[5]]}, {}, "1 completion_ids for 2 prompts"),
    # a token too many
    (
        {"completion_ids": [[5], [300]]},
        {},
        "completion_ids has the token 300, but .* 300 embeddings",
    ),
    # none, with aipo
    ({}, AIPO, "loss_type='aipo' needs the sampler's .* none: return .* as 'logprobs'"),
    # none to correct
    ({}, {"use_vllm": True}, "vllm_importance_sampling_correction needs the"),
    # of too few tokens
    ({"logprobs": [[-1.0], [-1.0]]}, AIPO, "of other lengths .*one number for each token"),
    # an env_mask of too few tokens
    ({"env_mask": [[1], [1]]}, {}, "env_mask of other lengths than completion_ids"),
]


def test_rollouts_of_a_users_function(trainer, monkeypatch):
    right = {"completion_ids": IDS, "prompt_ids": IDS}
    known = {**right, "logprobs": [[-1.0], [-1.0, float("nan")]], "env_mask": [[1], [0, 1]]}

    def checked(output: dict[str, Any]) -> dict[str, Any]:
        return checked_rollouts(lambda *_: output, ["a", "b"], trainer)

    for changed, settings, said in ROLLOUTS:
        monkeypatch.setattr(trainer.args, "loss_type", settings.get("loss_type", "dapo"))
        monkeypatch.setattr(trainer, "use_vllm", settings.get("use_vllm", False))
        refused(said, checked, {**right, "logprobs": None, **changed})
        assert checked(known) == known
    refused(r"without \['logprobs'\]: return all three", checked, right)


def test_the_trainer_looks_at_them(tiny_model):
    rollouts = {"prompt_ids": IDS, "completion_ids": IDS, "logprobs": [[-1.0]]}
    trainer = build(tiny_model, settings=AIPO, rollout_func=lambda prompts, trainer: rollouts)
    refused("logprobs of other lengths", trainer.rollout_func, ["a", "b"], trainer)
