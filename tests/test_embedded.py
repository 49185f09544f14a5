"""The embedded default: disjoint problems, a tokenizer that survives a reload, a cache that is never half."""

import dataclasses
import fcntl
import random
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from embedded_programs import PROGRAM_LESSONS, program_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl._cache import cache_folder
from dash_trl.embedded import warm_up
from dash_trl.embedded.problems import LARGEST_TOTAL, arithmetic_dataset, arithmetic_reward
from dash_trl.embedded.tokenizer import END_OF_TURN, arithmetic_tokenizer
from dash_trl.embedded.warm_up import WarmUp, embedded_model

SMALL = WarmUp(steps=2, batch_size=4, hidden_size=16, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> str:
    return embedded_model(tmp_path_factory.mktemp("cache"), settings=SMALL, progress=False)


def problems(split: str, make=arithmetic_dataset, **arguments) -> list[str]:
    return [row["prompt"][0]["content"] for row in make(split, **arguments)]


# ------------------------------------------------------------------------------------------------------- the problems


@pytest.mark.parametrize("make", [arithmetic_dataset, program_dataset])
def test_training_and_test_problems_are_disjoint(make):
    train = {problem for seed in range(3) for problem in problems("train", make, size=2000, seed=seed)}
    test = {problem for seed in range(3) for problem in problems("test", make, seed=seed)}
    assert train and test and not train & test
    assert problems("train", make) == problems("train", make) != problems("train", make, seed=1)
    assert len(problems("test", make)) == 256 and len(problems("train", make)) == 4096


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            arithmetic_dataset,
            {"size": 500, "operands": (2,)},
            r"size=500: there are only \d\d distinct problems of \(2,\)",
        ),
        (arithmetic_dataset, {"split": "dev"}, "split='dev' does not exist"),
        (program_dataset, {"split": "dev"}, "split='dev' does not exist"),
    ],
)
def test_impossible_datasets_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**{"split": "test", **arguments})


def test_the_answers_are_python_s_and_totals_stay_in_the_range_that_the_model_has_words_for():
    assert len(set(problems("test"))) == 256
    for row in arithmetic_dataset("train", size=1000):
        problem = row["prompt"][0]["content"]
        assert re.fullmatch(r"\d([+-]\d){2,4}", problem)
        totals = [eval(problem[: match.end()], {"__builtins__": {}}) for match in re.finditer(r"\d", problem)]
        assert 0 <= min(totals) and max(totals) <= LARGEST_TOTAL and str(totals[-1]) == row["answer"]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7+5=12\nThe answer is 12", 1.0),
        ("The answer is 11\nWait, 7+5=12\nThe answer is 12", 1.0),  # the last one counts
        ("The answer is 12\nThe answer is 11", 0.0),
        ("The answer is 112", 0.0),
        ("The answer is -12", 0.0),
        ("12", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_reads_the_last_answer(text, reward):
    assert arithmetic_reward([text], ["12"]) == [reward]
    assert arithmetic_reward([[{"role": "assistant", "content": text}]], ["12"]) == [reward]


# ------------------------------------------------------------------------------------------------------ the tokenizer

TASK_TEXT = (
    "<|im_start|>user\n7+5-3+8<|im_end|>\n"
    "<|im_start|>assistant\n7+5=12\n12-3=8\nWait, 12-3=9\n9+8=17\nThe answer is 17<|im_end|>"
)


TOKENIZER = arithmetic_tokenizer()


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_any_text_survives_the_tokenizer(text):
    text = unicodedata.normalize("NFC", text)  # Qwen2 normalises
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_the_reloaded_tokenizer_is_the_same(small_model):
    """AutoTokenizer makes a Qwen2Tokenizer of whatever was saved: other tokens than the model was taught, if unlike."""
    made, loaded = arithmetic_tokenizer(), AutoTokenizer.from_pretrained(small_model)
    for text in (TASK_TEXT, "naïve 7 − 5 = 2, 🙂 don't", " 20\n\n 19  "):
        assert loaded(text)["input_ids"] == made(text)["input_ids"]
        assert loaded.decode(made(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "1+2-3"}]
    assert loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>user\n1+2-3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (loaded.eos_token, loaded.pad_token, loaded.padding_side) == (END_OF_TURN, "<|endoftext|>", "left")
    assert len(loaded) == len(made) == AutoModelForCausalLM.from_pretrained(small_model).config.vocab_size


def test_words_and_digits_are_one_token_each():
    written = ["7", "+", "5", "=", "1", "2", "\n", "The", " answer", " is", " ", "1", "2", END_OF_TURN]
    assert [TOKENIZER.decode(ids) for ids in TOKENIZER("".join(written))["input_ids"]] == written


# -------------------------------------------------------------------------------------------------------- the warm-up


def read_trace(trace: str) -> tuple[int, int, int]:
    """(sums, of which wrong and left so, of which wrong and corrected); fails where a line does not follow."""
    *lines, last = trace.split("\n")
    sums = slips = corrected = 0
    sides = result = ""
    for line in lines:
        left, _, written = line.removeprefix("Wait, ").partition("=")
        right = str(eval(left, {"__builtins__": {}}))
        if line.startswith("Wait, "):
            assert left == sides and written == right != result, trace
            slips, corrected = slips - 1, corrected + 1
        else:
            assert left.startswith(result), trace
            sums, slips = sums + 1, slips + (written != right)
        sides, result = left, written
    assert last == f"The answer is {result}"
    return sums, slips, corrected


def test_traces_slip_and_correct_themselves_at_the_given_rates():
    generator, counts = random.Random(0), [0, 0, 0]
    for problem in problems("train", size=2500):
        for i, count in enumerate(read_trace(warm_up._trace(problem, generator, 0.12, 0.05))):
            counts[i] += count
    assert counts[1] / counts[0] == pytest.approx(0.12, abs=0.015)
    assert counts[2] / counts[0] == pytest.approx(0.05, abs=0.015)
    assert read_trace(warm_up._trace("7+5-3", generator, 0.0, 0.0)) == (2, 0, 0)


def test_the_loss_is_on_the_trace_and_its_end_only():
    tokenizer = arithmetic_tokenizer()
    batch = warm_up._batch(tokenizer, iter(problems("train")), random.Random(0), WarmUp(), clean=True)
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        learned = tokenizer.decode(ids[labels != -100])
        whole = tokenizer.decode(ids[mask == 1])
        assert re.fullmatch(r"(\d+[+-]\d=\d+\n){2,4}The answer is \d+<\|im_end\|>", learned)
        assert whole == whole.split("assistant\n")[0] + "assistant\n" + learned
        assert (labels[labels != -100] == ids[labels != -100]).all()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_the_cache_is_keyed_by_the_settings(tmp_path, small_model, monkeypatch):
    written = (Path(small_model) / "model.safetensors").stat().st_mtime_ns
    assert embedded_model(Path(small_model).parent, settings=SMALL, progress=False) == small_model
    assert (Path(small_model) / "model.safetensors").stat().st_mtime_ns == written
    folders = {Path(small_model).name}
    for field in dataclasses.fields(WarmUp):
        value = (7,) if field.name == "operands" else 7
        made = warm_up.cached_model(
            "arithmetic",
            dataclasses.asdict(dataclasses.replace(SMALL, **{field.name: value})),
            lambda folder: (folder / "model").touch(),
            tmp_path,
        )
        folders.add(Path(made).name)
    assert len(folders) == 1 + len(dataclasses.fields(WarmUp))
    assert names(tmp_path) == folders - {Path(small_model).name}


def test_the_same_settings_make_the_same_model_and_leave_the_random_state(tmp_path, small_model):
    torch.manual_seed(5)
    random.seed(5)
    states, threads = (torch.get_rng_state(), random.getstate()), torch.get_num_threads()
    again = embedded_model(tmp_path, settings=SMALL, progress=False)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert torch.get_num_threads() == threads
    one, other = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (again, small_model))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_an_interrupted_call_left_is_no_model_and_is_removed(tmp_path):
    def interrupted(folder):
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_up.cached_model("a", {}, interrupted, tmp_path)
    (left,) = names(tmp_path)
    made = warm_up.cached_model("a", {}, lambda folder: (folder / "whole").touch(), tmp_path)
    assert [path.name for path in Path(made).iterdir()] == ["whole"]
    assert names(tmp_path) == {Path(made).name} != {left}


