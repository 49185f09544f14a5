"""What `collect` does in place of TRL's sampling method, against what a plain `GRPOTrainer` returns and logs."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy
import pandas
import torch
from trl import GRPOTrainer

from dash_trl import DASHTrainer, RewardRunner
from dash_trl.collect import length_figures, reward_figures
from dash_trl.seams import decoded, sync_weights
from tests.tiny import assistant, prompts, refusal, said, tiny_tokenizer, user


def test_a_metric_is_a_float_and_of_two_columns_with_one_name_the_second_stays(train):
    """A checkpoint writes the log as JSON. Columns are as in TRL."""

    def measured(completions, log_extra, log_metric, **columns):
        log_extra("note", ["of the first"] * len(completions))
        log_metric("measured", torch.tensor(0.5))
        log_metric("shortest", numpy.float32(0.5))
        return [0.0, 1.0] * (len(completions) // 2)

    def noted(completions, log_extra, **columns):
        log_extra("note", ["of the second"] * len(completions))
        return [0.0] * len(completions)

    trainer = train(reward=[measured, noted])
    log = trainer.state.log_history[0]
    assert [type(log[name]) for name in ("measured", "shortest")] == [float, float]
    assert set(trainer._logs["extra"]["note"]) == {"of the second"}


def test_a_column_with_a_value_for_some_rows_only(train):
    """TRL fails with an IndexError while it writes the table."""
    settings = {"reward": lambda completions, log_extra, **_: log_extra("note", ["x"]) or [0.5] * len(completions)}
    train(**settings)
    said = refusal(train, log_completions=True, **settings)
    assert re.search(r"log_extra\('note'\) got 1 values for 16 completions", said)


def test_a_text_note_of_some_rows_is_a_column_since_then(train, tmp_path):
    calls = itertools.count()

    def graded(completion):
        number = next(calls)
        return float(number % 2), ({"why": "odd"} if number in range(16, 20) else {})

    train(reward=RewardRunner(graded), log_completions=True, max_steps=3, logging_steps=1)
    tables = [pandas.read_parquet(file) for file in sorted(tmp_path.glob("completions/*"))]
    assert "graded/why" not in tables[0]
    assert [sorted(table["graded/why"]) for table in tables[1:]] == [[""] * 12 + ["odd"] * 4, [""] * 16]


def test_the_last_window_s_completions_are_written_once(train, tmp_path, capsys):
    for every, steps in ((10, "3"), (2, "23"), (1, "123")):
        train(log_completions=True, max_steps=3, logging_steps=every)
        assert {file.stem[-1] for file in tmp_path.glob("completions/*")} == {*steps}
        assert capsys.readouterr().out.count("Step 3") == 1


def test_vllm_has_the_weights_of_now_when_a_rollout_func_is_called(train):
    """vLLM gets the weights once per optimizer step; here each window has two optimizer steps."""
    synced = []
    for kind in (GRPOTrainer, DASHTrainer):
        steps: list[int] = []

        def prepare(trainer, steps=steps):
            trainer.use_vllm = trainer.args.use_vllm = True
            trainer._last_loaded_step = -1
            sync = lambda: steps.append(trainer.state.global_step)  # noqa: E731
            trainer.vllm_generation = SimpleNamespace(sync_weights=sync)

        settings = {"vllm_importance_sampling_correction": False, "gradient_accumulation_steps": 2}
        trainer = train(kind, prepare=prepare, steps_per_generation=4, max_steps=4, **settings)
        synced.append(steps)
    assert synced == [[0, 2], [0, 2]]
    last = lambda: trainer._last_loaded_step  # noqa: E731
    for _ in range(2):
        sync_weights(trainer)
    assert synced[1] == [0, 2, 4] and last() == 4
    trainer.model.lm_head.weight.data.neg_()  # as averaged weights are swapped in: no optimizer step has made them
    assert last() == -1
    sync_weights(trainer)
    trainer.ranks = SimpleNamespace(largest=lambda own: True)  # another rank's shard has changed
    assert last() == -1


def test_figures_of_rows_that_no_function_scores_or_that_are_all_cut_off():
    figures = length_figures(torch.tensor([3, 5]), torch.tensor([True, True]))
    assert figures["completions/mean_terminated_length"] == 0.0 and figures["completions/clipped_ratio"] == 1.0
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


def test_some_rows_are_decoded_as_trl_decodes_all(train, monkeypatch):
    trainer = train(GRPOTrainer)
    texts = [f"{thought}) it is {row}!" for row, thought in enumerate(["the sum", "no end", "(", ""] * 4)]
    completion_ids = tiny_tokenizer()(text=texts)["input_ids"]
    tokenizer = trainer._tokenizer
    chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}<says>("
    monkeypatch.setattr(tokenizer, "chat_template", chat_template)
    monkeypatch.setattr(trainer, "rollout_func", None)
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *args: (completion_ids, None))
    said = assistant(texts[0])
    thought = [{"role": "assistant", "reasoning_content": "the sum", "content": "it is 0"}]
    for template, is_chat, first in ((None, False, texts[0]), (None, True, said), (TEMPLATE, True, thought)):
        monkeypatch.setattr(tokenizer, "response_template", template, raising=False)
        asked = prompts(16)["prompt"][:]
        if is_chat:
            asked = [user(text) for text in asked]
        prompt_ids, _, _, expected, *_ = trainer._generate(asked)
        for own in (slice(8, 12), slice(0, 16)):
            assert decoded(tokenizer, asked[own], prompt_ids[own], completion_ids[own]) == expected[own]
        assert expected[0] == first


def test_special_tokens_that_rewards_do_not_see_are_named_once(caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>", "<turn>"]})
    tokenizer.chat_template = "<turn>"
    rows = tokenizer(text=["<a>1<|im_end|>", "<turn><|endoftext|>", "<a>"])["input_ids"]
    for _ in range(2):
        assert decoded(tokenizer, prompts(3)["prompt"][:], [], rows) == ["1", "", ""]
    assert len(caplog.records) == 1 and "have the special tokens ['<a>'], which rewards do not see" in said(caplog)
