"""The contracts with TRL's internals: each seam on a plain `GRPOTrainer`, so that a new TRL fails here first."""

import inspect

import pytest
import torch
from trl import GRPOTrainer

from dash_trl.seams import Decoder, Instead, begin_anew, count_pass_time, relog_advantages, sample, sampled_by, seen_as
from dash_trl.update import OFF_POLICY_LOSSES, trl_settings
from tests.tiny import prompts, run, tiny_tokenizer


class Probe:
    beta = 0.5

    def double(self) -> float:
        self.asked = True
        return 2 * self.beta


def test_a_method_sees_other_values_and_sets_its_own_on_the_object():
    probe = Probe()
    assert Probe.double(Instead(probe, beta=3.0)) == 6.0
    assert probe.asked and probe.beta == 0.5 and "beta" not in vars(probe)
    assert Instead(probe, beta=3.0).double() == 1.0  # a method that it calls sees the object itself
    with pytest.raises(AttributeError, match="gamma"):
        _ = Instead(probe, beta=3.0).gamma


def test_sampling_is_trls_without_its_model_passes(tiny_model, tmp_path, monkeypatch):
    """What a plain trainer's sampling method returns, and the passes of its model meanwhile, muted and not."""
    seen, passes, method = {}, [], GRPOTrainer._generate_and_score_completions

    def compare(trainer, inputs):
        hook = trainer.model.register_forward_hook(lambda *args: passes.append(1))
        state = torch.get_rng_state()
        seen["muted"] = sample(trainer, inputs, method)
        assert not passes
        seen["plain"] = method(trainer, inputs)
        assert passes and trainer.beta == 0.04
        passes.clear()
        hook.remove()
        torch.set_rng_state(state)
        return seen["plain"]

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", compare)
    run(GRPOTrainer, tiny_model, tmp_path, beta=0.04, steps_per_generation=8, max_steps=2)
    known = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
    assert seen["muted"].keys() == known
    assert seen["plain"].keys() - known == {"old_per_token_logps", "ref_per_token_logps"}
    items = seen["muted"]["num_items_in_batch"]
    assert items == seen["muted"]["completion_mask"].sum() and items.dim() == 0


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    return run(GRPOTrainer, tiny_model, tmp_path_factory.mktemp("trl"), max_steps=2)


@pytest.mark.parametrize("loss_type", OFF_POLICY_LOSSES)
@pytest.mark.parametrize("detached", [False, True])
def test_the_settings_of_our_losses_are_trls(trainer, loss_type, detached):
    """Attributes that its loss reads; `use_vllm` means there that there is a correction, and nothing else."""
    settings = trl_settings(loss_type, delta=8.0, detached=detached)
    methods = (GRPOTrainer._compute_loss, GRPOTrainer._generate_and_score_completions)
    source = "".join(map(inspect.getsource, methods))
    for name in settings:
        place = "args.delta" if name == "delta" else name
        assert f"self.{place}" in source and hasattr(trainer.args if name == "delta" else trainer, name)
    correction = "self.use_vllm and self.vllm_importance_sampling_correction"
    assert source.count("self.use_vllm") == source.count(correction) > 0
    seen = seen_as(trainer, settings)
    assert seen.loss_type in ("dapo", "cispo") and seen.args.delta == settings.get("delta")
    assert seen.args.steps_per_generation == 4 and seen_as(trainer, {}) is trainer
    assert trainer.args.delta is None and trl_settings("dapo", delta=8.0, detached=detached) == {}


TEMPLATE = {  # of a model that shows what it thinks; the prompt has opened that
    "defaults": {"role": "assistant"},
    "start_anchor": "<says>",
    "fields": {
        "reasoning_content": {"open": "(", "close": ")", "content": "text"},
        "content": {"close": "!", "content": "text"},
    },
}


@pytest.mark.parametrize("style", ["text", "chat", "template"])
def test_a_part_of_a_batch_is_decoded_as_trl_decodes_the_whole(style, trainer, monkeypatch):
    """And each row once: parts of the batch first, then all of it."""
    texts = [f"{thought}) it is {row}!" for row, thought in enumerate(["the sum", "no end", "(", ""] * 4)]
    completion_ids = tiny_tokenizer()(text=texts)["input_ids"]
    tokenizer, decoded = trainer._tokenizer, []
    chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}<says>("
    monkeypatch.setattr(tokenizer, "chat_template", chat_template)
    monkeypatch.setattr(tokenizer, "response_template", TEMPLATE if style == "template" else None, raising=False)
    monkeypatch.setattr(trainer, "rollout_func", None)
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *args: (completion_ids, None))
    asked = prompts(16)["prompt"][:]
    if style != "text":
        asked = [[{"role": "user", "content": text}] for text in asked]
    prompt_ids, _, _, expected, *_ = trainer._generate(asked)
    before = repr(trainer._metrics), trainer.state.num_input_tokens_seen
    for name in ("batch_decode", "parse_response"):
        method = getattr(tokenizer, name)
        counted = lambda *args, method=method, **kwargs: decoded.append(args) or method(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(tokenizer, name, counted)
    decoder, early = Decoder(trainer, GRPOTrainer._generate), [None] * 16
    for first in (8, 0, 4, 12):
        own = slice(first, first + 4)
        early[own] = decoder.completions(asked[own], prompt_ids[own], completion_ids[own])
    assert before == (repr(trainer._metrics), trainer.state.num_input_tokens_seen)
    calls = len(decoded)
    whole = decoder.generate(asked)[3]
    assert len(decoded) == calls == (16 if style == "template" else 4)
    assert early == whole == expected
    if style != "text":  # a reward may write into its own
        assert not {id(one) for (one,) in early} & {id(one) for (one,) in whole}
    first = {"text": texts[0], "chat": [{"role": "assistant", "content": texts[0]}]}
    parsed = [{"role": "assistant", "reasoning_content": "the sum", "content": "it is 0"}]
    assert expected[0] == first.get(style, parsed)


def test_counters_and_logs_of_a_run(trainer):
    """The last one that uses the trainer, which it changes."""
    assert trainer._step == 8 and sampled_by(trainer, 3).tolist() == [[2, 2]] * 3
    known = {"_current_train_step_time", "_entropy_window_stats", "_pending_metrics", "_pending_extra_logs"}
    assert known <= vars(trainer).keys()
    assert "self.state.global_step != self._last_loaded_step" in inspect.getsource(GRPOTrainer)  # set with vLLM only
    count_pass_time(trainer, 5.0)
    assert trainer._current_train_step_time >= 5.0

    assert "frac_reward_zero_std" in trainer.state.log_history[0] and len(trainer._logs["advantages"]) == 16
    trainer._metrics["train"]["frac_reward_zero_std"] = [0.0, 0.0]
    relog_advantages(trainer, [7.0, 8.0], torch.tensor([True, False]))
    assert list(trainer._logs["advantages"])[-2:] == [7.0, 8.0] and len(trainer._logs["advantages"]) == 16
    assert trainer._metrics["train"]["frac_reward_zero_std"] == [0.0, 0.5]

    begin_anew(trainer)
    assert (trainer._step, trainer._current_train_step_time, trainer._last_loaded_step) == (0, 0.0, -1)
    assert not trainer._metrics["train"]
