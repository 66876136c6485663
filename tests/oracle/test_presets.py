"""Whole updates of real runs, with every preset, against the papers' formulas as slow loops in float64.

A run samples, scores and trains as it does for users; the oracle gets the sampled tokens and the order of the
minibatches, and nothing else that kedge computed. Only sizes are changed: few responses, few tokens, few updates, and a
learning rate that moves a tiny model.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from kedge.algorithm.experience import Rollout
from kedge.config import Config, config_from_settings, load_config
from kedge.config.presets import LANGUAGE_PRESETS, PRESETS
from kedge.models.pretrained import NORMALIZATION_KEY
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.trainer import Trainer
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge.training import update as training_update
from kedge_base.errors import ConfigError, KedgeError
from tests.oracle.slow import SlowPpo, Text
from tests.tiny import TEXTS, tiny_causal_lm, tiny_reward_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer(vocab_size=259)  # single bytes
PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time", "The tide", "The sun"]
UPDATES = 2
"""Updates of the policy that are compared; a warm-up of the critic comes before them."""

ROUNDING = 1e-2
"""Largest distance of a weight, in learning rates. Adam divides by |g| + 1e-5 at first, so that float32's rounding of a
small gradient is a visible part of its step; a wrong formula moves weights by a whole step."""

SMALL: dict[str, Any] = {
    "num_prompts": 4, "max_new_tokens": 7, "num_updates": UPDATES, "learning_rate": 1e-3,
    "report": False, "num_fixed_prompts": 0,
}  # fmt: skip
GROUPS = {"num_prompts": 3, "num_responses": 4}
WARM = {"value_warmup_updates": 1, "num_updates": UPDATES + 1}
SIZES: dict[str, dict[str, Any]] = {
    "ppo": {"num_minibatches": 2},
    "tldr-n+": {"reward": "model"},
    "instructgpt": {"reward": "model", "num_minibatches": 2, "num_updates": 50, "max_kl": 1e-6},
    "stiennon": {"reward": "model"},
    "ziegler": {"kl_controller": {"ziegler": {"horizon": 40, "wait": 0.0}}, "num_updates": 50, "max_kl": 1e-6},
    "s2-defaults": {},
    "small-cpu": {},
    "small-instruct": {"learning_rate": 3e-4},  # the head takes thirty times as much
    "rloo": GROUPS,
    "grpo": {**GROUPS, "learning_rate": 1e-2},  # the KL starts at 0
    "dr-grpo": GROUPS,
    "reinforce++": {},
    "spo": {"num_prompts": 4, "num_updates": 5, "num_minibatches": 2},  # until prompts recur
    "critic": {"num_prompts": 8, "num_updates": 4},  # until the critic has a weight
    "dapo": {**GROUPS, "num_minibatches": 4},
    "gspo": {**GROUPS, "num_minibatches": 4},
    "gigpo": {**GROUPS, "learning_rate": 1e-2},  # the KL starts at 0
    "cispo": {**GROUPS, "num_minibatches": 4, "learning_rate": 1e-2},  # ratios beyond a clip range
    "vapo": {**GROUPS, **WARM, "num_minibatches": 4},
    "sao": {**WARM, "num_updates": 5, "learning_rate": 2e-2},  # far enough for tokens to leave its clip range
    "distill": {"reference": "teacher", "num_minibatches": 2, "learning_rate": 2e-2},  # ratios beyond a clip range
}
"""What is smaller than in each preset; `reward` is what scores, a function unless it is given."""


IN_MAKE_TEST = ("ppo", "tldr-n+", "ziegler", "grpo", "spo", "critic", "dapo", "sao")


@dataclass
class Recorded:
    """What a run did in an update: what it sampled, what it trained on, in which order, the metrics of its steps."""

    sampled: list[Text] = field(default_factory=list)
    trained: list[Text] = field(default_factory=list)
    orders: list[list[list[int]]] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)


def score(response: list[int]) -> float:
    """0, ½ or 1, so that some groups have no spread."""
    return sum(response) % 3 / 2


def rewarded(completion_ids: list[list[int]]) -> list[float]:
    return [score(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A policy that stops at one token in five, by EOS or a full stop, a reward model, and a teacher."""
    folder, policy = tmp_path_factory.mktemp("models"), tiny_causal_lm("llama", len(TOKENIZER)).eval()
    with torch.no_grad():
        states = [policy.model(torch.tensor([TOKENIZER.encode(text)])).last_hidden_state[0] for text in TEXTS]
        direction = torch.cat(states).mean(0)
        policy.lm_head.weight[TOKENIZER.encode("<eos>.")] = 1.8 * direction / direction.norm()
    found = {"policy": policy, "model": tiny_reward_model("llama", len(TOKENIZER), seed=3)}
    found["teacher"] = tiny_causal_lm("llama", len(TOKENIZER), seed=5).eval()
    for name, model in found.items():
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    return {name: folder / name for name in found}


