"""`python -m dash_trl.evaluation`: what it writes, how it goes on, and what it refuses before weights are loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl import MathAccuracyReward
from dash_trl.evaluation import LocalSampler, open_sampler
from dash_trl.evaluation.command import labels, main
from tests.tiny import save_tiny_model

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.exists(), reason=f"MATH-500 and MBPP+ are not in {SHARED}")
PROBLEMS = [{"problem": f"{i} + {i}", "answer": str(2 * i)} for i in range(7)]
FAST = ("--max_completion_length", 6)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def problems(tmp_path) -> Path:
    return write(tmp_path / "problems.jsonl", PROBLEMS)


@pytest.fixture
def reward(tmp_path) -> Path:
    """Correct is what has an even number of characters; such that half of an untrained model's texts are."""
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(completion, answer):\n    return float(len(completion) % 2 == 0)\n")
    return path


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(*arguments: object) -> None:
    main(list(map(str, arguments)))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------ samples


@pytest.fixture(scope="module")
def model(tiny_model) -> tuple:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


def test_what_is_left_is_drawn_as_in_the_whole_run(model):
    """Batches of 4 rows, 3 samples of each of 5 prompts: no batch holds whole prompts only."""
    sampler = LocalSampler(*model, batch_size=4)
    prompts = [f"{i} + " for i in range(5)]
    arguments = {"num_samples": 3, "max_new_tokens": 6, "seed": 2}
    whole = dict(sampler.sample(prompts, **arguments))
    assert list(whole) == [0, 1, 2, 3, 4]
    for done in ({0, 1, 2}, {1, 3}, {4}, set(range(5))):
        rest = dict(sampler.sample(prompts, **arguments, done=done))
        assert rest == {index: samples for index, samples in whole.items() if index not in done}


def test_every_batch_and_seed_has_numbers_of_its_own(model):
    drawn = [
        tuple(tuple(one.token_ids) for one in samples)
        for seed in range(3)
        for _, samples in LocalSampler(*model, batch_size=2).sample(
            ["1"] * 3, num_samples=2, max_new_tokens=12, seed=seed
        )
    ]
    assert len(set(drawn)) == len(drawn) == 9


@pytest.mark.parametrize("pads", [True, False])
def test_truncated_is_what_did_not_end(model, tiny_model, pads):
    network, tokenizer = model[0], AutoTokenizer.from_pretrained(tiny_model)
    if not pads:
        tokenizer.pad_token = None
    ((_, samples),) = LocalSampler(network, tokenizer).sample(["1"], num_samples=64, max_new_tokens=40, temperature=3.0)
    ended = [one.token_ids[-1] == tokenizer.eos_token_id for one in samples]
    assert [one.truncated for one in samples] == [not one for one in ended]
    assert any(ended) and all(len(one.token_ids) == 40 for one in samples if one.truncated)
    assert [one.text for one in samples] == [
        tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in samples
    ]


def test_a_lora_adapter_is_merged(tiny_model, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model),
        LoraConfig(target_modules="all-linear", init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "lora")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = torch.tensor([tokenizer("1 + 2")["input_ids"]])
    with open_sampler(tmp_path / "lora") as sampler:
        assert not any("lora" in name for name, _ in sampler.model.named_parameters())
        assert torch.allclose(sampler.model(ids).logits, adapted(ids).logits, atol=1e-4)


# ------------------------------------------------------------------------------------------------------ the command


