"""Loads a stage's data and rewards, from the configuration or from Python arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Prompt, Sources, read_rows
from kedge.data.chat import prompt_form
from kedge.data.fields import Role, columns_of
from kedge.data.prompts import prompt_columns
from kedge.models.loading import Bases
from kedge.rewards import CallLimits, RewardSpec, RewardTerm, WeightedReward, load_reward
from kedge.rewards.source import PROMPT_NUMBER, RewardSource
from kedge.runs.frozen import freeze_models
from kedge.runs.judges import with_judges
from kedge.runs.run import Run
from kedge_base.errors import RewardError
from kedge_base.machine.progress import say
from kedge_base.registry import service
from kedge_base.run_folder.output import REWARD_LOG

if TYPE_CHECKING:
    from kedge.rollout.player import Player

AS_TEXT: Final[Mapping[Role, str]] = {
    "prompts": (
        "plain text, continued without the chat template (data.columns.instruction=prompt makes questions of it)"
    ),
    "comparisons": (
        "plain text, without the chat template (data.columns.comparisons.instruction=prompt makes questions of the "
        "prompts)"
    ),
    "demonstrations": (
        "plain text, without the chat template (data.columns.demonstrations.instruction=prompt "
        "data.columns.demonstrations.output=completion makes questions and answers of it)"
    ),
}
"""Notes on rows in plain text, with how to turn them into conversations; columns of other roles are unchanged."""
CONTEXT_LEAVES: Final = {
    "max_prompt_tokens": "the {} tokens that the context leaves",
    "max_length": "the context of {} tokens",
}
"""Name of each limit if the context allows less than the field."""


def reading(
    config: Config, role: Role, tokenizer: PreTrainedTokenizerBase, *, room: int | None = None
) -> dict[str, Any]:
    """Return the options for parsing a role's rows: the fields of `ReadingOptions`.

    Args:
        config: The limits and the form of the data.
        role: The role.
        tokenizer: Renders conversations and measures lengths.
        room: Longest prompt, or longest row with its answer, that a model allows; None for no limit.
    """
    data = config.data
    longest = data.max_prompt_tokens if role == "prompts" else data.max_length
    longest = longest if room is None else min(longest, room)
    is_mixed_in = role == "pretraining"  # its text is not about the task
    return {
        "tokenizer": tokenizer,
        "template": "none" if is_mixed_in else data.template,
        "max_prompt_tokens": longest if role == "prompts" else None if is_mixed_in else data.max_prompt_tokens,
        "max_length": None if role == "prompts" else longest,
        "truncate": data.truncate,
        "columns": columns_of(data.columns, role) if is_mixed_in else data.columns,
        "train_on": data.train_on,
        "ties": config.reward_model.ties != "drop",
    }


def with_all_columns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Fill in None for missing columns: a reward function must get an entry of each column for every response."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return [
        replace(
            prompt,
            columns={name: prompt.columns.get(name) for name in names},
            absent=tuple(name for name in names if name not in prompt.columns),
        )
        for prompt in prompts
    ]


def check_columns(check: Callable[[Mapping[str, Sequence[Any]]], None], prompts: Sequence[Prompt]) -> None:
    """Check the columns of prompts; an error names the file and line of a prompt instead of its number.

    Raises:
        RewardError: An entry cannot be used.
    """
    try:
        check(prompt_columns(prompts))
    except RewardError as error:
        text = PROMPT_NUMBER.sub(lambda found: prompts[int(found[1]) - 1].place, str(error), count=1)
        raise RewardError(text) from error


def load_rows(
    field: Literal["demonstrations", "comparisons", "prompts", "eval_prompts", "pretraining"],
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    *,
    room: int | None,
) -> list[Any]:
    """Read the data that a field of `config.data` names, or the run's rows instead, and note how it was used.

    A column that any prompt has is present in all of them.

    Args:
        field: The field.
        config: Names the data and its limits.
        run: Has rows instead of the configured data, if any; its folder receives the unusable ones.
        tokenizer: Renders conversations and measures lengths.
        room: Longest prompt, or longest row with its answer, that a model allows; None for no limit.

    Raises:
        DataError: The data cannot be read, or too many rows are unusable.
    """
    role: Role = "prompts" if field == "eval_prompts" else field
    data = config.data
    rows = run.objects.get(f"data.{field}")
    sources = tuple(getattr(data, field)) if rows is None else ()
    options = reading(config, role, tokenizer, room=room)
    table = read_rows(
        Sources(sources) if rows is None else rows,
        role,
        max_rejected_fraction=data.max_rejected_fraction,
        rejected_to=run.rejected_file,
        **options,
    )
    limits = {
        f"{name}={limit}": f"data.{name}={limit}" if limit == getattr(data, name) else left.format(limit)
        for name, left in CONTEXT_LEAVES.items()
        for limit in [options[name]]
    }
    run.data.note(field, table, sources, tokenizer, limits)
    _note_text(field, role, table.records, run, tokenizer, data.template)
    return with_all_columns(table.records) if role == "prompts" else table.records


def _note_text(
    field: str, role: Role, records: Sequence[Any], run: Run, tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    """Note that prompts of a chat model do not go through its template. Rows without a prompt are training texts."""
    if role not in AS_TEXT or not tokenizer.chat_template:
        return
    prompts = [record.text if isinstance(record, Prompt) else record.prompt for record in records]
    given = [prompt for prompt in prompts if prompt]
    if given and prompt_form(given, template=template) == "text":
        run.data.add(field, note=AS_TEXT[role])


Rewards: TypeAlias = "RewardSpec | RewardTerm | Sequence[RewardSpec | RewardTerm]"
"""One or several reward models and functions, as `load_reward` accepts them."""


def load_rewards(
    rewards: Rewards,
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    *,
    freeze: bool = True,
    bases: Bases | None = None,
    more: Sequence[RewardSource] = (),
    may_be_empty: bool = False,
) -> WeightedReward:
    """Load rewards on the run's device, and freeze their models; errors as in `load_reward`.

    Args:
        rewards: The reward models and functions.
        config: Has the `runtime` and `reward_functions` settings.
        run: Has the device, the precision, and the folder for the functions' output.
        tokenizer: The policy's.
        freeze: False if the caller freezes the models after copying a critic from them.
        bases: Where they find the weights of their bases.
        more: Further reward sources, such as an environment's.
        may_be_empty: See `WeightedReward`.
    """
    loaded = load_reward(
        with_judges(rewards, config, run.judge_folder),
        policy_tokenizer=tokenizer,
        device=run.device,
        trust_remote_code=config.runtime.trust_remote_code,
        micro_batch_tokens=run.micro_batch_tokens,
        precision=run.precision,
        limits=call_limits(config),
        log=run.folder / REWARD_LOG,
        bases=bases,
        ranks=run.ranks,
        more=more,
        may_be_empty=may_be_empty,
    )
    if freeze:
        freeze_models((each.model for each in loaded.models.values()), config, run)
    return loaded


def load_player(config: Config, run: Run, *, tokens: int, by_turn: bool) -> Player | None:
    """Load the player of a run's episodes; None for a run without an environment.

    Args:
        config: Names the environment and its limits.
        run: Has the class that replaces the configured one, if any; its folder receives the environment's output.
        tokens: Tokens of both sides after the prompt.
        by_turn: The reward of each turn is placed at its last token, instead of their sum at the end.

    Raises:
        EnvError: The environment cannot be imported, or is not one.
    """
    source = run.objects.get("environment.source") or config.environment.source
    if source is None:
        return None
    from kedge.rollout.episodes import Limits  # imported only if there is an environment
    from kedge.rollout.player import Player

    settings = config.environment
    limits = Limits(settings.max_turns, tokens, settings.max_turn_tokens, on_error=settings.on_error)
    temperature = None if "rollout.temperature" in config.schedules else config.rollout.temperature
    given = {"timeout": settings.timeout, "log": run.folder / REWARD_LOG, "temperature": temperature}
    loaded = service("environment")(source, **given)
    return Player(loaded, limits, by_turn=by_turn, say=say)


def rewards_of(config: Config, run: Run) -> Rewards:
    """Return the rewards of a run: objects from Python, or else the terms of `config.reward`."""
    given = run.objects.get("reward")
    return configured_rewards(config) if given is None else given


def configured_rewards(config: Config) -> list[RewardTerm]:
    """Convert the terms of `config.reward` for `load_reward`."""
    return [RewardTerm(term.source, term.weight, term.settings, term.name) for term in config.reward]


def call_limits(config: Config) -> CallLimits:
    """Return the limits on calls of reward functions, for `load_reward`."""
    return CallLimits(**config.reward_functions.model_dump())
