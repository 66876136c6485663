"""The rows of an update or a step: their lengths, measured on data or assumed from settings, and their passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kedge.algorithm.experience import Rollout
from kedge.algorithm.prefixes import Pieces, common_start, prefix_tree
from kedge.config import Config
from kedge.data import Sources
from kedge.data.parsing import ReadingOptions
from kedge.data.readers import read_table
from kedge.data.tokens import encode_example, encode_prompt, pad_left
from kedge.models import load_tokenizer
from kedge.ranks import ALONE
from kedge.rollout.privileged import privileged_text
from kedge.runs.inputs import reading
from kedge_base.errors import KedgeError
from kedge_base.stage import find_stage
from kedge_base.texts import counted

SAMPLE = 256
"""Rows to read from the data."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of a sample of rows, in tokens.

    Attributes:
        prompts: Length of each prompt.
        completions: Length of each answer; empty if there are only prompts.
        origin: Source of the lengths, for the report.
        rows: Number of rows in the data, if all were read.
        assumed: True if no data was read.
        pretraining: Lengths of the texts of ptx mixing; None without it.
        common: Tokens that all prompts begin with.
        privileged: Most tokens that only a critic reads beside a prompt.
    """

    prompts: tuple[int, ...]
    completions: tuple[int, ...] = ()
    origin: str = "settings"
    rows: int | None = None
    assumed: bool = False
    pretraining: Lengths | None = None
    common: int = 0
    privileged: int = 0


def lengths_of(config: Config, stage: str) -> Lengths:
    """Measure the lengths of a stage's data; without data or a tokenizer, assume the longest that the settings allow.

    In comparisons, each answer counts as a row with the prompt.
    """
    source = find_stage(stage).starting_model(config)
    role = {"sft": "demonstrations", "reward": "comparisons"}.get(stage, "prompts")
    if role != "prompts":
        return _lengths_of_answers(config, role, source)
    ptx = _lengths_of_answers(config, "pretraining", source) if stage == "ppo" and config.ppo.ptx_coef.coef else None
    table = _read(config, role, source)
    if table is None:
        return Lengths((config.data.max_prompt_tokens,), origin="data.max_prompt_tokens", assumed=True, pretraining=ptx)
    tokenizer, records, rows = table
    found = [encode_prompt(tokenizer, record.text) for record in records]
    text = privileged_text(config.ppo.privileged) if not config.environment.source else None
    return Lengths(
        tuple(map(len, found)),
        origin=f"the first {counted(len(found), 'prompt')}",
        rows=rows,
        pretraining=ptx,
        common=common_start(found),
        privileged=0 if text is None else text.longest(records, tokenizer),
    )


def _lengths_of_answers(config: Config, role: str, source: str | None) -> Lengths:
    table = _read(config, role, source)
    if table is None:
        half = config.data.max_length // 2
        return Lengths((half,), (config.data.max_length - half,), origin="data.max_length", assumed=True)
    tokenizer, records, rows = table
    encoded = [encode_example(tokenizer, record.prompt, each) for record in records for each in _answers(record)]
    prompts, completions = ([len(getattr(each, name)) for each in encoded] for name in ("prompt", "completion"))
    common = common_start([each.prompt for each in encoded]) if role == "comparisons" else 0
    origin = f"the first {counted(len(records), 'row')}"
    return Lengths(tuple(prompts), tuple(completions), origin, rows, common=common)


@dataclass(frozen=True)
class Rows:
    """Prompts and responses of an update or a step.

    Attributes:
        prompts: Tokens of each prompt.
        responses: Tokens of each response, or of each completion.
        budget: Tokens of a pass; None for all rows at once.
        group: Number of adjacent responses to each prompt, which a pass reads once.
        common: Tokens that all prompts begin with.
        privileged: Tokens that only the critic reads beside each prompt.
    """

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    budget: int | None
    group: int = 1
    common: int = 0
    privileged: int = 0

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.prompts)

    @property
    def row_lengths(self) -> list[int]:
        """Most tokens of each row that a model reads."""
        pairs = zip(self.prompts, self.responses, strict=True)
        return [prompt + self.privileged + response for prompt, response in pairs]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.prompts) + sum(self.responses)

    def shortened(self, passes: int = 2) -> Rows:
        """The rows of the first passes, which are the largest; later passes need no more memory than the second."""
        parts = [part.rows for part in ALONE.plan(self.row_lengths, self.budget, self._pieces())][:passes]
        return self.select([row for part in parts for row in part])

    def like(self, count: int, budget: int | None) -> Rows:
        """This many rows, with prompts distributed like these and the longest response."""
        responses = (max(self.responses),) * count
        return replace(self, prompts=quantiles(self.prompts, count), responses=responses, budget=budget, group=1)

    def select(self, rows: Sequence[int]) -> Rows:
        """Some of the rows."""
        prompts, responses = (tuple(each[row] for row in rows) for each in (self.prompts, self.responses))
        return replace(self, prompts=prompts, responses=responses)

    def texts(self, group: int | None = None, *, responses: bool = False) -> list[list[int]]:
        """Prompts of these lengths that differ after their common beginning, each for some rows one after the other;
        with their responses, which all differ, if asked.
        """
        texts: list[list[int]] = []
        for row, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True)):
            text = [*[1] * self.common, *_different(row // (group or self.group), prompt)][:prompt]
            texts.append([*text, *_different(row, response)] if responses else text)
        return texts

    def _pieces(self) -> list[Pieces]:
        return prefix_tree([tuple(text) for text in self.texts()], longest=max(self.row_lengths))

    def rollout(self, *, values: bool) -> Rollout:
        """Sampled responses of these lengths."""
        prompt_ids, prompt_mask = pad_left(self.texts(), 0)
        mask = torch.arange(max(self.responses)) < torch.tensor(self.responses)[:, None]
        beside = torch.ones(self.count, self.privileged, dtype=torch.long) if self.privileged else None
        return Rollout(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            response_ids=mask.long(),
            token_mask=mask,
            action_mask=mask,
            logprobs=torch.zeros(mask.shape),
            stopped=mask[:, 0],
            group=torch.arange(self.count) // self.group,
            policy_version=torch.zeros(self.count, dtype=torch.long),
            values=torch.zeros(mask.shape) if values else None,
            privileged_ids=beside,
            privileged_mask=None if beside is None else beside.bool(),
        )


def _different(number: int, length: int) -> list[int]:
    """Tokens that begin differently for each number; small ids, which every vocabulary has."""
    return [1 + number % 64, number // 64 % 64, *[1] * length][:length]


def quantiles(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` lengths that are distributed like the given ones, longest last."""
    ordered = sorted(lengths)
    return tuple(
        ordered[min(len(ordered) - 1, (2 * place + 1) * len(ordered) // (2 * count))] for place in range(count)
    )


def _answers(record: Any) -> list[str]:
    if hasattr(record, "completion"):
        return [record.completion]
    return [record.chosen, record.rejected] if hasattr(record, "chosen") else list(record.responses)


def _read(config: Config, role: Any, source: str | None) -> tuple[Any, list[Any], int | None] | None:
    sources: list[str] = getattr(config.data, role)
    if not sources or source is None:
        return None
    try:
        trusted = config.runtime.trust_remote_code
        tokenizer = load_tokenizer(source, trust_remote_code=trusted, chat_template=config.data.chat_template)
    except KedgeError:  # a plan needs only config.json
        return None
    options = ReadingOptions(**reading(config, role, tokenizer))
    table = read_table(Sources(tuple(sources)), role, options, num_rows=SAMPLE)
    if not table.records:
        return None
    return tokenizer, table.records, len(table.records) if len(table.records) < SAMPLE else None
