"""Whole updates of kedge: `kedge.PpoTrainer` on given responses, and the loop of `kedge sft` and `kedge reward`.

Everything is computed in float64, for which kedge has no setting: weights are converted when they are loaded, and what
kedge and transformers compute in float32 is not rounded. The order of the minibatches is the case's.
"""

import io
import multiprocessing
import os
import re
import socket
import tempfile
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

import kedge
from kedge.data import EncodedExample
from kedge.models import LanguageModel, ScalarModel
from kedge.models.packing.trunk import Trunk
from kedge.ranks.start import join_ranks
from kedge.stages.ppo import main as stage
from kedge.training import update as training
from kedge.training.supervised.loop import TrainingSettings, train_supervised
from kedge.training.supervised.losses import CompletionLoss, RankedResponses, RankingLoss
from ppo_conformance.adapters.kedge import AGGREGATIONS
from ppo_conformance.protocol import NotOffered
from ppo_conformance.reference.model import NORM_EPS, ROTARY_BASE, initial_weights, shapes_of

STOP = 1
"""The token that ends a response in all cases."""

NAMES = {name: name for name in ("temperature", "entropy_coef", "gamma", "value_coef", "ratio")}
NAMES |= {"optimization.max_grad_norm": "max_grad_norm", "optimization.weight_decay": "weight_decay"}
NAMES |= {"ppo.clip_range": "clip_low", "ppo.clip_range_high": "clip_high", "ppo.value_clip_range": "value_clip"}
NAMES |= {"ppo.learning_rate": "lr", "ppo.gae_lambda": "lam", "ppo.whiten_advantages": "whiten"}
"""kedge's settings that have the values of the case's."""

CONSTANT = {"ppo.schedule": "constant", "ppo.value_unit": "score", "ppo.value_head_rate": 1.0}
CONSTANT |= {"missing_eos_score": None, "device": "cpu", "report": False}


def update(case):
    """See `ppo_conformance.protocol.Adapter.update`."""
    count = case["execution"].get("ranks", 1)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        if count == 1:
            return trained(case, Path(folder))
        return of_ranks(case, Path(folder), count)


def of_ranks(case, folder, count):
    """The weights of the first rank, after an update of several that gloo connects."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload([__name__])  # imported once for the ranks of all cases
    start_processes(_as_rank, (case, folder, count, port), nprocs=count, start_method="forkserver")
    return load_file(folder / "weights")


def _as_rank(number, case, folder, count, port):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    weights = trained(case, folder)
    if number == 0:
        save_file(weights, folder / "weights")


def trained(case, folder):
    """The weights after the update, made by this process or by all ranks together."""
    made = {"reward_model": supervised, "sft": supervised}.get(case["kind"], reinforced)
    silent = io.StringIO()
    with redirect_stdout(silent), redirect_stderr(silent), in_float64(), arranged(case["execution"]):
        weights = made(case, folder)
    return {name: weights[name][: shape[0]] for name, shape in shapes_of(case["model"]).items()}


@contextmanager
def in_float64():
    """Compute in float64 also where the code asks for float32."""
    usual = torch.Tensor.to

    def to(tensor, *kind, **options):
        if tensor.dtype == torch.float64 and torch.float32 in (*kind, options.get("dtype")):
            return tensor
        return usual(tensor, *kind, **options)

    with patch.multiple(torch.Tensor, to=to, float=lambda x: to(x, torch.float32)):
        yield


def arranged(execution):
    """Return a context with this layout of rows; kedge's default is packed, with shared prompts."""
    layout, error = execution.get("layout"), Trunk._error

    def no_packing(trunk, way, *given, **options):
        return float("inf") if way == "packed" else error(trunk, way, *given, **options)

    if layout == "left":
        raise NotOffered("kedge pads on the right, where it cannot pack")
    if layout == "padded":
        return patch.object(Trunk, "_error", no_packing)
    return patch.object(Trunk, "shares_up_to", 0) if layout == "packed" else nullcontext()


