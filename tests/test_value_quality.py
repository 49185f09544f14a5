"""`python examples/value_quality`: the truth it samples, whom it lets learn from what, its figures and refusals."""

import json
import math
import random
import re
import statistics
import sys
from pathlib import Path

import datasets
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl.evaluation import Draw, LocalSampler
from examples.value_quality.command import main
from examples.value_quality.figures import auc, by_group, calibration, ceiling, figures_of, spearman
from examples.value_quality.study import Plan, choose
from tests.test_tensor_arguments import refusal
from tests.tiny import write_rows

PROBLEMS = [{"problem": f"{i} + {i}", "answer": str(2 * i)} for i in range(30)]
SMALL = ("--dataset_test_split", "train", "--num_problems", 6, "--num_samples", 5, "--num_rollouts", 4)
SMALL += ("--max_completion_length", 7, "--max_episode_tokens", 2, "--min_episode_tokens", 1, "--fit_rollouts", 16, 64)

# A reward that the first token decides, so that behind it the truth is known exactly.
REWARD = """
def compute_score(completions, completion_ids, **columns):
    assert all(1 <= len(ids) <= 7 for ids in completion_ids)
    return [ids[0] % 7 / 6 for ids in completion_ids]
"""
OTHERS = """
import math

def failing(completions, completion_ids, **columns):
    return [ids[0] % 7 or math.nan for ids in completion_ids]

def constant(completion):
    return 1.0

def broken(completion):
    return None
"""
VALUES = """
import math

from dash_trl.process_rewards import MonteCarloValue

class Settings:
    def __init__(self, url):
        pass

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
"""
OWN = ("--value_path", "my_values.py", "--value_name")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """With problems, rewards and estimators of one's own; the working directory."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.chdir(folder)
        write_rows(Path("problems.jsonl"), PROBLEMS)
        write_rows(
            Path("unanswered.jsonl"), [{"prompt": row["problem"], "test_list": ["assert True"]} for row in PROBLEMS]
        )
        Path("reward.py").write_text(REWARD)
        Path("others.py").write_text(OTHERS)
        Path("my_values.py").write_text(VALUES)
        yield folder
    sys.modules.pop("value_file_my_values", None)


def measure(output_dir: str, *arguments: object) -> dict:
    main([*map(str, arguments), "--output_dir", output_dir])
    return json.loads((Path(output_dir) / "value_quality.json").read_text())


def of_tiny(tiny_model: str, *arguments: object) -> tuple:
    return (tiny_model, "--dataset_name", "problems.jsonl", "--reward_path", "reward.py", *SMALL, *arguments)


@pytest.fixture(scope="module")
def loaded(tiny_model) -> tuple:
    """The tiny model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def study(folder, tiny_model) -> dict:
    """Responses and completions of the tiny model, and three estimators; its files stay in `tiny`."""
    return measure("tiny", *of_tiny(tiny_model, "--value", "outcome", *OWN, "Perfect", "backwards", "Pupil"))


# ------------------------------------------------------------------------------------------------------ the command


