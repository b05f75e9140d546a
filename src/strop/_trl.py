"""TRL's names and strop's equivalents. Hints in errors and the tables of docs/coming_from_trl.md come from here."""

import re
from typing import NamedTuple


class Name(NamedTuple):
    """A row of the table: one or several names of TRL, TRL's default, strop's equivalent, and its default.

    of   the algorithms it applies to; () is all
    """

    trl: str
    default: str
    here: str
    default_here: str = ""
    of: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return re.findall(r"\w+", self.trl)


SUPERVISED, SAMPLED = ("SFT", "DPO", "KTO", "RewardModel"), ("GRPO", "OnlineDPO", "PPO", "Distill")
ARGUMENTS = (
    Name("processing_class", "", "`tokenizer=`"),
    Name("args", "", "`config=`, or single options"),
    Name("train_dataset", "", "an argument of `train(dataset)`"),
    Name("eval_dataset", "", "an argument of `train(dataset, eval_dataset=…)`"),
    Name("reward_funcs", "", "`reward_fn=`"),
    Name("environment_factory", "", "`environment=`"),
    Name("peft_config", "", "`lora={'r': 16}`, or a peft model as `model=`"),
    Name("optimizers", "", "`optimizer=`, a function of parameter groups"),
    Name("formatting_func", "", "rows brought into one of the formats of data beforehand"),
    Name("compute_metrics", "", "a callback with `on_evaluate`"),
    Name("quantization_config, load_in_4bit, load_in_8bit", "",
         "`quantize`, nf4 or int8, with `lora`"),
    Name("data_collator, preprocess_logits_for_metrics, reward_processing_classes, rollout_func", "", "none"),
)  # fmt: skip
OPTIONS = (
    Name("learning_rate", "2e-5", "`learning_rate`", "2e-5", ("SFT",)),
    Name("learning_rate", "1e-6", "`learning_rate`", "1e-6", ("DPO", "KTO", "GRPO")),
    Name("lr", "", "`learning_rate`"),
    Name("per_device_train_batch_size, gradient_accumulation_steps", "8, 1",
         "`batch_size`, their product; `micro_batch_tokens` or `micro_batch_size` is what fits into memory",
         "8; 6144, 0", SUPERVISED),
    Name("per_device_train_batch_size, generation_batch_size, gradient_accumulation_steps", "8",
         "`batch_size`, which counts prompts: completions / group_size; `micro_batch_tokens` is what fits into memory",
         "8; 6144", SAMPLED),
    Name("per_device_eval_batch_size", "8", "`micro_batch_size`, or `batch_size`"),
    Name("num_generations", "8", "`group_size`", "8", ("GRPO",)),
    Name("max_completion_length, max_new_tokens", "512", "`max_new_tokens`", "128", SAMPLED),
    Name("temperature, top_p, top_k", "1, 1, 0", "`temperature`, `top_p`, `top_k`", "1, 1, 0", SAMPLED),
    Name("min_p, repetition_penalty, generation_kwargs", "None, 1, None", "none", "", SAMPLED),
    Name("beta", "0", "`kl_coef`", "0.04", ("GRPO",)),
    Name("beta", "0.1", "`beta`", "0.1", ("DPO", "OnlineDPO")),
    Name("loss_type", "dapo", "`loss_type`", "grpo", ("GRPO",)),
    Name("loss_type, loss_weights", '`["sigmoid"]`, a list', "`loss_type`, one or several, and `loss_weights`", "sigmoid",
         ("DPO", "OnlineDPO")),
    Name("simpo_gamma, cpo_alpha", "0.5, 1", "`simpo_gamma`, `loss_weights`; `loss_type` simpo, or cpo or orpo with sft",
         "0.5; 1", ("DPO",)),
    Name("epsilon, epsilon_high", "0.2, the same", "`clip_eps`, one or (low, high)", "0.2", ("GRPO",)),
    Name("delta", "None", "`delta`", "None", ("GRPO",)),
    Name("importance_sampling_level", "token", "`importance_level`", "token", ("GRPO",)),
    Name("vllm_importance_sampling_correction, vllm_importance_sampling_mode, vllm_importance_sampling_clip_min, "
         "vllm_importance_sampling_clip_max, vllm_importance_sampling_cap",
         "True, sequence_mask, None, 3.0", "`importance_cap` and `importance_mode`", "None, off; truncate", ("GRPO",)),
    Name("off_policy_mask_threshold", "None", "`stale_kl`", "None", ("GRPO",)),
    Name("sapo_temperature_neg, sapo_temperature_pos", "1.05, 1", "`sapo_temperatures`", "the same", ("GRPO",)),
    Name("vespo_k_neg, vespo_lambda_neg, vespo_k_pos, vespo_lambda_pos", "3, 2, 2, 3", "`vespo_gamma`", "the same",
         ("GRPO",)),
    Name("scale_rewards", "group", "`advantage_scale`", "group", ("GRPO",)),
    Name("num_iterations", "1", "`inner_epochs`", "1", ("GRPO",)),
    Name("steps_per_generation", "gradient_accumulation_steps", "`minibatch_size`, completions of an update", "0, all",
         ("GRPO",)),
    Name("mask_truncated_completions", "False", "`mask_truncated`", "False", ("GRPO",)),
    Name("reward_weights", "None", "`reward_weights`", "None", SAMPLED),
    Name("entropy_coef", "0", "`entropy_coef`", "0", ("GRPO",)),
    Name("use_bias_correction_kl", "True", "none: the weight of k3 is 1", "", ("GRPO",)),
    Name("use_vllm, vllm_mode, vllm_server_base_url, vllm_server_host, vllm_server_port", "False",
         "`rollout_server`, an address; without one strop samples itself", "none", SAMPLED),
    Name("vllm_server_timeout", "240", "`server_timeout`", "300", SAMPLED),
    Name("vllm_gpu_memory_utilization, vllm_max_model_length, vllm_tensor_parallel_size, vllm_model_impl, "
         "vllm_enable_sleep_mode, vllm_group_port", "", "options of the server, which you start yourself", "", SAMPLED),
    Name("vllm_structured_outputs_regex", "None", "none", "", SAMPLED),
    Name("use_transformers_continuous_batching, transformers_continuous_batching_config, use_transformers_paged, "
         "cache_implementation, ds3_gather_for_generation", "False", "none: strop samples with an engine of its own", "",
         SAMPLED),
    Name("num_generations_eval", "None", "none: an evaluation samples one greedy completion of each prompt", "", ("GRPO",)),
    Name("multi_objective_aggregation", "sum_then_normalize", '`advantage="gdpo"` is normalize_then_sum', "grpo", ("GRPO",)),
    Name("top_entropy_quantile", "1", "`top_entropy_quantile`", "1", ("GRPO",)),
    Name("use_adaptive_entropy, entropy_target", "False, 0.2", "`entropy_target`", "None, off", ("GRPO",)),
    Name("entropy_coef_min, entropy_coef_max, entropy_coef_delta", "0, 1, 0.005",
         "`entropy_coef_min`, `entropy_coef_max`, `entropy_coef_delta`", "the same", ("GRPO",)),
    Name("max_tool_calling_iterations", "None", "`max_turns`", "8", ("GRPO",)),
    Name("chat_template_kwargs", "None", "a column `chat_template_kwargs` of the rows"),
    Name("log_unique_prompts, log_multimodal, log_completions_hub_repo", "", "none: `samples.jsonl` in the run folder has samples"),
    Name("sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps", "False", "none: the reference stays as it is"),
    Name("precompute_ref_log_probs, precompute_ref_batch_size", "False, None", "none: computed in each step", "",
         ("DPO", "KTO")),
    Name("f_divergence_type, f_alpha_divergence_coef, ld_alpha, use_weighting", "reverse_kl, 0.5, None, False", "none", "",
         ("DPO",)),
    Name("discopop_tau", "0.05", "`discopop_tau`", "0.05", ("DPO",)),
    Name("desirable_weight, undesirable_weight", "1, 1", "`desirable_weight`, `undesirable_weight`", "1, 1", ("KTO",)),
    Name("center_rewards_coefficient", "None", "`center_coef`", "0", ("RewardModel",)),
    Name("label_smoothing", "0", "`label_smoothing`", "0", ("DPO", "OnlineDPO")),
    Name("max_length", "1024", "`max_length`", "None: cut nothing, refuse what does not fit"),
    Name("max_prompt_length, truncation_mode", "", "none: a prompt that does not fit is an error that names its row"),
    Name("packing, eval_packing, padding_free, packing_strategy, pad_to_multiple_of", "False", "none: training never pads a Hugging Face model"),
    Name("completion_only_loss", "None", "none: with `prompt` and `completion` only the completion counts", "",
         ("SFT",)),
    Name("assistant_only_loss", "False", "`assistant_only`; needs no marks in the chat template", "True", ("SFT",)),
    Name("chat_template_path, eos_token, pad_token", "None", "none: set them in the tokenizer and give it as `tokenizer=`"),
    Name("dataset_kwargs", "None", "none"),
    Name("router_aux_loss_coef", "0.001", "none: the loss has no auxiliary term"),
    Name("dataset_text_field", "text", "`--map text=column`, or a column `text`"),
    Name("disable_dropout", "True in DPO, else False", "`dropout`, the other way round", "False"),
    Name("lr_scheduler_type", "linear", "`schedule`", "constant"),
    Name("warmup_steps", "0", "`warmup_steps`", "0"),
    Name("warmup_ratio", "", "`warmup_steps`, counted in steps", "0"),
    Name("max_grad_norm, weight_decay", "1, 0", "`max_grad_norm`, `weight_decay`", "1, 0"),
    Name("adam_beta1, adam_beta2", "0.9, 0.999", "`betas`, a pair", "(0.9, 0.999)"),
    Name("adam_epsilon", "1e-8", "`eps`", "1e-8"),
    Name("num_train_epochs", "3", "`num_epochs`", "1"),
    Name("max_steps", "−1", "`num_steps`; above 0 it counts in place of `num_epochs`", "0"),
    Name("bf16", "True", '`autocast="bf16"`', "None"),
    Name("fp16", "False", 'none: `autocast="bf16"`'),
    Name("gradient_checkpointing", "True", "`gradient_checkpointing`", "False"),
    Name("activation_offloading, use_liger_kernel, cast_lm_head_to_fp32", "False", "none: the losses need no logits"),
    Name("logging_steps, logging_strategy", "10, steps", "`log_every`; 0 is off", "1"),
    Name("eval_steps, eval_strategy", "None, no", "`eval_every`; 0 evaluates before the first step and after the last", "0"),
    Name("save_steps, save_strategy", "500, steps", "`save_every`; 0 saves at the end only", "0"),
    Name("save_total_limit", "None", "`keep_checkpoints`", "2"),
    Name("log_completions, num_completions_to_print", "False", "`samples_every`", "10"),
    Name("report_to", "none", "`logger=` of strop.logging, `--log` on the command line", "console"),
    Name("output_dir, overwrite_output_dir", "trainer_output",
         "arguments of train: `train(…, output_dir=…, overwrite=True)`", "no folder"),
    Name("resume_from_checkpoint", "None", "`train(…, output_dir=…, resume=True)`"),
    Name("torch_compile", "False", "`compile`", "False"),
    Name("model_init_kwargs, trust_remote_code", "None, False",
         "`load_model(…)` of strop.models, whose model is given as `model=`"),
    Name("seed", "42", "`seed`", "0"),
    Name("shuffle_dataset", "True in GRPO", "`shuffle`", "True"),
    Name("remove_unused_columns", "False", "none: columns stay, reward functions get them by name"),
    Name("dataset_num_proc, dataloader_num_workers, dataloader_pin_memory, dataloader_drop_last, dataloader_prefetch_factor, "
         "dataloader_persistent_workers, dataloader_multiprocessing_context, dataloader_in_order", "",
         "none: rows are tokenised once, before the first step"),
    Name("train_sampling_strategy, length_column_name, group_by_length", "random", "`shuffle`", "True"),
    Name("data_seed", "None", "`seed`", "0"),
    Name("lr_scheduler_kwargs", "None", "`min_learning_rate`, where the schedule ends", "0"),
    Name("optim, optim_args, optim_target_modules", "adamw_torch_fused",
         "`optimizer`, a name, or as `optimizer=` a function of parameter groups", "adamw"),
    Name("gradient_checkpointing_kwargs, torch_compile_backend, torch_compile_mode, liger_kernel_config, use_cache", "", "none"),
    Name("bf16_full_eval, fp16_full_eval, tf32, half_precision_backend", "False", 'none: `autocast="bf16"` holds for evaluations too'),
    Name("label_smoothing_factor, neftune_noise_alpha", "0, None", "none"),
    Name("auto_find_batch_size, torch_empty_cache_steps, skip_memory_metrics", "False", "none: an error of memory says what to lower, "
         "`--dry-run` tells the peak"),
    Name("logging_first_step, logging_nan_inf_filter, log_level, log_level_replica, log_on_each_node, "
         "include_num_input_tokens_seen", "", "none: every step is logged, by the first process"),
    Name("disable_tqdm", "False", "`train(…, progress=False)`, `--quiet`"),
    Name("run_name, project, trackio_space_id, trackio_bucket_id, trackio_static_space_id", "None",
         "arguments of `TrackioLogger` and `WandbLogger`"),
    Name("eval_on_start", "False", "none: an evaluation before the first step is always made"),
    Name("eval_delay, eval_accumulation_steps, prediction_loss_only, eval_do_concat_batches, eval_use_gather_object, "
         "include_for_metrics, batch_eval_metrics, label_names", "", "none"),
    Name("load_best_model_at_end, metric_for_best_model, greater_is_better", "False, None",
         "the callback `BestCheckpoint(folder, metric)`, `--best eval/loss`"),
    Name("push_to_hub, hub_model_id, hub_private_repo, hub_token, hub_strategy, hub_always_push, hub_revision", "False",
         "`trainer.push_to_hub(name)` after training, `--push-to-hub owner/name`"),
    Name("save_only_model, save_on_each_node, enable_jit_checkpoint, ignore_data_skip, "
         "restore_callback_states_from_checkpoint", "False",
         "none: a checkpoint holds all that a run needs to go on, `final/` holds the model alone"),
    Name("full_determinism", "False", "none: see the page on exactness"),
    Name("use_cpu", "False", '`device="cpu"`'),
    Name("fsdp, fsdp_config, deepspeed, accelerator_config, parallelism_config", "", '`shard="full"` under torchrun', "none"),
    Name("ddp_find_unused_parameters, ddp_bucket_cap_mb, ddp_broadcast_buffers, ddp_static_graph, ddp_backend, ddp_timeout, "
         "local_rank, average_tokens_across_devices", "", "none: torchrun starts the processes, losses count the tokens of all"),
    Name("do_train, do_eval, do_predict, debug", "", "none"),
)  # fmt: skip


