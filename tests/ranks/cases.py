"""Short runs of every stage that several ranks can do together: `python -m tests.ranks.cases OUT CASE …`.

Each writes its run to OUT/runs/CASE; of CASE:shard, with sharded weights, to OUT/runs/CASE-shard. Started by torchrun,
all ranks take part in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kedge
from kedge.rewards import RewardTerm
from tests.tasks.environments.worlds import Rooms
from tests.tiny import save_tiny_policy, save_tiny_reward_model

PROMPTS = ["The boat", "A sailor and his long rope", "My rope broke", "Once upon a time", "The tide", "Wind and rain"]
TEXTS = [{"prompt": text, "completion": " sails" * (number + 1)} for number, text in enumerate(PROMPTS * 2)]
PAIRS = [
    {"prompt": text, "chosen": f" sails{' on' * number}", "rejected": " sinks"} for number, text in enumerate(PROMPTS)
]
PPO = {
    "num_updates": 3,
    "learning_rate": 1e-3,
    "num_epochs": 2,
    "max_new_tokens": 10,
    "micro_batch_tokens": 48,
    "missing_eos_score": None,  # with it, all responses of a random model score alike, and only rounding is learned
    "eval_fraction": 0.0,
}


def vowels(completions: list[str], **_: object) -> list[float | None]:
    """The number of vowels; the second response has no score."""
    return [
        None if row == 1 else float(sum(text.count(vowel) for vowel in "aeiou")) for row, text in enumerate(completions)
    ]


def vowels_of_all(completions: list[str], **_: object) -> list[float]:
    """The number of vowels."""
    return [float(sum(text.count(vowel) for vowel in "aeiou")) for text in completions]


def three_vowels(completions: list[str], **_: object) -> list[float]:
    """1 for at least three vowels: equal scores in some groups."""
    return [float(count >= 3) for count in vowels_of_all(completions)]


def shared(models: Path) -> dict[str, Any]:
    """Value head, ptx, minibatches of uneven rows, a function that leaves a row unscored, and a reward model."""
    return {
        **PPO,
        "reward": [RewardTerm(vowels), RewardTerm(models / "reward", weight=0.5)],
        "num_prompts": 6,
        "num_minibatches": 3,
        "ppo.critic": "shared",
        "ppo.ptx_coef": 0.5,
        "data.pretraining": str(models / "texts.jsonl"),
        "ppo.kl_controller": "ziegler",
    }


def separate(models: Path) -> dict[str, Any]:
    """A critic from the reward model with frozen attention: warm-up, more passes than the policy, prefix tests."""
    return {
        **PPO,
        "reward": models / "reward",
        "num_prompts": 3,
        "num_responses": 2,
        "ppo.critic": "frozen_attention",
        "ppo.value_warmup_updates": 1,
        "ppo.num_critic_epochs": 2,
        "ppo.critic_check": 3,
        "ppo.eval_every": 2,
        "data.eval_fraction": 0.34,
        "checkpoint.keep_best": "eval/score",
    }


def readout(models: Path) -> dict[str, Any]:
    """A read-out of the policy's states, of rows that the ranks share unevenly, first while the policy waits."""
    return {
        **PPO,
        "reward": vowels_of_all,
        "num_prompts": 5,
        "num_responses": 2,
        "num_minibatches": 2,
        "ppo.critic": {"readout": 2},
        "ppo.value_warmup_updates": 1,
    }


def frozen(models: Path) -> dict[str, Any]:
    """A separate critic that is not trained."""
    return {**PPO, "num_updates": 2, "reward": models / "reward", "num_prompts": 4, "ppo.critic": "frozen"}


def idle(models: Path) -> dict[str, Any]:
    """Fewer rows in a minibatch than ranks; no critic."""
    return {
        **PPO,
        "reward": vowels_of_all,
        "num_prompts": 2,
        "num_responses": 2,
        "num_minibatches": 4,
        "preset": "grpo",
        "ppo.entropy_coef": 0.01,
    }


def equal_groups(models: Path) -> dict[str, Any]:
    """Groups with equal scores, whose rows have no gradient."""
    return {
        **PPO,
        "num_updates": 2,
        "reward": three_vowels,
        "num_prompts": 6,
        "num_responses": 2,
        "num_minibatches": 2,
        "preset": "grpo",
        "ppo.kl_coef": 0.0,
    }


