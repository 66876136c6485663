"""Runs one update or step of each stage, with the stage's own code, on models without contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from kedge.config import Config, mean_epochs, with_values
from kedge.data import EncodedExample
from kedge.models import ActorCritic, LanguageModel, PolicyWeights, Precision, ScalarModel, TokenRows, autocast
from kedge.models.live_bytes import Hollow, LiveBytes
from kedge.models.packing.packed import PackedDecoder
from kedge.models.pretrained import inner_matrices
from kedge.ranks import ALONE
from kedge.rewards.score import ScoredRollout
from kedge.rollout import Sampler
from kedge.stages.critic.sampling import as_first_update, starts_of_chunks
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.log import Costs, ForwardCost
from kedge.stages.ppo.trainer import Trainer
from kedge.training.optimizer import build_optimizer
from kedge.training.pretraining_mix import PretrainingMix
from kedge.training.supervised.loop import TrainingSettings, count_steps, train_supervised
from kedge.training.supervised.losses import CompletionLoss, RankedResponses, RankingLoss
from kedge.training.supervised.returns import FIT_TOKENS, ReturnsLoss, SampledReturns
from kedge.training.update import distance_moved
from kedge_base.errors import ModelError
from kedge_base.stage import find_stage
from kedge_plan.counting import Figures, Phases, extrapolated
from kedge_plan.hollow import Blueprint, HollowModels, blueprints_of
from kedge_plan.rows import Lengths, Rows, quantiles

SHALLOW = 2
"""Passes are counted with this many blocks and one more; each further block adds as much as the last. Not with one and
two: the last block's backward pass overlaps the logits, and the first one's the embedding's gradient."""
NEARLY_ALL = 1 - 2**-30
"""The `ppo.num_epochs` of a trial if the run trains on a share of the responses: the same passes, on all rows."""
SQUARES = 6
"""Square matrices held while the least-squares fit of a critic's head is solved: both halves, their sum, and three for
its covariance."""


@dataclass(frozen=True)
class Work:
    """How to plan a stage.

    Attributes:
        make: Makes an update or a step.
        count: Returns the number of updates, parts or steps in the run; None if unknown.
        unit: Name of the unit that is counted.
        rows: The name of the stage's rows, if it does not sample.
        texts: Texts that share the prompt of a row, assumed to be equally long.
        critic_field: The setting with the critic's kind.
        config: Returns the configuration of an update.
        group: Returns the number of consecutive rows with the same prompt, which is read once for all of them.
        optimizer_steps: Returns the mean number of optimizer steps in an update.
    """

    make: Callable[[Subject, HollowModels, Phases], None]
    count: Callable[[Subject], int | None]
    unit: str = "step"
    rows: str = ""
    texts: int = 1
    critic_field: str = "ppo.critic"
    config: Callable[[Config], Config] = lambda config: config
    group: Callable[[Config], int] = lambda config: 1
    optimizer_steps: Callable[[Config], float] = lambda config: 1


@dataclass(frozen=True)
class Subject:
    """A stage to plan.

    Attributes:
        config: The resolved configuration.
        stage: sft, reward, critic or ppo.
        blueprints: The blueprint of each role.
        lengths: Lengths of the stage's data.
        rows: Rows of an update or a step.
        precision: Number format of the matrix products.
        accelerator: The stage runs on an accelerator.
        texts: Pretraining texts of an optimizer step; None without ptx mixing.
    """

    config: Config
    stage: str
    blueprints: Mapping[str, Blueprint]
    lengths: Lengths
    rows: Rows
    precision: Precision
    accelerator: bool
    texts: Rows | None

    def figures(self) -> Figures:
        """Memory and computation of an update at full depth, extrapolated if all layers are alike."""
        alike = all(each.alike for each in self.blueprints.values())
        layers = {role: each.layers for role, each in self.blueprints.items()}
        return extrapolated(self._measured, layers, SHALLOW if alike else None)

    @property
    def section(self) -> str:
        """The configuration section with the stage's optimizer."""
        return find_stage(self.stage).trains[-1]

    def optimizer_in(self, config: Config) -> str:
        """The stage's optimizer according to a configuration."""
        return config.optimization.of(self.section).optimizer

    @property
    def num_units(self) -> int | None:
        """Updates, parts or optimizer steps of the run; None if that is not known."""
        return self.work.count(self)

    @property
    def work(self) -> Work:
        """The `Work` that makes and counts the stage's updates."""
        return _WORK[self.stage]

    def _measured(self, layers: Mapping[str, int]) -> Figures:
        counter = LiveBytes()
        device = "cuda" if self.accelerator else "cpu"
        models = HollowModels(self.config, self.precision, self.blueprints, layers, counter, device)
        phases = Phases(counter)
        with counter:
            self.work.make(self, models, phases)
        return {**phases.figures, **models.sizes}