METHODS = {
    "save_model": "save_pretrained(folder) writes the model, save(path) a checkpoint",
    "save_state": "save(path) writes a checkpoint, from_checkpoint(path) reads it",
    "add_callback": "callbacks are given to the constructor, or appended to callbacks",
    "predict": "evaluate(rows) measures, strop.BestOfN generates",
    "log_metrics": "log(metrics) gives them to the loggers",
    "create_model_card": "train(…, output_dir=…) writes a model card to final/",
}
_CLASSES = {
    "SFTTrainer": "SFT", "DPOTrainer": "DPO", "KTOTrainer": "KTO", "RewardTrainer": "RewardModel", "GRPOTrainer": "GRPO",
    "PPOTrainer": "PPO", "RLOOTrainer": "RLOO", "GKDTrainer": "Distill", "OnlineDPOTrainer": "OnlineDPO",
}  # fmt: skip
_CONFIGS = tuple(f"{name}Config" for name in ("SFT", "DPO", "KTO", "GRPO", "PPO", "RLOO", "Distill", "OnlineDPO"))


def class_hint(name: str) -> str | None:
    """Return a hint with strop's equivalent of a class of TRL; None if the name is not one of TRL's classes."""
    if name in _CLASSES:
        here = _CLASSES[name]
        return f"{name} is TRL's; what strop has is {here}: from strop import {here}"
    if name in _CONFIGS:
        here = name.removesuffix("Config")
        return f"{name} is in strop.config; {here} also takes single options: {here}(model=…, learning_rate=1e-5)"
    return None


def hint(name: str, algorithm: str = "") -> str | None:
    """Return a hint with strop's equivalent of a name of TRL; None if the name is not one of TRL's."""
    rows = [row for row in (*ARGUMENTS, *OPTIONS) if name in row.names]
    told_apart = any(algorithm in row.of for row in OPTIONS)  # False if the algorithm is not in the table
    fitting = [row for row in rows if not row.of or algorithm in row.of or not told_apart]
    if not fitting or f"`{name}`" in fitting[0].here:  # with the same name in strop, the mistake is another one
        return f"{algorithm} has nothing for TRL's {name}" if rows and not fitting else None
    here = fitting[0].here.replace("`", "")
    if here.startswith("none"):
        return f"there is nothing in place of TRL's {name}{here.removeprefix('none')}"
    return f"what TRL calls {name} is {here}"
