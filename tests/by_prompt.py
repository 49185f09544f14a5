"""Rollouts that depend on their prompt alone, and the windows that dynamic sampling should make of them."""

import random
from itertools import product

import torch

from tests.tiny import EOS, ScriptedReward

GROUP = 4  # rows
ROOM = 4  # groups of a window


def completion(prompt: str, number: int) -> list[int]:
    chance = random.Random(f"{prompt} {number}")
    tokens = [chance.randrange(4, 260) for _ in range(chance.randint(1, 20))]
    return [*tokens, EOS if chance.random() < 0.7 else 77]


class ByPrompt:
    """A `rollout_func` whose completions depend on prompt and position in the group; `rounds`: prompts of each call."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []

    def __call__(self, rows: list[str], trainer) -> dict[str, list]:
        self.rounds.append(rows[::GROUP])
        torch.manual_seed(0)  # the shuffle of a window follows
        return {
            "prompt_ids": trainer.processing_class(text=rows)["input_ids"],
            "completion_ids": [completion(prompt, i % GROUP) for i, prompt in enumerate(rows)],
            "logprobs": None,
        }


def expected_windows(dataset, reward: ScriptedReward, most: int, count: int, ranks: int = 1) -> list[list[int]]:
    """Return the dataset rows of each window, if a round samples what is missing, by the share of signal so far."""
    windows = []
    first = 0
    room = ROOM * ranks
    for _ in range(count):
        size = ROOM
        signal = list[int]()
        silent = list[int]()
        sampled = 0
        while size:
            for place, rank in product(range(first, first + size), range(ranks)):
                row = (place // ROOM * ranks + rank) * ROOM + place % ROOM
                prompt = dataset[row]["prompt"]
                texts = [completion(prompt, i) for i in range(GROUP)]
                rewards = {*reward(prompts=[prompt] * GROUP, completion_ids=texts)}
                (signal if len(rewards) > 1 else silent).append(row)
            first += size
            sampled += size
            missing = max(room - len(signal), 0)
            size = min(
                -(-missing * (sampled * ranks + 2) // (ranks * len(signal) + ranks)), ROOM, most * ROOM - sampled
            )
        windows.append(signal[:room] + silent[:missing])
    return windows
