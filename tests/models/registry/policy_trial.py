"""One architecture as a policy: loaded, read, sampled from, trained for an update, saved; all against `alone`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kedge.algorithm.advantages import GeneralizedAdvantage
from kedge.algorithm.experience import Rollout
from kedge.algorithm.policy_losses import clipped_policy_loss
from kedge.models import ActorCritic, LanguageModel, TokenRows, load_language_model, load_scalar_model, save_policy
from kedge.training.learner import LanguageLearner
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer
from kedge.training.update import PpoUpdate
from kedge_base.errors import KedgeError
from kedge_hub.card import ModelCard
from tests.experience import collected
from tests.models.registry.alone import (
    gradients,
    logprobs_alone,
    relative_error,
    taken,
    words_only,
)
from tests.models.registry.builder import save_policy_folder
from tests.models.registry.checks import (
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    check,
    layout,
    one_line,
    phase,
    random_rows,
)
from tests.models.registry.outcome import Fault, Policy, Refused
from tests.models.registry.sampling import TEMPERATURE, check_sampling
from tests.models.registry.tokenizer import word_tokenizer

# Longer and shorter than every window, chunk and block of `sizes`, unsorted; some share a rectangle.
ROWS = random_rows((3, 7, 12, 5, 1, 9, 9))


def try_policy(architecture: str, folder: Path) -> Policy | Refused:
    """Put an architecture through everything that a policy goes through.

    Raises:
        Fault: Something differs from plain transformers, or fails with another error than kedge's.
    """
    plain = save_policy_folder(architecture, folder)
    try:
        with phase("load"):
            model = load_language_model(folder, tokenizer=word_tokenizer(), value_head=True)
    except KedgeError as error:
        return Refused(one_line(error, folder))
    with torch.no_grad(), phase("forward"):
        check("forward", logprobs(model, fitting(model)), logprobs_alone(plain, fitting(model)))
    sampled = check_sampling(model, plain)
    check_gradient("gradient", model, plain)
    separate_critic = check_separate_critic(folder, plain)
    checkpointing = check_checkpointing(model, plain)
    if sampled is not None:
        train(model, sampled.rollout)
    check_saving(model, folder.with_name("trained"))
    way, drops_rows = ("refused", False) if sampled is None else (sampled.way, sampled.drops_rows)
    return Policy(layout(model.trunk), way, drops_rows, checkpointing, separate_critic)


def fitting(model: LanguageModel) -> list[list[int]]:
    """The rows, cut to the model's context."""
    return [row[: model.context_length] for row in ROWS]


def logprobs(model: LanguageModel, rows: list[list[int]]) -> list[Tensor]:
    """Of each row, the log probability of every word at every position, by kedge."""
    together = words_only(model.logits(model.hidden(TokenRows.of(rows))))
    return list(together.split([len(row) for row in rows]))


def check_gradient(name: str, model: LanguageModel, plain: PreTrainedModel) -> None:
    """The gradient of the rows' summed log probability is that of plain passes over each row."""
    rows = fitting(model)
    with phase(name):
        theirs = gradients(plain, torch.cat(taken(logprobs_alone(plain, rows), rows)).sum())
        ours = gradients(model.causal, torch.cat(taken(logprobs(model, rows), rows)).sum())
        error = relative_error(ours, theirs)
    if not error <= GRADIENT_TOLERANCE:
        raise Fault(f"{name}: up to {error:.1g} of the gradient")


def check_checkpointing(model: LanguageModel, plain: PreTrainedModel) -> bool:
    """With activation checkpointing the gradient is the same, and two passes are equal; or it is refused."""
    try:
        with phase("checkpointing"):
            model.trunk.checkpoint_activations()
    except KedgeError:
        return False
    check_gradient("checkpointing", model, plain)
    first, second = (torch.cat(logprobs(model, fitting(model))) for _ in range(2))
    if not torch.equal(first, second):
        raise Fault(f"checkpointing: two passes differ by {float((first - second).abs().max()):.1g}")
    return True


def check_separate_critic(folder: Path, plain: PreTrainedModel) -> bool:
    """A critic on a copy of the trunk reads the trunk's states at every token; or it is refused."""
    try:
        with phase("critic"):
            critic = load_scalar_model(folder, tokenizer=word_tokenizer(), init="fresh")
    except KedgeError:
        return False
    head = critic.head
    if head is None or not critic.has_values:
        return False
    with torch.no_grad(), phase("critic"):
        rows = [row[: critic.context_length] for row in ROWS]
        ours = list(critic.read_values(TokenRows.of(rows)).values.split([len(row) for row in rows]))
        trunk = cast(PreTrainedModel, plain.base_model)
        states = [trunk(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0] for row in rows]
        check("critic", ours, [head(state)[:, 0] for state in states])
    return True


def train(model: LanguageModel, rollout: Rollout) -> None:
    """One PPO update, in which every weight stays finite and some move."""
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    models = ActorCritic(model)
    scores = torch.linspace(-1, 1, rollout.num_responses)
    advantage = GeneralizedAdvantage(gamma=1.0, gae_lambda=0.95)
    with phase("update"):
        experience = collected(rollout, scores, models, None, temperature=TEMPERATURE, advantage=advantage, kl_coef=0.0)
        result = PpoUpdate(
            LanguageLearner(models, TEMPERATURE, micro_batch_tokens=60),
            build_optimizer(models.parameters(), learning_rate=1e-3),
            experience,
            Objective(surrogate=partial(clipped_policy_loss, clip_range=0.2), value_clip_range=None, value_coef=0.5),
            num_epochs=1,
            num_minibatches=2,
            max_grad_norm=1.0,
            generator=torch.Generator().manual_seed(0),
        ).run()
    if not abs(result.metrics()["policy/first_ratio_max"] - 1) <= LOGPROB_TOLERANCE / TEMPERATURE:
        raise Fault(f"update: the first ratio is {result.metrics()['policy/first_ratio_max']:.4g}")
    after = dict(model.named_parameters())
    moved = [name for name, weight in after.items() if not torch.equal(weight, before[name])]
    if not moved or not all(weight.isfinite().all() for weight in after.values()):
        raise Fault("update: no weight has moved, or one is not finite")


def check_saving(model: LanguageModel, folder: Path) -> None:
    """What is saved is what was trained, for plain transformers and for kedge."""
    with torch.no_grad(), phase("saving"):
        rows = fitting(model)
        trained = logprobs(model, rows)
        save_policy(model, word_tokenizer(), folder, card=ModelCard("ppo", "tiny"))
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        check("saving", logprobs_alone(plain, rows), trained)
        check("loading again", logprobs(load_language_model(folder, tokenizer=word_tokenizer()), rows), trained)
