"""V(prefix): how good is it to be here? Estimated at the boundaries of every episode, once per rollout.

    request: prompt, completion, boundaries, answers ──► estimator ──► one value per boundary, NaN = missing

`AnswerLogProbValue` asks the policy itself for the known answer, forced now; `monte_carlo.py` lets it finish K times;
`outcome.py` fits the outcomes of the last windows to what the tokens' log-probs look like. A
value that could not be computed is missing (NaN), never 0: log P = 0 would mean certainty.
"""

import logging
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import is_peft_model
from transformers.integrations import is_deepspeed_zero3_enabled

from dash_trl.process_rewards.arguments import check_escapes, named
from dash_trl.process_rewards.tree import Branch, Tree, loop_log_probs, tree_flaw, tree_log_probs
from dash_trl.update import evaluating, fitted_bins, plain_causal_attention

logger = logging.getLogger(__name__)

ASK = "\nThe answer is "
END_THOUGHT = "</think>\n"
_THOUGHT_TAG = re.compile("</?think>")

# The logits of a scored token count as so many tokens: a pass over 8,192 tokens has those of 256, which for a
# vocabulary of 152 thousand and float32 is 156 MB.
LOGITS_TOKENS = 32

FLOOR = -10.0  # lowest log-prob of a token of an answer: it bounds U

DUMMY = Tree((0,), (Branch(1, (0,), 0),))  # for a rank that runs a pass only because others do


