"""The stages that use a trained model; see `kedge_base.stage` for the meaning of each attribute."""

from __future__ import annotations

from dataclasses import replace

from kedge.stages.descriptions import (
    ASKED,
    ENVIRONMENT,
    MODEL,
    NEEDS_MODEL,
    NEEDS_PROMPTS,
    REWARD,
    SCORED,
    language_stage,
)
from kedge_base.stage import Flag

PROMPT_TEXTS = Flag(
    ("--prompts",),
    "data.prompts",
    "DATA|TEXT",
    f"Prompts: {ASKED}; or one text. Repeatable.",
    repeats=True,
    takes_text=True,
)
FOR_TRAINING = (
    *("data.demonstrations", "data.comparisons", "data.eval_prompts", "data.pretraining", "data.mix"),
    *("data.max_length", "data.curriculum", "data.draw", "data.train_on", "data.eval_fraction"),
)

GENERATE = language_stage(
    "generate",
    help="Write a model's responses to prompts, with their scores if a reward is given.",
    run="kedge_lab.generate:run_generate",
    sections=(("generate",), SCORED, ("environment",)),
    dotted=("judge",),
    unread=FOR_TRAINING,
    needs={**NEEDS_MODEL, **NEEDS_PROMPTS},
    flags=(
        MODEL,
        PROMPT_TEXTS,
        REWARD,
        ENVIRONMENT,
        Flag(
            ("--best-of",),
            "generate.best_of",
            "N",
            "Sample N responses to each prompt, and write the one that scores best; needs --reward or --environment.",
        ),
    ),
    arguments={"prompts": "data.prompts", "reward": "reward", "environment": "environment.source"},
    makes_model=False,
    resumes=False,
)

EVALUATE = language_stage(
    "evaluate",
    help="Measure the win rate of a policy against another policy or the references; how many prompts it solves "
    "(--samples); or check a critic (--critic).",
    run="kedge_lab.evaluate:evaluate_or_check",
    sections=(("evaluate",), ("generate",), SCORED, ("environment",)),
    dotted=("judge",),
    unread=("generate.best_of", *FOR_TRAINING),
    needs={**NEEDS_MODEL, **NEEDS_PROMPTS, "evaluate.judge": "--judge"},
    needs_with={"evaluate.critic": ("data.prompts",), "environment.source": ("model", "data.prompts")},
    flags=(
        MODEL,
        PROMPT_TEXTS,
        Flag(
            ("--against",),
            "evaluate.against",
            "MODEL",
            "Policy to compare with; the references in the data by default.",
        ),
        Flag(
            ("--samples",),
            "generate.num_responses",
            "N",
            "Responses to each prompt: with several, measure pass@k and maj@k; the judge scores right ones 1.",
        ),
        Flag(
            ("--critic",),
            "evaluate.critic",
            "CRITIC",
            "Check this critic instead: a run, or a trained critic (folder or id).",
        ),
        replace(REWARD, only_with="evaluate.critic", otherwise="; policies are scored by --judge"),
        Flag(
            ("--judge",),
            "evaluate.judge",
            "JUDGE",
            "Judge: a reward model (folder or id), a function (file.py:name) or a model behind an API "
            "(openai:MODEL@URL).",
        ),
        replace(
            ENVIRONMENT,
            help="Environment: the episodes of the policies are compared, or counted as solved, by what it pays.",
        ),
    ),
    arguments={
        "prompts": "data.prompts",
        "reward": "reward",
        "judge": "evaluate.judge",
        "environment": "environment.source",
    },
    inputs=("evaluate.against", "evaluate.frontier"),
    makes_model=False,
    resumes=False,
)

STAGES = (GENERATE, EVALUATE)
"""The stages of this package, in the order of the help."""
