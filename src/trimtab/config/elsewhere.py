"""Settings of other tools that Trimtab does not have, and what to write or do instead. A table, nothing more.

Each way out, and under it the names that it is for, after the values that are harmless because they ask for what
happens anyway.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Elsewhere:
    """What to do about a setting that is not ours."""

    change: str
    harmless: list[Any]


_TABLE = """
set HF_TOKEN in the environment; a secret does not belong in a config
  [None]  hub_token hf_token token
remove it: a run stays in output_dir and nothing is uploaded
  [None, False]  push_to_hub hub_model_id hub_private_repo hub_always_push hub_revision
  [None, "every_save"]  hub_strategy
write model.quantize: nf4 to hold the frozen weights in four bits; it has no other settings
  [None, False]  load_in_8bit quantization_bit bnb_4bit_quant_storage
  [None, False, True]  use_bnb_nested_quant bnb_4bit_use_double_quant
  [None, "nf4"]  bnb_4bit_quant_type bnb_4bit_compute_dtype quantization_config
name the file alone, before the settings: trimtab train FILE
  [None]  config config_file
write sharding: true
  [None, False, "", {}]  deepspeed fsdp fsdp_config accelerator_config parallelism_config
write device: cuda:N for one GPU, or model_parallel: true to split the model
  [None]  device_map gpu gpu_id gpu_ids
write processes: N
  [None]  num_processes nproc_per_node num_gpus n_gpu gpus
remove it: the launcher's environment says the rank, and the plan sets up the processes
  [None, False, -1]  local_rank ddp_backend ddp_bucket_cap_mb ddp_find_unused_parameters ddp_broadcast_buffers
  [None, False, -1]  ddp_static_graph
remove it: see monitor.stuck_after_seconds for runs that hang
  [None, 1800]  ddp_timeout
remove it: AdamW uses betas 0.9 and 0.999
  [None, 0.9, 0.999]  adam_beta1 adam_beta2
remove it: AdamW uses epsilon 1e-8
  [None, 1e-08]  adam_epsilon
write training.optimizer: NAME; its arguments are its own defaults
  [None]  optim_args optim_target_modules
write training.lr_scheduler: NAME; its arguments are its own defaults
  [None, {}]  lr_scheduler_kwargs
write precision: fp32, bf16 or fp16
  [None, False]  tf32 bf16_full_eval fp16_full_eval pure_bf16
remove it: checkpointing is always non-re-entrant
  [None, {}, {"use_reentrant": False}]  gradient_checkpointing_kwargs
write training.gradient_checkpointing: true to save memory
  [None, False]  activation_offloading torch_empty_cache_steps auto_find_batch_size
remove it: the best checkpoint is the one of the lowest held-out loss (training.keep_best)
  [None, "loss", "eval_loss"]  metric_for_best_model
remove it: the lowest held-out loss is the best (training.keep_best)
  [None, False]  greater_is_better
write training.keep_best: true
  [None]  early_stopping_patience early_stopping_threshold
remove it: this verb trains
  [None, True]  do_train
write data.eval_fraction: 0 to evaluate on nothing
  [None, True]  do_eval
remove it: the held-out loss is reported before and after training
  [None, False]  eval_on_start do_predict
write training.eval_steps: N
  [None, 0]  eval_delay evals_per_epoch
write training.save_steps: N
  [None, 0]  saves_per_epoch
write training.logging_steps: N
  [None, "steps"]  logging_strategy
  [None, False, True]  logging_first_step
write monitor.stop_on_nonfinite: true or false
  [None, False, True]  logging_nan_inf_filter
write monitor.progress: none
  [None, False]  disable_tqdm
remove it: metrics are kept in the run's folder, see output_dir
  [None, False]  logging_dir run_name plot_loss
set it by the tracker's own environment variables, e.g. WANDB_PROJECT
  [None]  wandb_project wandb_entity wandb_name wandb_run_id mlflow_experiment_name trackio_space_id trackio_bucket_id
  [None]  trackio_static_space_id
  [None, "huggingface"]  project
write seed: N, which also seeds the order of the data
  [None]  data_seed
write seed: N
  [None, False]  full_determinism
remove it: weights are always saved as safetensors
  [None, True]  save_safetensors
