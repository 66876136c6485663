"""verl: the fields of `ppo_trainer.yaml` and `sft_trainer.yaml`, by their dotted names.

Source: verl/trainer/config/_generated_ppo_trainer.yaml and sft_trainer.yaml, commits 035682ed and 005a83db, and release
0.9.1. A name that ends in `.*` stands for a section without counterparts, of which no other row names a part.
"""

from kedge.config.libraries.row import Row

__all__ = ["ALGORITHM", "BATCHES", "MODELS_AND_DATA", "RUN", "WITHOUT_COUNTERPART"]

MODELS_AND_DATA = (
    Row("actor_rollout_ref.model.path model.partial_pretrain", "`model`: a folder or a hub id"),
    Row("critic.model.path", "`ppo.critic_init`; a model of this kind needs no `ppo.critic`"),
    Row("critic.enable", "`ppo.critic`: none by default where `ppo.advantage` needs no values"),
    Row("reward_model.model.path reward_model.enable", "`reward`: a reward model's folder or hub id"),
    Row(
        "custom_reward_function.path custom_reward_function.name",
        "`reward`: `rewards.py:compute_score`, with TRL's signature",
    ),
    Row("reward_model.reward_manager", "`reward`: a Python function, a reward model, or several with weights"),
    Row("data.train_files", "`data.prompts`; in sft `data.demonstrations`"),
    Row("data.val_files", "`data.eval_prompts`; sft and reward hold out `data.eval_fraction`"),
    Row("data.max_prompt_length actor_rollout_ref.rollout.prompt_length", "`data.max_prompt_tokens`"),
    Row("data.truncation data.filter_overlong_prompts", "`data.truncate`; by default longer prompts are rejected"),
    Row("data.shuffle", "always: the prompts' order depends on `runtime.seed`"),
    Row("data.prompt_key data.reward_fn_key", "`data.columns`: `data.columns.prompt=question` reads another column"),
    Row("data.train_max_samples data.val_max_samples", "part of the source: `org/name:train[:1000]`"),
    Row("data.seed", "`runtime.seed`"),
    Row(
        "actor_rollout_ref.model.custom_chat_template critic.model.custom_chat_template", "`data.chat_template`: a file"
    ),
    Row("actor_rollout_ref.model.tokenizer_path data.tokenizer", "none: the tokenizer in the model's folder"),
    Row(
        "actor_rollout_ref.model.trust_remote_code critic.model.trust_remote_code data.trust_remote_code",
        "`runtime.trust_remote_code`",
    ),
    Row(
        "actor_rollout_ref.model.enable_gradient_checkpointing critic.model.enable_gradient_checkpointing",
        "`runtime.activation_checkpointing`",
    ),
    Row(
        "reward.custom_reward_function reward.reward_manager",
        "`reward`: `rewards.py:compute_score`, with TRL's signature",
    ),
    Row("reward.reward_model", "`reward`: a reward model's folder or hub id"),
)
BATCHES = (
    Row("data.train_batch_size", "`rollout.num_prompts`: prompts per update; in sft `sft.batch_size`"),
    Row("actor_rollout_ref.rollout.n", "`rollout.num_responses`"),
    Row("data.max_response_length actor_rollout_ref.rollout.response_length", "`rollout.max_new_tokens`"),
    Row("actor_rollout_ref.rollout.temperature", "`rollout.temperature`"),
    Row(
        "actor_rollout_ref.rollout.top_k actor_rollout_ref.rollout.top_p",
        "none: with a filter the KL would be wrong; lower `rollout.temperature`",
    ),
    Row("actor_rollout_ref.rollout.val_kwargs.temperature", "`generate.temperature`"),
    Row(
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "`ppo.num_minibatches`: `rollout.num_prompts` divided by verl's value, which counts prompts",
    ),
    Row("critic.ppo_mini_batch_size", "`ppo.num_minibatches`, of policy and critic together"),
    Row(
        "actor_rollout_ref.actor.ppo_micro_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu reward_model.micro_batch_size_per_gpu "
        "data.micro_batch_size_per_gpu critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu "
        "critic.ppo_max_token_len_per_gpu critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu "
        "critic.forward_max_token_len_per_gpu actor_rollout_ref.ref.log_prob_micro_batch_size "
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu actor_rollout_ref.rollout.log_prob_micro_batch_size "
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        "`runtime.micro_batch_tokens`, in tokens; does not change gradients",
    ),
    Row(
        "actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.ref.log_prob_use_dynamic_bsz "
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz critic.use_dynamic_bsz",
        "always: `runtime.micro_batch_tokens` counts tokens",
    ),
    Row(
        "actor_rollout_ref.model.use_remove_padding actor_rollout_ref.actor.use_remove_padding "
        "critic.model.use_remove_padding",
        "always: rows are computed without padding",
    ),
    Row("data.gen_batch_size", "none: resampling (`ppo.constant_groups`) draws as many prompts as are missing"),
    Row("data.val_batch_size", "none: `runtime.micro_batch_tokens` splits every forward pass"),
    Row("actor_rollout_ref.actor.ppo_epochs", "`ppo.num_epochs`"),
    Row("critic.ppo_epochs", "`ppo.num_critic_epochs`, as a multiple of `ppo.num_epochs`"),
    Row(
        "trainer.total_epochs",
        "`ppo.num_updates`: passes over the prompts, times prompts in the data, divided by `rollout.num_prompts`; in "
        "sft `sft.num_epochs`",
    ),
    Row("trainer.total_training_steps", "`ppo.num_updates`"),
)
ALGORITHM = (
    Row("actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_low", "`ppo.clip_range`"),
    Row("actor_rollout_ref.actor.clip_ratio_high", "`ppo.clip_range_high`"),
    Row("actor_rollout_ref.actor.clip_ratio_c", "`ppo.dual_clip`; off by default"),
    Row("actor_rollout_ref.actor.loss_agg_mode", "`ppo.aggregation`: token, sequence or constant"),
    Row(
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "`ppo.policy_loss`; vanilla is clipped, and gspo is `ppo.ratio=sequence`",
    ),
    Row("actor_rollout_ref.actor.entropy_coeff", "`ppo.entropy_coef`"),
    Row("actor_rollout_ref.actor.use_kl_loss", "`ppo.kl_in=loss`"),
    Row(
        "algorithm.use_kl_in_reward",
        "`ppo.kl_in=reward`, the default, but not with `grpo`; `ppo.kl_coef=0` for no penalty",
    ),
    Row("actor_rollout_ref.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef", "`ppo.kl_coef`"),
    Row("actor_rollout_ref.actor.kl_loss_type algorithm.kl_penalty", "`ppo.kl_estimator`"),
    Row("algorithm.kl_ctrl.type", "`ppo.kl_controller`: fixed, ziegler (verl: adaptive) or schulman"),
    Row("algorithm.kl_ctrl.target_kl", "`ppo.kl_target`, in nats per response; verl's is per token"),
    Row("algorithm.kl_ctrl.horizon", "`ppo.kl_horizon`"),
    Row("algorithm.gamma", "`ppo.gamma`"),
    Row("algorithm.lam", "`ppo.gae_lambda`; `ppo.value_gae_lambda` for the critic's targets"),
    Row(
        "algorithm.adv_estimator",
        "`ppo.advantage`: gae, grpo, rloo, remax and opo alike, `reinforce++` and `reinforce++_baseline` for "
        "reinforce_plus_plus and its baseline form. See [The family](family.md)",
    ),
    Row("algorithm.norm_adv_by_std_in_grpo", "`ppo.advantage`: grpo for true, dr_grpo for false"),
    Row("critic.cliprange_value", "`ppo.value_clip_range`, in units of the score with `ppo.value_unit=score`"),
    Row("actor_rollout_ref.actor.grad_clip critic.grad_clip optim.clip_grad", "`ppo.max_grad_norm`"),
    Row("actor_rollout_ref.actor.optim.lr optim.lr", "`ppo.learning_rate`; in sft `sft.learning_rate`"),
    Row("critic.optim.lr", "`ppo.critic_learning_rate`, with `ppo.critic=separate`"),
    Row(
        "actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio "
        "optim.warmup_steps_ratio",
        "`ppo.warmup_fraction`, as a fraction of the policy's updates",
    ),
    Row("critic.optim.lr_warmup_steps critic.optim.lr_warmup_steps_ratio", "`ppo.warmup_fraction`"),
    Row(
        "actor_rollout_ref.actor.optim.warmup_style actor_rollout_ref.actor.optim.lr_scheduler_type optim.lr_scheduler "
        "critic.optim.warmup_style critic.optim.lr_scheduler_type",
        "`ppo.schedule`",
    ),
    Row("actor_rollout_ref.actor.optim.optimizer critic.optim.optimizer", "`ppo.optimizer`"),
    Row(
        "actor_rollout_ref.actor.optim.weight_decay optim.weight_decay critic.optim.weight_decay",
        "`ppo.weight_decay`",
    ),
    Row("actor_rollout_ref.actor.optim.clip_grad critic.optim.clip_grad", "`ppo.max_grad_norm`"),
    Row(
        "optim.betas actor_rollout_ref.actor.optim.betas critic.optim.betas",
        "none: fixed at 0.9 and 0.999",
    ),
    Row("critic.loss_agg_mode", "none: the value loss is the mean over tokens"),
    Row("algorithm.filter_groups", "`ppo.constant_groups`: resample; groups whose scores are all equal"),
    Row("algorithm.rollout_correction", "`ppo.importance_cap`: weights per token, truncated"),
    Row("trainer.critic_warmup", "`ppo.value_warmup_updates`"),
)
RUN = (
    Row(
        "actor_rollout_ref.model.lora_rank actor_rollout_ref.model.lora_alpha actor_rollout_ref.model.target_modules "
        "actor_rollout_ref.model.lora critic.model.lora_rank critic.model.lora_alpha critic.model.target_modules "
        "critic.model.lora",
        "`adapter.rank`, `adapter.alpha`, `adapter.target_modules`, with `adapter.kind=lora`",
    ),
    Row("actor_rollout_ref.model.lora_adapter_path", "`model`: the adapter's folder"),
    Row(
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload critic.fsdp.optimizer_offload "
        "critic.model.fsdp_config.optimizer_offload",
        "`runtime.offload_optimizer`",
    ),
    Row(
        "actor_rollout_ref.ref.fsdp_config.param_offload reward_model.model.fsdp_config.param_offload",
        "`runtime.offload_frozen`",
    ),
    Row(
        "actor_rollout_ref.actor.fsdp_config.param_offload critic.fsdp.param_offload "
        "critic.model.fsdp_config.param_offload",
        "none: trained weights stay on the device; `runtime.offload_optimizer` moves the optimizer's state",
    ),
    Row(
        "actor_rollout_ref.actor.strategy critic.strategy actor_rollout_ref.actor.fsdp_config "
        "actor_rollout_ref.ref.fsdp_config critic.fsdp critic.model.fsdp_config",
        "`runtime.parallel`: replicate, or shard for FSDP",
    ),
    Row("trainer.default_local_dir", "`out`"),
    Row("trainer.experiment_name", "the name of the run's folder, `out`"),
    Row("trainer.project_name", "`runtime.project`"),
    Row("trainer.logger", "`runtime.loggers`, in addition to the run's own files"),
    Row("trainer.save_freq", "`checkpoint.every`"),
    Row("trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep", "`checkpoint.keep`"),
    Row("trainer.resume_mode trainer.resume_from_path", "`--resume`"),
    Row(
        "trainer.test_freq trainer.val_before_train trainer.val_only",
        "`ppo.eval_every`: also at the start and at the end",
    ),
    Row("trainer.log_val_generations trainer.rollout_data_dir", "`runtime.num_samples`: saved in every update"),
    Row("trainer.device", "`runtime.device`"),
    Row("trainer.seed", "`runtime.seed`"),
    Row("actor_rollout_ref.rollout.name", "`rollout.engine`: builtin or vllm"),
    Row("actor_rollout_ref.rollout.gpu_memory_utilization", "`rollout.vllm.memory`, with `rollout.engine=vllm`"),
    Row(
        "actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.enforce_eager "
        "actor_rollout_ref.rollout.max_num_batched_tokens",
        "`rollout.vllm.args`: vLLM's own arguments",
    ),
    Row(
        "actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.max_num_seqs "
        "actor_rollout_ref.rollout.enable_chunked_prefill actor_rollout_ref.rollout.enable_prefix_caching "
        "actor_rollout_ref.rollout.engine_kwargs actor_rollout_ref.rollout.data_parallel_size",
        "`rollout.vllm.args`: vLLM's own arguments",
    ),
    Row("actor_rollout_ref.rollout.dtype", "`runtime.precision`"),
    Row("trainer.validation_data_dir", "the run's folder: `eval.jsonl` in `out`"),
)
WITHOUT_COUNTERPART = (
    Row(
        "trainer.nnodes trainer.n_gpus_per_node actor_rollout_ref.actor.ulysses_sequence_parallel_size "
        "critic.ulysses_sequence_parallel_size trainer.balance_batch trainer.default_hdfs_dir "
        "actor_rollout_ref.nccl_timeout ray_kwargs.* reward.num_workers "
        "reward_model.num_workers reward_model.n_gpus_per_node reward_model.nnodes reward_model.enable_resource_pool",
        "torchrun sets the number of processes",
    ),
    Row(
        "actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.free_cache_engine "
        "actor_rollout_ref.rollout.load_format",
        "vLLM is a server of its own, whose weights are sent",
    ),
    Row("actor_rollout_ref.actor.use_torch_compile actor_rollout_ref.model.use_liger", "no third-party kernels"),
    Row("algorithm.use_pf_ppo algorithm.pf_ppo", "no PF-PPO"),
    Row(
        "actor_rollout_ref.rollout.multi_turn actor_rollout_ref.rollout.agent data.tool_config_path "
        "data.function_tool_path data.return_raw_chat data.return_full_prompt data.custom_cls reward.sandbox_fusion "
        "sandbox_fusion.*",
        "responses of one turn, without tools",
    ),
    Row("data.image_key data.video_key data.audio_key data.image_patch_size", "text only"),
    Row(
        "data.apply_chat_template_kwargs data.filter_overlong_prompts_workers data.dataloader_num_workers "
        "data.use_shm data.return_raw_input_ids data.return_multi_modal_inputs data.mm_processor_kwargs "
        "data.validation_shuffle critic.model critic.optim "
        "critic.checkpoint critic.shuffle critic.data_loader_seed critic.loss_scale_factor critic.rollout_n "
        "critic.profiler reward_model.rollout reward_model.reward_kwargs actor_rollout_ref.* algorithm.* trainer.* "
        "distillation.* transfer_queue.* global_profiler.* skip.* reward_model.reward_loop_source reward_model.model "
        "reward_model.reward_loop_module_path reward_model.reward_loop_class_name",
        "not implemented",
    ),
)
