"""OpenRLHF: its losses, its experience maker, and its executor of agents with a scripted engine.

DeepSpeed, vLLM, flash-attn and Ray are stand-ins: nothing of them is used.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ppo_conformance import protocol
from ppo_conformance.adapters.stand_ins import stand_in
from ppo_conformance.adapters.torch_tools import by_group, micro_batches, sum_over_batches, tensors, value_and_gradient
from ppo_conformance.protocol import Array, Mask, NotOffered, Settings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
stand_in("deepspeed", "flash_attn", "pylatexenc", "ray", "vllm", without=["flash_attn.ops"])

from openrlhf.datasets.prompts_dataset import preprocess_data  # noqa: E402
from openrlhf.models import loss, utils  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from openrlhf.utils.agent import SingleTurnAgentExecutor  # noqa: E402
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm  # noqa: E402

BASELINES = {"grpo": "group_norm", "dr_grpo": "dr_grpo", "rloo": "rloo", "reinforce++": "reinforce"}
CORRECTIONS = {"token_truncate": "tis", "token_mask": "icepop"}


class Adapter(protocol.Adapter):
    """See `protocol.Adapter`."""

    name = "OpenRLHF"
    distribution = "openrlhf"
    profile = {
        "precision": "float32",
        "kl": "k1 k2 k3",
        "kl_loss": "k3 k2 k1",
        "ratio": "token sequence",
        "aggregation": "token response",
        "sequence_gradient": "through_ratio",
        "baseline": "grpo dr_grpo rloo reinforce++",
        "group_bessel": "yes no",
        "off_policy": "token_truncate token_mask",
        **dict.fromkeys(("tools", "left_padding", "micro_batches"), "yes"),
    }

    def log_probs(self, logits, tokens, settings):
        """See `protocol.Adapter`; of a copy of the logits, which are divided in place."""
        labels, tau = torch.tensor(tokens), settings["temperature"]
        return value_and_gradient(lambda x: utils.log_probs_from_logits(x * 1, labels, tau), logits)

    def entropy(self, logits, settings):
        """See `protocol.Adapter`."""
        if settings["temperature"] != 1:
            raise NotOffered("the temperature is a part of the model")
        return value_and_gradient(utils.compute_entropy, logits)

    def kl(self, log_probs, reference, settings):
        """See `protocol.Adapter`."""
        (ref,) = tensors(reference)
        return value_and_gradient(lambda x: utils.compute_approx_kl(x, ref, settings["kl"]), log_probs)

    def kl_loss(self, log_probs, reference, mask, settings):
        """See `protocol.Adapter`; always a mean over tokens."""
        (ref,) = tensors(reference)
        if settings["aggregation"] != "token":
            raise NotOffered("the KL is a mean over tokens")

        def term(x: torch.Tensor, rows: list[int], counts: torch.Tensor, batch: Any) -> torch.Tensor:
            kls = utils.compute_approx_kl(x, ref[rows], settings["kl_loss"])
            return settings["coef"] * loss.aggregate_loss(kls, counts, **batch)

        return _over_batches(log_probs, mask, settings, term)

    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        """See `protocol.Adapter`."""
        kls = utils.compute_approx_kl(*tensors(log_probs, reference), settings["kl"])
        return utils.compute_reward(torch.tensor(scores), settings["coef"], kls, torch.tensor(mask)).numpy()

    def gae(self, rewards, values, mask, last_values, settings):
        """See `protocol.Adapter`."""
        given = (*tensors(values, rewards, mask), settings["gamma"], settings["lam"])
        advantages, returns = RemoteExperienceMaker.get_advantages_and_returns(None, *given)
        return advantages.numpy(), returns.numpy()

    def whiten(self, values, mask, settings):
        """See `protocol.Adapter`; the values are rewards, of which GAE with γ = 0 makes advantages."""
        rows = len(values)
        made = _advantages("gae", np.zeros(rows), np.arange(rows), mask, kl=torch.tensor(-values).float())
        return made.numpy()

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        """See `protocol.Adapter`; the trainer has a mean over responses with GSPO, and else over tokens."""
        old, gains = tensors(old_log_probs, advantages)
        kind = {"token": "ppo", "sequence": "gspo"}[settings["ratio"]]
        if (kind == "gspo") != (settings["aggregation"] == "response"):
            raise NotOffered("the aggregation belongs to the ratio")
        made = loss.PolicyLoss(
            clip_eps_low=settings["clip_low"],
            clip_eps_high=settings["clip_high"],
            dual_clip=settings["dual_clip"],
            policy_loss_type=kind,
        )

        def term(x: torch.Tensor, rows: list[int], counts: torch.Tensor, batch: Any) -> torch.Tensor:
            return made(x, old[rows], gains[rows], counts, **batch)[0]

        return _over_batches(log_probs, mask, settings, term)

    def value_loss(self, values, old_values, returns, mask, settings):
        """See `protocol.Adapter`."""
        old, targets = tensors(old_values, returns)
        if settings["aggregation"] != "token":
            raise NotOffered("a mean over tokens")
        made = loss.ValueLoss(settings["value_clip"])

        def term(x: torch.Tensor, rows: list[int], counts: torch.Tensor, batch: Any) -> torch.Tensor:
            return made(x, old[rows], targets[rows], counts, **batch)

        return _over_batches(values, mask, settings, term)

    def group_advantages(self, scores, groups, valid, settings):
        """See `protocol.Adapter`; groups are of one size, and rows know their place among all."""
        kind = settings["baseline"]
        if (settings["group_bessel"] == "yes") == (kind == "reinforce++"):
            raise NotOffered("Bessel's correction belongs to the groups' deviation")
        order, size = by_group(groups, least=1 if kind == "reinforce++" else 2)
        one = np.ones((len(scores), 1), bool)
        return _advantages(BASELINES[kind], scores, np.argsort(order), one, size=size)[:, 0].numpy()

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        """See `protocol.Adapter`; the weights are the derivatives of the loss by advantages, where the ratio is 1."""
        kind = settings["off_policy"]
        bounds = [0.0, settings["cap"]] if kind == "token_truncate" else [settings["low"], settings["high"]]
        made = loss.PolicyLoss(
            enable_vllm_is_correction=True,
            vllm_is_truncated_threshold=bounds,
            vllm_is_correction_type=CORRECTIONS[kind],
        )
        train, sample, counts = tensors(train_log_probs, sample_log_probs, mask)
        _, found = value_and_gradient(lambda x: made(train, train, x, counts, sample)[0], -np.ones_like(mask, float))
        return -found * mask.sum()

    def reward_loss(self, scores, mask, settings):
        """See `protocol.Adapter`."""
        return value_and_gradient(lambda x: loss.PairWiseLoss()(x[:, 0], x[:, 1]), scores)

    def trained_tokens(self, case):
        """See `protocol.Adapter`; the text of further turns is written by the user's environment."""
        from ppo_conformance.adapters.transformers_tokens import tokenizer_of

        if case["replies"] or case["stop_strings"]:
            raise NotOffered("the user's environment writes the text between turns")
        tokenizer = tokenizer_of(case)
        text, *_ = preprocess_data({"input": case["messages"]}, apply_chat_template=tokenizer.apply_chat_template)

        async def generate(tokens: list[int], *_: Any, **__: Any) -> Any:
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=case["policy"](tokens), finish_reason="stop")])

        wanted = SimpleNamespace(max_tokens=99, logprobs=None)
        engine = SimpleNamespace(generate=generate)
        said = asyncio.run(SingleTurnAgentExecutor().execute(text, "", wanted, 999, tokenizer, engine))
        made = SamplesGenerator._process_response_into_experience(None, said, max_len=999)
        return {"rows": [{"tokens": made.sequences[0].tolist(), "trained": [0, *made.action_mask[0].tolist()]}]}


