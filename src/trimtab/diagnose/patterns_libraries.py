"""Known error texts of the libraries around torch (PEFT, accelerate, DeepSpeed, datasets, the hub), and torch 1.x's
older words for faults that have other words now."""

from __future__ import annotations

from trimtab.diagnose.pattern import read_table

LIBRARY_PATTERNS = read_table(
    r"""
device-mismatch: old-expected-on-gpu
  text Tensor for (?:argument #\d+ )?'(?P<arg>\w+)' is on (?P<got>CPU|GPU).{0,90}? but expected (?:it|them) to
       be on (?P<want>GPU|CPU)
  why  '{arg}' is on the {got} and the operation runs on the {want} (torch 1.x wording): the model or the batch
       was not moved
  fix  model.to(device) once, and x = x.to(device) for every batch (assign the result)
device-mismatch: old-current-device
  text Input, output and indices must be on the current device
  why  an embedding's ids, weight and output are not all on the current GPU (torch 1.x wording): the ids stayed
       on the CPU, or the model is on another GPU than torch.cuda.current_device()
  fix  input_ids = input_ids.to(model.device), and torch.cuda.set_device(...) before anything is made
device-mismatch: collective-of-devices
  text All input tensors must be on the same device\. Received (?P<a>\S+) and (?P<b>[\w:]+)
  why  tensors on {a} and {b} are put together in one call
  fix  bring them to one device first: [t.to(device) for t in tensors]
device-mismatch: invalid-gradient-device
  text Function \w+ returned an invalid gradient at index \d+ - expected (?:type|device) \S+ but got \S+
  why  a gradient arrives on another device or in another precision than the tensor that it is for: parameters
       were moved (model.to, .cpu()) between forward and backward, or a custom autograd.Function returns it so
  fix  move the model before the forward pass; in a custom backward return grad.to(input.device, input.dtype)
other-error: invalid-gradient-shape
  text Function (?P<name>\w+) returned an invalid gradient at index \d+ - got \[[^\]]*\] but expected shape
  why  the backward of {name} gives a gradient of another shape than its input: a parameter's data was replaced
       by one of another shape after the forward pass, or a custom backward is wrong
  fix  resize or replace layers only between steps; in a custom backward return one gradient of each input's
       shape
placement-conflict: invalid-device-id
  text AssertionError: Invalid device id
  why  device_ids names a GPU that is not visible: CUDA_VISIBLE_DEVICES renumbers the GPUs from 0
  fix  device_ids=list(range(torch.cuda.device_count()))
backend-unsupported: gpu-busy
  text all CUDA-capable devices are busy or unavailable
  why  the GPU is there and cannot be used: another process holds it in exclusive mode, or the driver is in a
       bad state
  fix  look with nvidia-smi who uses it; end that process, or set compute mode Default
backend-unsupported: gpu-hardware
  text uncorrectable ECC error|CUDA error: (?:an illegal instruction|hardware stack error)|GPU has fallen off
       the bus
  why  the GPU itself reports an error: no program can repair this
  fix  reset the GPU (nvidia-smi --gpu-reset) or take another one, and resume from the last checkpoint
backend-unsupported: driver-initialisation
  text CUDA driver initialization failed
  why  the CUDA driver does not start in this process: no GPU is given to the container, or the driver is broken
  fix  nvidia-smi must work in the same container first
other-error: cublas-failed
  text CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_SUPPORTED|INVALID_VALUE)|
       CUDNN_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)|Unable
       to find a valid cuDNN algorithm
  why  a CUDA library call failed. Usual reasons, in this order: the GPU is full, an earlier index was out of
       range, the library does not fit the driver or the GPU
  fix  run once with CUDA_LAUNCH_BLOCKING=1 and a smaller batch: if it names another line, that is the fault
batch-type: cat-shapes
  text Sizes of tensors must match except in dimension (?P<dim>\d+)
  why  tensors of different shape are put together along dimension {dim}; the other dimensions have to agree
  fix  pad them to one length first (torch.nn.utils.rnn.pad_sequence, tokenizer.pad)
other-error: conv-channels
  text expected input\[[^\]]*\] to have (?P<want>\d+) channels, but got (?P<got>\d+) channels
  why  the layer takes {want} channels and the image has {got} (grey or RGBA images, or height and width first)
  fix  convert the images: image.convert("RGB"), and put the channels first: x.permute(0, 3, 1, 2)
other-error: moved-leaf
  text leaf variable has been moved into the graph interior
  why  a tensor that requires a gradient was changed in place, as part of a computation
  fix  with torch.no_grad(): around the change, or make a new tensor: w = w - step
no-gradient: peft-target-missing
  text Please specify `target_modules` in `(?:peft_config|LoraConfig)`
  why  PEFT does not know this architecture and has no default for which layers get adapters
  fix  LoraConfig(target_modules="all-linear"), or names from model.named_modules()
no-gradient: quantised-without-adapters
  text You cannot perform fine-tuning on purely quantized models
  why  quantised weights cannot be trained, and no adapter was added that could
  fix  model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...)) before the trainer is
       made
placement-conflict: deepspeed-client-optimizer
  text You are using ZeRO-Offload with a client provided optimizer
  why  ZeRO-Offload keeps optimizer state on the CPU and wants DeepSpeed's own CPU optimizer
  fix  name the optimizer in the DeepSpeed config (AdamW), or set "zero_force_ds_cpu_optimizer": false
non-finite: loss-scale-minimum
  text Current loss scale already at minimum|Minimum loss scale reached
  why  every step had infinite or NaN gradients in fp16, until the loss scale could not be lowered any more
  fix  train in bf16 if the GPU has it; else look for NaN in the data, lower the learning rate, clip gradients
placement-conflict: zero-no-sync
  text no sync context manager is incompatible with gradient ?partitioning
  why  no_sync() was used with ZeRO 2 or 3, which share gradients in every backward pass
  fix  let DeepSpeed count: set gradient_accumulation_steps in its config and call engine.backward/engine.step
other-error: accelerator-argument
  text Accelerator\.__init__\(\) got an unexpected keyword argument
       '(?P<name>dispatch_batches|split_batches|even_batches|use_seedable_sampler|logging_dir|fp16)'
  why  '{name}' is no argument of the installed accelerate any more
  fix  dispatch_batches, split_batches, even_batches -> dataloader_config=DataLoaderConfiguration(...);
       logging_dir -> project_dir; fp16=True -> mixed_precision="fp16"
other-error: adamw-from-transformers
  text cannot import name 'AdamW' from 'transformers
  why  transformers no longer has an AdamW of its own
  fix  from torch.optim import AdamW
backend-unsupported: triton-missing
  text Cannot find a working triton installation|No module named 'triton'
  why  torch.compile (or a fused kernel) needs Triton, which is not installed or does not know this GPU
  fix  pip install triton (Linux and NVIDIA GPUs), or leave torch.compile away
other-error: tensor-as-bool
  text Boolean value of Tensor with more than one value is ambiguous
  why  a tensor with several elements stands in an `if`, `and`, `or` or `in`
  fix  say what is meant: (x > 0).any(), .all(), or torch.where; test for presence with `x is not None`
other-error: gated-repository
  text You are trying to access a gated repo|Access to model \S+ is restricted
  why  the model's owner has to grant access, and this machine is not logged in as somebody who has it
  fix  ask for access on the model's page, then `hf auth login` on this machine (or set HF_TOKEN)
other-error: hub-unreachable
  text Couldn't reach '?[\w./-]+'? on the Hub|LocalEntryNotFoundError|We couldn't connect to
       'https://huggingface\.co'
  why  the hub cannot be reached from here, and the files are not in the local cache
  fix  download them where there is a network and copy the folder; then give its path, with HF_HUB_OFFLINE=1
other-error: safetensors-header
  text Error while deserializing header: \w+
  why  the file is no whole safetensors file: a broken download, or a Git LFS pointer in its place
  fix  look at its size; download it again (`git lfs pull`, or hf download)
dataset-field: arrow-mixed
  text cannot mix list and non-list, non-null values|cannot mix struct and non-struct
  why  one column holds lists in some rows and plain values in others
  fix  make the column one type in all rows before Dataset.from_list (for example always a list)
dataset-field: dataset-generation (a consequence)
  text An error occurred while generating the dataset
  why  the data files could not be read as one table; the error above this one says which file or column
  fix  correct the file that the error above names; rows of a JSONL file need the same fields and types
"""
)
