"""TRL: `PPOTrainer`, `PPOConfig` and the `TrainingArguments` that it inherits; GRPO, RLOO, SFT and reward models.

Source: TRL 1.12.0, trl/experimental/ppo/ppo_config.py and ppo_trainer.py; transformers 5, training_args.py; for the
others TRL 1.16.0, trl/trainer/. Some names of earlier releases are still in use.
"""

from kedge.config.libraries.row import Row

__all__ = [
    "GROUPS",
    "PPO_CONFIG",
    "SCRIPT",
    "SUPERVISED",
    "TRAINER",
    "TRAINING_ARGUMENTS",
    "WITHOUT_COUNTERPART",
]

TRAINER = (
    Row(
        "args",
        "the configuration: keyword arguments, a file, overrides, a preset. See [Configuration](configuration.md)",
    ),
    Row("processing_class tokenizer", "the tokenizer in the policy's folder; a missing pad token is added"),
    Row("model", "`model`: a folder or a hub id"),
    Row("ref_model", "always the initial policy; not loaded if KL is neither penalized nor measured"),
    Row(
        "reward_model",
        "`reward`: a reward model, a Python function, or several with weights. See [Rewards](rewards.md)",
    ),
    Row(
        "train_dataset",
        "`data.prompts`: texts or conversations; kedge tokenizes them. In sft `data.demonstrations`, in reward "
        "`data.comparisons`",
    ),
    Row(
        "value_model",
        "`ppo.critic`: a head on the policy (the default), or `separate`; it starts from a trained model, "
        "the reward model or the policy (`ppo.critic_init`)",
    ),
    Row("data_collator", "none: prompts are tokenized one by one and packed without padding"),
    Row(
        "eval_dataset",
        "`data.eval_prompts`, or the share `data.eval_fraction` of the prompts; evaluated every `ppo.eval_every`",
    ),
    Row(
        "optimizers",
        "`ppo.optimizer`, with `ppo.learning_rate`, `ppo.schedule`, `ppo.adam_eps`, `ppo.weight_decay`",
    ),
    Row("callbacks", "in Python, `on_update`: see [Callbacks](api.md#callbacks)"),
    Row("peft_config", "`adapter.kind` and the other fields of `adapter`. See [Adapters](adapters.md)"),
)
PPO_CONFIG = (
    Row("num_mini_batches", "`ppo.num_minibatches`"),
    Row("total_episodes", "`ppo.num_updates` times `rollout.num_prompts` times `rollout.num_responses`"),
    Row("num_total_batches", "`ppo.num_updates`"),
    Row("batch_size local_batch_size", "`rollout.num_prompts`, of all processes together"),
    Row("mini_batch_size local_mini_batch_size", "`ppo.num_minibatches`: responses per update divided by TRL's value"),
    Row("micro_batch_size", "`runtime.micro_batch_tokens`, in tokens; does not change gradients"),
    Row(
        "local_rollout_forward_batch_size",
        "`rollout.micro_batch_size` for sampling, `runtime.micro_batch_tokens` for forward passes",
    ),
    Row("world_size", "none: torchrun sets the number of processes"),
    Row("num_ppo_epochs", "`ppo.num_epochs`"),
    Row("response_length", "`rollout.max_new_tokens`"),
    Row(
        "stop_token stop_token_id",
        "`rollout.stop_token`, as text or id, or a list of them. Default: EOS, the model's declared ids and the "
        "end of its template's turns; TRL's default never stops",
    ),
    Row("temperature", "`rollout.temperature`. Default 1; TRL: 0.7"),
    Row(
        "missing_eos_penalty",
        "`rollout.missing_eos_score` with `rollout.missing_eos_mode=subtract`. With a reward model, the default "
        "replaces the score by −1, or less if the model's scores lie lower",
    ),
    Row("kl_coef", "`ppo.kl_coef`; same default, 0.05"),
    Row("kl_estimator", "`ppo.kl_estimator`; also k2, if the KL is in the loss"),
    Row("whiten_rewards", "`ppo.whiten_rewards`"),
    Row("cliprange", "`ppo.clip_range`"),
    Row(
        "cliprange_value",
        "`ppo.value_clip_range`; in units of the score, as in TRL, with `ppo.value_unit=score`. Default 1; TRL: 0.2",
    ),
    Row("vf_coef", "`ppo.value_coef`"),
    Row("gamma", "`ppo.gamma`"),
    Row("lam", "`ppo.gae_lambda`. Default 1; TRL: 0.95"),
    Row("num_sample_generations", "`runtime.num_samples`: responses saved in *every* update, from its own rollout"),
    Row("sft_model_path", "`model`. In TRL only the example script reads it"),
    Row("reward_model_path", "`reward`. In TRL only the example script reads it"),
    Row("dataset_num_proc", "none: TRL's trainer does not read it"),
    Row("init_kl_coef", "`ppo.kl_coef`"),
    Row("adap_kl_ctrl", "`ppo.kl_controller`: ziegler for true"),
    Row("push_to_hub", "`push.repo`, or `--push`; `kedge push` does it afterwards"),
    Row("model_adapter_name ref_adapter_name", "none: with an adapter, the frozen base is the reference"),
    Row("ds3_gather_for_generation", "none: no DeepSpeed"),
)
GROUPS = (
    Row(
        "reward_funcs",
        "`reward`: reward models, Python functions with TRL's signature, or several with weights. See "
        "[Rewards](rewards.md)",
    ),
    Row("reward_processing_classes", "none: each reward model reads texts with the tokenizer in its own folder"),
    Row(
        "tools environment_factory rollout_func max_tool_calling_iterations",
        "none: the samplers write one response to a prompt and call no tools; a training loop of your own may. See "
        "[A loop of your own](api.md)",
    ),
    Row("num_generations", "`rollout.num_responses`"),
    Row("max_completion_length", "`rollout.max_new_tokens`"),
    Row("num_iterations", "`ppo.num_epochs`"),
    Row("steps_per_generation", "`ppo.num_minibatches`: optimizer steps per pass over the responses"),
    Row("generation_batch_size", "`rollout.num_prompts` times `rollout.num_responses`"),
    Row("epsilon", "`ppo.clip_range`"),
    Row(
        "epsilon_high",
        "`ppo.clip_range_high`; with `ppo.policy_loss=cispo` ratios are capped at 1 plus it, in TRL at it",
    ),
    Row("delta", "`ppo.dual_clip`"),
    Row("beta", "`ppo.kl_coef`, with `ppo.kl_in=loss` and `ppo.kl_estimator=k3` for GRPO's"),
    Row(
        "loss_type",
        "`ppo.aggregation`: sequence for grpo, token for dapo and bnpo, constant for dr_grpo; `ppo.policy_loss=cispo`. "
        "TRL's default is dapo",
    ),
    Row("importance_sampling_level", "`ppo.ratio`"),
    Row(
        "scale_rewards",
        "`ppo.advantage`: grpo for group, dr_grpo for none. Closest to batch is reinforce++_baseline, which divides by "
        "the standard deviation of the advantages; TRL divides by that of the scores",
    ),
    Row("normalize_advantages", "`ppo.whiten_advantages`"),
    Row("reward_weights", "`reward`: a mapping of sources to weights"),
    Row("multi_objective_aggregation", "none: the weighted scores are added up before anything is normalized"),
    Row("reward_clip_range", "none: clip in a reward function"),
    Row("max_prompt_length", "`data.max_prompt_tokens`"),
    Row("max_steps", "`ppo.num_updates`, in updates instead of optimizer steps; TRL's PPO loop ignores it"),
    Row("num_generations_eval", "none: every held-out prompt is answered once"),
    Row(
        "mask_truncated_completions",
        "none: truncated responses are trained on; `rollout.missing_eos_score` is their score",
    ),
    Row("use_adaptive_entropy", "`ppo.entropy_target`, toward which `ppo.entropy_coef` is adapted"),
    Row(
        "entropy_coef_min entropy_coef_max entropy_coef_delta", "none: the adaptation of `ppo.entropy_target` is fixed"
    ),
    Row(
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "none: the initial policy stays the reference; each further round of `kedge rlhf` has its own",
    ),
    Row("use_vllm vllm_mode", "`rollout.engine=vllm`: servers in another environment. See [vLLM](vllm.md)"),
    Row("vllm_server_base_url vllm_server_host vllm_server_port", "`rollout.vllm.urls`"),
    Row("vllm_server_timeout", "`rollout.vllm.start_timeout`"),
    Row("vllm_gpu_memory_utilization", "`rollout.vllm.memory`, with `rollout.engine=vllm`"),
    Row("vllm_tensor_parallel_size vllm_max_model_length vllm_model_impl", "`rollout.vllm.args`: vLLM's own arguments"),
    Row(
        "vllm_importance_sampling_correction vllm_importance_sampling_cap vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_max",
        "`ppo.importance_cap`: weights per token, truncated",
    ),
    Row("vllm_importance_sampling_clip_min", "none: importance weights have an upper bound only"),
    Row(
        "min_p repetition_penalty generation_kwargs vllm_structured_outputs_regex",
        "none: with a filter the KL would be wrong; lower `rollout.temperature`",
    ),
    Row("cast_lm_head_to_fp32", "`runtime.precision=fp32`, which computes everything in fp32"),
    Row("disable_dropout", "always: all models are computed without dropout"),
    Row("shuffle_dataset", "always: the order of the rows depends on `runtime.seed`"),
    Row(
        "log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo",
        "`runtime.num_samples`: saved in every update",
    ),
)
SUPERVISED = (
    Row("max_seq_length", "`data.max_length`, in tokens"),
    Row("chat_template_path", "`data.chat_template`: a file"),
    Row("chat_template_kwargs", "none: `data.chat_template` can be a template with other defaults"),
    Row("dataset_text_field", "`data.columns`: `data.columns.text=body` reads the column `body`"),
    Row("formatting_func dataset_kwargs", "none: pass texts or conversations. See [Data](data.md)"),
    Row("eos_token pad_token", "none: those of the model's tokenizer"),
    Row("truncation_mode", "`data.truncate`; by default longer rows are rejected, and completions are never cut"),
    Row(
        "packing packing_strategy eval_packing padding_free pad_to_multiple_of",
        "always: rows are computed without padding, each on its own",
    ),
    Row("completion_only_loss", "always: a prompt is never learned. Of a row with `text` alone, everything is"),
    Row("assistant_only_loss", "`data.train_on`: all messages of the assistant, or the last"),
    Row("activation_offloading", "`runtime.activation_checkpointing`, which computes activations again"),
    Row("center_rewards_coefficient", "`reward_model.normalize`: the mean score is shifted to 0 after the training"),
)
TRAINING_ARGUMENTS = (
    Row("output_dir", "`out`; must be new or empty, nothing is overwritten"),
    Row(
        "per_device_train_batch_size gradient_accumulation_steps",
        "`rollout.num_prompts`: their product is TRL's batch size; in sft `sft.batch_size`, in reward "
        "`reward_model.batch_size`. `runtime.micro_batch_tokens` splits it for memory",
    ),
    Row("per_device_eval_batch_size", "none: `runtime.micro_batch_tokens` splits every forward pass"),
    Row("eval_steps eval_strategy evaluation_strategy", "`ppo.eval_every`, in updates; off by default"),
    Row(
        "num_train_epochs",
        "`ppo.num_updates`; `kedge config schedule` prints the number of passes over the prompts. In sft "
        "`sft.num_epochs`, in reward `reward_model.num_epochs`",
    ),
    Row("learning_rate", "`ppo.learning_rate`. Default 1e-5; TRL: 3e-6"),
    Row("lr_scheduler_type lr_scheduler_kwargs", "`ppo.schedule`"),
    Row("warmup_steps warmup_ratio", "`ppo.warmup_fraction`, as a fraction of the policy's updates"),
    Row("optim optim_args optim_target_modules", "`ppo.optimizer`: adamw, adamw8bit, adafactor or muon"),
    Row("weight_decay", "`ppo.weight_decay`"),
    Row("adam_epsilon", "`ppo.adam_eps`. Default 1e-5; TRL: 1e-8"),
    Row("adam_beta1 adam_beta2", "fixed: 0.9 and 0.999"),
    Row("max_grad_norm", "`ppo.max_grad_norm`. TRL's PPO loop ignores the field and does not clip gradients"),
    Row("bf16 fp16", "`runtime.precision`: bf16 or fp32, no fp16"),
    Row(
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs",
        "`runtime.activation_checkpointing`. Off by default; on in TRL",
    ),
    Row("logging_steps logging_strategy logging_first_step", "none: every update is logged to `metrics.jsonl`"),
    Row("report_to", "`runtime.loggers`, in addition to the run's own files"),
    Row("project", "`runtime.project`"),
    Row("run_name", "the name of the run's folder, `out`"),
    Row("disable_tqdm", "none: progress is plain lines if the output is not a terminal"),
    Row("save_steps save_strategy", "`checkpoint.every`, `checkpoint.every_minutes`"),
    Row("save_total_limit", "`checkpoint.keep`"),
    Row(
        "load_best_model_at_end metric_for_best_model",
        "`checkpoint.keep_best`: the best checkpoint is kept beside the last model, as `RUN@best`",
    ),
    Row(
        "resume_from_checkpoint",
        "`--resume`, in Python `resume=True`: bit-identical, see [Interruptions and faults](reliability.md)",
    ),
    Row("seed data_seed", "`runtime.seed`, for all random streams"),
    Row("full_determinism", "always on a CPU; see [Running](running.md)"),
    Row("fsdp fsdp_config", "`runtime.parallel`: shard"),
    Row("use_cpu", "`runtime.device=cpu`"),
    Row("hub_model_id", "`push.repo`"),
    Row("hub_private_repo", "`push.private`"),
    Row("logging_dir", "`out`: logs are in the run's folder"),
)
WITHOUT_COUNTERPART = (
    Row(
        "label_smoothing_factor average_tokens_across_devices neftune_noise_alpha auto_find_batch_size "
        "eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps prediction_loss_only include_for_metrics batch_eval_metrics "
        "greater_is_better label_names train_sampling_strategy "
        "length_column_name remove_unused_columns logging_nan_inf_filter include_num_input_tokens_seen do_train "
        "do_eval do_predict debug skip_memory_metrics ignore_data_skip restore_callback_states_from_checkpoint "
        "torch_empty_cache_steps bf16_full_eval fp16_full_eval use_cache",
        "TRL's PPO loop ignores them as well, or sets them itself",
    ),
    Row(
        "local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout deepspeed accelerator_config parallelism_config "
        "log_on_each_node log_level_replica save_on_each_node",
        "torchrun sets the number of processes",
    ),
    Row(
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
        "prompts are kept in memory",
    ),
    Row(
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config tf32",
        "no compilation, no third-party kernels",
    ),
    Row(
        "hub_token hub_strategy hub_always_push hub_revision trackio_space_id trackio_bucket_id "
        "trackio_static_space_id",
        "nothing is uploaded but the finished model, by `kedge push`",
    ),
    Row(
        "save_only_model enable_jit_checkpoint",
        "checkpoints are always complete",
    ),
    Row(
        "log_level",
        "there is a single log level",
    ),
    Row(
        "vllm_enable_sleep_mode vllm_group_port cache_implementation use_transformers_continuous_batching "
        "transformers_continuous_batching_config use_transformers_paged",
        "the samplers decide",
    ),
    Row(
        "top_entropy_quantile off_policy_mask_threshold use_bias_correction_kl sapo_temperature_neg "
        "sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg router_aux_loss_coef "
        "compute_loss_func compute_metrics optimizer_cls_and_kwargs preprocess_logits_for_metrics log_multimodal "
        "dataset_streaming streaming",
        "not implemented",
    ),
    Row("model_init_kwargs", "a model is loaded from its folder or hub id; `runtime.precision` and others say how"),
    Row(
        "precompute_ref_log_probs precompute_ref_batch_size loss_weights ld_alpha f_divergence_type "
        "f_alpha_divergence_coef label_smoothing use_weighting discopop_tau",
        "no DPO trainer",
    ),
)
SCRIPT = (
    Row("model_name_or_path", "`model`: a folder or a hub id"),
    Row("dataset_name dataset_config dataset_train_split", "`data.prompts`, as `org/name:config:split`"),
    Row("dataset_test_split", "`data.eval_prompts` with `ppo.eval_every`, or the prompts of `kedge evaluate`"),
    Row("trust_remote_code", "`runtime.trust_remote_code`"),
    Row("dtype", "`runtime.precision`; trained weights are always kept in fp32, others in `runtime.frozen_dtype`"),
    Row(
        "use_peft lora_r lora_alpha lora_dropout lora_target_modules",
        "`adapter.kind`, `adapter.rank`, `adapter.alpha`; no dropout; `adapter.target_modules`",
    ),
    Row("use_rslora", "`adapter.rslora`"),
    Row("use_dora", "`adapter.kind=dora`"),
    Row("lora_modules_to_save", "`adapter.modules_to_save`"),
    Row("lora_task_type lora_target_parameters", "none: the modules are `adapter.target_modules`"),
    Row(
        "load_in_4bit load_in_8bit quantization_config bnb_4bit_quant_type",
        "`adapter.base_dtype`: nf4 or int8, with `adapter.kind=lora`",
    ),
    Row("use_bnb_nested_quant bnb_4bit_quant_storage", "none: `adapter.base_dtype` has no further settings"),
    Row("model_revision", "none: download the revision, and name its folder as `model`"),
    Row("attn_implementation", "none: no third-party kernels"),
    Row("datasets", "`data.prompts`, a list of sources, with `data.mix`"),
    Row("test_split_size", "`data.eval_fraction`"),
    Row("ignore_bias_buffers", "none: not needed"),
)
"""Arguments of TRL's example scripts (`ScriptArguments`, `ModelConfig`)."""
