"""Value estimators compute V(prefix) at the episode boundaries of completions::

    request: prompt, completion, boundaries, answers ──► estimator ──► one value per boundary, NaN = missing

A missing value is NaN, not 0, because log P = 0 would mean certainty.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import unwrap_peft_model
from trl import GRPOTrainer

from dash_trl.process_rewards.episodes import check_escapes
from dash_trl.process_rewards.tree import Branch, BranchLogProbs, Tree, loop_log_probs, tree_flaw, tree_log_probs
from dash_trl.update import evaluating, fitted_bins, keep_rows_apart, packing_obstacle

logger = logging.getLogger(__name__)

ASK = "\nThe answer is "
END_THOUGHT = "</think>\n"

# In the token budget of a pass, each scored token counts as 32 tokens, because its logits take memory. So a pass with a
# budget of 8,192 tokens has logits for at most 256 tokens. They take 156 MB in float32 if the vocabulary has 152,000
# tokens.
LOGITS_TOKENS = 32

# Smaller log-probs of an answer's tokens are raised to this number, so that no difference of two values becomes huge.
FLOOR = -10.0

# Under ZeRO-3 and FSDP, a pass is a collective. So a rank with fewer passes than other ranks runs more passes with this
# tree, whose result is dropped.
DUMMY = Tree((0,), (Branch(1, (0,), 0),))


@dataclass(frozen=True)
class ValueRequest:
    """A completion with the boundaries at which its values are needed.

    Args:
        prompt_ids: token ids of the prompt without padding, at least one.
        completion_ids: token ids of the completion without padding.
        boundaries: token positions; the prefix of a boundary is the prompt and `completion_ids[:boundary]`.
        answers: the accepted answers.
        example: the dataset row, for reward functions.
        own: per token of the completion, 1 = the policy wrote it, 0 = a tool or an environment. None = all 1.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    answers: tuple[str, ...] = ()
    example: dict[str, Any] | None = None
    own: tuple[int, ...] | None = None


class ValueEstimator(Protocol):
    """Computes V for the prefixes of a rank's completions.

    With the optional attribute `needs_answers = False`, `ValueRequest.answers` is not used, so the dataset needs no
    column with answers.
    """

    space: str
    """The unit of V: "log", "probability", "reward", or "score" if V has another unit than the outcome."""

    def __call__(self, requests: Sequence[ValueRequest], trainer: Any) -> list[list[float]]:
        """Return one list per request with one value per boundary; NaN = missing.

        All ranks call it, so it may use collectives.

        Args:
            requests: the completions of this rank.
            trainer: the `DASHTrainer`.
        """


def checked_values(values: Any, requests: Sequence[ValueRequest], estimator: object) -> list[list[float]]:
    """Return the values of a value estimator as lists of floats; NaN = missing.

    Raises:
        ValueError: if there is not one number for each boundary of each request.
    """
    expected = [len(request.boundaries) for request in requests]
    try:
        numbers = [[value - 0.0 * value for value in map(float, row)] for row in values]  # NaN for ±inf
        found: object = [*map(len, numbers)]
    except TypeError as error:
        found = error
    if found != expected:
        raise ValueError(
            f"The value estimator {estimator!r:.100} returned another form: {found}, for requests that have {expected} "
            "boundaries. Return a list with one list of numbers per request, one number per boundary, and math.nan for "
            "a value that is not known."
        )
    return numbers