def test_embedded_as_a_command(tmp_path):
    command = [sys.executable, "-m", "dash_trl.evaluation", "embedded", "--dataset_test_split", "test[:16]"]
    done = subprocess.run(
        [*command, "--num_samples", "4", "--output_dir", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out" / "embedded.json").read_text())
    assert 0.2 < figures["accuracy"] < 0.7 and figures["failed"] == 0
    settings, *rows = lines(tmp_path / "out" / "embedded.jsonl")
    assert settings["settings"]["dataset_name"] == "embedded" and len(rows) == 16
    rewards = [sample["reward"] for row in rows for sample in row["samples"]]
    assert figures["accuracy"] == sum(rewards) / 64 and figures["pass_at"]["1"][0] == pytest.approx(sum(rewards) / 64)
    right = [
        f"The answer is {row['answer']}" == sample["text"].split("\n")[-1] for row in rows for sample in row["samples"]
    ]
    assert rewards == list(map(float, right))
    shown = re.search(r"^embedded +(\S+) ", done.stdout, re.M)[1]
    assert shown == f"{100 * figures['accuracy']:.1f}"
    assert (tmp_path / "out" / "pass_at_k.png").read_bytes().startswith(b"\x89PNG")


def test_several_models_and_a_reward_of_ones_own(tiny_model, problems, reward, tmp_path, capsys):
    other = save_tiny_model(tmp_path / "other", num_hidden_layers=1)
    evaluate(
        *(tiny_model, other, "--dataset_name", problems, "--dataset_test_split", "train", "--num_samples", 4, *FAST),
        *("--k", 4, 1, "--reward_path", reward, "--output_dir", tmp_path / "out"),
    )
    names = [Path(tiny_model).name, "other"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "[" in line] == names
    for name in names:
        figures = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert list(figures["pass_at"]) == ["1", "4"] and figures["samples"] == 28
        for row in lines(tmp_path / "out" / f"{name}.jsonl")[1:]:
            assert row["prompt"].startswith(PROBLEMS[row["index"]]["problem"])
            assert [one["reward"] for one in row["samples"]] == [float(len(s["text"]) % 2 == 0) for s in row["samples"]]


def test_an_interrupted_run_goes_on_to_the_same_file(tiny_model, problems, reward, tmp_path, monkeypatch):
    arguments = (
        *(tiny_model, "--dataset_name", problems, "--dataset_test_split", "train", "--num_samples", 3, *FAST),
        *("--per_device_eval_batch_size", 6, "--reward_path", reward, "--output_dir", tmp_path / "out"),
    )  # two problems in a batch
    evaluate(*arguments)
    (file,) = (tmp_path / "out").glob("*.jsonl")
    whole = file.read_bytes()
    ends = [match.end() for match in re.finditer(b"\n", whole)]
    batches = []
    generate = LocalSampler._generate
    monkeypatch.setattr(
        LocalSampler,
        "_generate",
        lambda self, ids, draw, number: batches.append(number) or generate(self, ids, draw, number),
    )
    # in a line; between the lines of a batch; before the first row; nowhere
    for length, drawn in ((ends[4] + 30, [2, 3]), (ends[3], [1, 2, 3]), (40, [0, 1, 2, 3]), (len(whole), [])):
        file.write_bytes(whole[:length])
        batches.clear()
        evaluate(*arguments)
        assert file.read_bytes() == whole and batches == drawn
    monkeypatch.setattr("dash_trl.evaluation.tasks.open_sampler", None)
    evaluate(*arguments, "--k", 3)  # other k are new figures of the same samples
    (figures,) = (tmp_path / "out").glob("*.json")
    assert list(json.loads(figures.read_text())["pass_at"]) == ["3"]


@needs_data
@pytest.mark.parametrize(("source", "columns"), [("math500", {"answer"}), ("mbppplus", set())])
def test_math_and_code_are_told_apart(tiny_model, tmp_path, source, columns):
    (tmp_path / "part.jsonl").write_text("\n".join((SHARED / source / "test.jsonl").read_text().splitlines()[:2]))
    evaluate(
        *(tiny_model, "--dataset_name", tmp_path / "part.jsonl", "--dataset_test_split", "train", "--num_samples", 2),
        *(*FAST, "--output_dir", tmp_path / "out"),
    )
    (file,) = (tmp_path / "out").glob("*.jsonl")
    rows = lines(file)[1:]
    assert len(rows) == 2 and all(one["reward"] == 0.0 for row in rows for one in row["samples"])
    assert all(row.keys() - {"index", "prompt", "samples"} == columns for row in rows)


def test_olympiad_bench(tmp_path):
    """Its columns, and its gold answers as the training reward reads them."""
    from dash_trl import load_math_dataset

    rows = [
        {"question": "a", "solution": ["prose"], "final_answer": [r"$\frac{1}{2}$, $3$"]},
        {"question": "b", "solution": ["prose"], "final_answer": ["$(1,2)$", "$(3,4)$"]},
        {"question": "c", "solution": ["prose"], "final_answer": ["7"]},
    ]
    loaded = load_math_dataset(write(tmp_path / "olympiad.jsonl", rows))
    answers = [r"\boxed{\frac12, 3}", r"\boxed{(1, 2), (3, 4)}", r"\boxed{8}"]
    assert MathAccuracyReward()(completions=answers, answer=loaded["answer"]) == [1.0, 1.0, 0.0]


def test_failed_rewards_are_not_wrong_answers(tiny_model, problems, tmp_path, caplog):
    path = tmp_path / "fails.py"
    path.write_text(
        "def compute_score(completion, answer):\n    return float(int(answer) > 4) if answer != '6' else 1 / 0\n"
    )
    evaluate(
        *(tiny_model, "--dataset_name", problems, "--dataset_test_split", "train", "--num_samples", 2, *FAST),
        *("--reward_path", path, "--output_dir", tmp_path / "out"),
    )
    (file,) = (tmp_path / "out").glob("*.json")
    figures = json.loads(file.read_text())
    assert figures["accuracy"] == 0.5 and figures["failed"] == pytest.approx(1 / 7) and figures["marked"]
    assert figures["left_out"] == {"1": 1, "2": 1}
    assert "the reward failed on 14.3% of 14 samples" in caplog.text
    assert "pass@2 leaves out 1 of 7 problems" in caplog.text


def test_a_reward_that_only_raises_ends_the_evaluation(tiny_model, tmp_path):
    path = tmp_path / "raises.py"
    path.write_text("def compute_score(completion, answer):\n    raise KeyError('judge')\n")
    many = write(tmp_path / "many.jsonl", PROBLEMS * 2)
    with pytest.raises(RuntimeError, match=r"every sample of 10 problems in a row; at last it .*KeyError: 'judge'"):
        evaluate(
            *(tiny_model, "--dataset_name", many, "--dataset_test_split", "train", "--num_samples", 1, *FAST),
            *("--reward_path", path, "--output_dir", tmp_path / "out"),
        )


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["Qwen/Qwen2.5-0.5B", "outputs/gsm8k/"], ["Qwen2.5-0.5B", "gsm8k"]),
        (["a/checkpoint-10", "b/checkpoint-10", "c"], ["a-checkpoint-10", "b-checkpoint-10", "c"]),
        (["../x"], ["x"]),
    ],
)
def test_labels_tell_models_apart(models, names):
    assert labels(models) == names