@dataclass(frozen=True)
class ValueRequest:
    """One completion whose prefixes are to be valued.

    Args:
        prompt_ids, completion_ids: token ids without padding; at least one prompt token.
        boundaries: positions in the completion; a prefix is the prompt and `completion_ids[:boundary]`. Empty: this
            completion is not asked for.
        answers: the accepted answers.
        example: the dataset row, for the reward functions of `MonteCarloValue`.
        log_probs, entropies: of each token of the completion, by the policy that sampled it; NaN = not known, 0 = not
            written by the policy. For an estimator that `needs_log_probs`; entropies where they are known.
        own: for each token of the completion, 1 = the policy wrote it, 0 = a tool or an environment. None: the policy
            wrote all.
        begun: what the estimator's `begin` returned for it; None: it did not begin before.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    answers: tuple[str, ...] = ()
    example: dict[str, Any] | None = None
    log_probs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    own: tuple[int, ...] | None = None
    begun: Any = None


class ValueEstimator(Protocol):
    """Values the prefixes of a rank's completions.

    It may have, besides:
        needs_answers: False if it does without `ValueRequest.answers`, and the dataset without a column of them.
        needs_log_probs: True if it is to get `log_probs`.
        ready: False while it has no values yet, so that it is no mistake that all are missing.
        begin(requests, trainer, order): called as soon as a vLLM server has sampled a group, on the main thread of one
            rank alone. What it returns for each completion, `__call__` gets as `ValueRequest.begun`: values, or what
            they are awaited by; None: nothing was begun. `order` is the number of the group's generation batch.
        learn(requests, outcomes, trainer): called once per generation window, after all of it was valued, on every rank
            at the same point, with this rank's scored rows, their boundaries and weighted rewards.
        state_dict(), load_state_dict(state): what a checkpoint keeps of it, as tensors, numbers, lists and dicts, the
            same on all ranks and not changed later.
    """

    space: str
    """"log", "probability", or "reward"."""

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        """One list per request, one value per boundary; NaN = missing. Called on every rank at the same point."""


def checked_values(values: Any, requests: Sequence[ValueRequest], estimator: Any) -> list[list[float]]:
    """What an estimator returned, if it is one number for each boundary of each request.

    Raises:
        ValueError: names the estimator and what is wrong. NaN is no mistake: it is a missing value.
    """
    try:
        numbers = [[float(value) for value in row] for row in values]
    except TypeError as error:
        reason = str(error)
    else:
        found, expected = [len(row) for row in numbers], [len(request.boundaries) for request in requests]
        if found == expected:
            return numbers
        reason = f"{found} values for requests that have {expected} boundaries"
    raise ValueError(
        f"What the value estimator {named(estimator)} returned cannot be used: {reason}. Return a list with one list "
        "of numbers per request; a value that is not known is math.nan."
    )


class AnswerLogProbValue:
    """V(prefix) = mean_i log P(a_i | prefix + force prompt + a_<i) of the policy itself, at temperature 1.

    The "log-probability approximation" of "Training-Free Process Rewards for LLM RL". Deviations: the force prompt and
    the answer are tokenised together, so that the answer's tokens are those that the model would write; a token's
    log-prob is floored at `FLOOR` before the mean, which bounds U without breaking its telescoping sum; several
    accepted answers count together, as min(0, logsumexp of their means).

    The mean makes long answers comparable with short ones, and V no log P(answer): exp(V) is the geometric mean of the
    tokens' probabilities, above the answer's where it has several tokens.

    Args:
        force_prompt: text after the prefix, at whose end the answer is expected. By default `\\nThe answer is `, and
            before it `</think>\\n` at the boundaries at which a thought is open: where the last tag of prompt and
            completion is `<think>`. Prefixes end before half a tag. Other tags of thoughts need a force prompt of
            their own, which is used as it is at every boundary.
        closing: text after the answer that is scored, too, e.g. "}" or "<|im_end|>": "4" is then no good for "42".
        space: "log", or "probability": exp(V), the geometric mean per token.
        max_tokens_per_pass: budget of one model pass, prompts included, and 32 of each scored token; a larger tree gets
            a pass of its own.
    Raises:
        ValueError: for another space, and a force prompt in which a backslash was read as Python's.
    """

    def __init__(
        self,
        force_prompt: str | None = None,
        *,
        closing: str = "",
        space: str = "log",
        max_tokens_per_pass: int = 8192,
    ):
        check_escapes("force_prompt", force_prompt or "")
        if space not in ("log", "probability"):
            raise ValueError(f"space={space!r} is unknown: use 'log' or 'probability'.")
        self.force_prompt = force_prompt
        self.closing = closing
        self.space = space
        self.max_tokens_per_pass = max_tokens_per_pass
        self._flaws: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()  # model → why it takes no trees

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        model = trainer.model
        base = model.get_base_model() if is_peft_model(model) else model

        def most(passes: int) -> int:
            return int(trainer.ranks.gather(torch.tensor([passes])).max())

        rest = [request for request in requests if request.begun is None]
        trees = trainer.ranks.agree(partial(self._trees, rest, trainer._tokenizer))
        with trainer.accelerator.autocast():
            found = iter(self._valued(rest, trees, base, model, most))
        return [next(found) if request.begun is None else request.begun for request in requests]

    def begin(self, requests: Sequence[ValueRequest], trainer: Any, order: int) -> list[Any]:
        """The values, by passes of this rank alone while it waits for servers; see `ValueEstimator`."""
        model = trainer.model
        sharded = trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled()  # a pass takes all ranks then
        if sharded or trainer.args.async_level or model not in self._flaws:
            return [None] * len(requests)
        base = model.get_base_model() if is_peft_model(model) else model
        with trainer.accelerator.autocast():
            trees = self._trees(requests, trainer._tokenizer)
            return self._valued(requests, trees, base, model, lambda passes: passes)

    def score(
        self,
        requests: Sequence[ValueRequest],
        model: Any,
        tokenizer: Any,
        *,
        call: Any = None,
        passes_on_all_ranks: Callable[[int], int] = lambda passes: passes,
    ) -> list[list[float]]:
        """The values with any model and tokenizer, outside a trainer.

        Args:
            model: a transformers model. call: what is called in its place, if it is wrapped.
            passes_on_all_ranks: this rank's passes → the largest number of any rank; under ZeRO-3 and FSDP a pass is a
                collective, so that ranks with fewer run dummies.
        """
        return self._valued(
            requests, self._trees(requests, tokenizer), model, model if call is None else call, passes_on_all_ranks
        )

    def _trees(self, requests: Sequence[ValueRequest], tokenizer: Any) -> list[Tree]:
        return [self._tree(request, tokenizer) for request in requests]

    @torch.no_grad()
    def _valued(
        self,
        requests: Sequence[ValueRequest],
        trees: Sequence[Tree],
        model: Any,
        call: Any,
        passes_on_all_ranks: Callable[[int], int],
    ) -> list[list[float]]:
        """By a pass per bin of trees, or, if the model takes no trees, per branch; as many on every rank."""
        asked = [i for i, tree in enumerate(trees) if tree.branches]
        branches: list[list[list[float]]] = [[] for _ in trees]  # of each tree, log-probs of the scored tokens
        with evaluating(call):
            if self._takes_trees(model, call, passes_on_all_ranks):
                sizes = {i: max(len(trees[i]), LOGITS_TOKENS * trees[i].scored) for i in asked}
                passes = [[(i, trees[i]) for i in one] for one in fitted_bins(asked, sizes, self.max_tokens_per_pass)]
                score = partial(tree_log_probs, call, model)
            else:
                passes = [[(i, Tree(trees[i].trunk, (branch,)))] for i in asked for branch in trees[i].branches]
                score = partial(loop_log_probs, call)
            for number in range(passes_on_all_ranks(len(passes))):
                rows = passes[number] if number < len(passes) else []
                found = score([tree for _, tree in rows] or [DUMMY])
                for (i, _), log_probs in zip(rows, found, strict=False):
                    branches[i] += log_probs
        return [self._values(one, request) for one, request in zip(branches, requests, strict=True)]

    def _tree(self, request: ValueRequest, tokenizer: Any) -> Tree:
        """Branches of boundary 0 with every answer, of boundary 1 with every answer, …"""
        if not request.boundaries or not any(request.answers):
            return Tree((), ())
        ids = request.prompt_ids + request.completion_ids
        prefixes = [len(request.prompt_ids) + boundary for boundary in request.boundaries]
        if self.force_prompt is None:
            thoughts = _open_thoughts(ids, prefixes, tokenizer)
            forced = [(prefix, END_THOUGHT + ASK if thinks else ASK) for prefix, thinks in thoughts]
        else:
            forced = [(prefix, self.force_prompt) for prefix in prefixes]
        answers = {text: self._answers(request.answers, text, tokenizer) for text in {text for _, text in forced}}
        branches = [Branch(prefix, tokens, scored) for prefix, text in forced for tokens, scored in answers[text]]
        return Tree(ids[: max(prefixes)], tuple(branches))

    def _answers(self, answers: Iterable[str], force_prompt: str, tokenizer: Any) -> list[tuple[tuple[int, ...], int]]:
        """The tokens of the force prompt with each answer, and the first of them that belongs to the answer."""
        texts = [force_prompt + answer + self.closing for answer in answers if answer]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        found = []
        for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            # A token that straddles the end of the force prompt belongs to the answer.
            scored = next((i for i, (_, end) in enumerate(offsets) if end > len(force_prompt)), None)
            if scored is not None:
                found.append((tuple(ids), scored))
        return found

    def _values(self, branches: list[list[float]], request: ValueRequest) -> list[float]:
        count = len(request.boundaries)
        if not branches:
            return [math.nan] * count
        answers = len(branches) // count
        return [self._value(branches[i * answers : (i + 1) * answers]) for i in range(count)]

    def _value(self, answers: Iterable[Sequence[float]]) -> float:
        means = [sum(max(one, FLOOR) for one in tokens) / len(tokens) for tokens in answers]
        if not all(map(math.isfinite, means)):
            return math.nan
        top = max(means)
        value = min(top + math.log(sum(math.exp(mean - top) for mean in means)), 0.0)
        return value if self.space == "log" else math.exp(value)

    def _takes_trees(self, model: Any, call: Any, most_on_all_ranks: Any) -> bool:
        """Whether tree passes of this model are right: tried the first time it is seen, on all ranks together."""
        if model not in self._flaws:
            flaw: str | None = "its attention is not plain causal in every layer"
            if plain_causal_attention(model):
                flaw = tree_flaw(call, model)
                if most_on_all_ranks(int(flaw is not None)) and flaw is None:
                    flaw = "of what another rank found"
            if flaw is not None:
                logger.warning(
                    f"{type(model).__name__} takes no trees, because {flaw}. V(prefix) takes one pass per boundary "
                    "instead of one per batch of responses."
                )
            self._flaws[model] = flaw
        return self._flaws[model] is None


def _open_thoughts(ids: Sequence[int], prefixes: Iterable[int], tokenizer: Any) -> list[tuple[int, bool]]:
    """For each prefix, given by its number of tokens: that number without half a tag, and whether a thought is open.

    A thought is open where the last tag is `<think>`, be it of the prompt, of the completion, one token or several.
    """
    # The tokens of fast tokenizers are written in alphabets in which a tag's characters stand for themselves.
    pieces = [token or "" for token in tokenizer.convert_ids_to_tokens(ids)]
    starts = [0, *accumulate(map(len, pieces))]  # of each token, in characters; the last one is the end
    tags = list(_THOUGHT_TAG.finditer("".join(pieces)))
    found = []
    for prefix in prefixes:
        begun = [tag for tag in tags if tag.start() < starts[prefix]]
        if begun and begun[-1].end() > starts[prefix]:
            prefix = bisect_right(starts, begun.pop().start()) - 1
        found.append((prefix, bool(begun) and begun[-1][0] == "<think>"))
    return found


def server_pool(trainer: Any) -> Any:
    """The trainer's vLLM servers, a `VLLMPool`; None if it samples in another way."""
    sampler = getattr(trainer, "vllm_generation", None)
    return sampler if hasattr(sampler, "begin_scores") else None


