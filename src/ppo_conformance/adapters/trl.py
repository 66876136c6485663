"""TRL: the loss and the experience of GRPOTrainer, with a rollout function; RLOO's baseline; the fused LM head."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl as library
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from ppo_conformance.adapters.torch_tools import TorchAdapter, by_group
from ppo_conformance.protocol import NotOffered

GRPOTrainer, RLOOTrainer, RewardTrainer = library.GRPOTrainer, library.RLOOTrainer, library.RewardTrainer
LOSSES = {"token": "dapo", "response": "grpo", "response_sum": "luspo", "fixed_length": "dr_grpo"}
SCALES = {"grpo": "group", "dr_grpo": "none", "rloo": None}


class Adapter(TorchAdapter):
    """Trainers without models."""

    name = "TRL"
    distribution = "trl"
    profile = {
        "precision": "float32",
        "kl": "k3",
        "kl_loss": "k3",
        "aggregation": " ".join(LOSSES),
        "empty_rows": "counted",
        "ratio": "token sequence",
        "sequence_gradient": "through_ratio",
        "baseline": "grpo dr_grpo rloo",
        "off_policy": "token_truncate sequence_truncate token_mask",
        **dict.fromkeys(("tools", "left_padding", "rejection", "micro_batches"), "yes"),
    }

    def log_probs(self, logits, tokens, settings):
        return _fused("log_probs", logits, tokens, settings)

    def entropy(self, logits, settings):
        return _fused("entropy", logits, torch.zeros(logits.shape[:2], dtype=torch.long), settings)

    def kl(self, log_probs, reference, settings):
        """The loss of each token alone, without a surrogate."""
        use = {"aggregation": "response_sum", "coef": 1.0, "micro_batches": [[0]], "rows": [0]}
        one = torch.ones((1, 1), dtype=torch.bool)
        pairs = zip(log_probs.flatten(), reference.flatten(), strict=True)
        found = [self.kl_loss(x.view(1, 1), ref.view(1, 1), one, {**use, "whole": [one]}) for x, ref in pairs]
        return torch.stack(found).view_as(log_probs)

    def kl_loss(self, log_probs, reference, mask, settings):
        """The surrogate's part is 0, because the advantages are."""
        use = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio": "token", **settings}
        given = (log_probs, log_probs.detach(), torch.zeros_like(log_probs), mask, use)
        return _loss(*given, beta=settings["coef"], ref_per_token_logps=reference)

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        return _loss(log_probs, old_log_probs, advantages, mask, settings)

    def group_advantages(self, scores, groups, valid, settings):
        """Groups are of one size, and in order. A score that is NaN is left out."""
        order, size = by_group(groups)
        kind = RLOOTrainer if settings["baseline"] == "rloo" else GRPOTrainer
        trainer = _trainer(kind, scale_rewards=SCALES[settings["baseline"]], num_generations=size)
        one, given = torch.ones(len(scores), 1), scores.where(valid, torch.nan)[order]
        return _experience(trainer, one, given)["advantages"][order.argsort()]

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        truncates = "truncate" in settings["off_policy"]
        trainer = _trainer(
            use_vllm=True,
            vllm_importance_sampling_mode=settings["off_policy"],
            vllm_importance_sampling_clip_min=None if truncates else settings["low"],
            vllm_importance_sampling_clip_max=settings["cap" if truncates else "high"],
        )
        trainer.score = lambda *_, **__: (train_log_probs, None, None)
        found = _experience(trainer, mask, torch.zeros(len(mask)), sample_log_probs)
        return found["importance_sampling_ratio"].expand(mask.shape)

    def reward_loss(self, scores, mask, settings):
        logits = torch.cat([scores[:, 0], scores[:, 1]]).unsqueeze(-1)
        model = lambda **_: SimpleNamespace(logits=logits)  # noqa: E731
        return RewardTrainer.compute_loss(_trainer(RewardTrainer), model, {"attention_mask": torch.ones(2)})

    def trained_tokens(self, case):
        """Of single turns, since further ones are answers to calls of tools."""
        from ppo_conformance.adapters.transformers_tokens import tokenizer_of

        if case["replies"] or case["stop_strings"]:
            raise NotOffered("further turns are answers to calls of tools")
        trainer = _trainer(rollout_func=None, num_generations=1)
        trainer._tokenizer = trainer.processing_class = tokenizer_of(case)
        trainer._generate_single_turn = lambda prompts, *_: ([case["policy"](prompts[0])], None)
        found = _experience(trainer, torch.ones(1, 1), torch.zeros(1), messages=case["messages"])
        tokens, reads = (
            torch.cat([found[f"prompt_{name}"], found[f"completion_{name}"]], 1) for name in ("ids", "mask")
        )
        counts = torch.cat([torch.zeros_like(found["prompt_mask"]), found["completion_mask"]], 1)
        kept = reads[0].bool()
        return {"rows": [{"tokens": tokens[0][kept].tolist(), "trained": counts[0][kept].tolist()}]}


