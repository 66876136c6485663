"""Generates docs/token.md: its text with the values filled in."""

from __future__ import annotations

import math
from pathlib import Path

from handbook.token import TokenUpdate, compute_update, read_record

TEXT = Path(__file__).parent / "token.md"


def token_page() -> str:
    """The page, as Markdown. The text describes the committed record; a new record needs a new text."""
    update = compute_update(read_record())
    values = {**_batch(update), **_token(update), **_training(update)}
    return TEXT.read_text(encoding="utf-8").format(**values)


def _batch(update: TokenUpdate) -> dict[str, str]:
    scores = [row["score"] for row in update.record["responses"]]
    return {
        "parameters": f"{update.record['parameters']:,}",
        "updates_before": str(update.record["updates_before"]),
        "num_responses": str(len(scores)),
        "prompt": update.record["prompt"].replace("\n", "\n> "),
        "response": _response(update),
        "score": _number(update.score),
        "mean_score": _number(sum(scores) / len(scores)),
        "sequence_kl": _number(update.sequence_kl),
        "advantage_mean": _number(update.advantage_mean),
        "advantage_std": _number(update.advantage_std),
        "returns_std": _number(update.returns_std),
        **{name: f"{update.setting(name):g}" for name in ("temperature", "kl_coef", "gamma", "num_epochs")},
        "decay": f"{update.setting('gamma') * update.setting('gae_lambda'):g}",
    }


def _response(update: TokenUpdate) -> str:
    texts = [f" **{_bare(text)}**" if place == update.token else text for place, text in enumerate(update.tokens)]
    return "".join(texts).strip().replace("<|end|>", "`<|end|>`")


def _token(update: TokenUpdate) -> dict[str, str]:
    before = update.token - 2
    kl = update.of(update.kl)
    rewards = update.of(update.rewards)
    values = update.of(update.values)
    return {
        "token": _bare(update.tokens[update.token]),
        "probability": _percentage(math.exp(update.at(update.logprobs))),
        "logprob": _number(update.at(update.logprobs)),
        "ref_logprob": _number(update.at(update.ref_logprobs)),
        "kl": _number(kl[update.token]),
        "kl_before": _number(kl[before]),
        "ref_before": _percentage(math.exp(update.of(update.ref_logprobs)[before])),
        "paid_before": _number(-rewards[before]),
        "reward": _number(rewards[update.token]),
        "value": _number(values[update.token]),
        "next_value": _number(values[update.token + 1]),
        "delta": _number(update.at(update.residuals)),
        "raw_advantage": _number(update.at(update.raw_advantages)),
        "advantage": _number(update.at(update.advantages)),
        "return_": _number(update.at(update.returns)),
        "value_error": _number((update.at(update.returns) - update.at(update.values)) / update.returns_std),
        "value_loss": _number(update.value_loss),
    }


def _training(update: TokenUpdate) -> dict[str, str]:
    ratios = [1.0, *(float(epoch[update.row, update.token]) for epoch in update.ratios)]
    clip_range = update.setting("clip_range")
    effect = {False: "not clipped", True: "clipped: no gradient"}
    rows = [
        f"| epoch {number} | {_number(ratio)} | {_number(loss)} | {effect[clipped]} |"
        for number, (ratio, loss, clipped) in enumerate(
            zip(ratios, update.losses, update.clipped, strict=False), start=1
        )
    ]
    return {
        "low": f"{1 - clip_range:g}",
        "high": f"{1 + clip_range:g}",
        "epochs": "\n".join(rows),
        "third_ratio": _number(ratios[3]),
        "last_ratio": _number(ratios[-1]),
        "new_probability": _percentage(math.exp(update.at(update.logprobs)) * ratios[-1]),
    }


def _bare(token: str) -> str:
    return token.strip()


def _percentage(value: float) -> str:
    return f"{100 * value:.1f} %"


def _number(value: float) -> str:
    """Three decimals, with a typographic minus sign."""
    return f"{value:.3f}".replace("-", "−")
