"""How many labels each way of choosing them needs: `python -m bench.labels.select SEED …` adds one line per seed.

A simulated annotator of the demo compares two of four summaries per post, sampled from a fine-tuned policy. The first
50 posts are random; then two reward models, trained on the labels so far, choose the next ones. Reward models
start from the policy; their accuracy is that over pairs of summaries of other posts that the gold judge does not find
equal; seeds differ in posts, samples, labels and training.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from kedge.data import Comparison
from kedge.data.truncation import render_tldr
from kedge.models import load_scalar_model, load_tokenizer, score_rows
from kedge.runs.ending import chained
from kedge.stages.sft import run_sft
from kedge.training.supervised.losses import RankedResponses
from kedge.training.supervised.reward_model import train_reward_model
from kedge_base.generators import seed_generators
from kedge_lab.demo import recipe
from kedge_lab.demo.gold_evaluation import sample_summaries
from kedge_lab.demo.main import demo_config, rows, start_from_scratch
from kedge_lab.demo.world import Post, World, judge_summary
from kedge_people.labels import Item
from kedge_people.select import VALUES, choose

RECORD: Final = Path(__file__).parents[1] / "results" / "labels_select.jsonl"
WORK: Final = Path(__file__).parents[1] / ".work" / "labels"
COUNTS: Final = (50, 100, 200, 300)
POOL: Final = 400
RESPONSES: Final = 4
TESTED: Final = 500
MODELS: Final = 2
TRAINING: Final[dict[str, Any]] = {"learning_rate": 2e-3, "batch_size": 16, "num_epochs": 3, "adam_eps": 1e-8}


def sampled(world: World, policy: Path, count: int, draws: int) -> tuple[list[Post], list[tuple[str, ...]]]:
    """Posts, and several summaries of each."""
    posts = world.posts(count)
    return posts, list(zip(*(sample_summaries(policy, world, posts, draw=draw) for draw in range(draws)), strict=True))


class Scorers:
    """The ensemble, trained on labels."""

    def __init__(self, policy: Path, labels: Sequence[Comparison], seed: int) -> None:
        """Train it."""
        self.tokenizer = load_tokenizer(str(policy))
        self.models = []
        for number in range(MODELS):
            seed_generators(1000 * seed + number)
            model = load_scalar_model(str(policy), tokenizer=self.tokenizer, init="any")
            train_reward_model(model, self.tokenizer, labels, normalize="none", seed=1000 * seed + number, **TRAINING)
            self.models.append(model)

    def score(self, prompts: Sequence[str], texts: Sequence[tuple[str, ...]]) -> list[list[list[float]]]:
        """By model and prompt, the score of each text."""
        examples = [
            RankedResponses.encode(self.tokenizer, Comparison(prompt, *pair))
            for prompt, several in zip(prompts, texts, strict=True)
            for pair in zip(several[::2], several[1::2], strict=True)
        ]
        every = [row for example in examples for row in example.rows]
        found = []
        with torch.no_grad():
            for model in self.models:
                scores = score_rows(model, every, micro_batch_tokens=16384).tolist()
                size = len(texts[0])
                found.append([scores[start : start + size] for start in range(0, len(scores), size)])
        return found

    def accuracy(self, prompts: Sequence[str], pairs: Sequence[tuple[str, ...]]) -> float:
        """Mean over the models of the share of pairs, better one first, that they order right."""
        scores = self.score(prompts, pairs)
        return sum(a > b for each in scores for a, b in each) / (len(self.models) * len(pairs))


def fine_tuned() -> tuple[World, Path]:
    """The demo's world of seed 0 and its fine-tuned policy, made once."""
    if not (WORK / "start").exists():
        start_from_scratch(WORK / "start", 0)
    if not (WORK / "sft" / "model").exists():
        with chained():
            run_sft(
                demo_config("sft", WORK / "start", WORK / "sft", seed=0),
                demonstrations=rows(World(0, render=renderer()).demonstrations(recipe.NUM_DEMONSTRATIONS)),
            )
    return World(0, render=renderer()), WORK / "sft" / "model"


def renderer() -> Callable[[Post], str]:
    """Turns a post into the prompt that the policy reads."""
    tokenizer = load_tokenizer(str(WORK / "start"))
    return lambda post: render_tldr(post.subreddit, post.title, post.text, tokenizer, recipe.MAX_PROMPT_TOKENS)


def measure(seed: int) -> dict[str, Any]:
    """The accuracy of each method after each number of labels."""
    started = time.process_time()
    world, policy = fine_tuned()
    pool, texts = sampled(replace(world, split=f"labels-{seed}"), policy, POOL, RESPONSES)
    tested, pairs = sampled(replace(world, split=f"held-out-{seed}"), policy, TESTED, 2)
    judged = [
        (world.render(post), tuple(sorted(pair, key=lambda text: -judge_summary(post, text).quality)))
        for post, pair in zip(tested, pairs, strict=True)
        if len({round(judge_summary(post, text).quality, 9) for text in pair}) > 1
    ]
    test_prompts, test_pairs = [each for each, _ in judged], [each for _, each in judged]
    items = [
        Item(str(number), world.render(post), several, ("sft",) * RESPONSES)
        for number, (post, several) in enumerate(zip(pool, texts, strict=True))
    ]

    def label(chosen: Sequence[Item]) -> list[Comparison]:
        return [world.compare(pool[int(each.id)], *each.responses) for each in chosen]

    found: dict[str, list[float]] = {}
    gaps: dict[str, float] = {}
    at_random = [each for item in items for each in choose([item], [], 1, value=lambda _: 0.0, seed=seed)]
    before = label(at_random[: COUNTS[0]])
    begun = {each.id for each in at_random[: COUNTS[0]]}
    base = Scorers(policy, before, seed)
    for method in ("random", *VALUES):
        labels, scorers = list(before), base
        left = [item for item in items if item.id not in begun]
        found[method] = [base.accuracy(test_prompts, test_pairs)]
        differences = []
        for now, until in pairwise(COUNTS):
            if method == "random":
                chosen = at_random[now:until]
            else:
                scores = scorers.score([str(item.prompt) for item in left], [item.responses for item in left])
                chosen = choose(left, scores, until - now, value=VALUES[method], seed=seed)
            taken = {each.id for each in chosen}
            left = [item for item in left if item.id not in taken]
            labels += label(chosen)
            differences += [
                abs(a - b)
                for each in chosen
                for a, b in [[judge_summary(pool[int(each.id)], text).quality for text in each.responses]]
            ]
            scorers = Scorers(policy, labels, seed)
            found[method].append(scorers.accuracy(test_prompts, test_pairs))
            print(seed, method, until, round(found[method][-1], 3), flush=True)
        gaps[method] = sum(differences) / len(differences)
    return {
        "seed": seed,
        "counts": list(COUNTS),
        "accuracy": found,
        "gold_gap": gaps,
        "num_pairs": len(judged),
        "cpu_seconds": round(time.process_time() - started),
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        outcome = measure(int(name))
        with RECORD.open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")
