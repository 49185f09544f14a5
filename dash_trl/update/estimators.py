"""The registry of advantage estimators, by name.

`dash_trl.update.advantages` registers their outcome forms, for `DASHConfig(advantage_estimator=name)`, and
`dash_trl.process_rewards.credit` their credit forms, for `ProcessRewardCallback(estimator=name)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages. Register your own estimator before you create the config or the callback::

        ESTIMATORS["mine"] = Estimator(credit=function)

    Args:
        outcome: function (rewards [M, G]) → advantages [M, G], for M groups of G rows; NaN = unscored. `DASHConfig`
            needs it.
        credit: function (`Rewards`, `CreditSettings`) → advantages [N, T]. `ProcessRewardCallback` needs it.
        per_group: True = a group's advantages depend on no other group. `reward_pipeline` and `max_num_gen_batches`
            need this.
    """

    outcome: Callable[[Tensor], Tensor] | None = None
    credit: Callable[[Any, Any], Tensor] | None = None
    per_group: bool = False

    def __call__(self, rewards: Any, settings: Any) -> Tensor:
        """Return `credit(rewards, settings)`."""
        assert self.credit is not None, "`registered` refuses estimators without a credit form"
        return self.credit(rewards, settings)


ESTIMATORS: dict[str, Estimator] = {}


def registered(name: str, form: str, option: str) -> Estimator:
    """Return the estimator that an option names.

    Args:
        name: the option's value.
        form: "outcome" or "credit". "grpo" has both, because its outcome form is `group_advantages`, which takes more
            arguments.
        option: the option's name, for the error.
    Raises:
        ValueError: if no estimator with this name has this form.
    """
    known = [one for one, estimator in ESTIMATORS.items() if one == "grpo" or getattr(estimator, form, None)]
    if name not in known:
        raise ValueError(
            f"{option}={name!r} is unknown. Use one of {', '.join(map(repr, known))}, or register a function of your "
            f"own under a name: dash_trl.update.ESTIMATORS['mine'] = Estimator({form}=function)."
        )
    return ESTIMATORS[name]