remove it: checkpoints always hold what a resume needs
  [None, False]  save_only_model enable_jit_checkpoint
remove it: only the columns that training needs are kept
  [None, False, True]  remove_unused_columns
remove it: rows are always shuffled by the seed
  [None, False, True]  shuffle_dataset
remove it: there is no such setting here
  [None, False, 1]  dataset_num_proc preprocessing_num_workers overwrite_cache
  [None, False, 0, "", []]  label_smoothing_factor neftune_noise_alpha torch_compile_backend
  [None, False, 0, "", []]  torch_compile_mode use_liger_kernel liger_kernel_config use_cache prediction_loss_only
  [None, False, 0, "", []]  eval_use_gather_object eval_accumulation_steps batch_eval_metrics include_for_metrics
  [None, False, 0, "", []]  save_on_each_node ignore_data_skip restore_callback_states_from_checkpoint label_names
  [None, False, 0, "", []]  debug ignore_bias_buffers router_aux_loss_coef strict use_unsloth
  [None, False, True]  average_tokens_across_devices eval_do_concat_batches log_on_each_node skip_memory_metrics
  [None, "passive", "warning"]  log_level log_level_replica
  [None, False, "no"]  include_num_input_tokens_seen
  [None, "length"]  length_column_name
  [None, "auto"]  pad_to_multiple_of
write training.dataloader_workers: N; the rest is decided for you
  [None, True]  dataloader_pin_memory dataloader_in_order
  [None, False]  dataloader_drop_last dataloader_persistent_workers dataloader_prefetch_factor
  [None, False]  dataloader_multiprocessing_context
write data: PATH (or data: {source: PATH, format: alpaca})
  [None]  datasets dataset_dir data_files
write data.eval_source: PATH, or data.eval_fraction: 0.1
  [None, "test"]  test_datasets dataset_test_split
remove it: data sets are read whole
  [None, False]  dataset_streaming streaming
write data.columns: {instruction: your_column}
  [None, {}]  dataset_kwargs dataset_prepared_path
write data.too_long: truncate or drop
  [None, "keep_start"]  truncation_mode
write data.packing: true
  [None, False, "bfd"]  packing_strategy padding_free eval_packing eval_sample_packing
write model.chat_template: FILE.jinja; without it the model's own is used
  [None]  template chat_template
remove it: the tokenizer's own special tokens are used
  [None, {}]  special_tokens eos_token pad_token tokenizer_type
write model.attn_implementation: flash_attention_2 or sdpa
  [None, False, "auto"]  flash_attention flash_attn sdp_attention xformers_attention
write model.attn_implementation or precision
  [None, {}]  model_init_kwargs model_type tokenizer_name
remove it: recipe: sft is what runs
  [None, False, "sft"]  stage rl trainer_type
write lora.targets: [names]
  [None]  exclude_modules layers_to_transform layers_pattern
remove it: the adapter is for a causal language model
  [None, "CAUSAL_LM"]  task_type lora_task_type
write method: lora
  [None, "LORA"]  peft_type
remove it: only the adapter's weights are trained; method: full trains all
  [None, "none"]  bias
  [None, False, []]  modules_to_save lora_modules_to_save trainable_token_indices lora_bias
write lora.r, lora.alpha, lora.dropout, lora.targets, lora.rslora and lora.dora: what runs here
  [None, False, {}]  use_qalora use_bdlora loraplus_lr_ratio rank_pattern alpha_pattern
  [None, False, {}]  lora_target_parameters target_parameters loftq_config eva_config corda_config layer_replication
  [None, False, {}]  fan_in_fan_out megatron_config auto_mapping inference_mode
remove it: an adapter starts as PEFT starts it
  [None, True]  init_lora_weights
write grpo.vllm_server_base_url: http://HOST:PORT
  [None, "0.0.0.0", "localhost", 8000]  vllm_server_host vllm_server_port
"""


def _rows() -> Iterator[tuple[str, Elsewhere]]:
    change = ""
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            change = line
            continue
        harmless, names = line.strip().split("  ")
        row = Elsewhere(change, ast.literal_eval(harmless))
        yield from ((name, row) for name in names.split())


ELSEWHERE: dict[str, Elsewhere] = dict(_rows())
