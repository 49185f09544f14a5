"""Files and adapters of a weight sync, and its proof, with fake servers: `test_vllm.py` has the real ones."""

import gc
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from peft.tuners.lora.config import KasaConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dash_trl.sampling import (
    AdapterWeights,
    FileWeights,
    ScaledLayers,
    ServerPool,
    ShiftedAdapter,
    WeightMismatch,
    check_probe,
    model_log_probs,
    obstacle,
    weights_version,
)
from tests.fake_server import Fake, factory
from tests.models import EXPERTS, SIZES
from tests.tiny import refused

fakes = factory(Fake)


def test_versions_of_another_rank_are_of_this_run(tmp_path, fakes, caplog):
    """A rank that has not written them gives a server, which missed one, the last version."""
    writes = FileWeights(tmp_path, torch.float32)
    others = FileWeights(tmp_path, torch.float32)
    fake = fakes()
    pool = ServerPool([fake.url])
    fake.tag = writes.write([], 1).tag
    last = writes.write([], 2)
    pool.ask_all(partial(others.refit, last))
    assert fake.tag == last.tag and "another run" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_another_version_after_each_change(dtype):
    flat = torch.randn(36).to(dtype)
    layer = nn.Linear(5, 6).to(dtype)
    layer.weight.data = flat[1:31].view(6, 5)
    layer.bias.data = torch.zeros(6, dtype=dtype)
    changes = [lambda: layer.weight.data[5, 4].add_(1), lambda: layer.bias.data.neg_()]
    found = [weights_version(layer.parameters())]
    for change in changes:
        change()
        assert weights_version(layer.parameters()) not in found
        found.append(weights_version(layer.parameters()))
    assert weights_version(layer.parameters()) == found[-1]


# ------------------------------------------------------------------------------------------------------------ files


class Large(torch.Tensor):
    """A small tensor that claims to be of 2 GiB, half of a file."""

    nbytes = 2 << 30


def parameters(scale: float = 1.0):
    torch.manual_seed(0)
    return {f"layer.{i}.weight": (scale * torch.randn(4, 4)).as_subclass(Large) for i in range(5)}


def versions(directory: Path) -> list[str]:
    return sorted(map(str, directory.glob("*/version-*")))


def test_a_version_is_complete_when_it_appears_and_the_old_one_goes(tmp_path, fakes):
    fake = fakes()
    pool = ServerPool([fake.url])
    weights = FileWeights(tmp_path, torch.float32)
    shards = []
    load = fake.load

    def load_seen(path):
        shards.append(len(list(Path(path).glob("*.safetensors"))))
        load(path)

    fake.load = load_seen
    snapshot = weights.write(parameters().items(), 1)
    pool.ask_all(partial(weights.refit, snapshot))
    assert versions(tmp_path) == [snapshot.path]
    assert fake.tag == snapshot.tag and shards == [3]
    assert fake.held.keys() == parameters().keys()
    assert all(torch.equal(fake.held[name], tensor) for name, tensor in parameters().items())
    second = weights.write(parameters(2.0).items(), 2)
    assert versions(tmp_path) == [second.path] and second.tag != snapshot.tag


def test_a_server_whose_base_model_may_be_another_run_s_ends_the_run(tmp_path, fakes):
    adapter = AdapterWeights(tmp_path, torch.float32, LoraConfig(r=8))
    fake = fakes()
    pool = ServerPool([fake.url])
    for version in (1, 2):
        refit = partial(adapter.refit, adapter.write([], version))
        fake.tag = "adapter-another-1"  # with the same base model
        pool.ask_all(refit)
        fake.tag = "default"  # it was restarted
        pool.ask_all(refit)
        fake.tag = FileWeights(tmp_path, torch.float32).write([], 1).tag
        refused(f"{fake.url} was given a whole model by another run", pool.ask_all, refit, error=WeightMismatch)


