"""Chooses what people are asked next: prompts, and which of their sampled responses to compare.

candidates with k responses ─▶ scores by one or several reward models ─▶ the most valuable r of each prompt ─▶ items
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean, pstdev
from typing import Any, Literal, TypeAlias

from kedge_base.errors import ConfigError
from kedge_people.labels import Item

Method: TypeAlias = Literal["gap", "uncertain", "hard"]
"""A large and uncertain gap; a predicted probability near ½; where models disagree."""

Value: TypeAlias = Callable[[Sequence[float]], float]
"""Value of a comparison, from the difference in score that each model predicts."""


def check_choice(method: Method, scorers: Sequence[str]) -> None:
    """Check the reward models of a method, before anything is loaded or sampled.

    Raises:
        ConfigError: There are too few.
        ModelError: One does not exist.
    """
    least = 2 if method == "hard" else 1
    if len(scorers) < least:
        expected = "two reward models, which may disagree" if method == "hard" else "a reward model, or better two"
        raise ConfigError(f"--select {method} needs --scorer: {expected}")
    from kedge.models.sources import check_source

    for name in scorers:
        check_source(name)


def choose(
    candidates: Sequence[Item],
    scores: Sequence[Sequence[Sequence[float]]],
    count: int,
    *,
    value: Value,
    num_responses: int = 2,
    seed: int = 0,
) -> list[Item]:
    """Choose the items whose pairs have the largest total value; equal values in random order.

    Args:
        candidates: Prompts with sampled responses.
        scores: By model and candidate, a score per response; a candidate without scores is not chosen.
        count: Number of items, at most.
        value: The value of a pair.
        num_responses: Responses per item.
        seed: Seed of everything random.
    """
    draw = random.Random(f"labels {seed}")
    found: list[tuple[float, float, int, tuple[int, ...]]] = []
    for number, item in enumerate(candidates):
        own = [each[number] for each in scores]
        sets = list(combinations(range(len(item.responses)), num_responses))
        draw.shuffle(sets)
        sets = [each for each in sets if len({item.responses[place] for place in each}) == num_responses]
        if not sets or not all(own):
            continue
        # Nine of 18 responses are 48,620 sets, but only 153 pairs.
        values = {
            (i, j): value([each[i] - each[j] for each in own]) for i, j in combinations(range(len(item.responses)), 2)
        }
        worth = [sum(map(values.__getitem__, combinations(places, 2))) for places in sets]
        best = max(worth)
        found.append((best, draw.random(), number, sets[worth.index(best)]))
    chosen = sorted(found, reverse=True)[:count]
    return [_part(candidates[number], places) for *_, number, places in sorted(chosen, key=lambda each: each[2])]


def score_items(items: Sequence[Item], model: str, **reading: Any) -> list[list[float]]:
    """Score all responses with a reward model; empty for an item that it cannot read, such as one that is too long.

    Args:
        items: Prompts with responses.
        model: Folder, hub id or run.
        reading: Further fields of `kedge.data.parsing.ReadingOptions`.

    Raises:
        ModelError: The model cannot be loaded.
    """
    from kedge.data.parsing import ReadingOptions, parse_comparison
    from kedge.data.records import RowError
    from kedge.models import find_model, load_scalar_model, load_tokenizer, score_rows
    from kedge.training.supervised.losses import RankedResponses

    place = find_model(model)
    tokenizer = load_tokenizer(place)
    scorer = load_scalar_model(place, tokenizer=tokenizer)
    options = ReadingOptions(tokenizer, max_length=scorer.context_length, ties=True, **reading)
    rows: list[tuple[list[int], ...]] = []
    for item in items:
        ranked = {"responses": list(item.responses), "ranks": [1] * len(item.responses)}
        try:
            record = parse_comparison({**item.columns, "prompt": item.prompt, **ranked}, options)
            rows.append(RankedResponses.encode(tokenizer, record).rows)
        except RowError:
            rows.append(())
    flat = [row for each in rows for row in each]
    scores = iter(score_rows(scorer, flat).tolist() if flat else ())
    return [[next(scores) for _ in each] for each in rows]


def _gap(gaps: Sequence[float]) -> float:
    """Upper confidence bound of the gap: its mean over the models plus their standard deviation.

    Source: DeltaUCB of ActiveUltraFeedback (arXiv 2603.09692), whose ensemble of heads is here that of the models.
    """
    return abs(fmean(gaps)) + pstdev(gaps)


def _uncertain(gaps: Sequence[float]) -> float:
    return -abs(fmean(map(_chance, gaps)) - 0.5)


def _disagreement(gaps: Sequence[float]) -> float:
    return pstdev(map(_chance, gaps))


VALUES: Mapping[Method, Value] = {"gap": _gap, "uncertain": _uncertain, "hard": _disagreement}


def _chance(gap: float) -> float:
    """The probability that the first response is better, by Bradley and Terry."""
    return 1 / (1 + math.exp(-max(-700.0, gap)))


def _part(item: Item, places: Sequence[int]) -> Item:
    responses, models = (tuple(each[place] for place in places) for each in (item.responses, item.models))
    return replace(item, responses=responses, models=models)
