"""`python -m dash_trl.value_quality`: the truth it samples, whom it lets learn from what, its figures and refusals."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, HfArgumentParser

from dash_trl import ProcessRewardCallback
from dash_trl.evaluation import Draw, LocalSampler
from dash_trl.process_rewards import OutcomeValue, ValueRequest
from dash_trl.value_quality import Plan, choose, figures_of
from dash_trl.value_quality.candidates import Stage, saved, with_log_probs
from dash_trl.value_quality.command import ValueQualityArguments, main

PROBLEMS = [{"problem": f"{i} + {i}", "answer": str(2 * i)} for i in range(30)]
SMALL = ("--dataset_test_split", "train", "--num_problems", 6, "--num_samples", 5, "--num_rollouts", 4)
SMALL += ("--max_completion_length", 7, "--max_episode_tokens", 2, "--min_episode_tokens", 1, "--fit_rollouts", 16, 64)

# A reward that the first token decides, so that behind it the truth is known exactly.
REWARD = """
def compute_score(completions, completion_ids, **columns):
    assert all(1 <= len(ids) <= 7 for ids in completion_ids)
    return [ids[0] % 7 / 6 for ids in completion_ids]
"""
VALUES = """
import math
import threading

class Perfect:
    space = "probability"
    needs_answers = False

    def __call__(self, requests, trainer):
        return [[math.nan, *(one.completion_ids[0] % 7 / 6 for _ in one.boundaries[1:])] for one in requests]

def backwards(requests, trainer):
    return [[-v for v in row] for row in Perfect()(requests, trainer)]

class Pupil(Perfect):
    taught = []

    def learn(self, requests, outcomes, trainer):
        self.taught.append(([(one.prompt_ids, one.completion_ids) for one in requests], list(outcomes)))

