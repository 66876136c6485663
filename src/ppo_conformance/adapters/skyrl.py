"""SkyRL: `ppo_utils`, and the trainer's normalization of advantages. Rows are laid out as SkyRL does, padded before."""

# pyright: reportMissingImports=false

import asyncio
import typing
from types import SimpleNamespace

import torch
import typing_extensions

from ppo_conformance.adapters.stand_ins import stand_in
from ppo_conformance.adapters.torch_tools import TorchAdapter, num_ranks
from ppo_conformance.protocol import NotOffered

typing.TypedDict = typing_extensions.TypedDict  # type: ignore  # pydantic needs it before Python 3.12
stand_in(
    "vllm", "httpx", "vllm_router", "flash_attn", without=["flash_attn.ops", "flash_attn.ops.triton.cross_entropy"]
)

import skyrl_gym  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.backends.skyrl_train.utils import off_policy_correction_utils as off_policy  # noqa: E402
from skyrl.backends.skyrl_train.utils import ppo_utils, torch_utils  # noqa: E402
from skyrl.train.config.config import AlgorithmConfig, GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402


class Replies(skyrl_gym.Env):
    """An environment that gives its replies in turn, then ends."""

    def __init__(self, env_config, extras):
        self._replies = extras["replies"]

    def init(self, chat):
        return chat, {}

    def step(self, _):
        done = not self._replies
        return {"observations": [] if done else self._replies.pop(0), "reward": 0.0, "done": done}

    def get_metrics(self):
        return {}


skyrl_gym.register("replies", Replies)

AGGREGATIONS = {"token": "token_mean", "response": "sequence_mean", "fixed_length": "seq_mean_token_sum_norm"}
BASELINES = {"dr_grpo": "grpo"}


