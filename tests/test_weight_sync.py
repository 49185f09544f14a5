"""Checksums, files and the probe of a weight sync, without a server: `test_vllm.py` has the real ones."""

import asyncio
import errno
import gc
import os
import signal
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.generation import vllm_client

from dash_trl.sampling.checksum import combine_workers, tensor_checksum, weights_checksum
from dash_trl.sampling.server import WeightReport
from dash_trl.sampling.weights import FileWeights, NCCLWeights, Snapshot, file, model_log_probs, nccl, obstacle
from dash_trl.sampling.weights.proof import (
    check_probe,
    probe_tokens,
    scale_linear,
    scaled_outputs,
    shift_adapter,
    shifted_outputs,
)
from dash_trl.sampling.weights.snapshot import WeightMismatch
from tests.fake_server import Fake, factory
from tests.tiny import said

fakes = factory(Fake)
A, B, MODULUS = 0x2545F4914F6CDD1E - (1 << 61), 0x1E3779B97F4A7C15, 1 << 64


def reference(values: list[int]) -> int:
    """Python's own integers."""
    return sum((x * (A * x + B)) % MODULUS for x in values) % MODULUS


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40))
def test_the_checksum_is_a_sum_over_the_bits_of_elements(bits):
    assert tensor_checksum(torch.tensor(bits, dtype=torch.int32).view(torch.float32)) == reference(bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fusing_splitting_and_padding_leave_it_and_one_bit_does_not(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(6, 4).to(dtype), torch.randn(2, 4).to(dtype)
    whole = weights_checksum([q, k])
    assert weights_checksum([torch.cat([q, k])]) == whole
    assert weights_checksum([torch.cat([q, torch.zeros(3, 4).to(dtype)]), k]) == whole
    assert weights_checksum([q.t(), k]) == whole  # a view that is not contiguous
    flipped = q.clone()
    flipped.view(torch.int8)[0, 0] ^= 1
    assert weights_checksum([flipped, k]) != whole


def test_workers_together_hold_what_one_holds():
    torch.manual_seed(0)
    linear, norm = torch.randn(8, 4), torch.randn(4)
    workers = [
        {"linear": f"{tensor_checksum(part):x}", "norm": f"{tensor_checksum(norm):x}"} for part in linear.split(4)
    ]
    assert combine_workers(workers) == weights_checksum([linear, norm])
    assert combine_workers(workers[:1]) != weights_checksum([linear, norm])


# ------------------------------------------------------------------------------------------------------------ files


def answers(servers, ask):
    """As `ServerPool.on_each`."""

    async def ask_all():
        return await asyncio.gather(*map(ask, servers), return_exceptions=True)

    return dict(zip([server.url for server in servers], asyncio.run(ask_all()), strict=True))


class Tagged:
    """Says which weights it was given."""

    given, tag = None, "default"

    async def weight_tag(self) -> str:
        return self.tag


class Server(Tagged):
    """Reads the file as a server would, and answers its checksum, or `answer`."""

    url = "http://a"

    def __init__(self, answer=None):
        self.answer, self.loaded = answer, []

    def on_each(self, ask):
        return answers([self], ask)

    async def load_weights(self, path: str, tag: str) -> WeightReport:
        tensors = {}
        for shard in sorted(Path(path).glob("*.safetensors")):
            tensors |= load_file(shard)
        self.loaded.append((Path(path).name, tag, tensors))
        if isinstance(self.answer, Exception):
            raise self.answer
        return WeightReport(self.answer or weights_checksum(tensors.values()), "float32")


def parameters(scale: float = 1.0):
    torch.manual_seed(0)
    return {f"layer.{i}.weight": scale * torch.randn(4, 4) for i in range(5)}


def versions(directory: Path) -> list[str]:
    return sorted(map(str, directory.glob("*/version-*")))


def test_a_version_is_complete_when_it_appears_and_the_old_one_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "SHARD_BYTES", 100)  # two tensors of 64 bytes
    weights, servers = FileWeights(tmp_path, torch.float32), Server()
    snapshot, errors = weights.send(parameters().items(), 1, servers.on_each)
    assert errors == {"http://a": None}
    assert versions(tmp_path) == [snapshot.path]
    assert servers.loaded[0][:2] == (Path(snapshot.path).name, snapshot.tag)
    assert len(list(Path(snapshot.path).glob("*.safetensors"))) == 3
    for name, tensor in parameters().items():
        assert torch.equal(servers.loaded[0][2][name], tensor)
    second, _ = weights.send(parameters(2.0).items(), 2, servers.on_each)
    assert versions(tmp_path) == [second.path] and second.checksum != snapshot.checksum
    assert second.tag != snapshot.tag


def test_weights_are_sent_in_the_dtype_of_the_servers(tmp_path):
    weights, servers = FileWeights(tmp_path, torch.bfloat16), Server()
    weights.send(parameters().items(), 1, servers.on_each)
    assert all(tensor.dtype == torch.bfloat16 for tensor in servers.loaded[0][2].values())


def test_a_server_with_other_weights_ends_the_run_and_a_failing_one_does_not(tmp_path):
    weights = FileWeights(tmp_path, torch.float32)
    with pytest.raises(WeightMismatch, match="http://a was given the weights of version 1"):
        weights.send(parameters().items(), 1, Server(answer=12345).on_each)
    _, errors = weights.send(parameters().items(), 2, Server(answer=RuntimeError("no room")).on_each)
    assert errors == {"http://a": "no room"}


def killed_run(directory: Path) -> None:
    """Another process writes a version, and is killed in the middle of the next one."""
    complete = parameters()

    def unfinished():
        yield from list(complete.items())[:3]
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        try:
            weights = FileWeights(directory, torch.float32)
            weights.write(complete.items(), 1)
            weights.write(unfinished(), 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_run_removes_its_own_weights_and_those_of_killed_runs_only(tmp_path):
    other = tmp_path / "model" / "version-2"  # of a program with a lock of its own
    other.mkdir(parents=True)
    (tmp_path / "model" / ".lock").touch()
    directory = tmp_path / "made"
    first, second = FileWeights(directory, torch.float32), FileWeights(directory, torch.float32)
    assert not directory.exists()  # ranks that only receive leave no trace
    alive = first.write(parameters().items(), 1)
    killed_run(directory)
    assert len(versions(directory)) == 3 and len(list(directory.glob("*/*.partial"))) == 1
    also = second.write(parameters().items(), 1)
    assert versions(directory) == sorted([alive.path, also.path]) and len(list(directory.iterdir())) == 2
    del first
    gc.collect()
    assert versions(directory) == [also.path]
    del second
    gc.collect()
    assert list(directory.iterdir()) == []
    FileWeights(tmp_path, torch.float32).write(parameters().items(), 1)
    assert other.is_dir()


def test_without_locks_nobody_s_weights_are_removed(tmp_path, monkeypatch, caplog):
    """As on a network filesystem that has none: whether another run lives cannot be known."""
    killed_run(tmp_path)
    left = versions(tmp_path)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file.fcntl, "flock", no_locks)
    unlocked = FileWeights(tmp_path, torch.float32)
    snapshot = unlocked.write(parameters().items(), 1)
    assert "cannot be locked" in caplog.text and f"remove {unlocked.run}." in caplog.text
    assert versions(tmp_path) == sorted([*left, snapshot.path])
    monkeypatch.undo()
    locked = FileWeights(tmp_path, torch.float32)
    own = locked.write(parameters().items(), 1)  # of those with a lock it can be known
    assert versions(tmp_path) == sorted([snapshot.path, own.path])


# --------------------------------------------------------------------------------------------------------- the probe

SHAPE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}