class Locked(Pupil):
    def __init__(self):
        self.lock = threading.Lock()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """With problems, a reward and estimators of one's own; the working directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    write("problems.jsonl", PROBLEMS)
    Path("reward.py").write_text(REWARD)
    Path("my_values.py").write_text(VALUES)
    sys.modules.pop("my_values", None)
    importlib.invalidate_caches()
    return tmp_path


def write(name: str, rows: list[dict]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(*arguments: object) -> dict:
    main([*map(str, arguments)])
    output_dir = arguments[len(arguments) - 1 - arguments[::-1].index("--output_dir") + 1]
    return json.loads((Path(output_dir) / "value_quality.json").read_text())


def of_tiny(tiny_model: str, *arguments: object) -> tuple:
    own = (tiny_model, "--dataset_name", "problems.jsonl", "--reward_path", "reward.py", "--output_dir", "out")
    return (*own, *SMALL, *arguments)


# ------------------------------------------------------------------------------------------------------ the command


def test_embedded_and_then_other_values_of_the_same_samples(capsys, caplog, monkeypatch):
    arguments = ("embedded", "--num_problems", 6, "--num_samples", 4, "--num_rollouts", 6, "--output_dir", "out")
    found = measure(*arguments, "--fit_rollouts", 128, 256)
    names = ["position", "answer, 'The answer is <|im_end|>'", "outcome, 128 rollouts", "outcome, 256 rollouts"]
    assert list(found["estimators"]) == names and found["responses"] == 24 and found["without_truth"] == 0
    assert found["estimators"]["outcome, 256 rollouts"]["spearman"] > 0.4
    assert found["estimators"][names[1]]["brier"] is None and found["estimators"][names[2]]["brier"] < 0.3
    for row in found["values"]:  # boundaries are lines: 7+5=12
        assert len(row["boundaries"]) == len(row["truth"]) == len(row[names[2]]) > 1
        assert all(truth * 6 == pytest.approx(round(truth * 6)) for truth in row["truth"])
    assert "24 responses of 6 problems, 256 rollouts of 32 other problems, and 6 completions" in caplog.text
    assert caplog.text.index("This samples") < caplog.text.index("boundaries: ")
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("V "))
    assert [line.split("  ")[0] for line in lines[header + 1 : header + 5]] == names
    assert Path("out/value_quality.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(LocalSampler, "_generate", None)  # nothing is sampled any more
    again = measure(*arguments, "--values", "answer", "--value_space", "probability", "--force_prompt", "=", "is ")
    assert list(again["estimators"]) == ["position", "answer, '=<|im_end|>'", "answer, 'is <|im_end|>'"]
    assert again["estimators"]["position"] == found["estimators"]["position"]
    assert again["estimators"]["answer, '=<|im_end|>'"]["brier"] is not None


def test_the_truth_is_met_by_who_knows_it(tiny_model):
    """Responses and completions by transformers; what is rewarded is known behind the first boundary."""
    found = measure(*of_tiny(tiny_model, "--value_path", "my_values.Perfect", "my_values.backwards"))
    perfect, backwards = (found["estimators"][f"my_values.{name}"] for name in ("Perfect", "backwards"))
    assert (perfect["spearman"], perfect["spearman_within"]) == (pytest.approx(1), pytest.approx(1))
    assert perfect["auc"] == perfect["auc_within"] == 1 and perfect["brier"] == pytest.approx(0, abs=1e-24)
    assert perfect["calibration_error"] == pytest.approx(0, abs=1e-12) and perfect["missing"] == 30
    assert backwards["spearman_within"] == pytest.approx(-1) and backwards["auc"] == 0 and backwards["brier"] is None
    for row in found["values"]:
        assert row["my_values.Perfect"][1:] == pytest.approx(row["truth"][1:])
    beginnings = {row["truth"][0] for row in found["values"]}
    assert len(beginnings) > 5 and all(truth * 24 == pytest.approx(round(truth * 24)) for truth in beginnings)
    assert found["without_truth"] == 0  # no completion was longer than a response may be


def test_nothing_learns_from_the_problems_that_it_is_measured_on(tiny_model):
    found = measure(*of_tiny(tiny_model, "--values", "outcome", "--value_path", "my_values.Pupil"))
    (small, outcomes), (large, more) = sys.modules["my_values"].Pupil.taught
    assert len(small) == 16 and len(large) == 64 and large[:16] == small and more[:16] == outcomes
    assert more == [ids[0] % 7 / 6 for _, ids in large]
    prompts = [prompt for prompt, _ in large]
    assert len(set(prompts)) == 8 and [prompts.count(one) for one in set(prompts)] == [8] * 8
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    measured = {tuple(tokenizer(row["prompt"])["input_ids"]) for row in found["values"]}
    assert len(measured) == 6 and not measured & set(prompts)


def test_problems_are_drawn_once_and_by_the_seed():
    rows = [{"prompt": f"{i % 40}"} for i in range(100)]
    plan = Plan(num_problems=10, fit_rollouts=(80,))
    measured, to_fit = choose(rows, None, plan)
    assert len(measured) == 10 and sorted(row["prompt"] for row in measured + to_fit) == sorted(map(str, range(40)))
    assert choose(rows, None, plan) == (measured, to_fit)
    assert choose(rows, None, Plan(num_problems=10, fit_rollouts=(240,))) == (measured, to_fit)
    assert choose(rows, None, Plan(num_problems=10, seed=1))[0] != measured
    others = [*measured[:4], *({"prompt": f"other {i}"} for i in range(10))]
    assert sorted(row["prompt"] for row in choose(rows, others, plan)[1]) == sorted(f"other {i}" for i in range(10))


def test_a_value_of_a_checkpoint_is_measured_on_what_it_has_not_seen(tiny_model, caplog):
    """As `ProcessRewardCallback` saves it: its problems are left out, its entropies are asked for where it has any."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    first = measure(*of_tiny(tiny_model, "--values", "outcome"))
    seen = list(dict.fromkeys(row["prompt"] for row in first["values"]))
    generator = random.Random(0)
    requests = [
        ValueRequest(
            tuple(tokenizer(prompt)["input_ids"]),
            tuple(generator.randrange(3, 290) for _ in range(6)),
            (0, 2, 4, 6),
            log_probs=tuple(-generator.random() for _ in range(6)),
        )
        for prompt in (*seen, "another", "and another")
        for _ in range(12)
    ]
    value = OutcomeValue(ridge=3.0, num_windows=2)
    value.learn(requests, [float(generator.random() < 0.5) for _ in requests], Stage(model, tokenizer))
    Path("checkpoint-8").mkdir()
    torch.save({"ProcessRewardCallback": ProcessRewardCallback(value).state_dict()}, "checkpoint-8/callback_states.pt")
    as_saved = saved("checkpoint-8").value
    assert (as_saved.ridge, as_saved.num_windows, as_saved.space) == (3.0, 2, "probability")
    options = ("--values", "answer", "--checkpoint", "checkpoint-8", "--output_dir", "out2")
    found = measure(*of_tiny(tiny_model, *options))
    assert not {row["prompt"] for row in found["values"]} & set(seen)
    assert "6 problems are left out: the checkpoint's value has learned from them" in caplog.text
    figures = found["estimators"]["outcome, 96 rollouts of checkpoint-8"]
    assert figures["missing"] == 0 and figures["brier"] is not None
    rollouts = [row for row in found["settings"]["fit_rollouts"]]
    assert rollouts == [] and not Path("out2/rollouts.jsonl").exists()  # nobody learns