def part(models: Path) -> dict[str, Any]:
    """Steps on a share of the responses, which alone are evaluated."""
    settings = {"num_updates": 2, "num_responses": 4, "num_minibatches": 2, "ppo.num_epochs": 0.5, "preset": "grpo"}
    return {**PPO, "reward": vowels_of_all, "num_prompts": 3, **settings}


def episodes(models: Path) -> dict[str, Any]:
    """Episodes that open with texts of different lengths, end at different turns, and pay by turn."""
    return {
        **PPO,
        "num_updates": 2,
        "environment": Counting,
        "num_prompts": 5,
        "num_minibatches": 5,
        "max_new_tokens": 30,
        "environment.max_turns": 3,
        "environment.max_turn_tokens": 4,
        "ppo.critic": {"privileged": "Left:{left}"},
    }


def contexts(models: Path) -> dict[str, Any]:
    """Episodes that read notes instead of their history."""
    settings = {**episodes(models), "environment": Rooms, "max_new_tokens": 80}
    return {**settings, "ppo.critic": "separate", "environment.max_turns": 5}


def turns(models: Path) -> dict[str, Any]:
    """Episodes with a turn as one action, in advantages and ratios."""
    return {**episodes(models), "ppo.credit": "turn", "ppo.ratio": "turn", "ppo.clip_range": 1e-3, "ppo.gamma": 0.9}


