"""The interface of adapters: the methods that checks call, and the choices that a profile names.

Every method gets arrays first and then `settings`, a dict with the numbers of the case and one value for every choice
that concerns it. Arrays are numpy float64; ids, groups and masks are int64 and bool, with True = counts. Their axes are
B rows, T positions, V words, K responses of a ranking, n parameters, S steps. A masked position within a row is a token
that the policy did not choose, such as a tool's output; those before and after a row are padding. Masked positions hold
finite rubbish that must have no effect, and results there are not compared.

Gradients are those of the library's own automatic differentiation, so that stop-gradients show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Settings = Mapping[str, Any]


class NotOffered(Exception):
    """The library lacks this, which does not count as a failure."""


class UserError(Exception):
    """A user's mistake, with a message of one line."""


class Deviation(Exception):
    """A result differs from what a check expects.

    Args:
        message: what differs, in one line.
        where: the output and the index in it, such as `gradient[1, 3]`.
        expected: the number that the check expects there.
        got: the library's number.
        error: the largest relative error of the output.
    """

    def __init__(
        self, message: str, where: str = "", expected: Any = None, got: Any = None, error: float | None = None
    ) -> None:
        place = f" at {where}: expected {expected}, got {got}" if where else ""
        super().__init__(message + place)
        self.error = error


@dataclass(frozen=True)
class Choice:
    """A point on which correct libraries differ.

    Attributes:
        values: the allowed values; the first is assumed of a profile that does not name the choice.
        meaning: what is chosen.
    """

    values: tuple[str, ...]
    meaning: str


_ROWS = Path(__file__).with_name("choices.tsv").read_text("utf-8").splitlines()
CHOICES: dict[str, Choice] = {
    name: Choice(tuple(values.split()), meaning)
    for name, values, meaning in (row.split("\t") for row in _ROWS if not row.startswith("#"))
}
"""The choices by name: options of users, conventions of libraries, and features."""


