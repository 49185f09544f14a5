"""What `collect` does in place of TRL's sampling method, against what a plain `GRPOTrainer` returns and logs."""

import math
import random
from contextlib import contextmanager
from types import SimpleNamespace

import numpy
import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from dash_trl import DASHTrainer
from dash_trl.assembly import new_rounds
from dash_trl.collect import Sampled, decoded, is_truncated, length_figures, reward_figures, to_rollouts
from dash_trl.monitoring import Recorder
from tests.tiny import EOS, prompts, run, tiny_tokenizer


def rollouts_of(prompts, trainer):
    """Returns rollouts with truncated completions, tokens of an environment, and unknown log-probs."""
    chance = random.Random(0)
    rows = [[chance.randrange(4, 260) for _ in range(chance.randint(1, 12))] for _ in prompts]
    rows = [row + [EOS] * (chance.random() < 0.5) for row in rows]
    return {
        "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
        "completion_ids": rows,
        "logprobs": [[chance.choice((math.nan, -chance.random())) for _ in row] for row in rows],
        "env_mask": [[chance.randint(0, 1) for _ in row] for row in rows],
        "turns": [chance.randint(1, 3) for _ in prompts],
        "fleet": "two servers",
    }


def lengths(completion_ids, **columns):
    return [None if len(ids) % 3 == 0 else float(len(ids)) for ids in completion_ids]


def turns(turns, fleet, **columns):
    return [float(one) for one in turns]


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    settings = {"mask_truncated_completions": True, "pad_to_multiple_of": 8, "reward_weights": [0.5, 2.0]}
    folder = tmp_path_factory.mktemp("trl")
    return run(GRPOTrainer, tiny_model, folder, reward=[lengths, turns], rollouts=rollouts_of, **settings)