class Counting:
    """Pays vowels, and ends after some turns."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """The seed decides how long it is."""
        self.left = seed % 3
        return " and" * (seed % 4)

    def privileged(self) -> dict[str, str]:
        """What the critic may know, in texts of different lengths."""
        return {"left": " one" * self.left}

    def step(self, text: str) -> tuple[str, float, bool, bool]:
        """Answer what was said."""
        self.left -= 1
        return " and", float(sum(text.count(vowel) for vowel in "aeiou")), self.left < 0, len(text) > 30


SAMPLED = {"temperature": 0.7, "generate.batch_size": 5, "generate.max_new_tokens": 10}
"""The last batch has fewer responses than three ranks."""


def evaluate(models: Path) -> dict[str, Any]:
    """Another policy as opponent, the KL at another temperature, a reward model as judge."""
    return {"against": models / "other", "judge": models / "reward", "rollout.max_new_tokens": 10}


def pairwise(models: Path) -> dict[str, Any]:
    """A function that compares two responses, which only the first rank calls."""
    return {"against": models / "other", "judge": longer_on_the_first_rank, "judge_mode": "pairwise"}


def check_critic(models: Path) -> dict[str, Any]:
    """A separate critic, checked with continuations of prefixes; a KL of rounding errors would order equal scores."""
    return {
        "critic": models / "reward",
        "reward": vowels_of_all,
        "ppo.critic": "separate",
        "ppo.kl_coef": 0.0,
        "ppo.critic_check.size": [32, 2, 3],
        "rollout.max_new_tokens": 10,
        "rollout.missing_eos_score": None,
    }


def longer_on_the_first_rank(first: list[str], second: list[str], **_: object) -> list[float]:
    """Which text is longer."""
    assert os.environ.get("RANK", "0") == "0"
    return [0.5 if one == two else float(len(one) > len(two)) for one, two in zip(first, second, strict=True)]


CHAIN: Mapping[str, Any] = {
    "reward": [RewardTerm(vowels_of_all, weight=0.1)],
    "labeler": vowels_of_all,
    "rlhf.num_rounds": 2,
    "rlhf.train_critic": True,
    "rlhf.num_prompts": 4,
    "rlhf.num_responses": 3,
    "generate.batch_size": 5,
    "sft.batch_size": 5,
    "reward_model.batch_size": 3,
    "critic.num_prompts": 4,
    "critic.batch_size": 3,
    "rollout.num_prompts": 6,
    "rollout.max_new_tokens": 10,
    "rollout.missing_eos_score": None,
    "ppo.num_updates": 2,
    "ppo.num_minibatches": 2,
    "data.eval_fraction": 0.34,
}
"""Two rounds, each with a critic; labels and an additional reward by a function."""

COMPARED: Mapping[str, Callable[[Path], dict[str, Any]]] = {"evaluate": evaluate, "pairwise": pairwise}


def ahead(models: Path) -> dict[str, Any]:
    """Sampled two updates ahead, with a function and a reward model, and evaluations in between."""
    return {
        **PPO,
        "reward": [RewardTerm(vowels), RewardTerm(models / "reward", weight=0.5)],
        "num_updates": 5,
        "num_prompts": 3,
        "num_minibatches": 3,  # with one, a single process would evaluate a batch that fits into one pass once less
        "max_staleness": 2,
        "ppo.eval_every": 2,
        "data.eval_fraction": 0.34,
    }


def served(models: Path) -> dict[str, Any]:
    """The same one update ahead, sampled by a server, whose address is in the environment."""
    return {
        **ahead(models),
        "max_staleness": 1,
        "rollout.engine": "vllm",
        "rollout.engine.servers": os.environ["SERVER_URL"],
    }


def adapter(models: Path) -> dict[str, Any]:
    """LoRA adapters for the policy and a critic on its base, which is the reference, too."""
    return {**separate(models), "adapter.kind": "lora", "ppo.critic_init": "policy"}


def served_now(models: Path) -> dict[str, Any]:
    """Sampled by the server with the newest weights."""
    return {**served(models), "max_staleness": 0}


ENGINE_CASES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "ahead": ahead,
    "served": served,
    "served_now": served_now,
    "adapter": adapter,
}


def recomputed(models: Path) -> dict[str, Any]:
    """Activations are recomputed in the backward pass."""
    return {**separate(models), "activation_checkpointing": True}


POLICY_CASES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "shared": shared,
    "separate": separate,
    "readout": readout,
    "frozen": frozen,
    "idle": idle,
    "equal_groups": equal_groups,
    "part": part,
    "recomputed": recomputed,
    "episodes": episodes,
    "contexts": contexts,
    "turns": turns,
}


def run(case: str, models: Path, out: Path, **more: Any) -> None:
    """Run one case; the models' folder is made by `save_models`."""
    case, _, parallel = case.partition(":")
    name = f"{case}-{parallel}" if parallel else case
    common = {
        "out": out / name,
        "parallel": parallel or "replicate",
        "precision": "fp32",
        "device": "cpu",
        "report": False,
        **({"checkpoint.sharded_above": 0, "checkpoint.every": 1} if case in POLICY_CASES and parallel else {}),
        **more,
    }
    model = models / "policy"
    if case in ENGINE_CASES or case in POLICY_CASES:
        kedge.ppo(model=model, prompts=PROMPTS, **{**ENGINE_CASES, **POLICY_CASES}[case](models), **common)
    elif case == "sft":
        kedge.sft(model=model, demonstrations=TEXTS, batch_size=5, learning_rate=1e-3, **common)
    elif case == "reward":
        kedge.reward(model=model, comparisons=PAIRS, batch_size=3, **common)
    elif case == "generate":
        rewards = [RewardTerm(vowels), RewardTerm(models / "reward", weight=0.5)]
        kedge.generate(model=model, prompts=PROMPTS, reward=rewards, num_responses=2, **SAMPLED, **common)
    elif case in COMPARED:
        kedge.evaluate(model=model, prompts=PROMPTS, **COMPARED[case](models), **SAMPLED, **common)
    elif case == "rlhf":
        kedge.rlhf(model=model, demonstrations=TEXTS, comparisons=PAIRS, prompts=PROMPTS, **CHAIN, **common)
    elif case == "check_critic":
        kedge.check_critic(model=model, prompts=PROMPTS, **check_critic(models), **common)
    else:
        assert case in ("critic", "critic_head"), case
        more_of_head = {"critic.kind": "shared", "checkpoint.keep_last": True} if case == "critic_head" else {}
        settings = {
            "num_prompts": 4,
            "critic.num_responses": 2,
            "critic.batch_size": 3,
            "rollout.max_new_tokens": 10,
            "rollout.missing_eos_score": None,
        }
        kedge.critic(model=model, prompts=PROMPTS, reward=vowels_of_all, **settings, **more_of_head, **common)


def save_models(folder: Path) -> None:
    """The models and data that the cases start from."""
    save_tiny_policy(folder / "policy")
    save_tiny_policy(folder / "other", seed=1)
    save_tiny_reward_model(folder / "reward")
    rows = [f'{{"prompt": "{row["prompt"]}", "completion": "{row["completion"]}"}}\n' for row in TEXTS]
    (folder / "texts.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for name in sys.argv[2:]:
        run(name, place / "models", place / "runs")