@dataclass(frozen=True)
class Method:
    """A method of adapters.

    Attributes:
        inputs: the arrays that it gets, in order, by name, with their axes. The first one is differentiated.
        outputs: the results, in order, by name, with their axes; "" is a number.
        choices: those that concern it.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    choices: tuple[str, ...] = ()


METHODS: dict[str, Method] = {}
"""Methods of adapters whose arguments are arrays; `method` adds them."""


def method(inputs: str, outputs: Mapping[str, str], *choices: str) -> Callable[[Callable[..., Any]], Any]:
    """Describe a method of adapters, which raises `NotOffered` unless an adapter overrides it.

    Args:
        inputs: axes of its arguments, without the last one, the settings.
        outputs: see `Method`.
        choices: see `Method`.
    """

    def described(function: Callable[..., Any]) -> Any:
        names = list(signature(function).parameters)[1:-1]
        METHODS[function.__name__] = Method(dict(zip(names, inputs.split(), strict=True)), outputs, choices)

        @wraps(function)
        def not_offered(*_: Any) -> Any:
            raise NotOffered

        return not_offered

    return described


AVERAGING = ("aggregation", "empty_rows")


class Adapter:
    """The library under test. Subclasses override what it offers; everything else raises `NotOffered`.

    Attributes:
        name: of the library.
        distribution: the installed package whose version is the library's.
        profile: a value for each choice of `CHOICES`; several that the library offers are separated by spaces, its
            default first. A choice that is not named has its first value.
    """

    name: str = "unnamed"
    distribution: str = ""
    profile: Mapping[str, str] = {}

    def version(self) -> str:
        """Return the version of the library."""
        return version(self.distribution) if self.distribution else "unknown"

    def call(self, name: str, inputs: Sequence[NDArray[Any]], settings: Settings) -> Any:
        """Call the method of a name; adapters of torch libraries pass it tensors: `adapters.torch_tools`."""
        return getattr(self, name)(*inputs, settings)

    @method("BTV BT", {"values": "BT", "gradient": "BTV"})
    def log_probs(self, logits, tokens, settings):
        """Log probabilities of tokens under the logits, and the gradient of their sum w.r.t. logits.

        Settings: `temperature`.
        """

    @method("BTV", {"values": "BT", "gradient": "BTV"})
    def entropy(self, logits, settings):
        """Entropies in nats of softmax(logits / τ), and the gradient of their sum w.r.t. logits.

        Settings: `temperature`.
        """

    @method("BT BT", {"values": "BT", "gradient": "BT"}, "kl")
    def kl(self, log_probs, reference, settings):
        """KL estimates as used in a loss, and the gradient of their sum w.r.t. log_probs; every position counts.

        Settings: `kl`.
        """

    @method("BT BT BT", {"loss": "", "gradient": "BT"}, "kl_loss", *AVERAGING)
    def kl_loss(self, log_probs, reference, mask, settings):
        """The KL term as it is added to the loss that is minimized, and its gradient w.r.t. log_probs.

        Settings: `kl_loss`, `coef`, `aggregation` and what belongs to it (see `policy_loss`).
        """

    @method("B BT BT BT", {"rewards": "BT"}, "kl", "score_at")
    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        """Rewards: the scores at their slots minus `coef`·KL of each counted token.

        Settings: `coef`, `kl`, `score_at`.
        """

    @method("BT BT BT B", {"advantages": "BT", "returns": "BT"}, "gae_whitening")
    def gae(self, rewards, values, mask, last_values, settings):
        """Advantages and returns; `last_values` is V after each row's last token, 0 where the episode ended.

        Settings: `gamma`, `lam`, `gae_whitening`. The returns are those before whitening.
        """

    @method("BT BT", {"values": "BT"}, "whitening", "whitening_bessel")
    def whiten(self, values, mask, settings):
        """The counted entries scaled to unit variance; see the choices for what happens to the mean.

        Settings: `whitening`, `whitening_bessel`. An ε of up to 1e-4 is within the bounds.
        """

    @method("BT BT BT BT", {"loss": "", "gradient": "BT"}, "ratio", "sequence_gradient", *AVERAGING)
    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        """The loss to minimize, and its gradient w.r.t. log_probs.

        Settings:
            clip_low, clip_high: the ratio is clipped to [1 − clip_low, 1 + clip_high].
            dual_clip: c > 1, the bound of the ratio for negative advantages; None for none.
            ratio, sequence_gradient: see `CHOICES`.
            aggregation, empty_rows: see `CHOICES`; `length` for fixed_length; `episodes`, the episode of each row.
            micro_batches: lists of rows. The loss and gradient are those accumulated over all of them.
            ranks: the rank of each micro-batch. What is returned is what an optimizer sees: the sum over ranks of
                their shares, or the mean, as the library reduces them. The loss is likewise.
        """

    @method("BT BT BT BT", {"loss": "", "gradient": "BT"}, "value_loss_scale", "value_clip_form", *AVERAGING)
    def value_loss(self, values, old_values, returns, mask, settings):
        """The critic's loss without its coefficient, and its gradient w.r.t. values.

        Settings: `value_clip` (ε, or None), `value_loss_scale`, `value_clip_form`, and those of aggregation.
        """

    @method("B B B", {"advantages": "B"}, "baseline", "group_bessel", "single_response")
    def group_advantages(self, scores, groups, valid, settings):
        """One advantage per response; those of responses that are not valid are not compared.

        `groups` has the number of each response's prompt, in any order. Equal scores in a group give 0.
        Settings: `baseline`, `group_bessel`, `single_response`. An ε of up to 1e-4 is within the bounds.
        """

    @method("BT BT BT", {"weights": "BT"}, "off_policy")
    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        """Weights that correct for a sampler whose probabilities differ from the trainer's.

        Settings: `off_policy`; `cap` to truncate, `low` and `high` to mask.
        """

    @method("BK BK", {"loss": "", "gradient": "BK"}, "reward_loss", "ranking_weight")
    def reward_loss(self, scores, mask, settings):
        """A reward model's loss and its gradient w.r.t. scores, each row from the best response to the worst.

        Settings: `reward_loss` (pairwise has K = 2), `ranking_weight`. Masked entries are missing responses.
        """

    @method("n Sn", {"parameters": "n"}, "adam_eps")
    def optimizer_steps(self, parameters, gradients, settings):
        """Parameters after AdamW's S steps with the gradients, from moments of 0.

        Settings: `lr`, `betas`, `eps`, `weight_decay` (decoupled), `adam_eps`.
        """

    def update(self, case: Mapping[str, Any]) -> dict[str, Array]:
        """The weights of the tiny model after one whole update of a case of `checks/update.py`."""
        raise NotOffered

    def trained_tokens(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The tokens of a conversation as sampled, and which of them are trained: a case of `checks/tokens.py`."""
        raise NotOffered


def offered(adapter: Any, choice: str) -> tuple[str, ...]:
    """Return the values of a choice that an adapter's profile claims, its default first.

    Raises:
        UserError: the profile has a value that the choice does not.
    """
    known = CHOICES[choice].values
    values = tuple(str(adapter.profile.get(choice, known[0])).split())
    if not values or not set(values) <= set(known):
        raise UserError(f"profile of {adapter.name}: {choice} is {' '.join(values)!r}; allowed: {', '.join(known)}")
    return values


def check_profile(adapter: Any) -> None:
    """Reject a profile with an unknown choice or value.

    Raises:
        UserError: which one.
    """
    for name in adapter.profile:
        if name not in CHOICES:
            raise UserError(f"profile of {adapter.name}: no choice is named {name!r}; known: {', '.join(CHOICES)}")
        offered(adapter, name)
