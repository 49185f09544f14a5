"""`PromptQueue` and `PromptHistory`, without a model: any sequence of readings, rounds, interrupts and resumes.

The tests simulate all ranks of a run in step. The dataset's rows are numbers, so a test sees which rows each rank gets.
"""

import io
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerState

from dash_trl.rollout import PromptHistory, PromptQueue, permutation

FAR = 1000  # optimizer steps, more than any run here takes
GROUP = 2
Taken = tuple[int, int, list[tuple[int, int]], list[int]]  # window, round, places, rows of the dataset


def reloaded(state: Any) -> Any:
    """As from a checkpoint's file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@dataclass(frozen=True)
class Shape:
    """The shape of a run.

    Attributes:
        ranks: number of ranks.
        prompts: number of prompts of a rank in a generation batch.
        window_batches: number of micro-steps of a window.
        accumulation: number of micro-steps of an optimizer step.
        ahead: `async_level`.
        batches: number of whole generation batches in the dataset.
        rest: number of prompts in the dataset beside these.
        most: `max_skipped_epochs`.
        silent: share of prompts whose groups have no signal.
        firsts: numbers of prompts of a rank in the first rounds of windows; windows use them in turn.
    """

    ranks: int
    prompts: int
    window_batches: int
    accumulation: int
    ahead: int
    batches: int
    rest: int
    most: int
    silent: float
    firsts: tuple[int, ...]

    @property
    def batch(self) -> int:
        return self.ranks * self.prompts

    @property
    def dataset(self) -> int:
        return self.batches * self.batch + self.rest % self.batch

    def history(self) -> PromptHistory | None:
        settings = {"most": self.most, "batch": self.batch, "seed": 0}
        order = lambda epoch: permutation(self.dataset, epoch, 0)  # noqa: E731
        return PromptHistory(self.dataset, order=order, **settings) if self.most else None


# The numbers of micro-steps after which a callback ends the epoch; how many micro-steps are missing at the epoch's end;
# for the windows that begin in this step, in turn: the prompts of a rank in each further round.
OptimizerStep = tuple[list[int], int, list[list[int]]]


class Walk:
    """Simulates all ranks of a run, from its beginning or from a point: numbers of micro-steps, of optimizer steps, and
    of windows whose first round has its prompts, and each rank's state.

    Attributes:
        taken: for each rank, the prompts that it got.
        ahead: for each window that has not begun, the rows of each rank.
        orders: for each rank, the prompts of its epochs.
        before: for each optimizer step, the point at its beginning, when its windows are known.
        after: for each optimizer step, the point at its end.
    """

    def __init__(self, shape: Shape, start: tuple[int, int, int, list[Any]] = (0, 0, 0, [])):
        self.shape = shape
        self.step, self.global_step, self.firsts, states = start
        self.taken: list[list[Taken]] = [[] for _ in range(shape.ranks)]
        self.orders: list[dict[int, list[int]]] = [{} for _ in range(shape.ranks)]
        self.ahead: dict[int, list[Any]] = {}
        self.before, self.after = list[Any](), list[Any]()
        self.queues = [self._queue(rank) for rank in range(shape.ranks)]
        for queue, state in zip(self.queues, states, strict=bool(states)):
            queue.load_state_dict(reloaded(state))

    def _queue(self, rank: int) -> PromptQueue:
        shape, history, calls = self.shape, self.shape.history(), itertools.count(self.firsts)

        def first() -> int:
            self.firsts = next(calls) + 1
            return shape.firsts[(self.firsts - 1) % len(shape.firsts)]

        def open_epoch(epoch: int, batches: int) -> Iterator[list[dict[str, int]]]:
            order = permutation(shape.dataset, epoch, 0) if history is None else history.prompts(epoch)
            starts = range(0, len(order) // shape.batch * shape.batch, shape.batch)
            own = [order[start + rank * shape.prompts :][: shape.prompts] for start in starts]
            self.orders[rank][epoch] = sum(own, [])
            for chosen in own[batches:]:
                for _ in range(shape.window_batches):
                    yield [{"prompt": prompt} for prompt in chosen for _ in range(GROUP)]

        return PromptQueue(
            num_generations=GROUP,
            prompts=shape.prompts,
            window_batches=shape.window_batches,
            accumulation=shape.accumulation,
            ahead=shape.ahead,
            first=first,
            open_epoch=open_epoch,
            history=history,
            rank=rank,
            ranks=shape.ranks,
        )

    def run(self, script: list[OptimizerStep]) -> "Walk":
        for one in script:
            self._optimizer_step(*one)
        return self

    def _point(self) -> Any:
        return self.step, self.global_step, self.firsts, [reloaded(one.state_dict()) for one in self.queues]

    def _optimizer_step(self, cuts: list[int], short: int, rounds: list[list[int]]) -> None:
        shape, state = self.shape, TrainerState(global_step=self.global_step, max_steps=FAR)
        whole = max(shape.accumulation - short, 1)
        readings = [(shape.accumulation, cut) for cut in cuts if cut < shape.accumulation] + [(whole, whole)]
        for number, (size, run) in enumerate(readings):
            read = [list(queue.read(None, size, step=self.step, state=state)) for queue in self.queues]
            assert all(len(one) == size for one in read)
            if number == 0:
                self.before.append(self._point())
            for micro_step in range(run):
                if self.step % shape.window_batches == 0:
                    self._window([one[micro_step] for one in read], rounds)
                self.step += 1
        self.global_step += 1
        self.after.append(self._point())

    def _window(self, rows: list[Any], rounds: list[list[int]]) -> None:
        number = self.step // self.shape.window_batches
        assert all(now is then for now, then in zip(rows, self.ahead.pop(number, rows), strict=True))
        upcoming = zip(*(queue.upcoming(self.step) for queue in self.queues), strict=True)
        for window, known in enumerate(upcoming, number + 1):
            assert all(now is then for now, then in zip(known, self.ahead.setdefault(window, known), strict=True))
        batches = [rows, *([queue.take(size) for queue in self.queues] for size in rounds[number % len(rounds)])]
        prompts: list[int] = []
        for place, batch in enumerate(batches):
            for rank, own in enumerate(batch):
                self.taken[rank].append((number, place, own.places, numbers := self._numbers(rank, own)))
                prompts += numbers
        signal = [prompt >= self.shape.silent * self.shape.dataset for prompt in prompts]
        for queue in self.queues:
            if queue.history is not None:
                queue.history.note(torch.tensor(prompts), torch.tensor(signal))

    def _numbers(self, rank: int, rows: Any) -> list[int]:
        found = [row["prompt"] for row in rows]
        assert found == [number for number in found[::GROUP] for _ in range(GROUP)]
        if self.shape.most:
            assert self.queues[rank].numbers(rows) == found[::GROUP]
        return found[::GROUP]

    def known(self, rank: int) -> list[tuple[int, int]]:
        """The places of windows that have not begun."""
        return [place for window in self.ahead.values() for place in window[rank].places]


sizes = st.integers(1, 7)  # of a round, which may be larger than an epoch
shapes = st.builds(
    Shape,
    ranks=st.integers(1, 2),
    prompts=st.integers(1, 3),
    window_batches=st.integers(1, 4),
    accumulation=st.integers(1, 5),
    ahead=st.integers(0, 2),
    batches=st.integers(1, 4),
    rest=st.integers(0, 5),
    most=st.integers(0, 3),
    silent=st.floats(0, 1),
    firsts=st.lists(sizes, min_size=1, max_size=3).map(tuple),
)
steps = st.tuples(
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(0, 3),
    st.lists(st.lists(sizes, max_size=3), min_size=1, max_size=3),
)
scripts = st.lists(steps, min_size=2, max_size=8)


@settings(max_examples=25, derandomize=True)
@given(shapes, scripts, st.data())
def test_every_prompt_of_every_epoch_is_handed_out_once_and_in_order(shape, script, data):
    """And by a run that is resumed from an optimizer step's end, or from its beginning, as if saved within it."""
    script = [*script, ([], 0, [[]])]  # begins the windows that were known when an epoch was cut
    walk = Walk(shape).run(script)
    for rank, orders in enumerate(walk.orders):
        handed = [place for _, _, places, _ in walk.taken[rank] for place in places] + walk.known(rank)
        every = [(epoch, number) for epoch, order in orders.items() for number in range(len(order))]
        assert sorted(handed) == every[: len(handed)]
        for _, _, places, numbers in walk.taken[rank]:
            assert numbers == [orders[epoch][number] for epoch, number in places]
            assert places == every[every.index(places[0]) :][: len(places)]
    for epoch in walk.orders[0]:
        prompts = [prompt for orders in walk.orders for prompt in orders[epoch]]
        assert len(set(prompts)) == len(prompts) and len(prompts) % shape.batch == 0 < len(prompts)
        assert shape.most or len(prompts) == shape.batches * shape.batch

    at = data.draw(st.integers(1, len(script) - 1))
    begun = walk.before[at] if data.draw(st.booleans()) else walk.after[at - 1]
    rest = Walk(shape, begun).run(script[at:])
    for rank in range(shape.ranks):
        done = len(walk.taken[rank]) - len(rest.taken[rank])
        assert done >= 0 and rest.taken[rank] == walk.taken[rank][done:]
        assert rest.known(rank) == (walk.known(rank) if rest.taken[rank] else [])  # asked where a window begins
    for (*_, one), (*_, other) in zip(walk.after[at:], rest.after, strict=True):
        assert one[0]["place"] == other[0]["place"]