def killed_run(directory: Path) -> None:
    """Another process writes a version, and is killed."""
    pid = os.fork()
    if pid == 0:
        weights = FileWeights(directory, torch.float32)
        weights.write(parameters().items(), 1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_run_removes_its_own_weights_and_those_of_killed_runs_only(tmp_path):
    directory = tmp_path / "made"
    first = FileWeights(directory, torch.float32)
    second = FileWeights(directory, torch.float32)
    assert not directory.exists()  # ranks that only receive leave no trace
    alive = first.write(parameters().items(), 1)
    killed_run(directory)
    assert len(versions(directory)) == 2
    also = second.write(parameters().items(), 1)
    assert versions(directory) == sorted([alive.path, also.path]) and len(list(directory.iterdir())) == 2
    del first
    gc.collect()
    assert versions(directory) == [also.path]
    del second
    gc.collect()
    assert list(directory.iterdir()) == []


# --------------------------------------------------------------------------------------------------------- the probe


def qwen2(**settings):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero in a new model
            nn.init.normal_(parameter)
    return model


IDS = [(7919 * i) % 300 for i in range(1, 33)]


def changed_by(model, perturbation) -> set[str]:
    """Asserts that outputs as if the weights were changed are those of the changed weights; returns which these are."""
    plain = model_log_probs(model, IDS)
    with perturbation.outputs():
        expected = model_log_probs(model, IDS)
    sent = {name: value.detach().clone() for name, value in perturbation.parameters(model.named_parameters())}
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, sent[name])}
    model.load_state_dict(sent, strict=False)
    model.tie_weights()
    assert (model_log_probs(model, IDS) - expected).abs().max() < 1e-5 < 0.1 < (plain - expected).abs().max()
    return changed


def test_scaled_outputs_are_scaled_weights():
    for tied in (False, True):
        model = qwen2(tie_word_embeddings=tied)
        changed = changed_by(model, ScaledLayers(model))
        assert {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"} <= changed
        assert not any("norm" in name for name in changed)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_scaled_outputs_of_experts_are_scaled_weights(family):
    torch.manual_seed(0)
    sizes = SIZES | EXPERTS | {"num_local_experts": 4, "initializer_range": 0.5}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    changed = changed_by(model, ScaledLayers(model))
    assert {name for name, _ in model.named_parameters() if "experts.down_proj" in name} <= changed


def test_shifted_outputs_are_shifted_matrices():
    adapted = get_peft_model(qwen2(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    names = {name for name, _ in adapted.named_parameters() if "lora_B" in name}
    assert changed_by(adapted, ShiftedAdapter(adapted)) == names


ROOM = 8


# options of an adapter, the largest rank that servers take, why the adapter cannot go alone
ADAPTERS = [
    ({}, ROOM, None),
    ({"use_rslora": True, "layers_to_transform": [1]}, ROOM, None),
    ({"r": 16}, ROOM, "--enable-lora --max-lora-rank 16"),
    ({}, 0, "--enable-lora --max-lora-rank 8"),
    ({"use_dora": True}, ROOM, "use_dora"),
    ({"init_lora_weights": "pissa"}, ROOM, "init_lora_weights='pissa' has changed its base model"),
    ({"init_lora_weights": "OLoRA"}, ROOM, "init_lora_weights='OLoRA' has changed its base model"),
    ({"kasa_config": KasaConfig()}, ROOM, "kasa_config has changed its base model"),
    ({"bias": "lora_only"}, ROOM, "an adapter with bias"),
    ({"modules_to_save": ["lm_head"]}, ROOM, "modules_to_save"),
]


def test_which_adapters_a_server_can_be_given():
    for config, served, why in ADAPTERS:
        found = obstacle(
            get_peft_model(qwen2(), LoraConfig(**{"r": 8, "target_modules": ["q_proj"], **config})), served
        )
        assert found is None if why is None else why in found, (config, found)
    ia3 = get_peft_model(qwen2(), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    assert "this is IA3" in obstacle(ia3, ROOM)
    named = get_peft_model(qwen2(), LoraConfig(target_modules=["q_proj"]), adapter_name="policy")
    assert "the active adapters are ['policy'], and not 'default' alone" in obstacle(named, ROOM)
    quantised = get_peft_model(qwen2(), LoraConfig(target_modules=["q_proj"]))
    quantised.get_base_model().hf_quantizer = object()
    assert "its base model are quantised" in obstacle(quantised, ROOM)
    norm_too = get_peft_model(qwen2(), LoraConfig(target_modules=["q_proj"]))
    norm_too.base_model.model.model.norm.requires_grad_()
    assert "other parameters are trained, too, such as base_model.model.model.norm" in obstacle(norm_too, ROOM)


def test_the_probe_finds_a_server_that_computes_with_old_weights():
    model = qwen2()
    plain = model_log_probs(model, IDS)
    with ScaledLayers(model).outputs():
        expected = model_log_probs(model, IDS)
    servers = {"http://a": expected.tolist()}
    exact = {torch.float32}
    mixed = {torch.float32, torch.bfloat16}
    check_probe(expected, servers, exact)
    check_probe(expected, {"http://a": (expected + 0.1).tolist()}, mixed)  # rounding
    for wrong, dtypes in (
        (plain, exact),
        (expected * float("nan"), exact),
        (expected + 0.1, exact),
        (2 * plain, mixed),
    ):
        refused(
            "http://b does not compute with the weights that it was given",
            check_probe,
            expected,
            servers | {"http://b": wrong.tolist()},
            dtypes,
            error=WeightMismatch,
        )
