"""The toy default: disjoint problems, a tokenizer that survives a reload, a cache that is never half."""

import dataclasses
import fcntl
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from toy_programs import PROGRAM_LESSONS, program_dataset
from toy_tools import CALCULATOR_LESSONS, calculator, calculator_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from dash_trl.toy import WarmUp, arithmetic_dataset, arithmetic_reward, arithmetic_tokenizer, cached_model, toy_model
from tests.tiny import assistant, refused, user

SMALL = WarmUp(steps=2, batch_size=4, hidden_size=16, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return toy_model(settings=SMALL, progress=False)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dash_trl"


def problems(split: str, make=arithmetic_dataset, **arguments) -> list[str]:
    return [row["prompt"][0]["content"] for row in make(split, **arguments)]


# ------------------------------------------------------------------------------------------------------- the problems


def test_training_and_test_problems_are_disjoint():
    for make in (arithmetic_dataset, program_dataset, calculator_dataset):
        train = {problem for seed in range(3) for problem in problems("train", make, size=2000, seed=seed)}
        test = {problem for seed in range(3) for problem in problems("test", make, seed=seed)}
        assert train and test and not train & test
        assert problems("train", make) == problems("train", make) != problems("train", make, seed=1)
        assert len(problems("test", make)) == 256 and len(problems("train", make)) == 4096
    refused(
        r"size=500: there are only \d\d distinct problems of \(2,\)",
        arithmetic_dataset,
        "test",
        size=500,
        operands=(2,),
    )


def test_the_answers_are_python_s_and_totals_stay_in_the_range_that_the_model_has_words_for():
    assert len(set(problems("test"))) == 256
    for row in arithmetic_dataset("train", size=1000):
        problem = row["prompt"][0]["content"]
        assert re.fullmatch(r"\d([+-]\d){2,4}", problem)
        totals = [eval(problem[: match.end()], {"__builtins__": {}}) for match in re.finditer(r"\d", problem)]
        assert 0 <= min(totals) and max(totals) <= 20 and str(totals[-1]) == row["answer"]


def test_the_reward_reads_the_last_answer():
    for text, reward in [
        ("7+5=12\nThe answer is 12", 1.0),
        ("The answer is 11\nWait, 7+5=12\nThe answer is 12", 1.0),  # the last one counts
        ("The answer is 12\nThe answer is 11", 0.0),
        ("The answer is 112", 0.0),
        ("The answer is -12", 0.0),
        ("12", 0.0),
        ("", 0.0),
    ]:
        assert arithmetic_reward([text], ["12"]) == [reward]
        assert arithmetic_reward([assistant(text)], ["12"]) == [reward]


# ------------------------------------------------------------------------------------------------------ the tokenizer

TASK_TEXT = (
    "<|im_start|>user\n7+5-3+8<|im_end|>\n"
    "<|im_start|>assistant\n7+5=12\n12-3=8\nWait, 12-3=9\n9+8=17\nThe answer is 17<|im_end|>"
)


def test_the_reloaded_tokenizer_is_the_same(small_model):
    """AutoTokenizer makes a Qwen2Tokenizer of whatever was saved: other tokens than the model was taught, if unlike."""
    made = arithmetic_tokenizer()
    loaded = AutoTokenizer.from_pretrained(small_model)
    for text in (TASK_TEXT, "naïve 7 − 5 = 2, 🙂 don't", " 20\n\n 19  "):
        assert loaded(text)["input_ids"] == made(text)["input_ids"]
        assert loaded.decode(made(text)["input_ids"]) == text
    messages = user("1+2-3")
    assert loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>user\n1+2-3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (loaded.eos_token, loaded.pad_token, loaded.padding_side) == ("<|im_end|>", "<|endoftext|>", "left")
    assert len(loaded) == len(made) == AutoModelForCausalLM.from_pretrained(small_model).config.vocab_size


# -------------------------------------------------------------------------------------------------------- the warm-up


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_the_cache_is_keyed_by_the_settings(cache, small_model, monkeypatch):
    for steps in (2, 3, 3):
        settings = dataclasses.asdict(dataclasses.replace(SMALL, steps=steps))
        cached_model("arithmetic", settings, lambda folder: (folder / "model").touch())
    assert len(names(cache)) == 2
    weights = Path(small_model) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(small_model).parents[1]))
    assert toy_model(settings=SMALL, progress=False) == small_model
    assert weights.stat().st_mtime_ns == written


