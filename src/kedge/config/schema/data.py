"""`data`: sources, and the handling of rows that do not fit."""

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import field_validator

from kedge.config.schema.field import Choice, field
from kedge.config.schema.section import Section, StringList, check, flat_names, rewrite
from kedge.config.schema.update.former import without_rest

Draw = Literal["evenly", "by_spread"]

ROLES = ("demonstrations", "comparisons", "prompts", "pretraining")
COLUMNS = (
    *("prompt", "completion", "messages", "text", "chosen", "rejected", "margin", "responses", "ranks"),
    *("instruction", "input", "output", "system", "subreddit", "title", "post", "summary"),
    *("input_ids", "attention_mask", "labels", "completion_mask"),
)


class DataConfig(Section):
    """The training data. A source is a `.jsonl` file, a dataset folder, or a Hugging Face id; see `kedge data`."""

    @rewrite
    @classmethod
    def _collect_columns(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Gather `columns.prompt: dialogue` and `columns: {demonstrations: {prompt: dialogue}}` in `columns`."""
        given = without_rest(values)
        columns: Any = {} if given.get("columns") is None else given["columns"]
        if not isinstance(columns, Mapping):
            return given
        dotted = [name for name in given if str(name).startswith("columns.")]
        named = flat_names({**columns, **{name.removeprefix("columns."): given.pop(name) for name in dotted}})
        return {**given, "columns": named}

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for name in columns:
            role, _, column = name.rpartition(".")
            near = difflib.get_close_matches(column, COLUMNS, n=1, cutoff=0.8)
            if column not in COLUMNS and near:
                raise ValueError(f"{name} is not a column that kedge reads; did you mean {near[0]}?")
            if role not in ("", *ROLES):
                raise ValueError(
                    f"{name} is not a column that kedge reads: the roles are {', '.join(ROLES)}, not {role}"
                )
        return columns

    @property
    def choice_by_scores(self) -> tuple[str, str] | None:
        """The setting by which scores choose the prompts, if any, and the alternative without scores."""
        if self.draw == Choice("evenly"):
            return None
        rest = self.draw.parameter
        written = self.draw.name if rest is None else f"{{{self.draw.name}: {rest}}}"
        return f"data.draw={written}", "data.draw=evenly"

    @check
    def _check_mix(self) -> None:
        for role in ROLES:
            self.shares(role)
        several = [role for role in ROLES if len(getattr(self, role)) > 1]
        if self.mix is not None and not several and any(getattr(self, role) for role in ROLES):
            raise ValueError("data.mix needs several sources of one kind of data, and there is one")
        names = {name for role in ROLES for name in getattr(self, role)}
        unknown = [name for name in self.mix if name not in names] if isinstance(self.mix, dict) else []
        if unknown and names:
            raise ValueError(f"data.mix names {unknown[0]}, which is not a source; they are {', '.join(sorted(names))}")

    def shares(self, role: str) -> tuple[float, ...] | None:
        """The share of each of a role's sources; None where rows are not drawn by source.

        Raises:
            ValueError: `mix` does not fit the sources.
        """
        sources: list[str] = getattr(self, role)
        if self.mix is None or len(sources) < 2:
            return None
        if isinstance(self.mix, dict):
            if not any(name in self.mix for name in sources):
                return None
            if missing := [name for name in sources if name not in self.mix]:
                raise ValueError(f"data.mix has no share for {missing[0]} (0 leaves it out)")
            shares = tuple(self.mix[name] for name in sources)
        else:
            shares = tuple(self.mix)
        if len(shares) != len(sources):
            raise ValueError(f"data.mix has {len(shares)} shares, and data.{role} has {len(sources)} sources")
        if min(shares) < 0 or not 0 < sum(shares) < math.inf:
            raise ValueError("the shares of data.mix must be at least 0, and one of them above 0")
        return shares

    demonstrations: StringList = field([])
    """Sources of demonstrations for SFT (rows with `prompt` and `completion`, or `messages`).

    Source: kedge: no data is assumed
    """
    comparisons: StringList = field([])
    """Sources of comparisons for the reward model (rows with `prompt`, `chosen`, `rejected`, or ranked `responses`).

    Source: kedge: no data is assumed
    """
    prompts: StringList = field([])
    """Sources of prompts for PPO and generation (rows with `prompt`; other columns are passed to the reward functions).

    Source: kedge: no data is assumed
    """
    eval_prompts: StringList = field([])
    """Sources of the held-out prompts of ppo.eval_every and ppo.critic_check; empty: a part of data.prompts, see
    eval_fraction.

    Source: kedge: no data is assumed
    """
    pretraining: StringList = field([])
    """Sources of pretraining texts (rows with `text`) for `ppo.ptx_coef`.

    Source: kedge: no data is assumed; InstructGPT §3.5 mixes such texts in
    """
    columns: dict[str, str] = field({})
    """Columns of your data under kedge's names: data.columns.prompt=dialogue reads `dialogue` as `prompt`;
    data.columns.comparisons.prompt=question only for the comparisons. Other names are those of reward functions:
    data.columns.answer=solution.

    Source: kedge: columns are read under their own names
    """
    mix: list[float] | dict[str, float] | None = None
    """Shares of several sources in each pass over the training data, in their order ([0.7, 0.3]) or by name ({a.jsonl:
    0.7, b.jsonl: 0.3}); only proportions count. null reads every row once per pass.

    Source: kedge: off; a small source repeats where its share demands it
    """
    max_prompt_tokens: int = field(512, gt=0)
    """Maximum prompt length, in tokens.

    Source: N+ (TL;DR queries)
    Too high: a few very long prompts take most of the memory and time
    Too low: prompts are rejected, or lose text that the response needs
    """
    max_length: int = field(1024, gt=0)
    """Maximum length of prompt plus completion in SFT and reward modeling, in tokens.

    Source: kedge: a prompt of 512 tokens and a completion of 512
    Too high: a single long row sets the memory of its whole batch
    Too low: good rows are rejected as too long
    """
    truncate: Literal["never", "keep_start", "keep_end"] = "never"
    """What to do with a prompt that is too long, alone (max_prompt_tokens) or with its completion (max_length): reject
    the row, keep the prompt's start, or keep its end (of a conversation, the last turns). Answers of comparisons lose
    their end where they leave a prompt less than half of max_length; completions that are learned are never cut.

    Source: kedge: a truncated prompt is a different task, so truncation is opt-in; template=tldr always truncates at a
        paragraph
    """
    curriculum: str | None = None
    """Column of the prompts with their difficulty, a number: the first pass over the prompts goes from low to high;
    null shuffles every pass.

    Source: kedge: off; shuffled prompts are what the papers use
    Text: the name of a column
    """
    draw: Choice[Draw, Draw, Annotated[int, Ge(1)]] = field("evenly")
    """How often PPO draws each prompt in a pass: once, or in proportion to the variance of its latest responses'
    scores, relative to the mean. A prompt without variance counts a quarter of that, one that was not sampled yet 1.
    {evenly: 3}, or with by_spread: for three passes it leaves out a prompt after all responses to it scored the same:
    it is solved, or out of reach, and comes back to be tried again.

    Source: evenly: as in the papers. by_spread: VCRL (arXiv 2509.19803), whose measure of what a prompt has to teach
        this is; it filters by it and replays prompts from a memory. ppo.constant_groups leaves out equal responses only
        once they are sampled and scored
    Too high: with a long rest, prompts that the policy has come to solve, or has forgotten, are noticed late
    Too low: without a rest, most of the sampling may go into prompts that teach nothing
    """
    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's messages in a conversation (`messages`) SFT learns: all of them, or the last one. The
    others are read. Of the answers of a comparison, always the last messages count.

    Source: kedge: all; every answer of a conversation was written as an answer
    """
    chat_template: str | None = None
    """Template that renders conversations instead of the model's own, and is saved with the model: a file, `chatml`,
    `zephyr`, or one of the tokenizer's named templates.

    Source: kedge: the model's own template is the one that it was trained with
    Text: a file or a name
    """
    template: Literal["none", "tldr"] = "none"
    """How a row becomes a prompt: its text unchanged, or the TL;DR format of Reddit fields.

    Source: kedge: the text is left unchanged; tldr is the format of Stiennon and N+
    """
    max_rejected_fraction: float = field(0.05, ge=0, le=1)
    """Fraction of rejected rows above which the run stops before training.

    Source: kedge: more than 1 bad row in 20 points to a mistake in the file, not in single rows
    Too high: training starts on the remains of a broken file
    Too low: a single bad row stops the run
    """
    eval_fraction: float = field(0.05, ge=0, lt=1)
    """Fraction of rows held out to measure SFT loss and reward-model accuracy, and of prompts for ppo.eval_every and
    ppo.critic_check.

    Source: kedge: enough rows to measure with, at little cost to training
    Too high: less data to train on
    Too low: the held-out figures are mostly noise
    """