# ---------------------------------------------------------------------------------------------- which are passed over


def history(prompts: int = 40, **settings: Any) -> PromptHistory:
    settings = {"most": 3, "batch": 1, "order": lambda epoch: permutation(prompts, epoch, 5), "seed": 5, **settings}
    return PromptHistory(prompts, **settings)


def note(one: PromptHistory, verdicts: dict[int, bool]) -> None:
    one.note(torch.tensor(list(verdicts)), torch.tensor(list(verdicts.values())))


def test_the_chance_of_a_signal():
    """The mean of the Beta posterior of groups that were forgotten by a fifth with each epoch."""
    one = history(prompts=3)
    groups = {0: [True, True, False], 1: [False, False, False]}
    counts = {prompt: [0.0, 0.0] for prompt in range(3)}
    for epoch in range(3):
        one.prompts(epoch)
        for of_prompt in counts.values():
            of_prompt[:] = [0.8 * value for value in of_prompt]
        for prompt, signal in groups.items():
            note(one, {prompt: signal[epoch]})
            counts[prompt][signal[epoch]] += 1
    expected = [(1 + having) / (2 + without + having) for without, having in counts.values()]
    assert one.chance().tolist() == pytest.approx(expected, abs=1e-6)
    assert expected[1] < 0.25 < expected[0] and expected[2] == 0.5