def subject_of(
    config: Config, stage: str, lengths: Lengths, precision: Precision, *, accelerator: bool, response: int | None
) -> Subject:
    """Make the subject of a stage and the rows of its update.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic or ppo.
        lengths: Lengths of its data.
        precision: Number format of the matrix products.
        accelerator: The stage runs on an accelerator.
        response: Tokens of each sampled response; None for the longest allowed.

    Raises:
        ModelError: A model has no usable config.json.
    """
    work = _WORK[stage]
    config = work.config(config)
    described = find_stage(stage)
    if described.samples:
        sampled = config.rollout
        each = quantiles(lengths.prompts, sampled.num_prompts)
        prompts = tuple(length for length in each for _ in range(sampled.num_responses))
        responses = (sampled.max_new_tokens if response is None else response,) * len(prompts)
    else:
        count = getattr(config, described.trains[-1]).batch_size
        prompts = quantiles(lengths.prompts, count)
        responses = tuple(work.texts * length for length in quantiles(lengths.completions, count))
    budget = config.runtime.first_pass_tokens
    rows = Rows(prompts, responses, budget, work.group(config), lengths.common, lengths.privileged)
    texts = None
    if (ptx := lengths.pretraining) is not None:
        count = config.ppo.ptx_coef.batch * config.responses_per_update // config.ppo.num_minibatches
        texts = Rows(quantiles(ptx.prompts, count), quantiles(ptx.completions, count), budget)
    return Subject(config, stage, blueprints_of(config, stage), lengths, rows, precision, accelerator, texts)


def _sft(subject: Subject, models: HollowModels, phases: Phases) -> None:
    rows = subject.rows.shortened()
    model = models.policy()
    _train(subject, phases, CompletionLoss(model, subject.precision), _examples(rows), model, rows)


def _examples(rows: Rows) -> list[EncodedExample]:
    pairs = zip(rows.prompts, rows.responses, strict=True)
    return [EncodedExample([1] * prompt, [1] * answer) for prompt, answer in pairs]