def _advantages(kind: str, scores: Array, places: Any, mask: Mask, *, kl: Any = None, size: int = 1) -> torch.Tensor:
    """The advantages that the experience maker gives a batch, with γ = 0 for GAE and else 1."""
    counts = torch.tensor(mask)
    zeros = torch.zeros(counts.shape, dtype=torch.float64)
    args = SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=kind, gamma=float(kind != "gae"), lambd=1.0, no_std_norm=False)
        ),
        reward=SimpleNamespace(clip_range=None),
        rollout=SimpleNamespace(n_samples_per_prompt=size),
    )
    made = Experience(index=places.tolist(), rewards=torch.tensor(scores), action_mask=counts, values=zeros)
    made.kl = zeros if kl is None else kl
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args), advantage_estimator=kind, kl_ctl=SimpleNamespace(value=1.0)
    )
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(maker, name, getattr(RemoteExperienceMaker, name).__get__(maker))
    [found] = RemoteExperienceMaker.compute_advantages_and_returns(maker, [made])
    return found.advantages


def _over_batches(array: Array, mask: Mask, settings: Settings, term: Any) -> tuple[float, Array]:
    """The sum over micro-batches divided by their number, as DeepSpeed has it."""
    counts, parts = torch.tensor(mask), micro_batches(settings, len(array))
    strategy = SimpleNamespace(ds_device_mesh=None)
    [(_, batch), *_] = iter_grad_accum_global_norm(parts, strategy, len(parts), lambda rows: counts[rows])
    return sum_over_batches(lambda x, rows: term(x, rows, counts[rows], batch) / len(parts), array, settings)