def test_a_prompt_is_passed_over_with_the_probability_of_its_chance():
    """max(0, 1 − 2 · chance), of prompts that had no signal once, twice, or always had."""
    verdicts = {"once": [False], "twice": [False, False], "always": [True, True], "both": [True, False]}
    for name, signals in verdicts.items():
        one = history(prompts=4000)
        for signal in signals:
            one.note(torch.arange(4000), torch.full((4000,), signal))
        passed_over = 1 - len(one.prompts(0)) / 4000
        chance = (1 + sum(signals)) / (2 + len(signals))
        assert passed_over == pytest.approx(max(0.0, 1 - 2 * chance), abs=0.03), name
        assert one.skipped == 4000 - len(one.prompts(0))


@settings(max_examples=30, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 3), st.integers(0, 8), st.floats(0, 1), st.integers(0, 99))
def test_every_prompt_comes_back(most, batch, batches, rest, silent, seed):
    """After so many epochs at most, but for what does not fill a generation batch, as in TRL; on all ranks, resumed."""
    size, chance = batch * (1 + batches) + rest % batch, random.Random(seed)
    order = lambda epoch: permutation(size, epoch, seed)  # noqa: E731
    build = lambda: PromptHistory(size, most=most, batch=batch, order=order, seed=seed)  # noqa: E731
    one, resumed = build(), build()
    away, passed_over = dict.fromkeys(range(size), 0), 0
    for epoch in range(12):
        kept = one.prompts(epoch)
        assert kept == [prompt for prompt in order(epoch) if prompt in set(kept)]  # in their order, each once
        assert len(kept) % batch == 0 < len(kept)
        missing = set(range(size)) - set(kept)
        passed_over += size - len(kept)
        for prompt in range(size):
            away[prompt] = away[prompt] + 1 if prompt in missing else 0
        if size % batch == 0:
            assert max(away.values()) <= most and one.skipped == passed_over
        assert resumed.prompts(epoch) == kept
        note(one, verdicts := {prompt: chance.random() >= silent for prompt in kept})
        if chance.random() < 0.5:
            note(resumed, verdicts)
        else:
            state, resumed = reloaded(one.state_dict()), build()
            resumed.load_state_dict(state)
            assert resumed.prompts(epoch) == kept and one.prompts(epoch) == kept
