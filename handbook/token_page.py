"""The page that follows a token: its text with the figures filled in."""

from __future__ import annotations

import math
from pathlib import Path

from handbook.token import TokenStory, read_record, tell_story

__all__ = ["token_page"]

TEXT = Path(__file__).parent / "token.md"


def token_page() -> str:
    """The page, as Markdown. Its words are about the record that it was written for: a new one wants new words."""
    story = tell_story(read_record())
    figures = {**_batch(story), **_token(story), **_training(story)}
    return TEXT.read_text(encoding="utf-8").format(**figures)


def _batch(story: TokenStory) -> dict[str, str]:
    scores = [row["score"] for row in story.record["responses"]]
    return {
        "parameters": f"{story.record['parameters']:,}",
        "updates_before": str(story.record["updates_before"]),
        "num_responses": str(len(scores)),
        "prompt": story.record["prompt"].replace("\n", "\n> "),
        "response": _response(story),
        "score": _figure(story.score),
        "mean_score": _figure(sum(scores) / len(scores)),
        "sequence_kl": _figure(story.sequence_kl),
        "advantage_mean": _figure(story.advantage_mean),
        "advantage_std": _figure(story.advantage_std),
        "returns_std": _figure(story.returns_std),
        **{name: f"{story.setting(name):g}" for name in ("temperature", "kl_coef", "gamma", "num_epochs")},
        "fading": f"{story.setting('gamma') * story.setting('gae_lambda'):g}",
    }


def _response(story: TokenStory) -> str:
    said = [f" **{_bare(text)}**" if place == story.token else text for place, text in enumerate(story.tokens)]
    return "".join(said).strip().replace("<|end|>", "`<|end|>`")


def _token(story: TokenStory) -> dict[str, str]:
    before = story.token - 2
    kl, rewards, values = story.of(story.kl), story.of(story.rewards), story.of(story.values)
    return {
        "token": _bare(story.tokens[story.token]),
        "probability": _share(math.exp(story.at(story.logprobs))),
        "logprob": _figure(story.at(story.logprobs)),
        "ref_logprob": _figure(story.at(story.ref_logprobs)),
        "kl": _figure(kl[story.token]),
        "kl_before": _figure(kl[before]),
        "ref_before": _share(math.exp(story.of(story.ref_logprobs)[before])),
        "paid_before": _figure(-rewards[before]),
        "reward": _figure(rewards[story.token]),
        "value": _figure(values[story.token]),
        "next_value": _figure(values[story.token + 1]),
        "delta": _figure(story.at(story.residuals)),
        "raw_advantage": _figure(story.at(story.raw_advantages)),
        "advantage": _figure(story.at(story.advantages)),
        "return_": _figure(story.at(story.returns)),
        "value_error": _figure((story.at(story.returns) - story.at(story.values)) / story.returns_std),
        "value_loss": _figure(story.value_loss),
    }


def _training(story: TokenStory) -> dict[str, str]:
    ratios = [1.0, *(float(epoch[story.row, story.token]) for epoch in story.ratios)]
    clip_range = story.setting("clip_range")
    told = {False: "free: it may go on", True: "held by the clip: no gradient"}
    rows = [
        f"| epoch {number} | {_figure(ratio)} | {_figure(loss)} | {told[held]} |"
        for number, (ratio, loss, held) in enumerate(zip(ratios, story.losses, story.held, strict=False), start=1)
    ]
    return {
        "low": f"{1 - clip_range:g}",
        "high": f"{1 + clip_range:g}",
        "epochs": "\n".join(rows),
        "third_ratio": _figure(ratios[3]),
        "last_ratio": _figure(ratios[-1]),
        "new_probability": _share(math.exp(story.at(story.logprobs)) * ratios[-1]),
    }


def _bare(token: str) -> str:
    return token.strip()


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _figure(value: float) -> str:
    """Three decimals, with a proper minus."""
    return f"{value:.3f}".replace("-", "−")