def record(monkeypatch: pytest.MonkeyPatch) -> dict[int, Recorded]:
    """What the run from here on does, by update."""
    found: dict[int, Recorded] = defaultdict(Recorded)
    sample, improve, minibatches_of = Trainer.sample, Trainer.improve, training_update.minibatches_of
    random_rows = training_update.random_rows

    def sampling(self, prompts, *names, **options):
        rollout = sample(self, prompts, *names, **options)
        if names[:1] == ("rollout",):
            found[self.update].sampled += texts_of(rollout)
        return rollout

    def improving(self, experience, **options):
        update = self.update
        found[update].trained = texts_of(experience.rollout)

        def drawing(*arguments):
            parts = minibatches_of(*arguments)
            found[update].orders.append([part.tolist() for part in parts])
            return parts

        def choosing(*arguments, **options):
            rows = random_rows(*arguments, **options)
            found[update].choices.append(rows.tolist())
            return rows

        with monkeypatch.context() as patch:
            patch.setattr(training_update, "minibatches_of", drawing)
            patch.setattr(training_update, "random_rows", choosing)
            result = improve(self, experience, **options)
        found[update].steps = result.steps
        return result

    monkeypatch.setattr(Trainer, "sample", sampling)
    monkeypatch.setattr(Trainer, "improve", improving)
    return found


def texts_of(rollout: Rollout) -> list[Text]:
    """The ids of each prompt and response."""
    prompts, responses = (
        [row[counted].tolist() for row, counted in zip(ids, mask, strict=True)]
        for ids, mask in ((rollout.prompt_ids, rollout.prompt_mask), (rollout.response_ids, rollout.action_mask))
    )
    return list(zip(prompts, responses, strict=True))


def oracle_of(config: Config, models: Mapping[str, Path], *, by_model: bool) -> SlowPpo:
    """The oracle at the start of a run whose scores are a reward model's, or a function's."""

    def load(kind: Any, name: str, **options: Any) -> Any:
        with torch.random.fork_rng():
            return kind.from_pretrained(models[name], dtype=torch.float64, **options).eval()

    policy, head, critic, settings = load(AutoModelForCausalLM, "policy"), None, None, config.model_dump()
    parts = {"kl_in": config.ppo.kl_in.name, "schedule": config.ppo.decay}
    parts |= {name: getattr(config.ppo, name) for name in ("kl_estimator", "warmup_fraction")}
    parts |= {"advantage": config.ppo.estimator, "step_weight": 1.0}
    parts |= {"critic": config.ppo.critic.name, "readout_batches": config.ppo.readout_batches}
    new = None
    if config.ppo.resolved_critic == "shared":
        new = head = nn.Linear(policy.config.hidden_size, 1, dtype=torch.float64)
    elif config.ppo.resolved_critic == "separate":
        critic = load(AutoModelForSequenceClassification, "model" if by_model else "policy", num_labels=1)
        new = None if by_model else critic.score
        if config.ppo.critic.name == "frozen_attention":
            for layer in critic.model.layers:
                layer.self_attn.requires_grad_(False)
    for weight in () if new is None else new.parameters():
        nn.init.zeros_(weight)
    return SlowPpo(
        {**settings["rollout"], **config.optimization.arguments, **settings["ppo"], **parts},
        policy,
        reference=load(AutoModelForCausalLM, "policy" if config.ppo.reference is None else "teacher"),
        pad_id=TOKENIZER.encode("<pad>")[0],
        stop_ids=TOKENIZER.encode(config.rollout.stop_token or "<eos>"),
        head=head,
        critic=critic,
        new_head=new,
        scorer=load(AutoModelForSequenceClassification, "model") if by_model else None,
        score=score,
    )


Weights = dict[str, torch.Tensor]


def run_preset(
    preset: str, models: Mapping[str, Path], out: Path, **changes: Any
) -> tuple[Config, list[dict[str, float]], dict[int, Weights]]:
    """A small run with a preset: its settings, the metrics of each update, and the weights after it."""
    sizes = SIZES[preset] | changes
    reward = [str(models["model"])] if sizes.pop("reward", None) == "model" else rewarded
    named = {} if preset == "ppo" else {"preset": preset}
    if "reference" in sizes:
        named["reference"] = str(models[sizes.pop("reference")])
    config = config_from_settings("ppo", {**SMALL, **sizes, **named, "model": str(models["policy"]), "out": str(out)})
    weights: dict[int, Weights] = {}

    def keep(update: int, roles: Roles) -> None:
        weights[update] = {name: each.detach().clone() for name, each in roles.actor_critic.named_parameters()}

    return config, run_ppo(config, prompts=PROMPTS, reward=reward, on_update=keep).metrics, weights