def test_rewards_beyond_0_and_1_and_failed_ones(tiny_model, caplog):
    """A mean reward in place of a probability; a prefix that no completion was scored of has no truth."""
    Path("reward.py").write_text(REWARD.replace("% 7 / 6", "% 7 or math.nan").replace("def", "import math\n\ndef", 1))
    options = ("--value_path", "my_values.Perfect", "--fit_rollouts", 128, "--values", "outcome")
    found = measure(*of_tiny(tiny_model, *options))
    assert "rewards outside 0 … 1, such as 2: the truth is then a mean reward" in caplog.text
    fitted = found["estimators"]["outcome, 128 rollouts"]
    assert fitted["missing"] == 0 and fitted["brier"] is None and fitted["spearman"] is not None
    for row in found["values"]:
        known = [truth is not None for truth in row["truth"][1:]]
        assert known == [bool(one) for one in row["my_values.Perfect"][1:]]
    assert found["without_truth"] == sum(truth is None for row in found["values"] for truth in row["truth"]) > 0
    measured = found["estimators"]["my_values.Perfect"]
    assert measured["spearman"] == pytest.approx(1) and measured["boundaries"] < found["boundaries"]


# ------------------------------------------------------------------------------------------------------ its parts


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("absolute", [False, True])
def test_log_probs_are_those_of_a_pass_per_response(tiny_model, temperature, absolute):
    """Also of a model that counts positions from the row's beginning."""
    model, generator = AutoModelForCausalLM.from_pretrained(tiny_model), random.Random(0)
    if absolute:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=1024)).eval()
    requests = [
        ValueRequest(*(tuple(generator.randrange(3, 290) for _ in range(n)) for n in lengths), (0,))
        for lengths in [(3, 5), (1, 1), (600, 20), (7, 900), (2, 64), (5, 5)]
    ]
    for request, found in zip(requests, with_log_probs(requests, model, temperature), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *request.completion_ids]])
        with torch.no_grad():
            log_p = (model(ids).logits[0, :-1].double() / temperature).log_softmax(dim=-1)[
                len(request.prompt_ids) - 1 :
            ]
        chosen = log_p[range(len(request.completion_ids)), list(request.completion_ids)]
        assert found.log_probs == pytest.approx(chosen.tolist(), abs=1e-4)
        assert found.entropies == pytest.approx((-log_p.exp() * log_p).sum(dim=-1).tolist(), abs=1e-4)


