"""Sorting with a critic that reads the worked solution: `python -m bench.privileged` runs what is not recorded.

The task is the study's. The privileged critic has a sixth of the policy's parameters. It starts as a language model of
careless answers after the solution: from scores alone, a model from scratch does not learn to compare two texts. Arms
are compared at equal tokens of the policy and at equal FLOPs; the critics' training before PPO is in neither.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import kedge
from bench.examples import mean_score
from bench.processes import environment
from bench.study.child import run_unit
from bench.study.sort_task import (
    CRITIC,
    DEMONSTRATIONS_SEED,
    HELD_OUT_SEED,
    MODEL,
    NUM_DEMONSTRATIONS,
    NUM_HELD_OUT,
    NUM_PROMPTS,
    PROMPTS_SEED,
    SFT,
    SORT,
)
from bench.study.sorting import START, character_tokenizer, demonstrations, numbers, scratchpad, verify
from bench.study.task import QUIET, Problem
from bench.study.unit import Budget, Outcome, Unit, append_outcome, read_outcomes
from bench.tables import renewed
from kedge.models.untrained import save_untrained_llama
from kedge_base.intervals import mean_interval
from kedge_base.run_folder.output import replace_file

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "bench" / ".work" / "privileged"
RECORD: Final = ROOT / "bench" / "results" / "privileged.jsonl"
CRITICS: Final = ROOT / "bench" / "results" / "privileged.json"
PAGE: Final = ROOT / "bench" / "privileged.md"
NAME: Final = "privileged"

TOKENS: Final = 160_000
SHARE: Final = 0.5
"""The part of it that tuning runs get."""
SEEDS: Final = (0, 1, 2, 3, 4)
TUNING_SEED: Final = 100
RATES: Final = (2e-4, 5e-4, 1.2e-3)
TEMPLATE: Final = "{solution}" + START
SMALL: Final = {**MODEL, "hidden_size": 32, "num_layers": 2, "context_length": 112}

TRAINED_FIGURES: Final = ("explained_variance", "explained_by_third", "num_responses")
CHECKED_FIGURES: Final = ("pairs_within", "ceiling_within", "num_prefixes")

COMMON: Final[dict[str, Any]] = {
    "ppo.num_updates": 2000,  # the budget ends a run
    "ppo.schedule": "constant",
    "ppo.kl_coef": 0.0,
    "ppo.num_minibatches": 2,
    "ppo.eval_every": 6,
    "rollout.num_prompts": 128,
    "rollout.max_new_tokens": 48,
    "rollout.temperature": 1.0,
    "data.max_prompt_tokens": 16,
    "runtime.precision": "fp32",
}
EPOCHS: Final = ({"ppo.num_epochs": 1}, {"ppo.num_epochs": 2})
LAMBDAS: Final = ({"ppo.gae_lambda": 1.0}, {"ppo.gae_lambda": 0.9, "ppo.value_gae_lambda": 1.0})
TRAINED: Final = {"ppo.value_coef": 1.0, "ppo.critic_learning_rate": 1e-3, "ppo.num_epochs": 1}

ARMS: Final[Mapping[str, tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]] = {
    "privileged critic": ({**TRAINED, "ppo.critic": {"privileged": TEMPLATE}, "ppo.critic_init": "{small}"}, LAMBDAS),
    "critic of the policy's size": ({**TRAINED, "ppo.critic": "separate", "ppo.critic_init": "{plain}"}, LAMBDAS),
    "REINFORCE++": ({"ppo.advantage": "reinforce++"}, EPOCHS),
    "RLOO": ({"ppo.advantage": "rloo", "rollout.num_prompts": 16, "rollout.num_responses": 8}, EPOCHS),
}
"""Settings, and those that are tuned together with the learning rate."""


def main() -> int:
    """Run what is missing, and renew the tables of bench/privileged.md."""
    parser = argparse.ArgumentParser(prog="python -m bench.privileged", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write from the record, and run nothing")
    if not parser.parse_args().page:
        build()
        for arm in ARMS:
            for settings in tuned(arm):
                run_missing(unit(arm, settings, TUNING_SEED, SHARE))
            for seed in SEEDS:
                run_missing(unit(arm, best(arm, read_outcomes(RECORD)), seed))
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), NAME, page()), encoding="utf-8")
    return 0


def build() -> None:
    """Train the policy's start and both critics, once; record what the critics explain."""
    held_out = numbers(NUM_HELD_OUT, seed=HELD_OUT_SEED)
    if not (WORK / "sft" / "model").is_dir():
        WORK.mkdir(parents=True, exist_ok=True)
        SORT.build(WORK)
    if not (WORK / "small" / "model").is_dir():
        save_untrained_llama(WORK / "untrained", character_tokenizer(), **SMALL, seed=1)
        prompts = numbers(NUM_DEMONSTRATIONS, seed=DEMONSTRATIONS_SEED, without=held_out)
        rows = [
            {**row, "prompt": row["prompt"] + TEMPLATE.format(solution=scratchpad(row["prompt"].rstrip(START)))}
            for row in demonstrations(prompts, seed=DEMONSTRATIONS_SEED)
        ]
        longer = {"data.max_prompt_tokens": 64, "data.max_length": 112, "sft.num_epochs": 4}
        kedge.sft(model=WORK / "untrained", demonstrations=rows, out=WORK / "small", **{**QUIET, **SFT, **longer})
    more = {"critic.num_prompts": 8192, "critic.num_epochs": 6, "critic.learning_rate": 3e-3}
    kinds: dict[str, dict[str, Any]] = {
        "privileged": {"critic.base": str(WORK / "small" / "model"), "ppo.critic": {"privileged": TEMPLATE}},
        "plain": {},
    }
    known = json.loads(CRITICS.read_text(encoding="utf-8")) if CRITICS.is_file() else {}
    for kind, settings in kinds.items():
        out = WORK / kind
        common = {"model": WORK / "sft" / "model", "reward": verify, **QUIET}
        if not (out / "model").is_dir():
            prompts, held = problem().prompts, problem().held_out
            kedge.critic(**common, prompts=prompts, eval_prompts=held, out=out, **{**CRITIC, **more, **settings})
        if kind not in known:
            given = {"rollout.max_new_tokens": 48, "data.max_prompt_tokens": 16, "ppo.critic_check.size": [128, 4, 8]}
            held = problem().held_out
            checked = kedge.evaluate(**common, critic=out / "model", prompts=held, out=WORK / f"{kind}-check", **given)
            trained = json.loads((out / "summary.json").read_bytes())
            known[kind] = {name: trained[name] for name in TRAINED_FIGURES}
            known[kind] |= {name: checked.summary[name] for name in CHECKED_FIGURES}
            replace_file(CRITICS, [json.dumps(known, indent=1).encode(), b"\n"])


