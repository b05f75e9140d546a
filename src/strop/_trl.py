"""What TRL calls things. One table: errors take their hints from it, docs/coming_from_trl.md its tables."""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Name(NamedTuple):
    """A name of TRL or several, TRL's default, what strop has in its place, and that one's default.

    of   the algorithms it is so for; none is all
    """

    trl: str
    default: str
    here: str
    default_here: str = ""
    of: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return re.findall(r"\w+", self.trl)


SUPERVISED, SAMPLED = ("SFT", "DPO"), ("GRPO", "OnlineDPO")
ARGUMENTS = (
    Name("processing_class", "", "`tokenizer=`"),
    Name("args", "", "`config=`, or single options"),
    Name("train_dataset", "", "an argument of `train(dataset)`"),
    Name("eval_dataset", "", "an argument of `train(dataset, eval_dataset=…)`"),
    Name("reward_funcs", "", "`reward_fn=`"),
    Name("peft_config", "", "`lora={'r': 16}`, or a peft model as `model=`"),
    Name("optimizers", "", "`optimizer=`, a function of parameter groups"),
    Name("formatting_func", "", "rows brought into one of the formats of data beforehand"),
    Name("compute_metrics", "", "a callback with `on_evaluate`"),
    Name("data_collator, preprocess_logits_for_metrics, quantization_config, reward_processing_classes, rollout_func", "",
         "none"),
)  # fmt: skip
OPTIONS = (
    Name("learning_rate", "2e-5", "`learning_rate`", "2e-5", ("SFT",)),
    Name("learning_rate", "1e-6", "`learning_rate`", "1e-6", ("DPO", "GRPO")),
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
    Name("vllm_importance_sampling_correction, vllm_importance_sampling_mode, vllm_importance_sampling_clip_max",
         "True, sequence_mask, 3.0", "`importance_cap`, and `importance_mode` of tokens", "None, off; truncate", ("GRPO",)),
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
    Name("vllm_gpu_memory_utilization, vllm_max_model_length, vllm_tensor_parallel_size", "", "options of the server",
         "", SAMPLED),
    Name("sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps", "False", "none: the reference stays as it is"),
    Name("precompute_ref_log_probs", "False", "none: computed in each step", "", ("DPO",)),
    Name("label_smoothing", "0", "`label_smoothing`", "0", ("DPO", "OnlineDPO")),
    Name("max_length", "1024", "`max_length`", "None: cut nothing, refuse what does not fit"),
    Name("max_prompt_length, truncation_mode", "", "none: a prompt that does not fit is an error that names its row"),
    Name("packing, padding_free, packing_strategy", "False", "none: training never pads a Hugging Face model"),
    Name("completion_only_loss", "None", "none: with `prompt` and `completion` only the completion counts", "",
         ("SFT",)),
    Name("dataset_text_field", "text", "`--map text=column`, or a column `text`"),
    Name("disable_dropout", "True in DPO, else False", "`dropout`, the other way round", "False"),
    Name("lr_scheduler_type", "linear", "`schedule`", "constant"),
    Name("warmup_steps", "0", "`warmup_steps`", "0"),
    Name("warmup_ratio", "", "`warmup_steps`, counted in steps", "0"),
    Name("max_grad_norm, weight_decay", "1, 0", "`max_grad_norm`, `weight_decay`", "1, 0"),
    Name("adam_beta1, adam_beta2, adam_epsilon", "0.9, 0.999, 1e-8", "`betas`, `eps`", "(0.9, 0.999), 1e-8"),
    Name("num_train_epochs, max_steps", "3, −1", "`num_epochs`, `num_steps`", "1, 0"),
    Name("bf16", "True", '`autocast="bf16"`', "None"),
    Name("fp16", "False", 'none: `autocast="bf16"`'),
    Name("gradient_checkpointing", "True", "`gradient_checkpointing`", "False"),
    Name("activation_offloading, use_liger_kernel, cast_lm_head_to_fp32", "False", "none: the losses need no logits"),
    Name("logging_steps, eval_steps, save_steps", "10, None, 500", "`log_every`, `eval_every`, `save_every`", "1, 0, 0"),
    Name("logging_strategy, eval_strategy, save_strategy", "", "`log_every`, `eval_every`, `save_every`; 0 is off",
         "1, 0, 0"),
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
    Name("dataset_num_proc, dataloader_num_workers", "", "none: rows are tokenised once, before the first step"),
)  # fmt: skip


def hint(name: str, algorithm: str = "") -> str | None:
    """What strop has in place of a name of TRL; None for a name that is not TRL's."""
    rows = [row for row in (*ARGUMENTS, *OPTIONS) if name in row.names]
    told_apart = any(algorithm in row.of for row in OPTIONS)  # else an algorithm that is not in the table
    fitting = [row for row in rows if not row.of or algorithm in row.of or not told_apart]
    if not fitting or f"`{name}`" in fitting[0].here:  # the same name: what is wrong is something else
        return f"{algorithm} has nothing for TRL's {name}" if rows and not fitting else None
    here = fitting[0].here.replace("`", "")
    if here.startswith("none"):
        return f"there is nothing in place of TRL's {name}{here.removeprefix('none')}"
    return f"what TRL calls {name} is {here}"


def tables() -> tuple[str, str]:
    """The tables of the page, as Markdown: arguments, options."""
    arguments = [(_quoted(row.trl), row.here) for row in ARGUMENTS]
    options = [
        (_quoted(row.trl) + (f" ({', '.join(row.of)})" if row.of else ""), row.default, row.here, row.default_here)
        for row in OPTIONS
    ]
    return _table(("TRL", "strop"), arguments), _table(("TRL", "default", "strop", "default"), options)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


def _quoted(names: str) -> str:
    return re.sub(r"\w+", lambda found: f"`{found[0]}`", names)
