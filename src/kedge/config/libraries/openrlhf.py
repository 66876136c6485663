"""OpenRLHF: the arguments of `train_ppo_ray`, `train_sft` and `train_rm`, by their old flat and their new dotted names.

Source: openrlhf/cli/train_ppo_ray.py, train_sft.py and train_rm.py; flat names from releases 0.8 to 0.11, dotted names
from commit 3c3be623. An argument of several scripts has the counterpart of its PPO script.
"""

from kedge.config.libraries.row import Row

__all__ = ["ALGORITHM", "BATCHES", "MODELS_AND_DATA", "RUN", "WITHOUT_COUNTERPART"]

MODELS_AND_DATA = (
    Row("pretrain actor.model_name_or_path model.model_name_or_path", "`model`: a folder or a hub id"),
    Row("reward_pretrain reward.model_name_or_path", "`reward`: a reward model's folder or hub id"),
    Row(
        "remote_rm_url reward.remote_url",
        "`reward`: a Python function, which may call a server; OpenRLHF's reward file is `rewards.py:reward_func`",
    ),
    Row("critic_pretrain critic.model_name_or_path", "`ppo.critic_init`; a model of this kind needs no `ppo.critic`"),
    Row("value_head_prefix ds.value_head_prefix", "none: the head is found by its shape"),
    Row("prompt_data data.prompt_dataset", "`data.prompts`"),
    Row("dataset data.dataset", "`data.demonstrations` in sft, `data.comparisons` in reward"),
    Row("prompt_split dataset_split data.prompt_split data.dataset_split", "part of the source: `org/name:split`"),
    Row("eval_dataset eval_split eval.dataset eval.split", "`data.eval_fraction` in sft and reward"),
    Row("max_samples data.max_samples", "part of the source: `org/name:train[:1000]`"),
    Row("max_len data.max_len", "`data.max_length` in sft and reward; in ppo `data.max_prompt_tokens`"),
    Row("prompt_max_len", "`data.max_prompt_tokens`"),
    Row("apply_chat_template data.apply_chat_template", "automatic: conversations are rendered, texts are not"),
    Row("input_template data.input_template", "none: write the template into the prompts, or pass conversations"),
    Row(
        "data.input_key data.output_key data.label_key data.prompt_key data.chosen_key data.rejected_key",
        "`data.columns`: `data.columns.prompt=question` reads another column",
    ),
    Row("data.prompt_probs data.dataset_probs prompt_data_probs", "`data.mix`"),
    Row("data.tokenizer_chat_template tokenizer_chat_template", "`data.chat_template`: a file"),
    Row("data.multiturn multiturn", "`data.train_on`: all messages of the assistant, or the last"),
)
BATCHES = (
    Row("rollout_batch_size rollout.batch_size", "`rollout.num_prompts`: prompts per update"),
    Row("n_samples_per_prompt rollout.n_samples_per_prompt", "`rollout.num_responses`"),
    Row(
        "train_batch_size train.batch_size",
        "`ppo.num_minibatches`: responses per update (`rollout.num_prompts` times `rollout.num_responses`) divided by "
        "OpenRLHF's value; in sft `sft.batch_size`, in reward `reward_model.batch_size`",
    ),
    Row(
        "micro_train_batch_size train.micro_batch_size train_max_tokens_per_gpu train.max_tokens_per_gpu",
        "`runtime.micro_batch_tokens`, in tokens; does not change gradients",
    ),
    Row(
        "micro_rollout_batch_size rollout.micro_batch_size rollout_max_tokens_per_gpu rollout.max_tokens_per_gpu",
        "`rollout.micro_batch_size` for sampling, `runtime.micro_batch_tokens` for forward passes",
    ),
    Row("use_dynamic_batch train.dynamic_batch_enable", "always: `runtime.micro_batch_tokens` counts tokens"),
    Row("packing_samples ds.packing_samples", "always: rows are computed without padding"),
    Row(
        "num_episodes train.num_episodes",
        "`ppo.num_updates`: passes over the prompts, times prompts in the data, divided by `rollout.num_prompts`",
    ),
    Row("max_epochs train.max_epochs", "`ppo.num_epochs`; in sft `sft.num_epochs`"),
    Row("generate_max_len max_new_tokens rollout.max_new_tokens", "`rollout.max_new_tokens`"),
    Row("top_p rollout.top_p", "none: with a filter the KL would be wrong; lower `rollout.temperature`"),
)
ALGORITHM = (
    Row("eps_clip actor.eps_clip", "`ppo.clip_range`"),
    Row("eps_clip_low_high actor.eps_clip_low_high", "`ppo.clip_range` and `ppo.clip_range_high`"),
    Row("dual_clip actor.dual_clip", "`ppo.dual_clip`"),
    Row("value_clip critic.value_clip", "`ppo.value_clip_range`, in units of the score with `ppo.value_unit=score`"),
    Row("lambd algo.advantage.lambd", "`ppo.gae_lambda`"),
    Row("algo.advantage.gamma", "`ppo.gamma`"),
    Row(
        "advantage_estimator algo.advantage.estimator",
        "`ppo.advantage`: gae, rloo and dr_grpo alike, `grpo` for group_norm, `reinforce++` for reinforce, "
        "`reinforce++_baseline` for reinforce_baseline. See [The family](family.md)",
    ),
    Row(
        "no_advantage_std_norm algo.advantage.no_std_norm",
        "`ppo.whiten_advantages=false`, which also keeps the mean; auto depends on `ppo.advantage`",
    ),
    Row(
        "dynamic_filtering algo.dynamic_filtering_enable",
        "`ppo.constant_groups`: resample; groups whose scores are all equal, not those outside a range",
    ),
    Row("init_kl_coef algo.kl.init_coef", "`ppo.kl_coef`"),
    Row("algo.kl.target", "`ppo.kl_target`, with `ppo.kl_controller=ziegler`"),
    Row("algo.kl.horizon", "`ppo.kl_horizon`"),
    Row("algo.kl.estimator", "`ppo.kl_estimator`"),
    Row("use_kl_loss algo.kl.use_loss", "`ppo.kl_in=loss`"),
    Row("entropy_loss_coef actor.entropy_coef", "`ppo.entropy_coef`"),
    Row("policy_loss_type actor.policy_loss_type", "`ppo.policy_loss`; for gspo `ppo.ratio=sequence`, or the preset"),
    Row(
        "enable_vllm_is_correction vllm_is_truncated_threshold algo.advantage.is_correction_enable "
        "algo.advantage.is_correction_threshold",
        "`ppo.importance_cap`",
    ),
    Row(
        "vllm_gpu_memory_utilization vllm.gpu_memory_utilization",
        "`rollout.vllm.memory`, with `rollout.engine=vllm`",
    ),
    Row(
        "vllm_tensor_parallel_size vllm.tensor_parallel_size enforce_eager vllm.enforce_eager",
        "`rollout.vllm.args`: vLLM's own arguments",
    ),
    Row(
        "vllm_num_engines vllm.num_engines",
        "`rollout.vllm.urls`: kedge starts one server; further ones are named",
    ),
    Row("vllm_sync_backend vllm.sync_backend", "weights go through a folder, `rollout.vllm.folder`"),
    Row(
        "freezing_actor_steps critic.freezing_steps",
        "`ppo.value_warmup_updates`, in updates instead of optimizer steps",
    ),
    Row(
        "normalize_reward reward.normalize_enable",
        "`reward_model.normalize` and `reward_model.normalize_scale`, when the reward model is trained",
    ),
    Row(
        "overlong_buffer_len overlong_penalty_factor reward.overlong_buffer_len reward.overlong_penalty_factor",
        "`reward`: add the penalty `kedge.rewards.penalties:too_long`",
    ),
    Row(
        "stop_properly_penalty_coef reward.stop_properly_penalty_coef",
        "`rollout.missing_eos_score`: a score or a penalty instead of a factor",
    ),
    Row("reward_clip_range reward.clip_range", "none: clip in a reward function"),
    Row("loss model.loss_type", "none: the reward model's loss is the pairwise one of Bradley and Terry"),
    Row(
        "actor_learning_rate learning_rate actor.adam.lr adam.lr",
        "`ppo.learning_rate`; in sft `sft.learning_rate`, in reward `reward_model.learning_rate`",
    ),
    Row("critic_learning_rate critic.adam.lr", "`ppo.critic_learning_rate`, with `ppo.critic=separate`"),
    Row("lr_scheduler actor.lr_scheduler", "`ppo.schedule`"),
    Row("lr_warmup_ratio actor.lr_warmup_ratio", "`ppo.warmup_fraction`"),
    Row("min_lr_ratio actor.min_lr_ratio", "none: schedules end at 0, or stay constant"),
    Row("max_norm actor.max_norm critic.max_norm", "`ppo.max_grad_norm`"),
    Row("l2 actor.adam.weight_decay adam.weight_decay", "`ppo.weight_decay`: decoupled, as in AdamW"),
    Row("actor.adam.eps adam.eps", "`ppo.adam_eps`"),
    Row("adam_betas actor.adam.betas critic.adam.betas adam.betas", "none: fixed at 0.9 and 0.999"),
    Row(
        "gradient_checkpointing actor.gradient_checkpointing_enable model.gradient_checkpointing_enable",
        "`runtime.activation_checkpointing`",
    ),
)
RUN = (
    Row(
        "lora_rank lora_alpha target_modules ds.lora.rank ds.lora.alpha ds.lora.target_modules",
        "`adapter.rank`, `adapter.alpha`, `adapter.target_modules`, with `adapter.kind=lora`",
    ),
    Row("load_in_4bit ds.load_in_4bit", "`adapter.base_dtype`: nf4, with `adapter.kind=lora`"),
    Row("adam_offload ds.adam_offload", "`runtime.offload_optimizer`"),
    Row("ref_reward_offload ref.offload reward.offload", "`runtime.offload_frozen`"),
    Row("zero_stage ds.zero_stage", "`runtime.parallel=shard` for stage 3"),
    Row("train.async_enable async_train async_queue_size train.async_queue_size", "`rollout.max_staleness`"),
    Row("muon.lr", "`ppo.learning_rate`, with `ppo.optimizer=muon`"),
    Row("ckpt.best_metric_key", "`checkpoint.keep_best`"),
    Row("critic.save_value_network save_value_network", "always, if the critic is a model of its own"),
    Row("algo.dynamic_filtering_range", "none: groups are dropped where all scores are equal"),
    Row("eval.n_samples_per_prompt", "none: every held-out prompt is answered once"),
    Row("use_ms", "none: models and data are on the disk or on the Hugging Face hub"),
    Row("model.margin_loss_enable", "always: the column `margin` of a comparison is the margin of its loss"),
    Row("save_path ckpt.output_dir", "`out`: the model is in its folder `model/`"),
    Row("ckpt_path ckpt.path", "the folder `checkpoints/` in `out`"),
    Row("save_steps ckpt.save_steps", "`checkpoint.every`"),
    Row("max_ckpt_num ckpt.max_num", "`checkpoint.keep`"),
    Row("load_checkpoint ckpt.load_enable", "`--resume`"),
    Row("save_hf_ckpt ckpt.save_hf", "always: `model/` is a Hugging Face folder"),
    Row("logging_steps logger.logging_steps", "none: every update is logged"),
    Row("use_wandb use_tensorboard logger.wandb.key logger.tensorboard_dir", "`runtime.loggers`"),
    Row("wandb_project logger.wandb.project", "`runtime.project`"),
    Row("wandb_run_name logger.wandb.run_name", "the name of the run's folder, `out`"),
    Row("train.seed", "`runtime.seed`"),
    Row("full_determinism train.full_determinism_enable", "`runtime.deterministic`; always on a CPU"),
    Row(
        "param_dtype ds.param_dtype",
        "`runtime.precision`; trained weights are always kept in fp32, others in `runtime.frozen_dtype`",
    ),
    Row(
        "eval_steps eval.steps eval_temperature eval.temperature",
        "`ppo.eval_every`; the temperature is that of training",
    ),
)
WITHOUT_COUNTERPART = (
    Row(
        "actor_num_nodes actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node ref_num_nodes "
        "ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node colocate_all_models colocate_actor_ref "
        "colocate_critic_reward zpg ring_attn_size ds_tensor_parallel_size local_rank partial_rollout actor.num_nodes "
        "actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node ref.num_nodes ref.num_gpus_per_node "
        "reward.num_nodes reward.num_gpus_per_node train.colocate_all train.colocate_actor_ref "
        "train.colocate_critic_reward train.partial_rollout_enable ds.zpg ds.ring_attn_size ds.ring_attn_head_stride "
        "ds.tensor_parallel_size ds.overlap_comm ds.grad_accum_dtype ds.use_universal_ckpt ckpt.disable_ds "
        "ckpt.max_mem",
        "torchrun sets the number of processes",
    ),
    Row(
        "vllm_generate_batch_size vllm_enable_sleep enable_prefix_caching rollout.vllm_generate_batch_size "
        "vllm.enable_sleep vllm.enable_prefix_caching vllm.sync_with_ray ds.enable_sleep",
        "vLLM decides",
    ),
    Row("lora_dropout ds.lora.dropout", "no dropout"),
    Row(
        "flash_attn attn_implementation use_liger_kernel deepcompile ds.attn_implementation ds.use_liger_kernel "
        "ds.deepcompile ds.experts_implementation",
        "no third-party kernels",
    ),
    Row(
        "enable_ema ema_beta aux_loss_coef agent_func_path train.enable_ema train.ema_beta actor.aux_loss_coef "
        "model.aux_loss_coef train.agent_func_path algo.advantage.is_correction_type model.pretrain_mode_enable "
        "model.compute_fp32_loss_enable muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov logger.wandb.org "
        "logger.wandb.group actor.gradient_checkpointing_reentrant model.gradient_checkpointing_reentrant "
        "data.disable_fast_tokenizer data.dataloader_num_workers",
        "not implemented",
    ),
    Row("data.image_key data.max_images_per_prompt actor.freeze_visual_encoder", "text only"),
)