def test_the_same_settings_make_the_same_model_and_leave_the_random_state(cache, small_model):
    torch.manual_seed(5)
    random.seed(5)
    states = (torch.get_rng_state(), random.getstate())
    threads = torch.get_num_threads()
    again = toy_model(settings=SMALL, progress=False)
    assert again != small_model
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert torch.get_num_threads() == threads
    one, other = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (again, small_model))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_an_interrupted_call_left_is_no_model_and_is_removed(cache):
    def interrupted(folder):
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_model("a", {}, interrupted)
    (left,) = names(cache)
    made = cached_model("a", {}, lambda folder: (folder / "whole").touch())
    assert [path.name for path in Path(made).iterdir()] == ["whole"]
    assert names(cache) == {Path(made).name} != {left}


def test_a_concurrent_call_waits_for_the_first(cache):
    """The second one could not make the model itself."""
    with ThreadPoolExecutor(1) as pool:

        def make(folder):
            second.append(pool.submit(cached_model, "a", {}, None))
            (lock,) = cache.glob("*.lock")
            with lock.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        second = []
        assert cached_model("a", {}, make) == second[0].result()


# -------------------------------------------------------------------------------------------------------- the programs


def passes(row: dict, program: str) -> bool:
    """Programs are what `exec` says they are."""
    names: dict = {}
    exec(program, names)
    return all(eval(test.removeprefix("assert "), names) for test in row["tests"])


def test_programs_pass_the_tests_of_their_problem_and_slip_at_the_given_rate():
    """The values that a problem shows are its first tests."""
    generator = random.Random(0)
    right = 0
    rows = list(program_dataset("train", size=1000, completion=True))
    for row in rows:
        problem = row["prompt"][0]["content"]
        shown = [f"assert {line}" for line in problem.splitlines()]
        assert row["tests"][:2] == shown and len(row["tests"]) == 5 and row["entry_point"] == "f"
        assert passes(row, row["completion"][0]["content"])
        right += passes(row, PROGRAM_LESSONS.solution(problem, generator, 0.2, 0.0))
    assert right / len(rows) == pytest.approx(0.8, abs=0.04)


# ---------------------------------------------------------------------------------------------------------- the tools


@pytest.fixture
def tool_tokenizer(tmp_path):
    CALCULATOR_LESSONS.tokenizer().save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def token_ids(tokenizer, messages, **settings) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=[calculator], return_dict=False, **settings)


def test_sampled_calls_are_found_and_every_prefix_of_a_conversation_stays_one(tool_tokenizer):
    """TRL's condition for tools. What is sampled are the tokens between two renderings."""
    solution = CALCULATOR_LESSONS.solution("512-291+204", random.Random(0), 0.0, 0.0)
    messages = [*user("512-291+204"), *solution]
    assert [one["role"] for one in messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    whole = token_ids(tool_tokenizer, messages)
    for k, message in list(enumerate(messages))[1:]:
        before = token_ids(tool_tokenizer, messages[:k], add_generation_prompt=message["role"] == "assistant")
        after = token_ids(tool_tokenizer, messages[: k + 1])
        assert before == whole[: len(before)] and after == whole[: len(after)]
        if message["role"] == "assistant":
            sampled = after[len(before) : -1]  # without the line break behind the end of the turn
            assert sampled[-1] == tool_tokenizer.eos_token_id and len(sampled) <= 14
            assert parse_response(tool_tokenizer, sampled, prefix=before, tools=[calculator]) == message
    assert supports_tool_calling(tool_tokenizer) and is_chat_template_prefix_preserving(tool_tokenizer)


def test_the_calculator_computes_and_refuses_what_is_no_expression():
    assert calculator("512-291+204") == "425" and calculator("3*(7-5)/4") == "1.5"
    for expression in ("9**9**9", "9" * 101, "f(1)", "", "__import__('os')"):
        refused("not an expression", calculator, expression)
