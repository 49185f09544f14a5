"""`PromptQueue`, without a model: any sequence of readings, rounds, interrupts and resumes.

The dataset's rows are numbers, so a test sees which rows a rank gets. Ranks have a queue each, and share nothing.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerState

from dash_trl.rollout import PromptQueue

FAR = 1000  # optimizer steps, more than any run here takes
GROUP = 2
Taken = tuple[int, int, list[tuple[int, int]], list[int]]  # window, round, places, rows of the dataset


def reloaded(state):
    """As from a checkpoint's file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@dataclass(frozen=True)
class Shape:
    """The shape of a run.

    Attributes:
        prompts: number of prompts in a generation batch.
        window_batches: number of micro-steps of a window.
        accumulation: number of micro-steps of an optimizer step.
        ahead: `async_level`.
        batches: number of generation batches in the dataset.
        firsts: numbers of prompts in the first rounds of windows; windows use them in turn.
    """

    prompts: int
    window_batches: int
    accumulation: int
    ahead: int
    batches: int
    firsts: tuple[int, ...]

    def order(self, epoch: int) -> list[int]:
        rows = self.batches * self.prompts
        return torch.randperm(rows, generator=torch.Generator().manual_seed(epoch)).tolist()


# How many micro-steps are missing at the epoch's end; for the windows that begin in this step, in turn: the prompts of
# each further round.
OptimizerStep = tuple[int, list[list[int]]]


class Walk:
    """Simulates a run, from its beginning or from a point: numbers of micro-steps, of optimizer steps, and of windows
    whose first round has its prompts, and the queue's state.

    Attributes:
        taken: the prompts that were handed out.
        ahead: for each window that has not begun, its rows.
        before: for each optimizer step, the point at its beginning, when its windows are known.
        after: for each optimizer step, the point at its end.
    """

    def __init__(self, shape: Shape, start: tuple[int, int, int, Any] = (0, 0, 0, None)):
        self.shape = shape
        self.step, self.global_step, self.firsts, state = start
        self.taken: list[Taken] = []
        self.ahead: dict[int, Any] = {}
        self.before = list[Any]()
        self.after = list[Any]()
        self.queue = PromptQueue(
            rows=GROUP,
            prompts=shape.prompts,
            window_batches=shape.window_batches,
            accumulation=shape.accumulation,
            ahead=shape.ahead,
            first=self._first,
            open_epoch=self._open_epoch,
        )
        if state is not None:
            self.queue.load_state_dict(reloaded(state))

    def _first(self) -> int:
        self.firsts += 1
        return self.shape.firsts[(self.firsts - 1) % len(self.shape.firsts)]

    def _open_epoch(self, epoch: int, batches: int) -> Iterator[list[dict[str, int]]]:
        order = self.shape.order(epoch)
        size = self.shape.prompts
        for start in range(batches * size, len(order), size):
            for _ in range(self.shape.window_batches):
                yield [{"prompt": prompt} for prompt in order[start : start + size] for _ in range(GROUP)]

    def run(self, script: list[OptimizerStep]) -> "Walk":
        for one in script:
            self._optimizer_step(*one)
        return self

    def _point(self):
        return self.step, self.global_step, self.firsts, reloaded(self.queue.state_dict())

    def _optimizer_step(self, short: int, rounds: list[list[int]]) -> None:
        state = TrainerState(global_step=self.global_step, max_steps=FAR)
        read = list(self.queue.read(max(self.shape.accumulation - short, 1), micro_step=self.step, state=state))
        self.before.append(self._point())
        for rows in read:
            if self.step % self.shape.window_batches == 0:
                self._window(rows, rounds)
            self.step += 1
        self.global_step += 1
        self.after.append(self._point())

    def _window(self, rows, rounds: list[list[int]]) -> None:
        number = self.step // self.shape.window_batches
        assert rows is self.ahead.pop(number, rows)
        for window, known in enumerate(self.queue.upcoming(self.step), number + 1):
            assert known is self.ahead.setdefault(window, known)
        for place, own in enumerate([rows, *map(self.queue.take, rounds[number % len(rounds)])]):
            found = [row["prompt"] for row in own]
            assert found == [number for number in found[::GROUP] for _ in range(GROUP)]
            self.taken.append((number, place, own.places, found[::GROUP]))

    def known(self) -> list[tuple[int, int]]:
        """The places of windows that have not begun."""
        return [place for rows in self.ahead.values() for place in rows.places]


sizes = st.integers(1, 7)  # of a round, which may be larger than an epoch
shapes = st.builds(
    Shape,
    prompts=st.integers(1, 3),
    window_batches=st.integers(1, 4),
    accumulation=st.integers(1, 5),
    ahead=st.integers(0, 2),
    batches=st.integers(1, 4),
    firsts=st.lists(sizes, min_size=1, max_size=3).map(tuple),
)
steps = st.tuples(st.integers(0, 3), st.lists(st.lists(sizes, max_size=3), min_size=1, max_size=3))
scripts = st.lists(steps, min_size=2, max_size=8)


@settings(max_examples=25, derandomize=True)
@given(shapes, scripts, st.data())
def test_every_prompt_of_every_epoch_is_handed_out_once_and_in_order(shape, script, data):
    """And by a run that is resumed from an optimizer step's end, or from its beginning, as if saved within it."""
    script = [*script, (0, [[]])]  # begins the windows that are known at the end of the others
    walk = Walk(shape).run(script)
    handed = [place for _, _, places, _ in walk.taken for place in places] + walk.known()
    length = shape.batches * shape.prompts
    every = [divmod(number, length) for number in range(len(handed))]
    assert sorted(handed) == every
    for _, _, places, numbers in walk.taken:
        assert numbers == [shape.order(epoch)[number] for epoch, number in places]
        assert places == every[every.index(places[0]) :][: len(places)]

    at = data.draw(st.integers(1, len(script) - 1))
    begun = walk.before[at] if data.draw(st.booleans()) else walk.after[at - 1]
    rest = Walk(shape, begun).run(script[at:])
    done = len(walk.taken) - len(rest.taken)
    assert done >= 0 and rest.taken == walk.taken[done:]
    assert rest.known() == (walk.known() if rest.taken else [])  # asked where a window begins
    for (*_, one), (*_, other) in zip(walk.after[at:], rest.after, strict=True):
        assert one["place"] == other["place"]