@dataclass(eq=False)
class AnswerLogProbValue:
    """V(prefix) = mean_i log P(a_i | prefix + force prompt + a_<i), the policy's log-prob of the known answer.

    The "log-probability approximation" of "Training-Free Process Rewards for LLM RL", at temperature 1. Deviations:

    - Force prompt and answer are tokenised together, as the model would write them.
    - Log-probs below `FLOOR` are raised to it.
    - With several accepted answers, V is min(0, logsumexp of their means).

    The mean makes long and short answers comparable. But exp(V) is then not P(answer): it is larger if the answer has
    several tokens.

    Args:
        force_prompt: text between prefix and answer. None = ``"\\nThe answer is "``, or ``"</think>\\n\\nThe answer is
            "`` if a thought is open at the boundary: the last tag before it is `<think>`. Your own is used at every
            boundary; pass one if the model has other tags.
        closing: text after the answer, such as ``"}"`` or ``"<|im_end|>"``, which is scored, too. Without it, a policy
            that would write "42" also gets a high V for "4".
        space: unit of V: "log" for the mean log-prob, "probability" for its exponential.
        max_tokens_per_pass: token budget of a model pass. A completion takes its tokens (prompt, completion, force
            prompts, answers), or 32 per scored one if that is more.
    Raises:
        ValueError: if `space` is unknown, or `force_prompt` has a control character, as "\\b" in a plain string is.
    """

    force_prompt: str | None = None
    _: KW_ONLY
    closing: str = ""
    space: str = "log"
    max_tokens_per_pass: int = 8192

    def __post_init__(self) -> None:
        check_escapes("force_prompt", self.force_prompt or "")
        if self.space not in ("log", "probability"):
            raise ValueError(f"space={self.space!r} is unknown: use 'log' or 'probability'.")
        # Model → why its tree passes are wrong.
        self._flaws = WeakKeyDictionary[PreTrainedModel, str | None]()

    def __call__(self, requests: Sequence[ValueRequest], trainer: GRPOTrainer) -> list[list[float]]:
        trees = trainer.ranks.agree(self._trees, requests, trainer._tokenizer)
        with trainer.accelerator.autocast():
            return self._valued(requests, trees, trainer.model, trainer.ranks.largest)

    def score(
        self, requests: Sequence[ValueRequest], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> list[list[float]]:
        """Return the values with any model and tokenizer, without a trainer: one list per request; NaN = missing.

        Args:
            requests: the completions and their boundaries.
            model: a transformers model.
            tokenizer: the tokenizer of the model.
        """
        return self._valued(requests, self._trees(requests, tokenizer), model, int)

    @torch.no_grad()
    def _valued(
        self,
        requests: Sequence[ValueRequest],
        trees: Sequence[Tree],
        call: Module,
        passes_on_all_ranks: Callable[[int], int],
    ) -> list[list[float]]:
        """Return the values, from one pass per bin of trees, or one per branch if the model cannot do tree passes.

        `passes_on_all_ranks` turns a number into the largest of any rank: ranks with fewer passes run dummy passes.
        """
        model = unwrap_peft_model(call)
        asked = [i for i, tree in enumerate(trees) if tree.branches]
        branches: BranchLogProbs = [[] for _ in trees]
        with evaluating(call):
            together = self._takes_trees(model, call, passes_on_all_ranks)
            if together:
                sizes = {i: max(len(trees[i].shape), LOGITS_TOKENS * trees[i].scored) for i in asked}
                passes = [[(i, trees[i]) for i in one] for one in fitted_bins(asked, sizes, self.max_tokens_per_pass)]
            else:
                passes = [[(i, Tree(trees[i].trunk, (branch,)))] for i in asked for branch in trees[i].branches]
            passes += [[]] * (passes_on_all_ranks(len(passes)) - len(passes))
            for rows in passes:
                batch = [tree for _, tree in rows] or [DUMMY]
                found = tree_log_probs(call, model, batch) if together else loop_log_probs(call, batch)
                for (i, _), log_probs in zip(rows, found, strict=False):
                    branches[i] += log_probs
        return [self._values(one, request) for one, request in zip(branches, requests, strict=True)]

    def _trees(self, requests: Iterable[ValueRequest], tokenizer: PreTrainedTokenizerBase) -> list[Tree]:
        return [self._tree(request, tokenizer) for request in requests]

    def _tree(self, request: ValueRequest, tokenizer: PreTrainedTokenizerBase) -> Tree:
        """Return prompt and completion up to the last boundary as the trunk, with a branch per boundary and answer.

        Without boundaries or answers, the tree is empty.
        """
        if not request.boundaries or not any(request.answers):
            return Tree((), ())
        ids = request.prompt_ids + request.completion_ids
        prefixes = [len(request.prompt_ids) + boundary for boundary in request.boundaries]
        if self.force_prompt is None:
            pieces = tokenizer.batch_decode([ids[start:end] for start, end in pairwise([0, *prefixes])])
            # A thought is open if the last tag before the boundary is `<think>`.
            is_open = [text.rfind("<think>") > text.rfind("</think>") for text in accumulate(pieces)]
            texts = [END_THOUGHT + ASK if thinks else ASK for thinks in is_open]
        else:
            texts = [self.force_prompt] * len(prefixes)
        answers = {text: self._answers(request.answers, text, tokenizer) for text in {*texts}}
        forced = zip(prefixes, texts, strict=True)
        branches = [Branch(prefix, tokens, scored) for prefix, text in forced for tokens, scored in answers[text]]
        return Tree(ids[: max(prefixes)], tuple(branches))

    def _answers(
        self, answers: Iterable[str], force_prompt: str, tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[tuple[int, ...], int]]:
        """Return per answer the tokens of force prompt and answer, and the index of the answer's first token."""
        texts = [force_prompt + answer + self.closing for answer in answers if answer]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        found = []
        for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            # A token with characters of both the force prompt and the answer counts as the answer's first token.
            scored = next((i for i, (_, end) in enumerate(offsets) if end > len(force_prompt)), None)
            if scored is not None:
                found.append((tuple(ids), scored))
        return found

    def _values(self, branches: list[list[float]], request: ValueRequest) -> list[float]:
        """Return one value per boundary, from the log-probs of the answers' tokens at all boundaries."""
        count = len(request.boundaries)
        if not branches:
            return [math.nan] * count
        means = torch.tensor([fmean(max(one, FLOOR) for one in tokens) for tokens in branches], dtype=torch.double)
        values = means.view(count, -1).logsumexp(dim=1).clamp(max=0)  # NaN if one is NaN
        return (values if self.space == "log" else values.exp()).tolist()

    def _takes_trees(self, model: PreTrainedModel, call: Module, most_on_all_ranks: Callable[[int], int]) -> bool:
        """Return whether tree passes of this model are right; all ranks test a new model together."""
        if model not in self._flaws:
            flaw = packing_obstacle(model)
            if flaw is None:
                keep_rows_apart(model)
                flaw = tree_flaw(call, model)
                if most_on_all_ranks(int(flaw is not None)) and flaw is None:
                    flaw = "tree passes are wrong on another rank"
            if flaw is not None:
                logger.warning(
                    f"{type(model).__name__} cannot do tree passes, because {flaw}. V(prefix) takes one pass per "
                    "boundary instead of one per batch of responses."
                )
            self._flaws[model] = flaw
        return self._flaws[model] is None
