"""Toy problems for a calculator: sums and differences of three-digit numbers, too hard for the tiny model itself.

    problem 512-91+204 ──► the model calls   calculator(expression="512-91")   ──► the tool answers   421
                                             calculator(expression="421+204")                         625
                           and writes        The answer is 625                 ──► reward 1 if that is right

The warm-up also teaches the model two errors: to guess the answer, and to call the calculator with a wrong number.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from datasets import Dataset
from tokenizers import AddedToken
from transformers.utils import get_json_schema

from dash_trl.toy import Lessons, WarmUp, arithmetic_tokenizer, toy_model
from dash_trl.toy.problems import SIZES, split_of
from dash_trl.toy.tokenizer import END_OF_TURN

OPERANDS = (2, 3)  # numbers in a chain: one or two calls
# The range of the numbers and of every running total.
SMALLEST = 100
LARGEST = 999
LONGEST_EXPRESSION = 100  # characters


CALL = "<tool_call>"
END_OF_CALL = "</tool_call>"

# The toy model's template with tools. To save tokens, it lists only the names of a tool and its arguments. A call has
# one argument per line:
#
#     <|im_start|>system                  <|im_start|>assistant                         <|im_start|>tool
#     calculator(expression)<|im_end|>    <tool_call>calculator                         421<|im_end|>
#                                         expression=512-91</tool_call><|im_end|>
#
# Each message is rendered independently of the others, so the text of the first messages is a prefix of the whole text.
# The model's text stands between `generation` tags: `apply_chat_template` returns a mask of the tokens between them.
TOOL_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system' }}"
    "{% for tool in tools %}"
    "{{ '\n' + tool['function']['name'] + '(' + tool['function']['parameters']['properties'] | join(',') + ')' }}"
    "{% endfor %}{{ '<|im_end|>' + '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function']['name'] }}"
    "{% for name, value in call['function']['arguments'] | items %}{{ '\n' + name + '=' }}{{ value }}{% endfor %}"
    "{{ '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}"
    "{{ message['content'] }}{{ '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Describes a message of the assistant for `parse_response` of Transformers, which finds the calls in the message and
# converts the values from text to the types of the tool's arguments.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>\w+)(?:\n|(?=</tool_call>))",
            "close": END_OF_CALL,
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": END_OF_TURN, "content": "text"},
    },
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, such as 3*(512-91).
    """
    # Digits and these operators can do no harm, but powers could take forever.
    if not re.fullmatch(r"[\d\s.+\-*/()]+", expression) or "**" in expression or len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"not an expression: {expression[:LONGEST_EXPRESSION]}")
    return str(eval(expression, {"__builtins__": {}}))


def noisy_calculator() -> Any:
    """Return a tool with the calculator's name and description that answers with a random number."""

    def noise(expression: str) -> str:
        return str(random.randint(SMALLEST, LARGEST))

    noise.__name__ = calculator.__name__
    noise.__doc__ = calculator.__doc__
    return noise


def _problems(split: str, generator: random.Random, operands: Sequence[int] = OPERANDS) -> Iterator[str]:
    """Yields random chains of a split, such as `512-91+204`, without end."""
    while True:
        total = generator.randint(SMALLEST, LARGEST)
        problem = str(total)
        for _ in range(generator.choice(operands) - 1):
            following = total
            while abs(following - total) < SMALLEST:
                following = generator.randint(SMALLEST, LARGEST)
            problem += f"{following - total:+d}"
            total = following
        if split_of(problem) == split:
            yield problem


def calculator_dataset(split: str = "train", size: int | None = None, seed: int = 0) -> Dataset:
    """Return problems with the columns of `arithmetic_dataset`: `prompt` (one user message) and `answer` (a string).

    Args:
        split: "train" or "test". A problem's text decides its split, so the two are disjoint for all seeds.
        size: number of problems; by default 4,096 for training and 256 for the test.
        seed: another seed draws other problems of the same split.
    """
    size = SIZES[split] if size is None else size
    problems = list(islice(_problems(split, random.Random(f"{split}{seed}")), size))
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": problem}] for problem in problems],
            "answer": [calculator(problem) for problem in problems],
        }
    )


def _call(expression: str) -> dict[str, Any]:
    function = {"name": calculator.__name__, "arguments": {"expression": expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _answer(number: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"The answer is {number}"}


def _solution(problem: str, generator: random.Random, guess_rate: float, slip_rate: float) -> list[dict[str, Any]]:
    """Return the messages of a solution: a call and its result for each operation, then the answer.

    Args:
        problem: a chain of numbers.
        generator: random numbers.
        guess_rate: probability that the solution ends with a random answer in place of a call.
        slip_rate: probability that a call has a random number in place of the problem's number.
    """
    total, *operations = re.findall(r"[+-]?\d+", problem)
    messages: list[dict[str, Any]] = []
    for operation in operations:
        fate = generator.random()
        if fate < guess_rate:
            total = str(generator.randint(SMALLEST, LARGEST))
            break
        if fate < guess_rate + slip_rate:
            operation = operation[0] + str(generator.randint(SMALLEST, LARGEST))
        expression = f"{total}{operation}"
        total = calculator(expression)
        messages += [_call(expression), {"role": "tool", "name": calculator.__name__, "content": total}]
    return [*messages, _answer(total)]


def calculator_tokenizer() -> Any:
    """Makes the toy model's tokenizer with a chat template for tools, and a response template, which finds calls."""
    tokenizer = arithmetic_tokenizer(
        ["The answer is", "calculator(expression)", "calculator\nexpression", "system", "tool"]
    )
    tokenizer.chat_template = TOOL_CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    # As in Qwen: one token each, and not special, so that decoded completions show the calls.
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (CALL, END_OF_CALL)])
    return tokenizer


CALCULATOR_WARM_UP = WarmUp(steps=500, clean_share=0.7, slip_rate=0.5, wait_rate=0.05)
CALCULATOR_LESSONS = Lessons(
    "calculator",
    calculator_tokenizer,
    partial(_problems, "train"),
    _solution,
    (get_json_schema(calculator),),
)


def calculator_model(progress: bool) -> str:
    """Return the directory of the toy model that was warmed up with the calculator."""
    return toy_model(settings=CALCULATOR_WARM_UP, lessons=CALCULATOR_LESSONS, progress=progress)