def _reward(subject: Subject, models: HollowModels, phases: Phases) -> None:
    rows = subject.rows.shortened()
    model = models.reward("reward model", trained=True)
    if model.trunk is None:
        raise ModelError(f"{type(model.classifier).__name__} scores whole texts, and only decoders can be planned")
    pairs = zip(rows.texts(), rows.responses, strict=True)
    texts = [[[*prompt, first, *[1] * (length // 2 - 1)] for first in (1, 2)] for prompt, length in pairs]
    examples = [RankedResponses((chosen, rejected), (0.0, 1.0), (1, 1)) for chosen, rejected in texts]
    loss = RankingLoss(model, subject.precision)
    _train(subject, phases, loss, examples, model, rows)


def _train(
    subject: Subject,
    phases: Phases,
    loss: Any,
    examples: list[Any],
    model: LanguageModel | ScalarModel,
    rows: Rows,
    *,
    epochs: float = 1.0,
    steps: float = 1.0,
) -> None:
    """Take two optimizer steps, and count only the second, since the first has no moments yet.

    Args:
        subject: The stage.
        phases: Counts the steps.
        loss: The objective.
        examples: The examples of a step.
        model: The model to train.
        rows: The lengths of the examples.
        epochs: Epochs over the stage's rows in the planned unit.
        steps: Optimizer steps in the planned unit.
    """
    assert model.trunk is not None, "only decoders are planned"
    if subject.config.runtime.recomputes:
        model.trunk.checkpoint_activations()
    passes = epochs * subject.rows.num_tokens / rows.num_tokens
    inner = model.causal if isinstance(model, LanguageModel) else model

    def count_only_the_second(step: int, metrics: Any) -> None:
        if step == 1:
            phases.forget("train", "step")

    with phases.stepping(model, times=steps):
        phases.start("train", phases.role_of(inner), times=passes)
        train_supervised(
            loss,
            inner.parameters(),
            examples,
            TrainingSettings(
                learning_rate=1e-5,
                num_epochs=2.0,
                batch_size=len(examples),
                micro_batch_tokens=rows.budget,
                optimizer=_stand_in(subject),
                on_step=count_only_the_second,
            ),
            inner_matrices=inner_matrices(inner),
        )
        phases.end()


def _stand_in(subject: Subject) -> Any:
    """Return the optimizer to count with: Adam instead of 8-bit Adam, which needs real tensors; `Counted` corrects the
    size.
    """
    kind = subject.optimizer_in(subject.config)
    return "adamw" if kind == "adamw8bit" else kind


def _ppo(subject: Subject, models: HollowModels, phases: Phases) -> None:
    config = subject.config
    actor_critic = models.actor_critic(freezes=True)
    loop = config.ppo
    optimizer = build_optimizer(
        actor_critic.parameters(),
        kind=_stand_in(subject),
        critic_parameters=actor_critic.separable_parameters(),
        inner_matrices=inner_matrices(actor_critic),
        learning_rate=1e-5,
    )
    reference = models.reference() if loop.needs_reference else None
    copies = _allocate(_copied_ahead(config, actor_critic.policy))
    phases.counter.hold([copies], ("weights", "sampler"))
    head = actor_critic.value_head if loop.critic.name == "readout" else None
    square = 0 if head is None or subject.accelerator else 8 * head.in_features**2  # in the CPU's memory
    sums = _allocate(4 * square)  # two halves, each with sums from earlier updates and from this one
    phases.counter.hold([sums], ("weights", "read-out"))
    rows, minibatches = _trial_rows(subject.rows, loop.num_minibatches)
    epochs = mean_epochs(config)
    # The KL of models without contents is meaningless and must not stop the epochs early.
    one_epoch = {1: 1 if epochs >= 1 else NEARLY_ALL}
    schedules = {**config.schedules, "ppo.num_epochs": one_epoch, "ppo.early_stop_kl": {1: 1e9}}
    trial = with_values(config, {"schedules": schedules, "ppo.num_minibatches": minibatches})
    passes = subject.rows.num_tokens / rows.num_tokens
    steps = max(1.0, epochs) * loop.num_minibatches / minibatches
    draw: Any = None
    if subject.texts is not None:
        given = (subject.texts, actor_critic.policy, subject.precision, phases, steps)
        draw = SimpleNamespace(draw=lambda update: repeat(partial(_texts, *given, then=epochs * passes)))
    trainer = _trainer(subject, trial, actor_critic, reference, optimizer, draw)
    trainer.begin(trial.ppo.value_warmup_updates.at_most + 1)
    trained = filter(None, (actor_critic.policy, actor_critic.critic))
    with phases.stepping(*trained, times=steps):
        for weight in actor_critic.parameters():  # create the moments, as after an earlier update
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        phases.forget("step")
        scorers = _scorers(subject, models)
        scored = _sampled(subject, scorers, phases, trainer, rows)
        phases.start("experience", "policy", times=passes * (epochs if trainer._reads_trained_rows else 1))
        experience = trainer.estimate(scored)
        phases.start("train", "policy", times=epochs * passes)
        result = trainer.improve(experience)
        # Later epochs need the forward pass that the first one had from the experience. The distance is measured once,
        # but was counted in every epoch, so the number of passes may be negative.
        more = max(epochs - 1, 0) * result.reused_first_pass - (epochs - 1) * trainer.settings.measures_distance
        if more:
            phases.start("train", "policy", times=more * passes)
            distance_moved(trainer._new_learner(), experience)
        if head is not None:
            phases.start("fit", "policy")
            _allocate(SQUARES * square)
        phases.end()
    models.sizes.update(_cost(subject, trainer, scorers, experience, result))


def _cost(subject: Subject, trainer: Trainer, scorers: Mapping[str, ScalarModel], trial: Any, result: Any) -> Figures:
    """The FLOPs of an update and of a step of supervised fine-tuning, as a run counts them, from a trial's epoch."""
    config, rows, settings = subject.config, subject.rows, trainer.settings
    models = trainer.roles.actor_critic
    weighted = {f"reward: {term.name or term.source}" for term in config.reward if term.weight}
    rewards = [ForwardCost.of(scorers[role]) for role in weighted & scorers.keys()]
    policy, critic, reference = map(ForwardCost.of, (models.policy, models.critic, trainer.roles.reference))
    first = replace(rows, prompts=rows.prompts[:: rows.group], responses=rows.responses[:: rows.group], group=1)
    sampled = [each.rollout(values=False) for each in (rows, first)]
    epochs = mean_epochs(config)
    share = min(1.0, epochs)
    read = 1.0 if trial.evaluated is None else share
    per_gradient = epochs / settings.ppo.num_minibatches
    flops = Costs(policy, critic, reference, rewards, config.runtime.recomputes).metrics(
        sampled[0],
        sampled=sampled[: 1 + settings.samples_greedy],
        models_read=trainer.models_read_before(result),
        read_share=read,
        num_passes=per_gradient * result.num_gradients,
        train_policy=True,
        train_critic=models.trains_critic,
        num_critic_passes=per_gradient * result.num_critic_gradients,
        num_readings=settings.measures_distance + (read - share) * result.reused_first_pass,
    )
    steps = flops.pop("cost/sft_steps")
    update = sum(flops.values())
    return {("cost", "update"): update, ("cost", "step"): update / steps}


def _copied_ahead(config: Config, policy: LanguageModel) -> int:
    """Bytes of the policy copy that samples ahead, and of the weights queued for it; see `BackgroundEngine`."""
    waiting = config.rollout.max_staleness
    has_own = config.rollout.engine.name == "vllm"
    if not waiting:
        return 0
    each = sum(weight.nbytes for _, weight in PolicyWeights(policy, merged=has_own))
    copy = 0 if has_own else sum(weight.nbytes for weight in policy.causal.parameters() if weight.requires_grad)
    return copy + waiting * each


def _texts(
    rows: Rows, policy: LanguageModel, precision: Precision, phases: Phases, steps: float, *, then: float
) -> Iterator[Tensor]:
    """The pretraining loss of an optimizer step, counted as a separate phase; see `PretrainingMix.draw`.

    Args:
        rows: The texts.
        policy: The policy that reads them.
        precision: Number format of the matrix products.
        phases: Counts the passes.
        steps: Optimizer steps per update that each counted step stands for.
        then: Repetitions per update of the subsequent training.
    """
    first = rows.shortened()
    loss = CompletionLoss(policy, precision)
    mix = PretrainingMix(loss, [], coef=1.0, batch_size=first.count, micro_batch_tokens=first.budget, seed=0)
    phases.start("ptx", "policy", times=steps * rows.num_tokens / first.num_tokens)
    yield from mix.shares(_examples(first))
    phases.start("train", "policy", times=then)


def _trial_rows(rows: Rows, minibatches: int) -> tuple[Rows, int]:
    """Reduce an update to fewer rows with the same peak; also return their number of minibatches."""
    if rows.budget is None:
        return rows, minibatches
    if minibatches == 1:
        return rows.shortened(), 1
    count = rows.count // minibatches
    half = rows.like(count, rows.budget).shortened()
    return replace(half, prompts=2 * half.prompts, responses=2 * half.responses), 2


def _critic(subject: Subject, models: HollowModels, phases: Phases) -> None:
    config = subject.config
    rows = subject.rows
    settings = subject.config.critic
    actor_critic = models.actor_critic()
    critic = actor_critic.critic
    head = actor_critic.policy.value_head
    actor_critic.policy.requires_grad_(False)
    models.sizes["trained", "policy"] = sum((float(each.nbytes) for each in head.parameters()), 0.0) if head else 0.0
    sampler = ActorCritic(actor_critic.policy) if critic is not None else actor_critic
    trainer = _trainer(subject, config, sampler, None, None)
    prompts = config.critic.num_prompts or subject.lengths.rows or config.rollout.num_prompts
    longest = max(rows.prompts) * 9 + max(rows.responses) * 19  # ids, masks, a return and a zero
    kept = [_allocate(prompts * settings.num_responses * longest)]
    phases.counter.hold(kept, ("rollout buffers", "run"))
    trial = rows.shortened()
    scored = _sampled(subject, _scorers(subject, models), phases, trainer, trial)
    phases.start("experience", "policy", times=rows.num_tokens / trial.num_tokens)
    trainer.evaluate(scored)
    role = "policy" if critic is None else "critic"
    after_last = config.ppo.score_at == "after_last"
    budget = rows.budget or FIT_TOKENS
    filling = min(prompts * settings.num_responses, budget // min(rows.row_lengths) + 1)
    fitted = rows.like(filling, budget).shortened(1)
    phases.start("fit", role, times=rows.num_tokens / fitted.num_tokens)
    with torch.no_grad():
        rollout = fitted.rollout(values=False)
        states = actor_critic.value_states(rollout, precision=subject.precision, value_after_last=after_last).float()
    square = 0 if subject.accelerator else 8 * states.shape[1] ** 2  # in the CPU's memory
    # On top of the states themselves, the fit copies half of them in fp32 and fp64, and holds the sums of both halves
    # and one product. Solving (below) comes after that.
    _allocate(states.nbytes * 3 // 2 + 3 * square)
    del states
    _allocate(SQUARES * square)
    phases.end()
    if critic is None:
        return
    count = settings.batch_size
    batch = rows.like(count, rows.budget).shortened()
    rollout = batch.rollout(values=False)
    sampled = SampledReturns(rollout, torch.zeros(rollout.action_mask.shape), rollout.action_mask)
    loss = ReturnsLoss(actor_critic, sampled, 0.0, 1.0, after_last, subject.precision)
    epochs = settings.num_epochs
    _train(
        subject, phases, loss, [*range(batch.count)], critic, batch, epochs=epochs, steps=epochs * rows.count / count
    )


def _allocate(size: int) -> Tensor:
    """Allocate `size` bytes on the meta device: they count toward the plan but take no memory."""
    return Hollow(torch.empty(size, dtype=torch.uint8, device="meta")).clone()


def _scorers(subject: Subject, models: HollowModels) -> dict[str, ScalarModel]:
    """The reward models and the judge, by role."""
    scoring = [role for role in subject.blueprints if role.startswith("reward") or role == "judge"]
    return {role: models.reward(role) for role in scoring}


def _sampled(
    subject: Subject, scorers: Mapping[str, ScalarModel], phases: Phases, trainer: Trainer, trial: Rows
) -> ScoredRollout:
    """Count sampling and scoring; return the responses of the trial."""
    config = subject.config
    rows = subject.rows
    policy = trainer.roles.actor_critic.policy
    same = config.rollout.num_responses
    greedy = 1 / same if trainer.settings.samples_greedy else 0.0  # the greedy responses are scored as well
    _decode(subject, phases, trainer, rows, "rollout", same=same, times=1 + greedy)
    for count, alike in _measurements(config):
        held_out = rows.like(count, rows.budget)
        _decode(subject, phases, trainer, held_out, "evaluation", same=alike, times=0.0)
        phases.start("evaluation", "policy", times=0.0)
        trainer.evaluate(_unscored(held_out.shortened(), policy))
    first = rows.shortened(1)
    texts = first.texts(responses=True)
    for role, model in scorers.items():
        if role == "judge":
            phases.start("evaluation", role, times=0.0)
        else:
            phases.start("reward", role, times=(1 + greedy) * rows.num_tokens / first.num_tokens)
        with model.host(), torch.no_grad(), autocast("bf16" if model.holds_bf16 else subject.precision, model.device):
            model.scores(TokenRows.of(texts, prompts=model.pieces(texts)))
    return _unscored(trial, policy)


def _unscored(rows: Rows, policy: LanguageModel) -> ScoredRollout:
    """Responses without scores."""
    rollout = rows.rollout(values=policy.value_head is not None)
    return ScoredRollout(rollout, torch.zeros(rows.count), None, [""] * rows.count, cast(Any, None))


def _measurements(config: Config) -> Iterator[tuple[int, int]]:
    """Return the maximum number of held-out responses in an evaluation and in a check of the critic, and how many share
    their start.

    A check samples continuations together if their prefixes are about equally long, as in short responses.
    """
    ppo = config.ppo
    if ppo.eval_every.updates:
        yield ppo.eval_every.num_prompts, 1
    if ppo.critic_check.every:
        prompts, prefixes, continuations = ppo.critic_check.size
        yield prompts * (prefixes + 1) * continuations, continuations


def _decode(
    subject: Subject, phases: Phases, trainer: Trainer, rows: Rows, phase: str, *, same: int, times: float
) -> None:
    """Count the memory and work of sampling responses.

    Args:
        subject: The stage.
        phases: Counts the sampling.
        trainer: Has the policy and the sampler.
        rows: Prompts and responses.
        phase: The phase that the sampling belongs to.
        same: Consecutive rows with the same prompt.
        times: Repetitions per update.
    """
    policy = trainer.roles.actor_critic.policy
    count = min(subject.config.rollout.micro_batch_size or rows.count, rows.count)
    response = max(2, max(rows.responses))
    batches = times * rows.count / count
    prompts = rows.select(range(rows.count - count, rows.count)).texts(same)
    sampler: Any = trainer.roles.engine
    draws = torch.zeros(count, dtype=torch.float64)

    def read(decoder: Any) -> None:
        tokens, _ = sampler._draw(decoder.hidden, draws)
        decoder.step(tokens)

    phases.start(phase, "policy", times=batches)
    with torch.no_grad(), autocast(subject.precision, policy.device):
        decoder: Any = policy.trunk.decoder(prompts, max_new_tokens=response, pad_id=0)
        most = max(map(len, prompts)) + response
        if isinstance(decoder, PackedDecoder):
            phases.keep("key–value cache")
            phases.start(phase, "policy", times=0.0, kind="key–value cache")
            cache = decoder._cache
            while (room := cache._layers[0][0].shape[2]) < most - 1:  # grow the cache by half, as in a run
                cache.length = room
                read(decoder)
            cache.length = most - response // 2 - 1
        else:
            del decoder
            phases.start("load", "policy")
            longer = [[*prompt, *[1] * (response - 2)] for prompt in prompts]
            decoder = policy.trunk.decoder(longer, max_new_tokens=2, pad_id=0)
            phases.keep("key–value cache")
        phases.start(phase, "policy", times=batches * (response - 1), kind="logits")
        read(decoder)


def _trainer(
    subject: Subject,
    config: Config,
    actor_critic: ActorCritic,
    reference: LanguageModel | None,
    optimizer: Any,
    pretraining: Any = None,
) -> Trainer:
    """Make the trainer of these models."""
    sampler = Sampler(
        actor_critic.policy,
        pad_id=0,
        stop_tokens=(0,),
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        precision="fp32" if config.rollout.engine.name == "builtin" else "bf16",  # decides whether the sampler is exact
    )
    sampler = replace(sampler, precision=subject.precision) if sampler.is_exact else sampler
    roles: Any = SimpleNamespace(
        actor_critic=actor_critic,
        reference=reference,
        engine=sampler,
        optimizer=optimizer,
        pretraining=pretraining,
        own=None,  # the configuration's own
    )
    device = next(actor_critic.parameters()).device
    run: Any = SimpleNamespace(
        precision=subject.precision, micro_batch_tokens=subject.rows.budget, ranks=ALONE, device=device
    )
    return Trainer.of(config, run, roles)


def _num_steps(subject: Subject) -> int | None:
    settings = getattr(subject.config, subject.section)
    rows = subject.lengths.rows
    return rows and count_steps(rows, num_epochs=settings.num_epochs, batch_size=settings.batch_size)


def _num_parts(subject: Subject) -> int | None:
    config = subject.config
    rows = subject.lengths.rows
    share = 0.0 if config.data.eval_prompts else config.data.eval_fraction
    held_out = round((rows or 0) * share)
    trained = config.critic.num_prompts or (rows and rows - held_out)
    return sum(len(starts_of_chunks(count, config)) for count in (trained, held_out)) if trained else None


_WORK: Mapping[str, Work] = {
    "sft": Work(_sft, _num_steps, rows="demonstrations"),
    "reward": Work(_reward, _num_steps, rows="comparisons", texts=2),
    "critic": Work(
        _critic,
        _num_parts,
        unit="part",
        critic_field="critic.kind",
        config=lambda config: as_first_update(config, holds_out=False),
    ),
    "ppo": Work(
        _ppo,
        lambda subject: subject.config.ppo.num_updates,
        unit="update",
        config=with_saved_critic,
        group=lambda config: config.rollout.num_responses,
        optimizer_steps=lambda config: max(1.0, mean_epochs(config)) * config.ppo.num_minibatches,
    ),
}
