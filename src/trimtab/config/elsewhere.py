"""Settings of other tools that Trimtab does not have, and what to write or do instead. A table, nothing more.

Each row: the way out, the names, and the values that are harmless because they ask for what happens anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Elsewhere:
    """What to do about a setting that is not ours."""

    change: str
    harmless: tuple[Any, ...]


_NOT_ASKED = (None, False)
_ANY_BOOLEAN = (None, False, True)
_REMOVE = "remove it: there is no such setting here"

_ROWS: list[tuple[str, str, tuple[Any, ...]]] = [
    (
        "set HF_TOKEN in the environment; a secret does not belong in a config",
        "hub_token hf_token token",
        (None,),
    ),
    (
        "remove it: a run stays in output_dir and nothing is uploaded",
        "push_to_hub hub_model_id hub_private_repo hub_always_push hub_revision",
        _NOT_ASKED,
    ),
    ("remove it: a run stays in output_dir and nothing is uploaded", "hub_strategy", (None, "every_save")),
    (
        "remove it: weights are trained unquantised; to save memory write method: lora and precision: bf16",
        "load_in_4bit load_in_8bit use_bnb_nested_quant quantization_bit bnb_4bit_quant_storage",
        _NOT_ASKED,
    ),
    (
        "remove it: weights are trained unquantised; to save memory write method: lora and precision: bf16",
        "bnb_4bit_quant_type bnb_4bit_compute_dtype quantization_config",
        (None, "nf4"),
    ),
    (
        "write sharding: true",
        "deepspeed fsdp fsdp_config accelerator_config parallelism_config",
        (None, False, "", {}),
    ),
    (
        "write device: cuda:N for one GPU, or model_parallel: true to split the model",
        "device_map gpu gpu_id gpu_ids",
        (None,),
    ),
    ("write processes: N", "num_processes nproc_per_node num_gpus n_gpu gpus", (None,)),
    (
        "remove it: the launcher's environment says the rank, and the plan sets up the processes",
        "local_rank ddp_backend ddp_bucket_cap_mb ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph",
        (None, False, -1),
    ),
    ("remove it: see monitor.stuck_after_seconds for runs that hang", "ddp_timeout", (None, 1800)),
    ("remove it: AdamW uses betas 0.9 and 0.999", "adam_beta1 adam_beta2", (None, 0.9, 0.999)),
    ("remove it: AdamW uses epsilon 1e-8", "adam_epsilon", (None, 1e-8)),
    (
        "write training.optimizer: NAME; its arguments are its own defaults",
        "optim_args optim_target_modules",
        (None,),
    ),
    (
        "write training.lr_scheduler: NAME; its arguments are its own defaults",
        "lr_scheduler_kwargs",
        (None, {}),
    ),
    ("write precision: fp32, bf16 or fp16", "tf32 bf16_full_eval fp16_full_eval pure_bf16", _NOT_ASKED),
    (
        "remove it: checkpointing is always non-re-entrant",
        "gradient_checkpointing_kwargs",
        (None, {}, {"use_reentrant": False}),
    ),
    (
        "write training.gradient_checkpointing: true to save memory",
        "activation_offloading torch_empty_cache_steps auto_find_batch_size",
        _NOT_ASKED,
    ),
    (
        "remove it: the best checkpoint is the one of the lowest held-out loss (training.keep_best)",
        "metric_for_best_model",
        (None, "loss", "eval_loss"),
    ),
    ("remove it: the lowest held-out loss is the best (training.keep_best)", "greater_is_better", _NOT_ASKED),
    ("write training.keep_best: true", "early_stopping_patience early_stopping_threshold", (None,)),
    ("remove it: this verb trains", "do_train", (None, True)),
    ("write data.eval_fraction: 0 to evaluate on nothing", "do_eval", (None, True)),
    (
        "remove it: the held-out loss is reported before and after training",
        "eval_on_start do_predict",
        _NOT_ASKED,
    ),
    ("write training.eval_steps: N", "eval_delay evals_per_epoch", (None, 0)),
    ("write training.save_steps: N", "saves_per_epoch", (None, 0)),
    ("write training.logging_steps: N", "logging_strategy", (None, "steps")),
    ("write training.logging_steps: N", "logging_first_step", _ANY_BOOLEAN),
    ("write monitor.stop_on_nonfinite: true or false", "logging_nan_inf_filter", _ANY_BOOLEAN),
    ("write monitor.progress: none", "disable_tqdm", _NOT_ASKED),
    (
        "remove it: metrics are kept in the run's folder, see output_dir",
        "logging_dir run_name plot_loss",
        _NOT_ASKED,
    ),
    (
        "set it by the tracker's own environment variables, e.g. WANDB_PROJECT",
        "wandb_project wandb_entity wandb_name wandb_run_id mlflow_experiment_name trackio_space_id"
        " trackio_bucket_id trackio_static_space_id",
        (None,),
    ),
    (
        "set it by the tracker's own environment variables, e.g. WANDB_PROJECT",
        "project",
        (None, "huggingface"),
    ),
    ("write seed: N, which also seeds the order of the data", "data_seed", (None,)),
    ("write seed: N", "full_determinism", _NOT_ASKED),
    ("remove it: weights are always saved as safetensors", "save_safetensors", (None, True)),
    (
        "remove it: checkpoints always hold what a resume needs",
        "save_only_model enable_jit_checkpoint",
        _NOT_ASKED,
    ),
    ("remove it: only the columns that training needs are kept", "remove_unused_columns", _ANY_BOOLEAN),
    ("remove it: rows are always shuffled by the seed", "shuffle_dataset", _ANY_BOOLEAN),
    (_REMOVE, "dataset_num_proc preprocessing_num_workers overwrite_cache", (None, False, 1)),
    (
        "write training.dataloader_workers: N; the rest is decided for you",
        "dataloader_pin_memory dataloader_in_order",
        (None, True),
    ),
    (
        "write training.dataloader_workers: N; the rest is decided for you",
        "dataloader_drop_last dataloader_persistent_workers dataloader_prefetch_factor"
        " dataloader_multiprocessing_context",
        _NOT_ASKED,
    ),
    (
        "write data: PATH (or data: {source: PATH, format: alpaca})",
        "datasets dataset_dir data_files",
        (None,),
    ),
    (
        "write data.eval_source: PATH, or data.eval_fraction: 0.1",
        "test_datasets dataset_test_split",
        (None, "test"),
    ),
    ("remove it: data sets are read whole", "dataset_streaming streaming", _NOT_ASKED),
    ("write data.columns: {instruction: your_column}", "dataset_kwargs dataset_prepared_path", (None, {})),
    ("write data.too_long: truncate or drop", "truncation_mode", (None, "keep_start")),
    (
        "write data.packing: true",
        "packing_strategy padding_free eval_packing eval_sample_packing",
        (None, False, "bfd"),
    ),
    (
        "write model.chat_template: FILE.jinja; without it the model's own is used",
        "template chat_template",
        (None,),
    ),
    (
        "remove it: the tokenizer's own special tokens are used",
        "special_tokens eos_token pad_token tokenizer_type",
        (None, {}),
    ),
    (
        "write model.attn_implementation: flash_attention_2 or sdpa",
        "flash_attention flash_attn sdp_attention xformers_attention",
        (None, False, "auto"),
    ),
    (
        "write model.attn_implementation or precision",
        "model_init_kwargs model_type tokenizer_name",
        (None, {}),
    ),
    ("remove it: recipe: sft is what runs", "stage rl trainer_type", (None, False, "sft")),
    ("write lora.targets: [names]", "exclude_modules layers_to_transform layers_pattern", (None,)),
    (
        "remove it: the adapter is for a causal language model",
        "task_type lora_task_type",
        (None, "CAUSAL_LM"),
    ),
    ("write method: lora", "peft_type", (None, "LORA")),
    ("remove it: only the adapter's weights are trained; method: full trains all", "bias", (None, "none")),
    (
        "remove it: only the adapter's weights are trained; method: full trains all",
        "modules_to_save lora_modules_to_save trainable_token_indices lora_bias",
        (None, False, []),
    ),
    (
        "write lora.r, lora.alpha, lora.dropout and lora.targets: the plain LoRA that runs here",
        "use_rslora use_dora use_qalora use_bdlora loraplus_lr_ratio rank_pattern alpha_pattern"
        " lora_target_parameters target_parameters loftq_config eva_config corda_config layer_replication"
        " fan_in_fan_out megatron_config auto_mapping inference_mode",
        (None, False, {}),
    ),
    ("remove it: an adapter starts as PEFT starts it", "init_lora_weights", (None, True)),
    (
        _REMOVE,
        "label_smoothing_factor neftune_noise_alpha torch_compile torch_compile_backend torch_compile_mode"
        " use_liger_kernel liger_kernel_config use_cache prediction_loss_only eval_use_gather_object"
        " eval_accumulation_steps batch_eval_metrics include_for_metrics save_on_each_node ignore_data_skip"
        " restore_callback_states_from_checkpoint label_names debug ignore_bias_buffers router_aux_loss_coef"
        " strict use_unsloth",
        (None, False, 0, "", []),
    ),
    (
        _REMOVE,
        "average_tokens_across_devices eval_do_concat_batches log_on_each_node skip_memory_metrics",
        _ANY_BOOLEAN,
    ),
    (
        "write grpo.vllm_server_base_url: http://HOST:PORT",
        "vllm_server_host vllm_server_port",
        (None, "0.0.0.0", "localhost", 8000),
    ),
    (_REMOVE, "log_level log_level_replica", (None, "passive", "warning")),
    (_REMOVE, "include_num_input_tokens_seen", (None, False, "no")),
    (_REMOVE, "length_column_name", (None, "length")),
    (_REMOVE, "pad_to_multiple_of", (None, "auto")),
]

ELSEWHERE: dict[str, Elsewhere] = {
    name: Elsewhere(change, harmless) for change, names, harmless in _ROWS for name in names.split()
}