@pytest.mark.parametrize(
    "preset", [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.slow) for name in SIZES]
)
def test_every_update_is_that_of_the_papers_formulas(preset, models, tmp_path, monkeypatch):
    recorded = record(monkeypatch)
    config, rows, weights = run_preset(preset, models, tmp_path / "run")
    oracle = oracle_of(config, models, by_model=SIZES[preset].get("reward") == "model")
    for update, metrics in enumerate(rows, 1):
        done = recorded[update]
        report = oracle.update(update, done.sampled, done.orders)
        assert report.trained == done.trained
        for found, expected in [(metrics, report.figures), *zip(done.steps, report.steps, strict=True)]:
            # Explained variance is 1 minus a ratio of about 2, whose rounding depends on the kind of processor.
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=2e-5)
        assert distance(weights[update], oracle.weights()) < ROUNDING * config.ppo.learning_rate
    if preset == "critic":
        assert max(row["advantage/critic_weight"] for row in rows) > 0.1
    if preset == "sao":  # whose critic changes outside its attention only
        frozen = [name for name in weights[1] if re.search(r"critic\..*\.self_attn\..*_proj", name)]
        assert len(frozen) == 4 * len(oracle.critic.model.layers)
        for name in weights[1]:
            is_kept = torch.equal(weights[1][name], weights[len(rows)][name])
            assert is_kept == (name in frozen) or not name.startswith("critic.classifier")
    if preset == "sao":  # whose mask is for stale tokens: one step per update has no other ratios
        masked = [metrics["policy/clip_fraction"] for metrics in rows]
        assert masked[:2] == [0.0, 0.0], "the critic's warm-up, and responses of the policy that is trained"
        assert max(masked[2:]) > 0.0
        assert all("policy/sampler_truncated" not in metrics for metrics in rows)  # the ratio is the correction
        assert not (tmp_path / "run" / "incidents.jsonl").exists()  # older weights are not a mismatch


BY_TURN: dict[str, dict[str, Any]] = {
    "after the score": {"score_at": "after_last", "gamma": 0.9, "gae_lambda": 0.8, "value_gae_lambda": 0.5},
    "separate": {"critic": "separate", "ratio": "turn", "clip_range": 1e-3, "num_minibatches": 2, "gamma": 0.7},
    "to go": {"advantage": "to_go", "gamma": 0.5, "ratio": "turn", "aggregation": "sequence", "clip_range": 1e-3},
    "whitened": {"whiten_rewards": True, "value_unit": "score", "kl_in": "score", "learning_rate": 3e-4},
}
"""Runs in which a response, a single turn, is one action."""


@pytest.mark.parametrize("name", BY_TURN)
def test_every_update_by_turn_is_that_of_the_papers_formulas(name, models, tmp_path, monkeypatch):
    recorded = record(monkeypatch)
    config, rows, weights = run_preset("ppo", models, tmp_path / "run", credit="turn", **BY_TURN[name])
    oracle = oracle_of(config, models, by_model=False)
    for update, metrics in enumerate(rows, 1):
        report = oracle.update(update, recorded[update].sampled, recorded[update].orders)
        steps = zip(recorded[update].steps, report.steps, strict=True)
        for found, expected in [(metrics, report.figures), *steps]:
            assert {each: found[each] for each in expected} == pytest.approx(expected, rel=1e-5, abs=2e-5)
        assert distance(weights[update], oracle.weights()) < ROUNDING * config.ppo.learning_rate


SHARES: dict[str, dict[str, Any]] = {
    "ppo": {"num_minibatches": 2, "num_epochs": 0.5},
    "grpo": {"num_minibatches": 1, "num_epochs": 0.25},
    "dapo": {"num_minibatches": 2, "num_epochs": 0.7},
}
"""Runs that train on a share of their responses."""


@pytest.mark.parametrize("preset", SHARES)
def test_every_update_on_a_share_is_that_of_the_papers_formulas(preset, models, tmp_path, monkeypatch):
    recorded = record(monkeypatch)
    config, rows, weights = run_preset(preset, models, tmp_path / "run", **SHARES[preset])
    oracle = oracle_of(config, models, by_model=False)
    for update, metrics in enumerate(rows, 1):
        done = recorded[update]
        report = oracle.update(update, done.sampled, done.orders, done.choices)
        if preset == "grpo":
            report.figures.pop("objective/kl")  # of the responses that were trained on alone
        assert len(done.choices) == config.ppo.num_minibatches
        for found, expected in [(metrics, report.figures), *zip(done.steps, report.steps, strict=True)]:
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=2e-5)
        assert distance(weights[update], oracle.weights()) < ROUNDING * config.ppo.learning_rate