def test_toy_and_then_other_values_of_the_same_samples(toy, capsys, caplog, monkeypatch):
    arguments = ("toy", "--num_problems", 6, "--num_samples", 4, "--num_rollouts", 4)
    found = measure("out", *arguments, "--fit_rollouts", 128, 160)
    names = ["position", "answer, 'The answer is <|im_end|>'", "outcome, 128 rollouts", "outcome, 160 rollouts"]
    assert list(found["estimators"]) == names and found["responses"] == 24 and found["without_truth"] == 0
    assert found["estimators"]["outcome, 160 rollouts"]["spearman"] > 0.4
    assert found["estimators"]["outcome, 160 rollouts"]["spearman"] < found["ceiling"]["spearman"] < 1
    assert found["estimators"][names[1]]["brier"] is None and found["estimators"][names[2]]["brier"] < 0.3
    for row in found["values"]:  # boundaries are lines: 7+5=12
        assert len(row["boundaries"]) == len(row["truth"]) == len(row[names[2]]) > 1
        assert all(truth * 4 == round(truth * 4) for truth in row["truth"])
    assert "24 responses of 6 problems, 160 rollouts of 20 other problems, and 4 completions" in caplog.text
    assert caplog.text.index("This samples") < caplog.text.index("boundaries: ")
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("V "))
    assert [line.split("  ")[0] for line in lines[header + 1 : header + 6]] == [*names, "ceiling of K = 4"]
    assert Path("out/value_quality.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr("transformers.GenerationMixin.generate", None)  # nothing is sampled any more
    again = measure("out", *arguments, "--value", "answer", "--force_prompt", "=", "is ")
    assert list(again["estimators"]) == ["position", "answer, '=<|im_end|>'", "answer, 'is <|im_end|>'"]
    assert again["estimators"]["position"] == found["estimators"]["position"]


def test_the_truth_is_met_by_who_knows_it(study):
    """What is rewarded is known behind the first boundary, which the figures leave out."""
    perfect, backwards = (study["estimators"][f"my_values.{name}"] for name in ("Perfect", "backwards"))
    assert (perfect["spearman"], perfect["spearman_within"]) == (pytest.approx(1), pytest.approx(1))
    assert perfect["auc"] == perfect["auc_within"] == 1 and perfect["brier"] == pytest.approx(0, abs=1e-24)
    assert perfect["calibration_error"] == pytest.approx(0, abs=1e-12) and perfect["missing"] == 0
    assert perfect["boundaries"] == sum(max(0, len(row["boundaries"]) - 2) for row in study["values"])
    assert study["ceiling"]["spearman"] == study["ceiling"]["spearman_within"] == pytest.approx(1)
    assert backwards["spearman_within"] == pytest.approx(-1) and backwards["auc"] == 0 and backwards["brier"] is None
    for row in study["values"]:
        assert row["my_values.Perfect"][1:] == pytest.approx(row["truth"][1:])
    beginnings = {row["truth"][0] for row in study["values"]}
    assert len(beginnings) > 5 and all(truth * 24 == pytest.approx(round(truth * 24)) for truth in beginnings)
    assert study["without_truth"] == 0  # no completion was longer than a response may be


def test_nothing_learns_from_the_problems_that_it_is_measured_on(study, loaded):
    (small, outcomes), (large, more) = sys.modules["value_file_my_values"].Pupil.taught
    assert len(small) == 16 and len(large) == 64 and large[:16] == small and more[:16] == outcomes
    assert more == [ids[0] % 7 / 6 for _, ids in large]
    prompts = [prompt for prompt, _ in large]
    assert len(set(prompts)) == 8 and [prompts.count(one) for one in set(prompts)] == [8] * 8
    measured = {tuple(loaded[1](row["prompt"])["input_ids"]) for row in study["values"]}
    assert len(measured) == 6 and not measured & set(prompts)


def test_an_interrupted_study_goes_on_and_other_settings_are_refused_by_name(study, tiny_model, monkeypatch):
    truth = Path("tiny/truth.jsonl")
    whole = truth.read_bytes()
    truth.write_bytes(whole[: len(whole) // 2])
    again = measure("tiny", *of_tiny(tiny_model, "--value", "answer"))
    assert truth.read_bytes() == whole and again["estimators"]["position"] == study["estimators"]["position"]
    assert list(again["estimators"]) == ["position", "answer"]
    with pytest.raises(ValueError, match="truth.jsonl has other settings: segmentation is"):
        measure("tiny", *of_tiny(tiny_model, "--value", "answer", "--max_episode_tokens", 3))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # before weights are loaded
    with pytest.raises(ValueError, match="responses.jsonl has other settings: temperature is 1.0 there and 0.5 here"):
        measure("tiny", *of_tiny(tiny_model, "--temperature", 0.5))


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


def test_rewards_beyond_0_and_1_and_failed_ones(tiny_model):
    """A mean reward in place of a probability; a prefix that no completion was scored of has no truth."""
    options = (*OWN, "Perfect", "--fit_rollouts", 128, "--value", "outcome")
    others = ("--reward_path", "others.py", "--reward_name", "failing")
    found = measure("failing", *of_tiny(tiny_model, *options, *others))
    fitted = found["estimators"]["outcome, 128 rollouts"]
    assert fitted["missing"] == 0 and fitted["brier"] is None and fitted["spearman"] is not None
    for row in found["values"]:
        known = [truth is not None for truth in row["truth"][1:]]
        assert known == [bool(one) for one in row["my_values.Perfect"][1:]]
    assert found["without_truth"] == sum(truth is None for row in found["values"] for truth in row["truth"]) > 0
    measured = found["estimators"]["my_values.Perfect"]
    assert measured["spearman"] == pytest.approx(1) and measured["boundaries"] < found["boundaries"]


# ------------------------------------------------------------------------------------------------------ its parts


def test_every_prefix_has_room_of_its_own(loaded):
    sampler, rooms = LocalSampler(*loaded, batch_size=4), [3, 9, 1, 5]
    drawn = dict(sampler.continuations([[7], [8, 9], [10], [11]], Draw(3, 1.0, rooms, 0)))
    for index, room in enumerate(rooms):
        lengths = [len(one.token_ids) for one in drawn[index]]
        assert max(lengths) == room and all(one.truncated or len(one.token_ids) <= room for one in drawn[index])


def test_figures_are_of_known_truths_and_values():
    """Two problems by hand; NaN is left out, U spans one boundary; the first and the last boundary change nothing."""

    def whole(rows, first=0.3, last=0.9):
        return [[first, *row, last] for row in rows]

    nan = math.nan
    values = [[0.1, 0.2, 0.9], [0.4, nan, 0.3], [0.5, 0.6, 0.8]]
    truth = [[0.0, 0.5, 1.0], [0.2, 0.6, 0.1], [0.5, nan, 0.25]]
    found = figures_of(whole(values), whole(truth), [0, 0, 1], probabilities=True)
    assert figures_of(whole(values, nan, 0.1), whole(truth, 0.7, 0.2), [0, 0, 1], probabilities=True) == found
    assert (found["missing"], found["boundaries"]) == (1, 8)
    # all: (.1 0) (.2 .5) (.9 1) (.4 .2) (.3 .1) (.5 .5) (.8 .25); the ranks are 0 1 6 3 2 4 5 and 0 4.5 6 2 1 4.5 3
    assert found["spearman"] == pytest.approx(18.5 / math.sqrt(28 * 27.5))
    # within: of the first problem ranks 0 1 4 3 2 and 0 3 4 2 1; the second has two pairs only
    assert found["spearman_within"] == pytest.approx(0.7) and found["spearman_within_interval"] == [0.7, 0.7]
    assert found["auc"] == 1 and found["auc_within"] == 1  # 0.9 is the only one above ½
    assert found["u_spearman"] is None  # U is 0.1, 0.7 of 0.5, 0.5: no more differences are known
    errors = [0.1, 0.3, 0.1, 0.2, 0.2, 0.0, 0.55]
    assert found["brier"] == pytest.approx(sum(error**2 for error in errors) / 7)
    assert figures_of(whole(values), whole(truth), [0, 0, 1], probabilities=False)["brier"] is None
    moves = figures_of(whole([[0.0, 0.1, 0.4, 0.9]]), whole([[0.0, 0.3, 0.4, 1.0]]), [0], probabilities=True)
    assert moves["u_spearman"] == moves["u_spearman_within"] == pytest.approx(0.5)  # the ranks are 0 1 2 and 1 0 2


def test_the_ceiling_is_what_a_perfect_value_reaches():
    generator = random.Random(0)
    problems = [response // 4 for response in range(160)]
    chances = [[generator.random() for _ in range(10)] for _ in problems]
    rewards = [[[float(generator.random() < p) for _ in range(8)] for p in row] for row in chances]
    truth, even, odd = (
        [[statistics.fmean(one[part]) for one in row] for row in rewards]
        for part in (slice(None), slice(0, None, 2), slice(1, None, 2))
    )
    perfect, found = figures_of(chances, truth, problems, probabilities=True), ceiling(even, odd, problems)
    assert {name: perfect[name] for name in found} == pytest.approx(found, rel=0.03) and 0.8 < found["spearman"] < 0.95
    assert list(ceiling(truth, truth, problems).values()) == pytest.approx([1.0] * 4)
    opposite = [[-one for one in row] for row in truth]
    assert list(ceiling(truth, opposite, problems).values()) == [0.0] * 4
    assert list(ceiling([[1.0]], [[1.0]], [0]).values()) == [None] * 4


def test_the_interval_is_over_problems():
    generator = random.Random(0)
    truth = [[generator.random() for _ in range(6)] for _ in range(40)]
    values = [[one + generator.gauss(0, 0.3) for one in row] for row in truth]
    found, again = (figures_of(values, truth, range(40), probabilities=False, seed=3) for _ in range(2))
    low, high = found["spearman_within_interval"]
    assert low < found["spearman_within"] < high and 0.05 < high - low < 0.4 and again == found


def pairs(seed: int, size: int = 40) -> tuple[list[float], list[bool]]:
    generator = random.Random(seed)
    return [generator.randrange(8) / 8 for _ in range(size)], [generator.random() < 0.4 for _ in range(size)]


def test_auc_is_the_share_of_pairs_in_the_right_order_ties_half():
    values, labels = pairs(0)
    won = [
        (a > b) + (a == b) / 2
        for a, yes in zip(values, labels, strict=True)
        for b, no in zip(values, labels, strict=True)
        if yes and not no
    ]
    assert auc(values, labels) == pytest.approx(sum(won) / len(won), abs=1e-12)
    assert auc(values, [True] * len(values)) is None and spearman(values, [1.0] * len(values)) is None
    groups = [number // 20 for number in range(40)]
    halves = [auc(values[:20], labels[:20]), auc(values[20:], labels[20:])]
    assert by_group(auc, [*groups, 2], [*values, 0.1], [*labels, True]) == halves  # the third has one member


def test_calibration():
    values, labels = pairs(0)
    values[0] = 1.0  # in the last bin
    found, off = calibration(values, labels), [0.0] * 10
    for value, label in zip(values, labels, strict=True):
        off[min(9, int(10 * value))] += value - label
    assert found["calibration_error"] == pytest.approx(sum(map(abs, off)) / len(values), abs=1e-12)
    assert sum(count for _, _, count in found["reliability"]) == len(values)
    assert calibration([], []) == {"brier": None, "calibration_error": None, "reliability": []}


# ------------------------------------------------------------------------------------------------------ bad input

WITHOUT_MODEL_LOADING = {
    "greedy": (("--temperature", 0), "greedy decoding"),
    "too few to fit to": (("--fit_rollouts", 512), "30 distinct problems .* 6 are to be measured and 64 others"),
    "too few to measure": (("--num_problems", 31), "31 are to be measured"),
    "a missing split": (("--dataset_train_split", "other"), "has no split 'other'"),
    "no answers": (("--dataset_name", "unanswered.jsonl", "--value", "answer"), "answer needs a problem's answer"),
    "no answers for one's own": (
        ("--dataset_name", "unanswered.jsonl", *OWN, "backwards"),
        "my_values.backwards needs a problem's answer",
    ),
    "no such file": (("--value_path", "none.py", "--value_name", "V"), "value_path='none.py' is no Python file"),
    "no such name": ((*OWN, "Perfekt"), "defines no 'Perfekt'; it has .*Name the function or class with value_name"),
    "no name": (OWN[:2], "--value_path my_values.py with --value_name None"),
    "no file": (("--value_name", "Perfect"), "--value_path None with --value_name"),
    "not callable": ((*OWN, "math"), "cannot estimate"),
    "a class with arguments": ((*OWN, "Settings"), "value_name='Settings' of my_values.py is a class that cannot"),
    "one that samples": ((*OWN, "MonteCarloValue"), "is a MonteCarloValue, which"),
    "no state": (("--checkpoint", "."), "has no OutcomeValue that learned anything"),
}


def test_mistakes_are_found_before_weights_are_loaded(tiny_model, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    for case, (given, message) in WITHOUT_MODEL_LOADING.items():
        found = refusal(measure, "refused", *of_tiny(tiny_model, *given))
        assert re.search(message, found), (case, found)
        assert not Path("refused").exists(), case


def test_rewards_that_tell_nothing_end_it_before_the_truth(tiny_model):
    for reward, message in (
        ("constant", "All 30 responses have the reward 1, so there are no better"),
        ("broken", "The reward failed on all 30"),
    ):
        given = of_tiny(tiny_model, "--reward_path", "others.py", "--reward_name", reward)
        assert message in refusal(measure, reward, *given)
        assert not Path(reward, "truth.jsonl").exists()
