"""Bugs of the tokens of conversations, of masks, of the place of scores, and of checkpoints."""

from dataclasses import replace

import numpy as np

from ppo_conformance.bugs import bug
from ppo_conformance.reference.conversations import Conversations
from ppo_conformance.reference.model import initial_weights
from ppo_conformance.reference.trainer import State, Trainer


@bug(
    Conversations.encode,
    "tokens/bos_twice",
    "25 huggingface/trl/issues/3853",
    "27 vllm-project/vllm/issues/16976",
)
def bos_twice(encode, tokenizer, text):
    """The tokenizer added a BOS to the one that the chat template had written."""
    return tokenizer.encode(text, add_special_tokens=True).ids


@bug(Conversations.render, "tokens/ordinary", "26 huggingface/trl/issues/3520")
def no_bos(render, case, messages):
    """The prompt had no BOS."""
    return render({**case, "bos": ""}, messages)


@bug(
    Conversations.kept,
    "tokens/retokenized",
    "28 huggingface/trl/issues/5224",
    "29 jingyaogong/minimind/issues/850",
)
def encoded_again(kept, tokenizer, sampled):
    """Turns were decoded and encoded again, which can give other tokens than the sampled ones."""
    return tokenizer.encode(tokenizer.decode(sampled, skip_special_tokens=False), add_special_tokens=False).ids


@bug(Trainer.tokens, "update/rloo", "30 huggingface/trl/issues/5303")
def end_masked(tokens, case, *given):
    """Padding was told by its token, so that a stop token with the same id was masked as well."""
    found, mask = tokens(case, *given)
    return found, mask & (found != case["settings"]["pad"])


@bug(Trainer.tokens, "update/ppo update/grpo", "31 verl-project/verl/issues/847")
def mask_shifted(tokens, *given):
    """The mask of responses was shifted by a token."""
    found, mask = tokens(*given)
    return found, np.roll(mask, 1, axis=1)


@bug(Trainer.score_slots, "update/reward_model", "33 EleutherAI/gpt-neox/pull/1285")
def score_before_the_end(score_slots, lengths):
    """The score was read a token before the last one."""
    return score_slots(lengths) - 1


@bug(Trainer.load, "update/resume", "49 NVIDIA-NeMo/RL/pull/3171")
def moments_lost(load, case, checkpoint):
    """A resumed run started with a new optimizer."""
    zeros = {name: np.zeros_like(each) for name, each in checkpoint["weights"].items()}
    return State(checkpoint["weights"], zeros, dict(zeros))


@bug(Trainer.load, "update/resume", "50 radixark/miles/issues/2224")
def critic_lost(load, case, checkpoint):
    """The critic was not in the checkpoint, and started from scratch."""
    state, first = load(case, checkpoint), initial_weights(case["model"])
    critic = {name: weight for name, weight in first.items() if name.startswith("value_head")}
    return replace(state, weights={**state.weights, **critic})