def problem() -> Problem:
    """The policy, prompts with their solutions, and the reward."""
    held_out = numbers(NUM_HELD_OUT, seed=HELD_OUT_SEED)
    texts = numbers(NUM_PROMPTS, seed=PROMPTS_SEED, without=held_out)
    train, held = (
        [{"prompt": text, "solution": scratchpad(text.rstrip(START))} for text in part] for part in (texts, held_out)
    )
    return Problem(WORK / "sft" / "model", train, held, verify, "eval/score")


def tuned(arm: str) -> list[dict[str, Any]]:
    """The settings to choose from, as many for each arm."""
    return [{"ppo.learning_rate": rate, **others} for rate in RATES for others in ARMS[arm][1]]


def unit(arm: str, settings: Mapping[str, Any], seed: int, share: float = 1.0) -> Unit:
    """A run of an arm."""
    return Unit(NAME, {**COMMON, **ARMS[arm][0], **settings}, seed, Budget(TOKENS * share, 0))


def best(arm: str, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """The settings with the best mean score over a tuning run, all of which are recorded."""
    end = TOKENS * SHARE
    return max(tuned(arm), key=lambda each: mean_score(outcomes[unit(arm, each, TUNING_SEED, SHARE).key], end))


def run_missing(wanted: Unit) -> None:
    """Make a run and record it, unless it is recorded."""
    if wanted.key in read_outcomes(RECORD):
        return
    folders = {"{small}": str(WORK / "privileged" / "model"), "{plain}": str(WORK / "plain" / "model")}
    settings = {name: folders.get(str(value), value) for name, value in wanted.settings.items()}
    placed = Unit(wanted.task, settings, wanted.seed, wanted.budget)
    found = run_unit(placed, problem(), Path(), WORK / "runs" / wanted.key)
    append_outcome(Outcome(**{**vars(found), "key": wanted.key}), RECORD)


def page() -> str:
    """What the critics explain, and the arms' scores."""
    critics = json.loads(CRITICS.read_text(encoding="utf-8"))
    lines = [
        "| before PPO | explained variance | by third of the response | pairs of one prompt in the right order |",
        "|---|---|---|---|",
    ]
    for kind, found in critics.items():
        thirds = ", ".join(f"{each:.2f}" for each in found["explained_by_third"])
        lines.append(
            f"| {kind} critic | {found['explained_variance']['value']:.2f} | {thirds} | "
            f"{found['pairs_within']['value']:.2f} (at most {found['ceiling_within']:.2f}) |"
        )
    outcomes = read_outcomes(RECORD)
    runs = {arm: [outcomes[unit(arm, best(arm, outcomes), seed).key] for seed in SEEDS] for arm in ARMS}
    flops = min(each.flops[-1] for found in runs.values() for each in found)
    lines += [
        "",
        f"| right, after | {TOKENS:,} tokens | {flops / 1e9:,.0f}·10⁹ FLOPs | explained variance, late |",
        "|---|---|---|---|",
    ]
    for arm, found in runs.items():
        budgets = ("tokens", TOKENS), ("flops", flops)
        at = [mean_interval([each.score_at(*budget) for each in found]) for budget in budgets]
        late = [each.explained_late for each in found if each.explained_late is not None]
        explained = f"{sum(late) / len(late):.2f}" if late else "–"
        lines.append(f"| {arm} | {at[0]} | {at[1]} | {explained} |")
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.update(environment(1))
    sys.exit(main())
