"""TRL: `PPOTrainer`, `PPOConfig` and the `TrainingArguments` that it inherits; `GRPOConfig` and `RLOOConfig`.

Source: TRL 1.12.0, trl/experimental/ppo/ppo_config.py and ppo_trainer.py; transformers 5, training_args.py; for GRPO
and RLOO commit f2cd577, trl/trainer/grpo_config.py and rloo_config.py.
"""

from kedge.config.libraries.row import Row

__all__ = ["GROUP_CONFIGS", "PPO_CONFIG", "SCRIPT", "TRAINER", "TRAINING_ARGUMENTS", "WITHOUT_COUNTERPART"]

TRAINER = (
    Row(
        "args",
        "the configuration: keyword arguments, a file, overrides, a preset. See [Configuration](configuration.md)",
    ),
    Row("processing_class", "the tokenizer in the policy's folder; a missing pad token is added"),
    Row("model", "`model`: a folder or a hub id"),
    Row("ref_model", "always the initial policy; not loaded if KL is neither penalized nor measured"),
    Row(
        "reward_model",
        "`reward`: a reward model, a Python function, or several with weights. See [Rewards](rewards.md)",
    ),
    Row("train_dataset", "`data.prompts`: texts or conversations; kedge tokenizes them"),
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
    Row("callbacks", "in Python, `on_update`: see [Callbacks](custom.md#callbacks)"),
    Row("peft_config", "`adapter.kind` and the other fields of `adapter`: [Adapters](adapters.md)"),
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
    Row("push_to_hub", "`push.repo`, or `--push`; `kedge push` does it afterwards"),
    Row("model_adapter_name ref_adapter_name", "none: with an adapter, the frozen base is the reference"),
    Row("ds3_gather_for_generation", "none: no DeepSpeed"),
)
GROUP_CONFIGS = (
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
    Row("vllm_importance_sampling_correction vllm_importance_sampling_cap", "`ppo.importance_cap`"),
)
TRAINING_ARGUMENTS = (
    Row("output_dir", "`out`; must be new or empty, nothing is overwritten"),
    Row(
        "per_device_train_batch_size gradient_accumulation_steps",
        "`rollout.num_prompts`: their product is TRL's batch size. `runtime.micro_batch_tokens` splits it for memory",
    ),
    Row("per_device_eval_batch_size", "none: `runtime.micro_batch_tokens` splits every forward pass"),
    Row("eval_steps eval_strategy", "`ppo.eval_every`, in updates; off by default"),
    Row("num_train_epochs", "`ppo.num_updates`; `kedge config schedule` prints the number of passes over the prompts"),
    Row("learning_rate", "`ppo.learning_rate`. Default 1e-5; TRL: 3e-6"),
    Row("lr_scheduler_type lr_scheduler_kwargs", "`ppo.schedule`"),
    Row("warmup_steps", "`ppo.warmup_fraction`, as a fraction of the policy's updates"),
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
    Row("use_cpu", "`runtime.device=cpu`"),
    Row("hub_model_id", "`push.repo`"),
)
WITHOUT_COUNTERPART = (
    Row(
        "max_steps label_smoothing_factor average_tokens_across_devices neftune_noise_alpha auto_find_batch_size "
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
        "ddp_backend ddp_timeout fsdp fsdp_config deepspeed accelerator_config parallelism_config "
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
        "hub_token hub_private_repo hub_strategy hub_always_push hub_revision trackio_space_id trackio_bucket_id "
        "trackio_static_space_id",
        "nothing is uploaded",
    ),
    Row(
        "save_only_model enable_jit_checkpoint",
        "checkpoints are always complete",
    ),
    Row(
        "log_level",
        "there is a single log level",
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
    Row("load_in_4bit load_in_8bit", "none: no quantization"),
)
"""Arguments of TRL's example scripts (`ScriptArguments`, `ModelConfig`)."""