def test_a_concurrent_call_waits_for_the_first(tmp_path):
    """The second one could not make the model itself."""
    with ThreadPoolExecutor(1) as pool:

        def make(folder):
            second.append(pool.submit(warm_up.cached_model, "a", {}, None, tmp_path))
            (lock,) = tmp_path.glob("*.lock")
            with lock.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        second = []
        assert warm_up.cached_model("a", {}, make, tmp_path) == second[0].result()


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        embedded_model(tmp_path / "file" / "cache", settings=SMALL, progress=False)


@pytest.mark.parametrize(
    ("set_to", "folder"),
    [("/somewhere", "/somewhere/dash_trl"), ("relative/is/invalid", "/home/somebody/.cache/dash_trl")],
)
def test_the_user_s_cache_folder(monkeypatch, set_to, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", set_to)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path(folder)


# -------------------------------------------------------------------------------------------------------- the programs


def passes(row: dict, program: str) -> bool:
    """Programs are what `exec` says they are."""
    names: dict = {}
    exec(program, names)
    return all(eval(test.removeprefix("assert "), names) for test in row["tests"])


def test_programs_pass_the_tests_of_their_problem_and_slip_at_the_given_rate():
    """The values that a problem shows are its first tests."""
    generator, right = random.Random(0), 0
    rows = list(program_dataset("train", size=1000, completion=True))
    for row in rows:
        problem = row["prompt"][0]["content"]
        shown = [f"assert {line}" for line in problem.splitlines()]
        assert row["tests"][:2] == shown and len(row["tests"]) == 5 and row["entry_point"] == "f"
        assert passes(row, row["completion"][0]["content"])
        right += passes(row, PROGRAM_LESSONS.solution(problem, generator, 0.2, 0.0))
    assert right / len(rows) == pytest.approx(0.8, abs=0.04)


def test_other_lessons_are_cached_under_another_name(tmp_path, small_model):
    path = embedded_model(tmp_path, settings=SMALL, progress=False, lessons=PROGRAM_LESSONS)
    assert Path(path).name == Path(small_model).name.replace("arithmetic", "programs")
    written = AutoTokenizer.from_pretrained(path)("def f(x): return x + 37")["input_ids"]
    assert len(written) <= 11 < len(TOKENIZER("def f(x): return x + 37")["input_ids"])