def qwen2(**settings):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, **settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero in a new model
            nn.init.normal_(parameter)
    return model


def tied():
    return qwen2(tie_word_embeddings=True)


def qwen3():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8))


@pytest.mark.parametrize("make", [qwen2, tied, qwen3])
def test_scaled_outputs_are_scaled_weights(make):
    model, ids = make(), probe_tokens(300)
    expected, plain = model_log_probs(model, ids, scaled_outputs(model, 0.5)), model_log_probs(model, ids)
    scaled = dict(scale_linear(model, model.named_parameters(), 0.5, lambda name: name))
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, scaled[name])}
    assert {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"} <= changed
    assert not any("norm" in name for name in changed)
    model.load_state_dict({name: value.detach().clone() for name, value in scaled.items()}, strict=False)
    model.tie_weights()
    assert (model_log_probs(model, ids) - expected).abs().max() < 1e-5 < 0.1 < (plain - expected).abs().max()


def test_scaled_outputs_with_an_adapter():
    """The weights that a server gets are merged, and an adapter with its base layer counts once."""
    model, ids = qwen2(), probe_tokens(300)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    expected = model_log_probs(adapted, ids, scaled_outputs(adapted, 0.5))
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        for module in merged.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight *= 0.5
                if getattr(module, "bias", None) is not None:
                    module.bias *= 0.5
    assert (model_log_probs(merged, ids) - expected).abs().max() < 1e-5


def test_shifted_outputs_are_shifted_matrices():
    model, ids = qwen2(), probe_tokens(300)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    expected, plain = model_log_probs(adapted, ids, shifted_outputs(adapted)), model_log_probs(adapted, ids)
    shifted = dict(shift_adapter(adapted.named_parameters()))
    assert {name for name, value in adapted.named_parameters() if not torch.equal(value, shifted[name])} == {
        name for name in shifted if "lora_B" in name
    }
    adapted.load_state_dict(shifted, strict=False)
    assert (model_log_probs(adapted, ids) - expected).abs().max() < 1e-5 < 0.1 < (plain - expected).abs().max()


LORA = {"lora_config": {"max_lora_rank": 8}}


@pytest.mark.parametrize(
    ("config", "served", "why"),
    [
        ({}, LORA, None),
        ({"use_rslora": True, "layers_to_transform": [1]}, LORA, None),
        ({"r": 16}, LORA, "--enable-lora --max-lora-rank 16"),
        ({}, {"lora_config": None}, "--enable-lora --max-lora-rank 8"),
        ({"use_dora": True}, LORA, "use_dora"),
        ({"bias": "lora_only"}, LORA, "bias='lora_only'"),
        ({"rank_pattern": {"q_proj": 2}}, LORA, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, LORA, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, LORA, "modules_to_save"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, LORA, "adapts the embeddings or the output layer"),
        ({"target_modules": ["lm_head", "q_proj"]}, LORA, "adapts the embeddings or the output layer"),
        ({"trainable_token_indices": [3]}, LORA, "trainable_token_indices"),
    ],
)
def test_which_adapters_a_server_can_be_given(config, served, why):
    adapted = get_peft_model(qwen2(), LoraConfig(**{"r": 8, "target_modules": ["q_proj"], **config}))
    found = obstacle(adapted, served)
    assert found is None if why is None else why in found


def test_of_several_adapters_none_goes_alone():
    adapted = get_peft_model(qwen2(), LoraConfig(target_modules=["q_proj"]))
    adapted.add_adapter("other", LoraConfig(target_modules=["k_proj"]))
    adapted.base_model.set_adapter(["default", "other"])
    assert "the active adapters are" in obstacle(adapted, LORA)
    other = get_peft_model(qwen2(), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    assert "this is IA3" in obstacle(other, LORA)
    named = get_peft_model(qwen2(), LoraConfig(target_modules=["q_proj"]), adapter_name="policy")
    assert "none is 'default'" in obstacle(named, LORA)


def test_an_adapter_beside_other_trained_parameters_does_not_go_alone():
    adapted = get_peft_model(qwen2(), LoraConfig(target_modules=["q_proj"]))
    adapted.base_model.model.model.norm.requires_grad_()
    assert "other parameters are trained, too, such as base_model.model.model.norm" in obstacle(adapted, LORA)


def test_the_probe_finds_a_server_that_computes_with_old_weights(caplog):
    model, ids = qwen2(), probe_tokens(300)
    plain, expected = model_log_probs(model, ids), model_log_probs(model, ids, scaled_outputs(model, 0.5))
    check_probe(expected, plain, {"http://a": expected.tolist()}, torch.float32)
    assert not said(caplog)
    for wrong in (plain, expected * float("nan")):
        with pytest.raises(WeightMismatch, match="http://b holds .* it was given but does not compute with"):
            check_probe(expected, plain, {"http://a": expected.tolist(), "http://b": wrong.tolist()}, torch.float32)
    check_probe(plain + 1e-4, plain, {"http://a": plain.tolist()}, torch.float32)
    assert "proves little" in caplog.text


# -------------------------------------------------------------------------------------------------------------- NCCL


class NCCLServer(Tagged):
    """With the face of TRL's client, which needs CUDA: keeps what it is sent; what is broken fails, or hangs."""

    def __init__(self, name: str, broken: str = ""):
        self.url, self.calls, self.broken = f"http://{name}", [], broken
        self.received, self.closed = {}, False

    async def pause(self):
        self._note("pause")

    async def resume(self):
        self._note("resume")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.broken == call:
            raise RuntimeError(f"no {call}")

    async def end_weight_update(self, tag):
        self.calls.append(tag)

    async def weight_report(self):
        return WeightReport(weights_checksum(self.received.values()), "float32")

    def close_communicator(self):
        self.closed = True

    def weight_update(self):
        return nullcontext()

    def update_named_params(self, metadata, tensors):
        if self.broken == "hangs":
            threading.Event().wait()
        for (name, dtype, shape), (same, tensor) in zip(metadata, tensors, strict=True):
            assert name == same and f"torch.{dtype}" == str(tensor.dtype) and shape == list(tensor.shape)
            self.received[name] = tensor


def test_buckets_reach_every_server_and_a_hung_one_costs_its_timeout_not_the_run(monkeypatch):
    """The queues and threads only: the broadcast itself is TRL's and needs a GPU."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl, "BUCKET_BYTES", 100)
    servers = [NCCLServer(*one) for one in (("a",), ("b",), ("c", "hangs"), ("d", "pause"), ("e", "resume"))]
    urls = [server.url for server in servers]
    weights = NCCLWeights(urls, 5000, torch.device("cpu"), timeout=1.0, dtype=torch.float32)
    assert [weights.ports[url] for url in urls] == [5000, 5001, 5002, 5003, 5004]
    weights._clients = dict(zip(urls, servers, strict=True))
    snapshot, errors = weights.send(parameters().items(), 1, partial(answers, servers))
    assert errors[urls[0]] is errors[urls[1]] is None
    assert "nothing was consumed for 1 s" in errors[urls[2]] or "Timeout" in errors[urls[2]]
    assert errors[urls[3]] == "no pause" and errors[urls[4]] == "no resume"
    assert snapshot.checksum == weights_checksum(parameters().values())
    for server in (servers[0], servers[1], servers[4]):
        assert server.calls == ["pause", snapshot.tag, "resume"]
    for server in servers[2:4]:
        assert server.calls == ["pause", "resume"] and not server.received
    assert list(weights._clients) == urls[:2]  # the others begin anew
    assert [server.closed for server in servers] == [False, False, True, True, True]


def test_the_client_of_trl_sends_the_key_with_every_request(fakes, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    begin = lambda self, device: self._post(f"{self.base_url}/init_weight_transfer_engine")  # noqa: E731
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", begin)
    fake = fakes()
    fake.key = "secret"
    NCCLWeights([fake.url], 5000, torch.device("cpu"), timeout=1.0, dtype=torch.float32)._connect(fake.url)
    assert fake.asked == {"/v1/models": 1, "/init_weight_transfer_engine": 1}


class Returning(Tagged):
    """A server that came back."""

    url = "http://a"

    def __init__(self, tag: str):
        self.tag, self.calls = tag, []

    async def resume(self):
        self.calls.append("resume")

    async def load_weights(self, path, tag):
        self.calls.append((path, tag))
        return WeightReport(7, "float32")


@pytest.mark.parametrize("tag", ["run-3", "run-2", "default"])
def test_a_server_that_came_back_is_given_the_weights_unless_it_has_them(tag, tmp_path):
    snapshot = Snapshot(3, "run-3", 7, "directory")
    server = Returning(tag)
    assert asyncio.run(FileWeights(tmp_path, torch.float32).refit(server, snapshot)) == 3
    assert server.calls == ["resume" if tag == "run-3" else ("directory", "run-3")]
    server = Returning(tag)
    weights = NCCLWeights([server.url], 5000, torch.device("cpu"), timeout=0.5, dtype=torch.float32)
    assert asyncio.run(weights.refit(server, snapshot)) == (3 if tag == "run-3" else None)
    with pytest.raises(WeightMismatch):
        asyncio.run(FileWeights(tmp_path, torch.float32).refit(Returning("other"), Snapshot(3, "run-3", 8, "")))


def test_a_snapshot_says_what_differs():
    with pytest.raises(WeightMismatch, match=r"version 3 \(checksum ff\) but holds others \(fe\)"):
        Snapshot(3, "tag", 0xFF).verify(WeightReport(0xFE, "float32"), "http://a")
    Snapshot(3, "tag", 0xFF).verify(WeightReport(None, "float32"), "http://a")  # cannot be compared