# ------------------------------------------------------------------------------------------------------ bad input

WITHOUT_MODEL_LOADING = {
    "k beyond the samples": (("--num_samples", 4, "--k", 1, 8), r"k=\[1, 8\] with num_samples=4.*--num_samples 8"),
    "k of nothing": (("--k", 0), r"k=\[0\] with num_samples=16"),
    "greedy samples": (("--temperature", 0), "greedy decoding"),
    "a missing file": (("--dataset_name", "./none.jsonl"), "none.jsonl"),
    "a missing split": (("--dataset_test_split", "test"), "has no split 'test'"),
    "unknown columns": (("--dataset_name", "UNKNOWN"), r"neither gold answers .* nor unit tests .*\['text', 'label'\]"),
    "a column that the reward wants": (("--reward_path", "JUDGE"), "rubric"),
    "a missing reward": (("--reward_path", "./none.py"), "is no Python file"),
    "a name without a file": (("--reward_name", "score"), "has no effect without --reward_path"),
    "a split of embedded": (("--dataset_name", "embedded", "--dataset_test_split", "dev"), "'embedded' has no split"),
    "no address": (("--vllm_server_urls", "localhost"), "is not the address of a server"),
}


@pytest.fixture
def unloadable(monkeypatch) -> None:
    """Loading weights fails the test: the mistake has to be found before."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)


@pytest.mark.parametrize("case", WITHOUT_MODEL_LOADING)
def test_mistakes_are_found_before_weights_are_loaded(case, tiny_model, problems, tmp_path, unloadable, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "unknown.jsonl", [{"text": "a", "label": 1}])
    (tmp_path / "judge.py").write_text("def compute_score(completion, rubric):\n    return 1.0\n")
    files = {"UNKNOWN": "./unknown.jsonl", "JUDGE": "./judge.py"}
    given, message = WITHOUT_MODEL_LOADING[case]
    with pytest.raises(ValueError, match=message):
        evaluate(
            tiny_model, "--dataset_name", problems, "--dataset_test_split", "train", *(files.get(x, x) for x in given)
        )


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["./no/such/model"], r"'./no/such/model' cannot be read.*config.json"),
        (["TINY", "no-owner/no-such-model"], r"'no-owner/no-such-model' cannot be read"),
        (["TINY", "TINY"], "name each once"),
        (["LORA"], r"base model './gone' of the adapter '.*lora'"),
    ],
)
def test_models_that_are_not_there(models, message, tiny_model, problems, tmp_path, unloadable):
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "./gone"}))
    names = {"TINY": tiny_model, "LORA": tmp_path / "lora"}
    with pytest.raises(ValueError, match=message):
        evaluate(
            *(names.get(model, model) for model in models),
            *("--dataset_name", problems, "--dataset_test_split", "train", "--output_dir", tmp_path / "out"),
        )


def test_a_model_without_a_dataset(tiny_model):
    with pytest.raises(ValueError, match="add --dataset_name"):
        evaluate(tiny_model)


def test_results_of_other_settings_are_refused_by_name(tiny_model, problems, reward, tmp_path, request):
    """A setting, a changed problem, a changed reward, weights that were trained further: each by its name."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    arguments = (model, "--dataset_name", problems, "--dataset_test_split", "train", "--num_samples", 2, *FAST)
    arguments += ("--reward_path", reward, "--output_dir", tmp_path / "out")
    evaluate(*arguments)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    request.getfixturevalue("unloadable")

    def refused(difference: str, *more: object) -> None:
        with pytest.raises(
            ValueError, match=f"model.jsonl is of other settings: {difference} is .* nothing is overwritten"
        ):
            evaluate(*arguments, *more)
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before

    refused("temperature", "--temperature", 0.5)
    refused("batch_size", "--per_device_eval_batch_size", 3)
    reward.write_text(reward.read_text() + "\n")
    refused("reward_file")
    reward.write_text(reward.read_text()[:-1])
    write(problems, [*PROBLEMS[:-1], {"problem": "6 + 6", "answer": "13"}])
    refused("problems")
    write(problems, PROBLEMS)
    weights = model / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    refused("weights")