def parts_of(case):
    """The configuration of the case's model, and a tokenizer of its tokens."""
    model, pad = case["model"], case["settings"]["pad"]
    vocabulary = {f"t{token}": token for token in range(model["vocabulary"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="t2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=f"t{pad}", eos_token=f"t{STOP}")
    config = LlamaConfig(
        vocab_size=model["vocabulary"],
        hidden_size=model["width"],
        intermediate_size=model["hidden"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["heads"],
        tie_word_embeddings=model["tied"],
        rms_norm_eps=NORM_EPS,
        pad_token_id=pad,
        eos_token_id=STOP,
        bos_token_id=None,
        max_position_embeddings=64,
    )
    return config, tokenizer


@torch.no_grad()
def start(module, weights):
    """Set a module's weights; kedge adds a row for padding to the embedding if no token is for padding alone."""
    module.double()
    for name, weight in module.named_parameters():
        given = torch.from_numpy(weights[_short(name)])
        weight[: len(given)] = given
    for name, frequencies in module.named_buffers():
        if name.endswith("inv_freq"):  # transformers rounds these to float32
            number = len(frequencies)
            frequencies.copy_(torch.from_numpy(ROTARY_BASE ** (-np.arange(number) / number)))


def _short(name):
    """The name of a weight in the case."""
    return re.sub(r"(policy|causal|classifier|base_model\.model)\.|\.base_layer|\.default", "", name)


def weights_of(module):
    """The weights of a module by their names in the case."""
    return {_short(name): weight.detach().numpy().copy() for name, weight in module.named_parameters()}


def reinforced(case, folder):
    """PPO and its relatives, through `kedge.PpoTrainer`."""
    weights, load = initial_weights(case["model"]), stage.load_roles
    if any(not ended for batch in case["batches"] for ended in batch["ended"]):
        raise NotOffered("only episodes of an environment are bootstrapped where they are cut off")
    config, tokenizer = parts_of(case)
    model = LlamaForCausalLM(config)
    orders = iter([])

    def load_roles(*given, **options):
        roles = load(*given, **options)
        start(roles.actor_critic, weights)
        if roles.reference is not None:
            start(roles.reference, weights)
        return roles

    def minibatches_of(*_):
        return [torch.tensor(rows) for rows in next(orders)]

    def opened(**options):
        return kedge.PpoTrainer(
            model=kedge.LoadedModel(deepcopy(model), tokenizer), out=folder / "run", **options, **config_of(case)
        )

    with patch.object(stage, "load_roles", load_roles), patch.object(training, "minibatches_of", minibatches_of):
        trainer = opened()
        try:
            for number, batch in enumerate(case["batches"]):
                if number == case["execution"].get("resume_at"):
                    trainer.close()
                    trainer = opened(resume=True)
                scores, tools = batch["scores"], batch.get("tools", {})
                kept = [row for row, valid in enumerate(batch.get("valid", [True] * len(scores))) if valid]
                places = {row: place for place, row in enumerate(kept)}
                orders = iter(
                    [[[places[r] for r in rows if r in places] for rows in epoch] for epoch in batch["orders"]]
                )
                responses = [
                    [([token], place not in tools.get(str(row), [])) for place, token in enumerate(response)]
                    for row, response in enumerate(batch["responses"])
                ]
                given = trainer.batch(batch["prompts"], responses, groups=batch["groups"])
                trainer.update(given, [score if row in places else None for row, score in enumerate(scores)])
            return weights_of(trainer.roles.actor_critic)
        finally:
            trainer.close()


def config_of(case):
    """The settings of the run."""
    use, first, lora = case["settings"], case["batches"][0], case["model"].get("lora")
    place, kind = ("reward", "kl") if use["kl_in_reward"] else ("loss", "kl_loss")
    prompts = len(set(first["groups"]))
    longest = max(len(response) for batch in case["batches"] for response in batch["responses"])
    return {
        **{name: use[key] for name, key in NAMES.items()},
        **CONSTANT,
        "num_updates": len(case["batches"]),
        "num_epochs": len(first["orders"]),
        "num_minibatches": len(first["orders"][0]),
        "num_prompts": prompts,
        "num_responses": len(first["groups"]) // prompts,
        "max_new_tokens": use["length"] if use["aggregation"] == "fixed_length" else longest,
        "ppo.policy_loss": {"dual_clip": use["dual_clip"]} if use["dual_clip"] else "clipped",
        "ppo.aggregation": AGGREGATIONS[use["aggregation"]],
        "ppo.kl_in": {place: use[kind]},
        "ppo.kl_coef": use[f"kl_in_{place}"],
        "ppo.advantage": use["baseline"] if case["kind"] != "ppo" else "gae",
        "ppo.critic": "shared" if case["kind"] == "ppo" else "none",
        "optimization.adam_eps": use["eps"] if use["adam_eps"] == "after_debiasing" else {"tf1": use["eps"]},
        "micro_batch_tokens": tokens_of(case),
        **({"adapter": {**lora, "target_modules": ["q_proj", "v_proj"]}} if lora else {}),
    }


def tokens_of(case):
    """Tokens per pass; a pass of a single row has more where that is longer."""
    rows = case["execution"].get("micro_batch")
    return None if rows is None else 1 + 8 * (rows - 1)


def supervised(case, folder):
    """Fine-tuning and reward models, through the loop of their stages."""
    settings, batch = case["settings"], case["batches"][0]
    config, tokenizer = parts_of(case)
    unit = 2 if case["kind"] == "reward_model" else 1
    texts = list(zip(batch["prompts"], batch["responses"], strict=True))
    if unit == 1:
        model = LanguageModel(LlamaForCausalLM(config), tokenizer)
        objective: Any = CompletionLoss(model)
        examples: Any = [EncodedExample(*text) for text in texts]
    else:
        config.num_labels = 1
        model = ScalarModel(LlamaForSequenceClassification(config), tokenizer)
        objective = RankingLoss(model)
        rows = [[*prompt, *response] for prompt, response in texts]
        pairs = zip(rows[::2], rows[1::2], strict=True)
        examples = [RankedResponses(pair, ranks=(0.0, 1.0), lengths=(1, 1)) for pair in pairs]
    start(model, initial_weights(case["model"]))
    orders = [[row // unit for rows in epoch for row in rows[::unit]] for epoch in batch["orders"]]
    use = TrainingSettings(
        learning_rate=settings["lr"],
        batch_size=len(batch["orders"][0][0]) // unit,
        num_epochs=len(orders),
        schedule="constant",
        **{name: settings[name] for name in ("max_grad_norm", "weight_decay")},
        adam_eps=settings["eps"],
        adam_eps_mode="torch" if settings["adam_eps"] == "after_debiasing" else "tf1",
        micro_batch_tokens=tokens_of(case),
        order=lambda epoch: orders[epoch],
        ranks=join_ranks("replicate"),
    )
    train_supervised(objective, model.parameters(), examples, use)
    return weights_of(model)