OFF = (
    "aux_loss_enabled _entropy_bonus_enabled use_vllm mask_truncated_completions _is_vlm "
    "reward_clip_range normalize_advantages off_policy_mask_threshold environment_factories "
    "environments tools pad_to_multiple_of chat_template"
)
ABSENT = "use_bias_correction_kl gradient_checkpointing_kwargs center_rewards_coefficient"
ZERO = "beta _last_loaded_step _total_train_tokens"
ONE = "top_entropy_quantile num_iterations num_generations _tp_size vllm_importance_sampling_correction"


def _loss(log_probs, old, gains, mask, settings, *, beta=0.0, **more):
    """The loss of a micro-batch."""
    parts, kind = settings["micro_batches"], settings["aggregation"]
    if kind != "token" and len({*map(len, parts)}) > 1:
        raise NotOffered("other micro-batches than of tokens have one size")
    trainer = _trainer(
        loss_type=LOSSES[kind], beta=beta, importance_sampling_level=settings["ratio"],
        epsilon_low=settings["clip_low"], epsilon_high=settings["clip_high"],
        max_completion_length=settings.get("length"), current_gradient_accumulation_steps=len(parts),
    )  # fmt: skip
    trainer.args.delta, trainer.args.steps_per_generation = settings["dual_clip"], len(parts)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, log_probs.detach(), None)
    given = {"old_per_token_logps": old, "advantages": gains, "completion_mask": mask.long(), **more}
    given |= dict.fromkeys(("completion_ids", "prompt_ids", "prompt_mask"), torch.zeros_like(mask, dtype=torch.long))
    given["num_items_in_batch"] = settings["whole"][-1].sum().float()
    return GRPOTrainer._compute_loss(trainer, trainer.model, given)


def _trainer(kind: Any = GRPOTrainer, **settings: Any) -> Any:
    """A trainer without a model: what its methods read, with TRL's defaults."""
    same = lambda x, **_: x  # noqa: E731
    made = object.__new__(kind)
    made.accelerator = SimpleNamespace(
        gather=same, reduce=same, gather_for_metrics=same, num_processes=1, process_index=0, device=torch.device("cpu")
    )
    made.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    made.args = SimpleNamespace(steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=1)
    vars(made.args).update(dict.fromkeys(ABSENT.split()))
    made.state = SimpleNamespace(num_input_tokens_seen=0, global_step=0)
    made.reward_weights, made.reward_func_names = torch.ones(1), ["score"]
    made.eos_token_ids, made.chat_template_kwargs = [1], {}
    made.scale_rewards, made.multi_objective_aggregation = "group", "sum_then_normalize"
    made._pending_extra_logs, made._pending_metrics, made._metrics = {}, {}, {"train": defaultdict(list)}
    made._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    for names, value in ((OFF, None), (ZERO, 0), (ONE, 1)):
        vars(made).update(dict.fromkeys(names.split(), value))
    vars(made).update(settings)
    return made


def _experience(trainer: Any, mask: Any, scores: Any, sampled: Any = None, messages: Any = None) -> Any:
    """Let a trainer prepare sampled rows, or its model's answers to a conversation, for its loss."""
    rows = mask.shape[0]
    tokens = {"prompt_ids": [[0]] * rows, "completion_ids": [[1] * mask.shape[1]] * rows}
    tokens |= {"env_mask": mask.long().tolist(), "logprobs": None if sampled is None else sampled.tolist()}
    if not hasattr(trainer, "_tokenizer"):
        trainer.rollout_func = lambda *_: tokens
        trainer._generate_single_turn = lambda *_: tokens["completion_ids"]
        trainer._tokenizer = trainer.processing_class = _Words()
        trainer._get_per_token_logps_and_entropies = getattr(
            trainer, "score", lambda *_, **__: (torch.zeros(mask.shape), None, None)
        )
    trainer._calculate_rewards = lambda *_: scores.unsqueeze(-1)
    return type(trainer)._generate_and_score_completions(trainer, [{"prompt": messages or ""}] * rows)


def _fused(output, logits, tokens, settings):
    """An output of the fused LM head, whose matrix is the identity."""
    size = logits.shape[-1]
    head = nn.Linear(size, size, bias=False)
    head.weight = nn.Parameter(torch.eye(size, dtype=torch.float64))
    model: Any = _Model()
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type=""))
    model.base_model = lambda **_: SimpleNamespace(last_hidden_state=logits)
    model.get_output_embeddings = lambda: head
    add_fused_lm_head(model, settings["temperature"], outputs=("log_probs", "entropy"))
    return getattr(model.forward(fused_lm_head=True, shift_labels=tokens), output)


class _Words:
    """The tokenizer of texts that do not matter."""

    pad_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [[0] for _ in text]}

    def batch_decode(self, ids, **_):
        return [""] * len(ids)


class _Model:
    """A model of which only the head is used."""

    def forward(self):
        """Stand for the forward pass that the head replaces."""
