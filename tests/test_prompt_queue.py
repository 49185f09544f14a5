"""`PromptQueue`, without a model: any sequence of readings, rounds, interrupts and resumes.

The tests simulate all ranks of a run in step. The dataset's rows are numbers, so a test sees which rows each rank gets.
"""

import io
import itertools
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
        firsts: numbers of prompts of a rank in the first rounds of windows; windows use them in turn.
    """

    ranks: int
    prompts: int
    window_batches: int
    accumulation: int
    ahead: int
    batches: int
    rest: int
    firsts: tuple[int, ...]

    @property
    def batch(self) -> int:
        return self.ranks * self.prompts

    @property
    def dataset(self) -> int:
        return self.batches * self.batch + self.rest % self.batch

    def order(self, epoch: int) -> list[int]:
        return torch.randperm(self.dataset, generator=torch.Generator().manual_seed(epoch)).tolist()


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
        shape, calls = self.shape, itertools.count(self.firsts)

        def first() -> int:
            self.firsts = next(calls) + 1
            return shape.firsts[(self.firsts - 1) % len(shape.firsts)]

        def open_epoch(epoch: int, batches: int) -> Iterator[list[dict[str, int]]]:
            order = shape.order(epoch)
            starts = range(0, len(order) // shape.batch * shape.batch, shape.batch)
            own = [order[start + rank * shape.prompts :][: shape.prompts] for start in starts]
            self.orders[rank][epoch] = sum(own, [])
            for chosen in own[batches:]:
                for _ in range(shape.window_batches):
                    yield [{"prompt": prompt} for prompt in chosen for _ in range(GROUP)]

        return PromptQueue(
            rows=GROUP,
            prompts=shape.prompts,
            window_batches=shape.window_batches,
            accumulation=shape.accumulation,
            ahead=shape.ahead,
            first=first,
            open_epoch=open_epoch,
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
            read = [list(queue.read(size, micro_step=self.step, state=state)) for queue in self.queues]
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
        for place, batch in enumerate(batches):
            for rank, own in enumerate(batch):
                found = [row["prompt"] for row in own]
                assert found == [number for number in found[::GROUP] for _ in range(GROUP)]
                self.taken[rank].append((number, place, own.places, found[::GROUP]))

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
        assert len(set(prompts)) == len(prompts) == shape.batches * shape.batch

    at = data.draw(st.integers(1, len(script) - 1))
    begun = walk.before[at] if data.draw(st.booleans()) else walk.after[at - 1]
    rest = Walk(shape, begun).run(script[at:])
    for rank in range(shape.ranks):
        done = len(walk.taken[rank]) - len(rest.taken[rank])
        assert done >= 0 and rest.taken[rank] == walk.taken[rank][done:]
        assert rest.known(rank) == (walk.known(rank) if rest.taken[rank] else [])  # asked where a window begins
    for (*_, one), (*_, other) in zip(walk.after[at:], rest.after, strict=True):
        assert one[0]["place"] == other[0]["place"]
