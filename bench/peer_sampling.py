# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Samples with transformers or vLLM, in a separate environment; writes a row at the start and after each batch.

python -I peer_sampling.py generate MODEL PROMPTS OUT --batch=64 --max-new-tokens=64 --precision=bf16
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main() -> None:
    """Sample a response to each prompt, a batch at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("how", "model"):
        parser.add_argument(name)
    for name in ("prompts", "out"):
        parser.add_argument(name, type=Path)
    for name in ("batch", "max-new-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--precision")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    template = {"add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(row["prompt"], **template) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=False).input_ids
    sample = (with_vllm if options.how == "vllm" else with_transformers)(options, tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "progress.jsonl").open("w", encoding="utf-8") as file:
        for start in range(0, len(encoded) + 1, options.batch):
            file.write(json.dumps({"done": start}) + "\n")
            file.flush()
            if start < len(encoded):
                tokens = sample(encoded[start : start + options.batch])
                print(f"{tokens} tokens", flush=True)


def with_transformers(options: argparse.Namespace, tokenizer: Any) -> Callable[[list[list[int]]], int]:
    """Sample with `generate` and padding, or `generate_batch` with continuous batching."""
    import torch
    from transformers import ContinuousBatchingConfig

    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=options.max_new_tokens, **ends)

    def padded(prompts: list[list[int]]) -> int:
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        with torch.inference_mode():
            found = model.generate(**batch, generation_config=config)
        return int((found[:, batch["input_ids"].shape[1] :] != tokenizer.pad_token_id).sum())

    # Two pages of 256 tokens a response; by default it takes most of the memory of the machine.
    paged = ContinuousBatchingConfig(num_blocks=2 * options.batch, max_batch_tokens=4096)

    def continuous(prompts: list[list[int]]) -> int:
        with torch.inference_mode():
            found = model.generate_batch(prompts, config, continuous_batching_config=paged)
        return sum(len(each.generated_tokens) for each in found.values())

    return continuous if options.how == "continuous" else padded


def with_vllm(options: argparse.Namespace, tokenizer: Any) -> Callable[[list[list[int]]], int]:
    """Sample with vLLM in this process, so that its memory is measured, on all cores."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM, SamplingParams

    dtype = "bfloat16" if options.precision == "bf16" else "float32"
    model = LLM(options.model, dtype=dtype, max_model_len=1024, max_num_seqs=options.batch, disable_log_stats=True)
    sampling = SamplingParams(temperature=1.0, max_tokens=options.max_new_tokens)

    def sample(prompts: list[list[int]]) -> int:
        found = model.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in found)

    return sample


if __name__ == "__main__":
    main()