class ServerValue(AnswerLogProbValue):
    """`AnswerLogProbValue` from the trainer's vLLM servers: a request per boundary and answer.

    A value is asked for as soon as a completion is there, while others are sampled. The servers hold the trainer's
    weights of then. They read each prefix anew, where a tree reads it once: worth it where servers are many and the
    trainer is the bottleneck. Their `--max-model-len` needs room for the force prompt and the answer behind the longest
    completion.
    """

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        pool = self._pool(trainer)

        def values() -> list[list[float]]:
            rest = iter(self.begin([request for request in requests if request.begun is None], trainer))
            begun = [next(rest) if request.begun is None else request.begun for request in requests]
            return [self._found(*one, pool=pool) for one in zip(requests, begun, strict=True)]

        return trainer.ranks.agree(values)

    def begin(self, requests: Sequence[ValueRequest], trainer: Any, order: int = -1) -> list[tuple[Tree, Any]]:
        """Asks for the log-probs of the requests' branches; see `ValueEstimator`."""
        found = []
        for tree in self._trees(requests, trainer._tokenizer):
            sequences = [[*tree.trunk[: branch.attach], *branch.tokens] for branch in tree.branches]
            found.append((tree, self._pool(trainer).begin_scores(sequences, order=order) if sequences else None))
        return found

    def _found(self, request: ValueRequest, begun: tuple[Tree, Any], *, pool: Any) -> list[float]:
        tree, batch = begun
        scored = [] if batch is None else pool.scores(batch)
        answers = [row[one.scored - len(one.tokens) :] for row, one in zip(scored, tree.branches, strict=True)]
        return self._values(answers, request)

    def _pool(self, trainer: Any) -> Any:
        pool = server_pool(trainer)
        if pool is None:
            raise ValueError(
                "ServerValue asks the vLLM servers that a run samples from, but this run has none: name them with "
                "vllm_server_urls, or use AnswerLogProbValue, which asks the trainer's model."
            )
        return pool
