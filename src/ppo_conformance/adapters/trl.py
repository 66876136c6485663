"""TRL: GRPOTrainer's loss, and its experience with a rollout function; RLOO's baseline; the fused LM head."""

# pyright: reportMissingImports=false

from collections import defaultdict
from typing import Any
from unittest.mock import Mock

import torch
from trl import GRPOTrainer, RewardTrainer, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from ppo_conformance.adapters.stand_ins import Blank
from ppo_conformance.adapters.torch_tools import TorchAdapter, by_group
from ppo_conformance.protocol import NotOffered

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
        """Compute the KL loss of each token separately."""
        use = {"aggregation": "response_sum", "coef": 1.0, "micro_batches": [[0]], "rows": [0]}
        one = torch.ones((1, 1), dtype=torch.bool)
        pairs = zip(log_probs.flatten(), reference.flatten(), strict=True)
        found = [self.kl_loss(x.view(1, 1), ref.view(1, 1), one, {**use, "whole": [one]}) for x, ref in pairs]
        return torch.stack(found).view_as(log_probs)

    def kl_loss(self, log_probs, reference, mask, settings):
        """Use the policy loss with advantages of 0, so that only the KL is left."""
        use = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio": "token", **settings}
        given = (log_probs, log_probs.detach(), torch.zeros_like(log_probs), mask, use)
        return _loss(*given, beta=settings["coef"], ref_per_token_logps=reference)

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        return _loss(log_probs, old_log_probs, advantages, mask, settings)

    def group_advantages(self, scores, groups, valid, settings):
        """Groups need equal sizes; rows are sorted by group. NaN scores are ignored."""
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
        found = _experience(trainer, mask, torch.zeros(len(mask)), sample_log_probs, train_log_probs)
        return found["importance_sampling_ratio"].expand(mask.shape)

    def reward_loss(self, scores, mask, settings):
        logits = torch.cat([scores[:, 0], scores[:, 1]]).unsqueeze(-1)
        model = Mock(return_value=Blank(logits=logits))
        return _trainer(RewardTrainer).compute_loss(model, {"attention_mask": torch.ones(2)})

    def trained_tokens(self, case):
        """Single turns only: further turns answer tool calls."""
        from ppo_conformance.adapters.transformers_tokens import tokenizer_of

        if case["replies"] or case["stop_strings"]:
            raise NotOffered("further turns are answers to calls of tools")
        tokenizer = tokenizer_of(case)
        trainer = _trainer(
            _tokenizer=tokenizer,
            processing_class=tokenizer,
            _generate_single_turn=lambda prompts, *_: ([case["policy"](prompts[0])], None),
            _calculate_rewards=lambda *_: torch.zeros(1, 1),
        )
        found = trainer._generate_and_score_completions([{"prompt": case["messages"]}])
        read, said = (found[f"{part}_ids"][found[f"{part}_mask"] == 1].tolist() for part in ("prompt", "completion"))
        return {"rows": [{"tokens": read + said, "trained": [False] * len(read) + [True] * len(said)}]}


def _loss(log_probs, old, gains, mask, settings, *, beta=0.0, **more):
    """The loss of a micro-batch."""
    parts, kind = settings["micro_batches"], settings["aggregation"]
    if kind != "token" and len({*map(len, parts)}) > 1:
        raise NotOffered("other micro-batches than of tokens have one size")
    trainer = _trainer(
        loss_type=LOSSES[kind],
        beta=beta,
        importance_sampling_level=settings["ratio"],
        epsilon_low=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        max_completion_length=settings.get("length"),
        current_gradient_accumulation_steps=len(parts),
        args=Blank(delta=settings["dual_clip"], steps_per_generation=len(parts)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, log_probs.detach(), None),
    )
    given = {"old_per_token_logps": old, "advantages": gains, "completion_mask": mask.long(), **more}
    given |= dict.fromkeys(("completion_ids", "prompt_ids", "prompt_mask"), torch.zeros_like(mask, dtype=torch.long))
    given["num_items_in_batch"] = settings["whole"][-1].sum().float()
    return trainer._compute_loss(trainer.model, given)


def _trainer(kind: Any = GRPOTrainer, **settings):
    """A trainer without a model: what its methods read, with TRL's defaults."""
    same = lambda x, **_: x  # noqa: E731
    accelerator = {"gather": same, "gather_for_metrics": same, "reduce": same, "num_processes": 1, "process_index": 0}
    used = {
        "accelerator": Blank(device=torch.device("cpu"), **accelerator),
        "model": Blank(training=True),
        "args": Blank(steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=1),
        "state": Blank(num_input_tokens_seen=0, global_step=0),
        "reward_weights": torch.ones(1),
        "reward_func_names": ["score"],
        "eos_token_ids": [1],
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        **{name: {} for name in ("_pending_extra_logs", "_pending_metrics", "chat_template_kwargs")},
        **dict.fromkeys(("beta", "_last_loaded_step", "_total_train_tokens"), 0),
        **dict.fromkeys(("num_iterations", "num_generations", "_tp_size", "top_entropy_quantile"), 1),
        "vllm_importance_sampling_correction": True,
    }
    return type("Trainer", (Blank, kind), {})(**{**used, **settings})


def _experience(trainer, mask, scores, sampled=None, trained=None):
    """Let a trainer prepare sampled rows for its loss."""
    rows, width = mask.shape
    said = [[1] * width] * rows
    log_probs = None if sampled is None else sampled.tolist()
    tokens = {
        "prompt_ids": [[0]] * rows,
        "completion_ids": said,
        "env_mask": mask.long().tolist(),
        "logprobs": log_probs,
    }
    words = Mock(pad_token_id=0, return_value={"input_ids": [[0]] * rows})
    words.batch_decode.return_value = [""] * rows
    vars(trainer).update(
        rollout_func=lambda *_: tokens,
        _generate_single_turn=lambda *_: said,
        _tokenizer=words,
        processing_class=words,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            torch.zeros(mask.shape) if trained is None else trained,
            None,
            None,
        ),
        _calculate_rewards=lambda *_: scores.unsqueeze(-1),
    )
    return trainer._generate_and_score_completions([{"prompt": ""}] * rows)


class _Model(Blank):
    """A model of which only the LM head is used: a matrix with ones on its diagonal."""

    def forward(self):
        """Stand for the forward pass that the head replaces."""


def _fused(output, logits, tokens, settings):
    """An output of the fused LM head."""
    head = Blank(weight=torch.eye(logits.shape[-1], dtype=torch.float64))
    config = Blank(get_text_config=lambda: Blank(model_type=""))
    model: Any = _Model(
        config=config, base_model=lambda **_: Blank(last_hidden_state=logits), get_output_embeddings=lambda: head
    )
    add_fused_lm_head(model, settings["temperature"], outputs=("log_probs", "entropy"))
    return getattr(model.forward(fused_lm_head=True, shift_labels=tokens), output)