def distance(one: Weights, other: Weights) -> float:
    """The largest difference of a weight; of other models, infinite."""
    return max(float((one[name] - other[name]).abs().max()) for name in one) if one.keys() == other.keys() else math.inf


def test_every_preset_is_compared():
    assert list(SIZES) == ["ppo", *LANGUAGE_PRESETS]


OTHERS: dict[str, Any] = {
    "rollout.num_prompts": 2,
    "rollout.num_responses": 2,
    "rollout.max_new_tokens": 5,
    "rollout.missing_eos_score": None,
    "ppo.num_updates": 6,
    "ppo.learning_rate": 5e-4,
    "ppo.num_minibatches": 1,
    "ppo.value_warmup_updates": 0,
    "ppo.kl_in": {"loss": "k2"},
    "ppo.kl_controller": {"ziegler": {"horizon": 10, "wait": 0.0}},
    "ppo.critic_init": "policy",
    "ppo.value_clip_range": 1e-3,
    "ppo.clip_range_high": 1e-2,
    "ppo.whiten_advantages": False,
}
"""Values that a field is compared with if its default is large, or stands for what presets set."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", LANGUAGE_PRESETS)
def test_every_field_of_a_preset_acts(preset, models, tmp_path):
    """With another value for it, the run ends with other weights, or is refused."""
    defaults, idle = Config().model_dump(), []
    config, _, whole = run_preset(preset, models, tmp_path / "whole")
    for name, cited in PRESETS[preset].values.items():
        section, field_name = name.split(".")
        default = defaults[section][field_name]
        if section not in ("ppo", "rollout", "optimization") or cited.value == default:
            continue
        other = "separate" if cited.value == "shared" else OTHERS.get(name, default)
        other = default if other == cited.value else other
        try:
            _, _, weights = run_preset(preset, models, tmp_path / name, **{field_name: other})
        except ConfigError:
            continue
        if distance(list(whole.values())[-1], list(weights.values())[-1]) < ROUNDING * config.ppo.learning_rate:
            idle.append(name)
    # A response to a prompt is one turn, after which nothing is left to discount.
    assert idle == (["ppo.gamma"] if preset == "gigpo" else [])


DEMONSTRATIONS = [{"prompt": text, "completion": " sun and sea" * (1 + i % 3)} for i, text in enumerate(PROMPTS)]
COMPARISONS = [{"prompt": text, "chosen": " sun", "rejected": f" rope {text}"} for text in PROMPTS]
STAGES: dict[str, tuple[str, Callable[[Config], Any]]] = {
    "sft": ("sft", lambda config: run_sft(config, demonstrations=DEMONSTRATIONS)),
    "reward_model": (
        "reward",
        lambda config: run_reward(config, comparisons=COMPARISONS, demonstrations=DEMONSTRATIONS[:3]),
    ),
}
SHORT = {"sft.batch_size": 2, "sft.num_epochs": 2, "reward_model.batch_size": 2, "data.eval_fraction": 0}


@pytest.mark.slow
@pytest.mark.parametrize("section", STAGES)
@pytest.mark.parametrize("preset", [name for name in LANGUAGE_PRESETS if "data.max_length" in PRESETS[name].values])
def test_every_field_of_the_stages_before_acts(preset, section, models, tmp_path):
    """As above, for the weights of the stage's model, and the shift of its scores."""
    stage, run = STAGES[section]

    def trained(name: str, **changes: Any) -> Weights:
        place = {"model": str(models["policy"]), "out": str(tmp_path / name), "report": False}
        model = run(config_from_settings(stage, {"preset": preset, **place, **SHORT, **changes})).model
        shift = json.loads((model / "config.json").read_text()).get(NORMALIZATION_KEY, 0.0)
        return {**load_file(model / "model.safetensors"), "shift": torch.tensor(shift)}

    whole, defaults, idle = trained("whole"), Config().model_dump(), []
    rate = getattr(load_config(preset=preset), section).learning_rate
    for name, cited in PRESETS[preset].values.items():
        own, field_name = name.split(".")
        others = {"max_length": 12, "batch_size": 3, "num_epochs": 1, "normalize": "none"}
        other = others.get(field_name, defaults[own][field_name])
        if (
            own not in (section, "data", "optimization")
            or cited.value == defaults[own][field_name]
            or name == "data.max_prompt_tokens"
        ):
            continue
        try:
            changed = trained(name, **{name: other})
        except KedgeError:
            continue
        if distance(whole, changed) < ROUNDING * rate:
            idle.append(name)
    assert idle == []