def test_rows_and_figures_are_those_of_trl(trainer):
    examples = [{"prompt": prompt, "answer": row} for row, prompt in enumerate(prompts(4)["prompt"]) for _ in range(4)]
    texts = [example["prompt"] for example in examples]
    logged = trainer._metrics["train"]
    logged.clear()
    expected = trainer._generate_and_score_completions(examples)

    columns = rollouts_of(texts, trainer)
    prompt_ids, completion_ids, log_probs, own_tokens = map(
        columns.pop, ("prompt_ids", "completion_ids", "logprobs", "env_mask")
    )
    completions = decoded(trainer._tokenizer, texts, prompt_ids, completion_ids)
    versions = torch.zeros(16, 2, dtype=torch.long)
    sampled = Sampled(
        prompt_ids,
        completion_ids,
        completions,
        versions,
        prompts=texts,
        log_probs=log_probs,
        own_tokens=own_tokens,
        columns=columns,
    )
    truncated = is_truncated(completion_ids, [EOS, trainer._tokenizer.pad_token_id])
    assert 0 < truncated.sum() < 16
    settings = {"pad_token_id": trainer._tokenizer.pad_token_id, "pad_to_multiple_of": 8, "masked": truncated}
    rows = to_rollouts(sampled, sampled.examples(examples), group=torch.arange(16) // 4, **settings)
    found = rows.tensors()
    assert {*found} - {*expected} == {"group", "policy_version"} and "tool_mask" in found
    for name in found.keys() & expected.keys():
        torch.testing.assert_close(found[name], expected[name].cpu(), rtol=0, atol=0, equal_nan=True)
    assert rows.loss_mask.sum() == expected["num_items_in_batch"]

    by_length = [math.nan if reward is None else reward for reward in lengths(completion_ids)]
    rewards = torch.tensor([by_length, turns(**columns)]).T
    assert [row["turns"] for row in rows.examples] == columns["turns"] and rows.examples[0]["fleet"] == "two servers"
    written = torch.tensor(list(map(sum, own_tokens)))
    figures = length_figures(written, truncated)
    figures |= reward_figures(rewards, ["lengths", "turns"], torch.tensor([0.5, 2.0]))
    assert figures.keys() == logged.keys() - {"num_tokens", "frac_reward_zero_std"} - {
        name for name in logged if name.startswith("sampling/")
    }
    for name, value in figures.items():
        assert [value] == pytest.approx(logged[name], rel=1e-6, nan_ok=True), name


def test_a_rollout_func_may_return_tensors(tiny_model, tmp_path):
    """TRL takes them; a tensor is in no set."""

    def as_tensors(prompts, trainer):
        columns = rollouts_of(prompts, trainer)
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        return columns | {name: list(map(torch.tensor, columns[name])) for name in names}

    logs = []
    for rollouts in (rollouts_of, as_tensors):
        settings = {"rollouts": rollouts, "mask_truncated_completions": True, "reward": [lengths, turns]}
        found = run(DASHTrainer, tiny_model, tmp_path, **settings).state.log_history[0]
        logs.append({name: value for name, value in found.items() if "time" not in name})
    assert 0 < logs[0]["completions/clipped_ratio"] < 1 and logs[0] == logs[1]


@pytest.mark.parametrize("value", [torch.tensor(0.5), numpy.float32(0.5)], ids=["torch", "numpy"])
def test_a_metric_of_a_reward_function_is_a_float(value, tiny_model, tmp_path):
    """A checkpoint writes the log as JSON."""

    def measured(completions, log_metric, **columns):
        log_metric("measured", value)
        return [0.0, 1.0] * (len(completions) // 2)

    assert type(run(DASHTrainer, tiny_model, tmp_path, reward=measured).state.log_history[0]["measured"]) is float


def test_tokenizing_is_a_part_of_generation(tiny_model, tmp_path, monkeypatch):
    timed, phases, found = Recorder.timed, [], []

    @contextmanager
    def noted(recorder, phase, **counts):
        phases.append(phase)
        with timed(recorder, phase, **counts):
            yield
        phases.pop()

    class Tokenizing(DASHTrainer):
        def _tokenize_prompts(self, prompts):
            found.append(list(phases))
            return super()._tokenize_prompts(prompts)

    monkeypatch.setattr(Recorder, "timed", noted)
    run(Tokenizing, tiny_model, tmp_path, in_process=True, max_completion_length=2)
    assert found == [["generate"]]


class Changing(TrainerCallback):
    """Changes settings after the first step: the filter drops all rows, and the reward weight is ten times as large."""

    def on_step_end(self, args, state, control, **kwargs):
        args.gradient_filter_threshold = 1e9
        self.trainer.reward_weights = torch.tensor([10.0])


def test_a_callback_may_change_settings_during_a_run(tiny_model, tmp_path):
    callback = Changing()
    settings = {"callbacks": [callback], "max_steps": 2, "constant": 0.0}
    trainer = run(
        DASHTrainer, tiny_model, tmp_path, prepare=lambda trainer: setattr(callback, "trainer", trainer), **settings
    )
    first, second, *_ = trainer.state.log_history
    assert first["filter/kept_rows"] > 0 and first["reward"] == pytest.approx(first["rewards/scripted/mean"])
    assert second["filter/kept_rows"] == 0 and second["reward"] == pytest.approx(10 * second["rewards/scripted/mean"])


def test_vllm_has_the_weights_of_now_when_a_rollout_func_is_called(tiny_model, tmp_path):
    """vLLM gets the weights once per optimizer step; here each window has two optimizer steps."""
    synced = []
    for kind in (GRPOTrainer, DASHTrainer):
        steps: list[int] = []

        def prepare(trainer, steps=steps):
            trainer.use_vllm = True
            trainer._last_loaded_step = -1
            sync = lambda: steps.append(trainer.state.global_step)  # noqa: E731
            trainer.vllm_generation = SimpleNamespace(sync_weights=sync)

        settings = {"vllm_importance_sampling_correction": False, "gradient_accumulation_steps": 2}
        run(kind, tiny_model, tmp_path, prepare=prepare, steps_per_generation=4, max_steps=4, **settings)
        synced.append(steps)
    assert synced == [[0, 2], [0, 2]]


def test_a_window_whose_completions_are_all_cut_off_has_no_figure_of_others():
    figures = length_figures(torch.tensor([3, 5]), torch.tensor([True, True]))
    assert figures["completions/mean_terminated_length"] == 0.0 and figures["completions/clipped_ratio"] == 1.0


def test_rows_to_which_no_function_applies_are_left_out():
    figures = reward_figures(torch.tensor([[math.nan], [2.0]]), ["one"], torch.tensor([3.0]))
    assert figures["reward"] == 6.0 and figures["rewards/one/mean"] == 2.0


TEMPLATE = {  # of a model that shows what it thinks; the prompt has opened that
    "defaults": {"role": "assistant"},
    "start_anchor": "<says>",
    "fields": {
        "reasoning_content": {"open": "(", "close": ")", "content": "text"},
        "content": {"close": "!", "content": "text"},
    },
}


@pytest.mark.parametrize("style", ["text", "chat", "template"])
def test_some_rows_are_decoded_as_trl_decodes_all(style, trainer, monkeypatch):
    texts = [f"{thought}) it is {row}!" for row, thought in enumerate(["the sum", "no end", "(", ""] * 4)]
    completion_ids = tiny_tokenizer()(text=texts)["input_ids"]
    tokenizer = trainer._tokenizer
    chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}<says>("
    monkeypatch.setattr(tokenizer, "chat_template", chat_template)
    monkeypatch.setattr(tokenizer, "response_template", TEMPLATE if style == "template" else None, raising=False)
    monkeypatch.setattr(trainer, "rollout_func", None)
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *args: (completion_ids, None))
    asked = prompts(16)["prompt"][:]
    if style != "text":
        asked = [[{"role": "user", "content": text}] for text in asked]
    prompt_ids, _, _, expected, *_ = trainer._generate(asked)
    for own in (slice(8, 12), slice(0, 16)):
        assert decoded(tokenizer, asked[own], prompt_ids[own], completion_ids[own]) == expected[own]
    first = {"text": texts[0], "chat": [{"role": "assistant", "content": texts[0]}]}
    parsed = [{"role": "assistant", "reasoning_content": "the sum", "content": "it is 0"}]
    assert expected[0] == first.get(style, parsed)


def test_ranks_that_share_an_engine_ask_for_equally_many_rows():
    """TRL cuts a rank's completions out of those of all its ranks by the number of this rank's own prompts."""
    asked = []

    def generate(contexts, *others):
        asked.append(len(contexts))
        return [[7] for _ in contexts], [[-1.0] for _ in contexts]

    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_mode="colocate",
        args=SimpleNamespace(vllm_tensor_parallel_size=2),
        ranks=SimpleNamespace(least=lambda number: min(number, -3)),  # another rank has 3 rows
        num_generations=2,
        _tokenizer=SimpleNamespace(eos_token_id=EOS),
        _conversations=None,
        _generate_single_turn=generate,
    )
    rounds = new_rounds(trainer)
    assert [len(rounds._generate([[5]] * rows, False)[0]) for rows in (0, 1, 5)] == [0, 1, 5]
    trainer.args.vllm_tensor_parallel_size = 1
    assert [len(rounds._generate([[5]] * rows, False)[0]) for rows in (0, 1)] == [0, 1]
    assert asked == [3, 3, 5, 1, 1]