def test_every_prefix_has_room_of_its_own(tiny_model):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    sampler = LocalSampler(model, tokenizer, batch_size=4)
    rooms = [3, 9, 1, 5]
    drawn = dict(sampler.continuations([[7], [8, 9], [10], [11]], Draw(3, 1.0, rooms, 0)))
    for index, room in enumerate(rooms):
        lengths = [len(one.token_ids) for one in drawn[index]]
        assert max(lengths) == room and all(one.truncated or len(one.token_ids) <= room for one in drawn[index])


def test_figures_are_of_known_truths_and_values():
    """Two problems by hand; NaN is left out, U spans one boundary."""
    nan = math.nan
    values = [[0.1, 0.2, 0.9], [0.4, nan, 0.3], [0.5, 0.6, 0.8]]
    truth = [[0.0, 0.5, 1.0], [0.2, 0.6, 0.1], [0.5, nan, 0.25]]
    found = figures_of(values, truth, [0, 0, 1], probabilities=True)
    assert (found["missing"], found["boundaries"]) == (1, 8)
    # all: (.1 0) (.2 .5) (.9 1) (.4 .2) (.3 .1) (.5 .5) (.8 .25); the ranks are 0 1 6 3 2 4 5 and 0 4.5 6 2 1 4.5 3
    assert found["spearman"] == pytest.approx(18.5 / math.sqrt(28 * 27.5))
    # within: of the first problem ranks 0 1 4 3 2 and 0 3 4 2 1; the second has two pairs only
    assert found["spearman_within"] == pytest.approx(0.7) and found["spearman_within_interval"] == [0.7, 0.7]
    assert found["auc"] == 1 and found["auc_within"] == 1  # 0.9 is the only one above ½
    assert found["u_spearman"] is None  # U is 0.1, 0.7 of 0.5, 0.5: no more differences are known
    errors = [0.1, 0.3, 0.1, 0.2, 0.2, 0.0, 0.55]
    assert found["brier"] == pytest.approx(sum(error**2 for error in errors) / 7)
    assert figures_of(values, truth, [0, 0, 1], probabilities=False)["brier"] is None


def test_the_interval_is_over_problems():
    generator = random.Random(0)
    truth = [[generator.random() for _ in range(6)] for _ in range(40)]
    values = [[one + generator.gauss(0, 0.3) for one in row] for row in truth]
    found = figures_of(values, truth, range(40), probabilities=False, seed=3)
    low, high = found["spearman_within_interval"]
    assert low < found["spearman_within"] < high and 0.05 < high - low < 0.4
    assert figures_of(values, truth, range(40), probabilities=False, seed=3) == found


# ------------------------------------------------------------------------------------------------------ bad input

