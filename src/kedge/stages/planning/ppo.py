"""Counts what a PPO run holds: its own passes, on models without contents."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.config import Config
from kedge.models import ActorCritic, LanguageModel, Precision, ScalarModel, TokenRows, autocast, response_logprobs
from kedge.models.hollow import (
    Blueprint,
    HollowModels,
    freeze_hollow,
    held_bytes,
    hold_hollow_base,
    hollow_models,
    layers_of,
)
from kedge.models.live_bytes import LiveBytes
from kedge.models.packing.packed import attention_of_accelerator
from kedge.plan.machine import Phase, Speed
from kedge.plan.optimizer import PlannedOptimizer
from kedge.plan.ppo_memory import PpoWork, flops_of, ppo_phases
from kedge.plan.workload import Rows, quantiles
from kedge.rollout import Sampler
from kedge.runs.frozen import adapter_of
from kedge.stages.planning.counting import Figures, count_pass, count_training, held_by
from kedge.stages.planning.lengths import Lengths
from kedge.stages.ppo.settings import value_bins_of
from kedge.system.ranks import ALONE
from kedge.training.host_state import AT_A_TIME

__all__ = ["PpoCount", "hold_base", "named", "planned_optimizer", "ppo_rows", "rollout_of", "sizes_of", "split_rows"]


def ppo_rows(config: Config, prompts: tuple[int, ...], response: int) -> Rows:
    """The rows of an update whose prompts are like the given ones, all responses of one length."""
    each = config.rollout.num_responses
    lengths = tuple(length for length in quantiles(prompts, config.rollout.num_prompts) for _ in range(each))
    return split_rows(lengths, (response,) * len(lengths), config.runtime.first_pass_tokens)


def split_rows(prompts: tuple[int, ...], responses: tuple[int, ...], budget: int | None) -> Rows:
    """Rows of these lengths in passes of so many tokens."""
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return Rows(prompts, responses, tuple(tuple(part.rows) for part in ALONE.plan(lengths, budget)))


@dataclass(frozen=True)
class PpoCount:
    """A PPO run whose passes are counted.

    Attributes:
        config: Its configuration.
        blueprints: Of each role but the reference: `policy`, `critic`, `reward: NAME`.
        rows: Of an update.
        precision: Number format of the matrix products.
        accelerator: Whether it runs on one.
    """

    config: Config
    blueprints: Mapping[str, Blueprint]
    rows: Rows
    precision: Precision
    accelerator: bool = False

    stage: ClassVar = "ppo"

    @property
    def layers(self) -> dict[str, int]:
        """Blocks of each role."""
        return {role: each.layers for role, each in self.blueprints.items()}

    @property
    def work(self) -> PpoWork:
        """The update, for the sums."""
        config, rows = self.config, self.rows
        budget, minibatches = config.runtime.first_pass_tokens, config.ppo.num_minibatches
        minibatch = rows if minibatches == 1 else self.minibatch
        largest = minibatch.tokens_of(minibatch.largest)
        fits = budget is None or rows.tokens <= budget
        reference = ("reference",) if config.ppo.needs_reference else ()
        return PpoWork(
            roles=(*self.blueprints, *reference),
            prompt=max(rows.prompts),
            response=max(rows.responses),
            rows=rows.count,
            sampled=min(config.rollout.micro_batch_size or rows.count, rows.count),
            epochs=config.ppo.num_epochs,
            minibatches=minibatches,
            passes=rows.tokens / largest,
            scored=rows.tokens / rows.tokens_of(rows.largest),
            accumulates=len(minibatch.parts) > 1,
            reuses_pass=minibatches == 1 and fits,
            optimizer=planned_optimizer(config, config.optimization.of("ppo").optimizer, on_gpu=self.accelerator),
        )

    @property
    def minibatch(self) -> Rows:
        """The rows of one step: like those of the update."""
        count = self.rows.count // self.config.ppo.num_minibatches
        prompts = quantiles(self.rows.prompts, count)
        return split_rows(prompts, self.rows.responses[:count], self.config.runtime.first_pass_tokens)

    def phases(self, figures: Figures, speed: Speed | None) -> tuple[Phase, ...]:
        """The phases of an update."""
        return ppo_phases(figures, self.work, speed)

    def num_units(self, lengths: Lengths) -> int | None:
        """Updates of the run."""
        return self.config.ppo.num_updates

    def sft_steps(self, figures: Figures) -> float | None:
        """The cost of an update in steps of fine-tuning on the same tokens."""
        return flops_of(figures, self.work) / (3 * figures["policy.forward flops"] * self.work.scored)

    def figures(self, layers: Mapping[str, int]) -> Figures:
        """The figures of models with so many blocks; see `kedge.plan.ppo_memory`."""
        with hollow_models() as hollow, attention_of_accelerator() if self.accelerator else nullcontext():
            return self._figures(hollow, layers)

    def _figures(self, hollow: HollowModels, layers: Mapping[str, int]) -> Figures:
        actor_critic, figures = self.actor_critic(hollow, layers)
        figures |= named("train", self._train(actor_critic))
        actor_critic.zero_grad(set_to_none=True)
        return figures | self.sampling(hollow, actor_critic, layers)

    def actor_critic(self, hollow: HollowModels, layers: Mapping[str, int]) -> tuple[ActorCritic, Figures]:
        """Policy and critic, and their sizes."""
        config, blueprints, adapter = self.config, self.blueprints, adapter_of(self.config)
        critic_kind, bins = config.ppo.resolved_critic, value_bins_of(config)
        built = {role: blueprints[role].with_layers(layers[role]) for role in ("policy", "critic") if role in layers}
        policy = hollow.language(built["policy"], value_head=critic_kind == "shared", bins=bins, adapter=adapter)
        hold_base(config, policy, blueprints["policy"])
        critic = None
        if "critic" in built:
            critic = hollow.scalar(built["critic"], adapter=adapter)
            hold_base(config, critic, blueprints["critic"])
            if bins is not None:
                hollow.empty(critic.predict_histogram(bins))
        actor_critic = ActorCritic(policy, critic, value_gradient=config.ppo.value_gradient)
        if config.runtime.activation_checkpointing:
            actor_critic.checkpoint_activations()
        figures = self._sizes("policy", policy)
        if critic is not None:
            figures |= self._sizes("critic", critic, only_own=self._shares("critic"))
        return actor_critic, figures

    def sampling(self, hollow: HollowModels, actor_critic: ActorCritic, layers: Mapping[str, int]) -> Figures:
        """What comes before the epochs."""
        blueprints, policy, adapter = self.blueprints, actor_critic.policy, adapter_of(self.config)
        figures = self._rollout(policy) | self._old(actor_critic)
        figures |= self._reference(hollow, policy, blueprints["policy"], layers["policy"])
        # Of the policy alone, in the unit of the cost: a step of fine-tuning is three of these.
        if policy.adapter is None and "reference pass.flops" in figures:
            figures["policy.forward flops"] = figures["reference pass.flops"]
        else:
            rollout = rollout_of(self.rows, self.rows.largest)
            alone = count_pass([policy], partial(response_logprobs, policy, rollout, **self._numerics))
            figures["policy.forward flops"] = alone["flops"]
        for role in (role for role in blueprints if role.startswith("reward")):
            own = adapter if blueprints[role].is_adapter else None
            model = hollow.scalar(blueprints[role].with_layers(layers[role]), adapter=own)
            hold_base(self.config, model, blueprints[role])
            sizes = self._sizes(role, model, only_own=self._shares(role))
            if self._shares(role) or own is not None:
                model.requires_grad_(False)
            else:
                self._freeze(model, blueprints[role])
                sizes = sizes_of(role, model) | {f"{role}.weights": self._held(model)}
            figures |= sizes | {f"{role}.trained": 0.0} | named(f"{role} pass", self._score(model))
        return figures

    def _train(self, actor_critic: ActorCritic) -> Figures:
        rows = self.minibatch
        rollout = rollout_of(rows, rows.largest)
        entropy = bool(self.config.ppo.entropy_coef) or "ppo.entropy_coef" in self.config.schedules

        def loss() -> Tensor:
            outputs = actor_critic(rollout, **self._numerics, entropy_gradient=entropy, **self._after_last)
            terms = [outputs.logprobs.sum()]
            terms += [] if outputs.values is None else [outputs.values.sum()]
            terms += [] if outputs.value_logits is None else [outputs.value_logits.sum()]
            terms += [outputs.entropy.sum()] if entropy else []
            return torch.stack(terms).sum()

        critic = actor_critic.critic
        models = [actor_critic.policy, *([] if critic is None else [critic])]
        return count_training(models, loss, accumulates=len(rows.parts) > 1)

    def _rollout(self, policy: LanguageModel) -> Figures:
        """Reading the prompts, drawing a token per row, and reading it."""
        config, rows = self.config, self.rows
        count = min(config.rollout.micro_batch_size or rows.count, rows.count)
        same = config.rollout.num_responses
        prompts = [[1 + row // same % 64, row // same // 64 % 64, *[1] * (length - 2)][:length]
                   for row, length in enumerate(rows.prompts[-count:])]  # fmt: skip
        sampler = Sampler(policy, 0, (0,), config.rollout.max_new_tokens, config.rollout.temperature, self.precision)
        figures: Figures = {}
        counter = LiveBytes()
        held = counter.hold(held_by([policy]))
        counter.restart()

        def note(name: str, above: int) -> None:
            nonlocal work
            done = counter.work
            figures[f"{name}.peak"] = counter.restart() - above
            for each, before in asdict(work).items():
                figures[f"{name}.{each}"] = getattr(done, each) - before
            work = done

        work = counter.work
        with counter, torch.no_grad(), autocast(self.precision, policy.device):
            decoder = policy.trunk.decoder(prompts, max_new_tokens=max(2, max(rows.responses)), pad_id=0)
            note("prefill", held)
            kept = counter.live
            caches = [
                each for pair in getattr(getattr(decoder, "_cache", None), "_layers", {}).values() for each in pair
            ]
            figures["prefill.kept"] = kept - held
            figures["prefill.cache"] = sum(each.nbytes for each in caches)
            figures["prefill.layer cache"] = sum(each.nbytes for each in caches[:2])
            tokens, _ = sampler._draw(decoder.hidden, torch.zeros(count, dtype=torch.float64))
            note("draw", kept)
            decoder.step(tokens)
            note("decode", kept)
        return {name: float(figure) for name, figure in figures.items()}

    def _old(self, actor_critic: ActorCritic) -> Figures:
        """The pass for old log probabilities and values, where sampling has not noted them exactly."""
        exact = self.precision == "fp32" and self.config.rollout.engine == "builtin"
        own_values = actor_critic.critic is None and not self._after_last["value_after_last"]
        if exact and (not actor_critic.has_critic or own_values):
            return {}
        rollout = rollout_of(self.rows, self.rows.largest)
        if exact and actor_critic.critic is not None:
            run = partial(actor_critic.values, rollout, precision=self.precision, **self._after_last)
            return named("old pass", count_pass([actor_critic], run))
        run = partial(actor_critic, rollout, **self._numerics, **self._after_last)
        return named("old pass", count_pass([actor_critic], run))

    def _reference(self, hollow: HollowModels, policy: LanguageModel, blueprint: Blueprint, layers: int) -> Figures:
        if not self.config.ppo.needs_reference:
            return {}
        reference = hollow.language(blueprint.with_layers(layers))
        if policy.adapter is None:
            self._freeze(reference, blueprint)
        else:
            reference.requires_grad_(False)
        sizes = sizes_of("reference", reference)
        sizes |= {"reference.weights": 0.0 if policy.adapter is not None else self._held(reference)}
        rollout = rollout_of(self.rows, self.rows.largest)
        run = partial(response_logprobs, reference, rollout, **self._numerics)
        return sizes | named("reference pass", count_pass([reference], run))

    def _score(self, model: ScalarModel) -> Figures:
        lengths = [self.rows.lengths[row] for row in self.rows.largest]

        def score() -> Tensor:
            with autocast("bf16" if model.holds_bf16 else self.precision, model.device):
                return model.scores(TokenRows.of([[1] * length for length in lengths]))

        return count_pass([model], score)

    def _shares(self, role: str) -> bool:
        """Whether a role stands on a base that another role before it has loaded."""
        if self.config.adapter.kind == "none":
            return False
        roles = list(self.blueprints)
        base = self.blueprints[role].base
        return any(self.blueprints[each].base == base for each in roles[: roles.index(role)])

    def _freeze(self, model: LanguageModel | ScalarModel, blueprint: Blueprint) -> None:
        freeze_hollow(model, self.config.runtime.frozen_dtype, self.precision, saved_bf16=blueprint.saved_bf16)

    def _sizes(self, role: str, model: LanguageModel | ScalarModel, *, only_own: bool = False) -> Figures:
        """See `sizes_of`; those of a base in nf4 are counted as they are held."""
        sizes = sizes_of(role, model, only_own=only_own)
        if model.adapter is not None and self.config.adapter.base_dtype == "nf4" and not only_own:
            sizes[f"{role}.weights"] = float(held_bytes(model, "nf4"))
        return sizes

    def _held(self, model: LanguageModel | ScalarModel) -> float:
        return float(held_bytes(model, self.config.runtime.frozen_dtype))

    @property
    def _numerics(self) -> dict[str, object]:
        return {"temperature": self.config.rollout.temperature, "precision": self.precision}

    @property
    def _after_last(self) -> dict[str, bool]:
        return {"value_after_last": self.config.ppo.score_at == "after_last"}


def rollout_of(rows: Rows, part: tuple[int, ...]) -> Rollout:
    """Some rows as a rollout whose responses are all in use."""
    prompts, responses = ([each[row] for row in part] for each in (rows.prompts, rows.responses))
    prompt_mask = torch.arange(max(prompts)) >= max(prompts) - torch.tensor(prompts)[:, None]
    mask = torch.arange(max(responses)) < torch.tensor(responses)[:, None]
    return Rollout(
        prompt_ids=prompt_mask.long(),
        prompt_mask=prompt_mask,
        response_ids=mask.long(),
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(mask.shape),
        stopped=mask[:, 0],
        group=torch.arange(len(part)),
        policy_version=torch.zeros(len(part), dtype=torch.long),
    )


def hold_base(config: Config, model: LanguageModel | ScalarModel, blueprint: Blueprint) -> None:
    """Hold the base of an adapter in `adapter.base_dtype`."""
    adapter = config.adapter
    if model.adapter is not None and not (adapter.kind == "dora" and adapter.base_dtype == "auto"):
        hold_hollow_base(model, adapter.base_dtype, saved_bf16=blueprint.saved_bf16)


def planned_optimizer(config: Config, kind: str, *, on_gpu: bool) -> PlannedOptimizer:
    """An optimizer, with its state where `runtime.offload_optimizer` keeps it."""
    return PlannedOptimizer(kind, AT_A_TIME if on_gpu and config.runtime.offload_optimizer else None)


def sizes_of(role: str, model: LanguageModel | ScalarModel, *, only_own: bool = False) -> Figures:
    """Bytes and numbers of a role's weights.

    Args:
        role: The role.
        model: Its model.
        only_own: Leave out the weights of a base that another role has loaded.
    """
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    number = sum(each.numel() for each in model.parameters())
    held = sum(each.nbytes for each in held_by([model]))
    if only_own:
        held = trained if model.adapter is not None else 0
    matrices = [each for block in layers_of(model) for each in block.parameters() if each.ndim == 2]
    inner = sum(each.nbytes for each in matrices if each.requires_grad)
    sizes = {"weights": held, "trained": trained, "inner": inner, "parameters": number}
    return {f"{role}.{name}": float(size) for name, size in sizes.items()}


def named(name: str, figures: Figures) -> Figures:
    """The figures of a pass, each with its name before it."""
    return {f"{name}.{each}": figure for each, figure in figures.items()}
