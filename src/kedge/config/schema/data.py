"""`data`: what is read, and what happens to rows that do not fit."""

from typing import Literal

from kedge.config.schema.field import Section, StringList, knob

__all__ = ["Data"]


class Data(Section):
    """Where the records come from. A source is a `.jsonl` file, a data set's folder, or a hub id."""

    demonstrations: StringList = knob(
        [],
        meaning="Sources of demonstrations (`prompt` + `completion`, or `messages`) for SFT.",
        source="kedge: there is no data to assume",
    )
    comparisons: StringList = knob(
        [],
        meaning="Sources of comparisons (`prompt`, `chosen`, `rejected`, or ranked `responses`) for the reward model.",
        source="kedge: there is no data to assume",
    )
    prompts: StringList = knob(
        [],
        meaning="Sources of prompts (`prompt`, other columns go to the reward functions) for PPO and generation.",
        source="kedge: there is no data to assume",
    )
    pretraining: StringList = knob(
        [],
        meaning="Sources of plain pretraining texts (`text`) for `ppo.ptx_coef`.",
        source="InstructGPT §3.5 mixes them in; kedge assumes none",
    )
    max_prompt_tokens: int = knob(
        512,
        gt=0,
        meaning="Longest prompt, in tokens.",
        source="N+ (TL;DR queries)",
        too_high="memory and time go into few very long prompts, since a batch is padded to its longest",
        too_low="prompts are refused or lose the text that the response needs",
    )
    max_length: int = knob(
        1024,
        gt=0,
        meaning="Longest row in SFT and reward modelling, prompt and completion together, in tokens.",
        source="kedge: fits 512 tokens of prompt and as many of completion",
        too_high="one long row sets the memory of its whole batch",
        too_low="good rows are refused as too long",
    )
    truncate: Literal["never", "keep_start", "keep_end"] = knob(
        "never",
        meaning="What becomes of a prompt over max_prompt_tokens: refused as a bad row, or cut to its start or end.",
        source="kedge: a cut prompt is a changed task, so it is asked for; template=tldr always cuts at a paragraph",
    )
    template: Literal["none", "tldr"] = knob(
        "none",
        meaning="How a row becomes a prompt: its text as it is, or Reddit fields in the TL;DR format.",
        source="Stiennon and N+ for tldr; none leaves the text alone",
    )
    max_rejected_fraction: float = knob(
        0.05,
        ge=0,
        le=1,
        meaning="Share of bad rows above which a run stops before any training.",
        source="kedge: more than one bad row in twenty is a mistake in the file, not in the rows",
        too_high="training goes on with what is left of a broken file",
        too_low="one odd row stops the run",
    )
    eval_fraction: float = knob(
        0.05,
        ge=0,
        lt=1,
        meaning="Share of the rows held out to measure SFT loss and reward-model accuracy.",
        source="kedge: enough to measure, small enough not to be missed",
        too_high="less data to train on",
        too_low="the evaluation figure is mostly noise",
    )
