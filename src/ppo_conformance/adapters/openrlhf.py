"""OpenRLHF: its losses, its experience maker, and its executor of agents with a scripted engine.

DeepSpeed, vLLM, flash-attn and Ray are stand-ins: nothing of them is used.
"""

# pyright: reportMissingImports=false

import asyncio
import os
from types import SimpleNamespace

import torch

from ppo_conformance.adapters.stand_ins import stand_in
from ppo_conformance.adapters.torch_tools import TorchAdapter, by_group
from ppo_conformance.protocol import NotOffered

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


class Adapter(TorchAdapter):
    """Averages over tokens, or over responses with GSPO."""

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
        """Copy the logits, which are divided in place."""
        return utils.log_probs_from_logits(logits * 1, tokens, settings["temperature"])

    def entropy(self, logits, settings):
        if settings["temperature"] != 1:
            raise NotOffered("the temperature is a part of the model")
        return utils.compute_entropy(logits)

    def kl(self, log_probs, reference, settings):
        return utils.compute_approx_kl(log_probs, reference, settings["kl"])

    def kl_loss(self, log_probs, reference, mask, settings):
        if settings["aggregation"] != "token":
            raise NotOffered("the KL is a mean over tokens")
        batch, parts = _minibatch(settings)
        kls = utils.compute_approx_kl(log_probs, reference, settings["kl_loss"])
        return settings["coef"] * loss.aggregate_loss(kls, mask, **batch) / parts

    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        kls = utils.compute_approx_kl(log_probs, reference, settings["kl"])
        return utils.compute_reward(scores, settings["coef"], kls, mask)

    def gae(self, rewards, values, mask, last_values, settings):
        given = (values, rewards, mask, settings["gamma"], settings["lam"])
        return RemoteExperienceMaker.get_advantages_and_returns(None, *given)

    def whiten(self, values, mask, settings):
        """Pass the values as rewards, which GAE with γ = 0 whitens as advantages."""
        rows = len(values)
        return _advantages("gae", torch.zeros(rows), torch.arange(rows), mask, kl=-values.float())

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        """The trainer averages over responses with GSPO, else over tokens."""
        kind = {"token": "ppo", "sequence": "gspo"}[settings["ratio"]]
        if (kind == "gspo") != (settings["aggregation"] == "response"):
            raise NotOffered("the aggregation belongs to the ratio")
        made = loss.PolicyLoss(
            clip_eps_low=settings["clip_low"],
            clip_eps_high=settings["clip_high"],
            dual_clip=settings["dual_clip"],
            policy_loss_type=kind,
        )
        batch, parts = _minibatch(settings)
        return made(log_probs, old_log_probs, advantages, mask, **batch)[0] / parts

    def value_loss(self, values, old_values, returns, mask, settings):
        if settings["aggregation"] != "token":
            raise NotOffered("a mean over tokens")
        batch, parts = _minibatch(settings)
        return loss.ValueLoss(settings["value_clip"])(values, old_values, returns, mask, **batch) / parts

    def group_advantages(self, scores, groups, valid, settings):
        """Groups need equal sizes; each row comes with its index in the batch."""
        kind = settings["baseline"]
        if (settings["group_bessel"] == "yes") == (kind == "reinforce++"):
            raise NotOffered("Bessel's correction belongs to the groups' deviation")
        order, size = by_group(groups, least=1 if kind == "reinforce++" else 2)
        return _advantages(BASELINES[kind], scores, order.argsort(), torch.ones(len(scores), 1), size=size)[:, 0]

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        """Recover the weights as the derivatives of the loss by the advantages, at ratio 1."""
        kind = settings["off_policy"]
        bounds = [0.0, settings["cap"]] if kind == "token_truncate" else [settings["low"], settings["high"]]
        made = loss.PolicyLoss(
            enable_vllm_is_correction=True,
            vllm_is_truncated_threshold=bounds,
            vllm_is_correction_type=CORRECTIONS[kind],
        )
        train, gains = train_log_probs, torch.ones_like(train_log_probs, requires_grad=True)
        found, *_ = made(train, train, gains, mask, sample_log_probs)
        return -torch.autograd.grad(found, gains)[0] * mask.sum()

    def reward_loss(self, scores, mask, settings):
        return loss.PairWiseLoss()(scores[:, 0], scores[:, 1])

    def trained_tokens(self, case):
        """Single turns only: the user's environment writes the text between turns."""
        from ppo_conformance.adapters.transformers_tokens import tokenizer_of

        if case["replies"] or case["stop_strings"]:
            raise NotOffered("the user's environment writes the text between turns")
        tokenizer = tokenizer_of(case)
        text, *_ = preprocess_data({"input": case["messages"]}, apply_chat_template=tokenizer.apply_chat_template)

        async def generate(tokens, *_, **__):
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=case["policy"](tokens), finish_reason="stop")])

        wanted = SimpleNamespace(max_tokens=99, logprobs=None)
        engine = SimpleNamespace(generate=generate)
        said = asyncio.run(SingleTurnAgentExecutor().execute(text, "", wanted, 999, tokenizer, engine))
        made = SamplesGenerator._process_response_into_experience(None, said, max_len=999)
        return {"rows": [{"tokens": made.sequences[0].tolist(), "trained": [0, *made.action_mask[0].tolist()]}]}


def _advantages(kind, scores, places, mask, *, kl=None, size=1):
    """The advantages that the experience maker computes, with γ = 0 for GAE and 1 otherwise."""
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    algorithm = SimpleNamespace(estimator=kind, gamma=float(kind != "gae"), lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=algorithm),
        reward=SimpleNamespace(clip_range=None),
        rollout=SimpleNamespace(n_samples_per_prompt=size),
    )
    made = Experience(index=places.tolist(), rewards=scores, action_mask=mask, values=zeros)
    made.kl = zeros if kl is None else kl
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args), advantage_estimator=kind, kl_ctl=SimpleNamespace(value=1.0)
    )
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(maker, name, getattr(RemoteExperienceMaker, name).__get__(maker))
    [found] = RemoteExperienceMaker.compute_advantages_and_returns(maker, [made])
    return found.advantages


def _minibatch(settings):
    """The divisors of the minibatch, and the number of its micro-batches, by which DeepSpeed divides."""
    mask, parts = settings["whole"][-1], settings["micro_batches"]
    strategy = SimpleNamespace(ds_device_mesh=None)
    [(_, batch), *_] = iter_grad_accum_global_norm(parts, strategy, len(parts), lambda rows: mask[rows])
    return batch, len(parts)