WITHOUT_MODEL_LOADING = {
    "an unknown value": (("--values", "outcom"), r"values=\['outcom'\] are unknown: use answer and outcome"),
    "one completion": (("--num_rollouts", 1), "num_rollouts=1: one completion of a prefix says only"),
    "greedy": (("--temperature", 0), "greedy decoding completes a prefix in one way"),
    "one problem": (("--num_problems", 1), "take at least 2 problems"),
    "no groups of 8": (("--fit_rollouts", 20), "fit_rollouts=20 are not 8 of each"),
    "too few to fit to": (("--fit_rollouts", 512), "30 distinct problems .* 6 are to be measured and 64 others"),
    "too few to measure": (("--num_problems", 31), "31 are to be measured"),
    "a missing split": (("--dataset_train_split", "other"), "has no split 'other'"),
    "no answers": (("--dataset_name", "unanswered.jsonl", "--values", "answer"), "answer needs a problem's answer"),
    "no answers for one's own": (
        ("--dataset_name", "unanswered.jsonl", "--value_path", "my_values.backwards"),
        "my_values.backwards needs a problem's answer",
    ),
    "unknown columns": (("--dataset_name", "unknown.jsonl"), "neither gold answers"),
    "no module": (("--value_path", "my_values"), "no import path"),
    "no such module": (("--value_path", "none.such"), "ModuleNotFoundError"),
    "no such name": (("--value_path", "my_values.Perfekt"), "AttributeError"),
    "not callable": (("--value_path", "my_values.math"), "cannot estimate"),
    "one that samples": (("--value_path", "dash_trl.process_rewards.MonteCarloValue"), "is a MonteCarloValue, which"),
    "one that cannot be copied": (("--value_path", "my_values.Locked"), "learns, but cannot be copied"),
    "one of servers": (("--value_path", "dash_trl.process_rewards.ServerValue"), "is a ServerValue, which"),
    "no state": (("--checkpoint", "."), "has no OutcomeValue that learned anything"),
    "a space": (("--values", "outcome", "--value_space", "probability"), "are of answer values"),
    "no marker": (("--markers", ""), "cannot begin an episode"),
    "an impossible cut": (("--max_episode_tokens", 1), "cannot both hold"),
    "no answer's form": (("--final_answer", "("), "is no regular expression"),
    "batches of vLLM": (("--use_vllm", "--per_device_eval_batch_size", 8), "has no effect with vLLM"),
    "a force prompt": (("--force_prompt", "\\boxed{", ""), "asks for nothing"),
}


@pytest.mark.parametrize("case", WITHOUT_MODEL_LOADING)
def test_mistakes_are_found_before_weights_are_loaded(case, tiny_model, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    write("unanswered.jsonl", [{"prompt": row["problem"], "test_list": ["assert True"]} for row in PROBLEMS])
    write("unknown.jsonl", [{"text": "a", "label": 1}])
    given, message = WITHOUT_MODEL_LOADING[case]
    with pytest.raises(ValueError, match=message):
        measure(*of_tiny(tiny_model, *given))
    assert not Path("out").exists()


@pytest.mark.parametrize(("flags", "entropies"), [([], True), (["--use_vllm"], False)])
def test_a_fitted_value_gets_what_training_gets(flags, entropies):
    """vLLM reports log-probs alone."""
    (arguments,) = HfArgumentParser(ValueQualityArguments).parse_args_into_dataclasses(["--values", "outcome", *flags])
    assert [one.entropies for one in arguments.candidates(["prompt"], embedded=False)] == [entropies]


@pytest.mark.parametrize(
    ("reward", "message"),
    [("1.0", "All 30 responses have the reward 1: there is no better"), ("None", "The reward failed on all 30")],
)
def test_rewards_that_tell_nothing_end_it_before_the_truth(tiny_model, reward, message):
    Path("reward.py").write_text(f"def compute_score(completion):\n    return {reward}\n")
    with pytest.raises(ValueError, match=message):
        measure(*of_tiny(tiny_model))
    assert not Path("out/truth.jsonl").exists()


def test_an_interrupted_study_goes_on_and_other_settings_are_refused_by_name(tiny_model, monkeypatch):
    found = measure(*of_tiny(tiny_model, "--values", "answer"))
    truth = Path("out/truth.jsonl")
    whole = truth.read_bytes()
    truth.write_bytes(whole[: len(whole) // 2])
    assert measure(*of_tiny(tiny_model, "--values", "answer")) == found and truth.read_bytes() == whole
    with pytest.raises(ValueError, match="truth.jsonl is of other settings: segmentation is"):
        measure(*of_tiny(tiny_model, "--values", "answer", "--max_episode_tokens", 3))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # before weights are loaded
    with pytest.raises(ValueError, match="responses.jsonl is of other settings: temperature is 1.0 there and 0.5 here"):
        measure(*of_tiny(tiny_model, "--temperature", 0.5))