class Adapter(TorchAdapter):
    """`ppo_utils`, the trainer, and its generator."""

    name = "SkyRL"
    distribution = "skyrl"
    profile = {
        "kl": "k3 k1 k2",
        "gae_whitening": "bessel",
        "aggregation": " ".join(AGGREGATIONS),
        "empty_rows": "counted",
        "ratio": "token sequence",
        "baseline": "grpo dr_grpo rloo",
        "single_response": "score zero",
        "off_policy": "token_truncate sequence_truncate",
        "precision": "float32",
        **dict.fromkeys(("tools", "left_padding", "micro_batches", "ranks"), "yes"),
    }

    def log_probs(self, logits, tokens, settings):
        if settings["temperature"] != 1:
            raise NotOffered("the temperature is a part of the model")
        return torch_utils.logprobs_from_logits(logits, tokens)

    def entropy(self, logits, settings):
        if settings["temperature"] != 1:
            raise NotOffered("the temperature is a part of the model")
        return torch_utils.chunked_entropy_from_logits(logits, requires_grad=True)

    def kl(self, log_probs, reference, settings):
        return ppo_utils.compute_approx_kl(log_probs, reference, kl_estimator_type=settings["kl"])

    def gae(self, rewards, values, mask, last_values, settings):
        """The trainer passes a mask that counts tools' tokens."""
        if _has_holes(mask):
            raise NotOffered("GAE runs over tools' tokens, which have values")
        width = mask.shape[1]
        ends = (mask * torch.arange(1, width + 1)).amax(1, keepdim=True)
        places = (torch.arange(width) + ends) % width
        given = (x.gather(1, places) for x in (rewards, values, mask.double()))
        found = ppo_utils.compute_gae_advantage_return(*given, gamma=settings["gamma"], lambd=settings["lam"])
        return tuple(x.gather(1, places.argsort(1)) for x in found)

    def whiten(self, values, mask, settings):
        """`advantage_batch_normalize`, with advantages of 0 in the padding."""
        if _has_holes(mask):
            raise NotOffered("the trainer counts tools' tokens")
        batch = TrainingInputBatch({"advantages": values * mask, "response_mask": mask, "loss_mask": mask})
        algorithm = SimpleNamespace(
            advantage_batch_normalize=True, loss_reduction=AGGREGATIONS["fixed_length"], max_seq_len=1
        )
        trainer = SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=len(values))
        stub = SimpleNamespace(cfg=SimpleNamespace(trainer=trainer))
        return RayPPOTrainer._normalize_advantages(stub, batch, [(0, len(values))])["advantages"] * len(values)

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        """The minibatch's divisors are part of the advantages, so losses are sums."""
        sequence, dual = settings["ratio"] == "sequence", settings["dual_clip"]
        if sequence and dual:
            raise NotOffered("GSPO has no dual clip")
        config = AlgorithmConfig(
            policy_loss_type="gspo" if sequence else "dual_clip" if dual else "regular",
            eps_clip_low=settings["clip_low"],
            eps_clip_high=settings["clip_high"],
            clip_ratio_c=dual or 3.0,
            loss_reduction=AGGREGATIONS[settings["aggregation"]],
        )
        *_, gains, counts = settings["whole"]
        gains = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
            gains, counts, config.loss_reduction, len(counts), settings.get("length") or 1
        )
        function = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type)
        return function(log_probs, old_log_probs, gains[settings["rows"]], config, mask)[0]

    def value_loss(self, values, old_values, returns, mask, settings):
        """Weight micro-batches by their rows, as the trainer does with token-based ones."""
        if settings["aggregation"] != "response" or num_ranks(settings) > 1:
            raise NotOffered("the critic's loss is a mean over responses, on ranks with as many rows")
        config = SimpleNamespace(value_clip=settings["value_clip"])
        found, _ = ppo_utils.ppo_critic_loss(values, old_values, returns, config, mask)
        return found * len(mask) / len(settings["whole"][-1])

    def group_advantages(self, scores, groups, valid, settings):
        """Treat each response as one token."""
        kind = settings["baseline"]
        if settings["single_response"] != ("zero" if kind == "rloo" else "score"):
            raise NotOffered("RLOO gives 0 to a response that is alone, GRPO its score")
        rewards = scores.unsqueeze(-1)
        estimate = ppo_utils.AdvantageEstimatorRegistry.get(BASELINES.get(kind, kind))
        more = {"index": groups.numpy(), "grpo_norm_by_std": kind == "grpo"}
        return estimate(rewards, response_mask=torch.ones_like(rewards), **more)[0][:, 0]

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        level, _ = settings["off_policy"].split("_")
        caps = SimpleNamespace(token_tis_ratio_clip_high=settings["cap"], sequence_tis_ratio_clip_high=settings["cap"])
        return off_policy.compute_tis_ratio(train_log_probs, sample_log_probs, mask, level, caps)[0].expand(mask.shape)

    def trained_tokens(self, case):
        """The generator's loop with an environment that gives the replies."""
        from ppo_conformance.adapters.transformers_tokens import tokenizer_of

        tokenizer = tokenizer_of(case)

        async def generate(asked, **_):
            said = case["policy"](asked["prompt_token_ids"][0])
            return {"responses": [tokenizer.decode(said)], "response_ids": [[*said]], "stop_reasons": ["stop"]}

        async def finish(_):
            pass

        engine = SimpleNamespace(generate=generate, finish_session=finish)
        games, config = SkyRLGymConfig(max_env_workers=0), GeneratorConfig(max_turns=9)
        generator = SkyRLGymGenerator(config, games, engine, tokenizer)
        sampling, extras = {"stop": case["stop_strings"] or None}, {"replies": [*case["replies"]]}
        found = asyncio.run(generator.agent_loop([*case["messages"]], "replies", extras, 99, 999, sampling))
        trained = [False] * len(found.prompt_ids) + [bool(each) for each in found.loss_mask]
        return {"rows": [{"tokens": [*found.prompt_ids, *found.response_ids], "trained": trained}]}


def _has_holes(mask):
    """True if a row has a masked token between two that count."""
    return any(bool((row.nonzero().diff(dim=0) > 1).any()) for row in mask)
