"""Known error texts of the libraries around torch (PEFT, accelerate, DeepSpeed, datasets, the hub), and torch 1.x's
older words for faults that have other words now."""

from __future__ import annotations

from trimtab.diagnose.pattern import Pattern

LIBRARY_PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "device-mismatch: old-expected-on-gpu",
        r"Tensor for (?:argument #\d+ )?'(?P<arg>\w+)' is on (?P<got>CPU|GPU).{0,90}? but expected (?:it|them) to be on"
        r" (?P<want>GPU|CPU)",
        "'{arg}' is on the {got} and the operation runs on the {want} (torch 1.x wording): the model or the batch was"
        " not moved",
        "model.to(device) once, and x = x.to(device) for every batch (assign the result)",
    ),
    Pattern(
        "device-mismatch: old-current-device",
        r"Input, output and indices must be on the current device",
        "an embedding's ids, weight and output are not all on the current GPU (torch 1.x wording): the ids stayed on"
        " the CPU, or the model is on another GPU than torch.cuda.current_device()",
        "input_ids = input_ids.to(model.device), and torch.cuda.set_device(...) before anything is made",
    ),
    Pattern(
        "device-mismatch: collective-of-devices",
        r"All input tensors must be on the same device\. Received (?P<a>\S+) and (?P<b>[\w:]+)",
        "tensors on {a} and {b} are put together in one call",
        "bring them to one device first: [t.to(device) for t in tensors]",
    ),
    Pattern(
        "device-mismatch: invalid-gradient-device",
        r"Function \w+ returned an invalid gradient at index \d+ - expected (?:type|device) \S+ but got \S+",
        "a gradient arrives on another device or in another precision than the tensor that it is for: parameters were"
        " moved (model.to, .cpu()) between forward and backward, or a custom autograd.Function returns it so",
        "move the model before the forward pass; in a custom backward return grad.to(input.device, input.dtype)",
    ),
    Pattern(
        "other-error: invalid-gradient-shape",
        r"Function (?P<name>\w+) returned an invalid gradient at index \d+ - got \[[^\]]*\] but expected shape",
        "the backward of {name} gives a gradient of another shape than its input: a parameter's data was replaced by"
        " one of another shape after the forward pass, or a custom backward is wrong",
        "resize or replace layers only between steps; in a custom backward return one gradient of each input's shape",
    ),
    Pattern(
        "placement-conflict: invalid-device-id",
        r"AssertionError: Invalid device id",
        "device_ids names a GPU that is not visible: CUDA_VISIBLE_DEVICES renumbers the GPUs from 0",
        "device_ids=list(range(torch.cuda.device_count()))",
    ),
    Pattern(
        "backend-unsupported: gpu-busy",
        r"all CUDA-capable devices are busy or unavailable",
        "the GPU is there and cannot be used: another process holds it in exclusive mode, or the driver is in a bad"
        " state",
        "look with nvidia-smi who uses it; end that process, or set compute mode Default",
    ),
    Pattern(
        "backend-unsupported: gpu-hardware",
        r"uncorrectable ECC error|CUDA error: (?:an illegal instruction|hardware stack error)|GPU has fallen off"
        r" the bus",
        "the GPU itself reports an error: no program can repair this",
        "reset the GPU (nvidia-smi --gpu-reset) or take another one, and resume from the last checkpoint",
    ),
    Pattern(
        "backend-unsupported: driver-initialisation",
        r"CUDA driver initialization failed",
        "the CUDA driver does not start in this process: no GPU is given to the container, or the driver is broken",
        "nvidia-smi must work in the same container first",
    ),
    Pattern(
        "other-error: cublas-failed",
        r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_SUPPORTED|INVALID_VALUE)|CUDNN_STATUS_(?:NOT_INITIALIZED"
        r"|EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)|Unable to find a valid cuDNN algorithm",
        "a CUDA library call failed. Usual reasons, in this order: the GPU is full, an earlier index was out of range,"
        " the library does not fit the driver or the GPU",
        "run once with CUDA_LAUNCH_BLOCKING=1 and a smaller batch: if it names another line, that is the fault",
    ),
    Pattern(
        "batch-type: cat-shapes",
        r"Sizes of tensors must match except in dimension (?P<dim>\d+)",
        "tensors of different shape are put together along dimension {dim}; the other dimensions have to agree",
        "pad them to one length first (torch.nn.utils.rnn.pad_sequence, tokenizer.pad)",
    ),
    Pattern(
        "other-error: conv-channels",
        r"expected input\[[^\]]*\] to have (?P<want>\d+) channels, but got (?P<got>\d+) channels",
        "the layer takes {want} channels and the image has {got} (grey or RGBA images, or height and width first)",
        'convert the images: image.convert("RGB"), and put the channels first: x.permute(0, 3, 1, 2)',
    ),
    Pattern(
        "other-error: moved-leaf",
        r"leaf variable has been moved into the graph interior",
        "a tensor that requires a gradient was changed in place, as part of a computation",
        "with torch.no_grad(): around the change, or make a new tensor: w = w - step",
    ),
    Pattern(
        "no-gradient: peft-target-missing",
        r"Please specify `target_modules` in `(?:peft_config|LoraConfig)`",
        "PEFT does not know this architecture and has no default for which layers get adapters",
        'LoraConfig(target_modules="all-linear"), or names from model.named_modules()',
    ),
    Pattern(
        "no-gradient: quantised-without-adapters",
        r"You cannot perform fine-tuning on purely quantized models",
        "quantised weights cannot be trained, and no adapter was added that could",
        "model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...)) before the trainer is made",
    ),
    Pattern(
        "placement-conflict: deepspeed-client-optimizer",
        r"You are using ZeRO-Offload with a client provided optimizer",
        "ZeRO-Offload keeps optimizer state on the CPU and wants DeepSpeed's own CPU optimizer",
        'name the optimizer in the DeepSpeed config (AdamW), or set "zero_force_ds_cpu_optimizer": false',
    ),
    Pattern(
        "non-finite: loss-scale-minimum",
        r"Current loss scale already at minimum|Minimum loss scale reached",
        "every step had infinite or NaN gradients in fp16, until the loss scale could not be lowered any more",
        "train in bf16 if the GPU has it; else look for NaN in the data, lower the learning rate, clip gradients",
    ),
    Pattern(
        "placement-conflict: zero-no-sync",
        r"no sync context manager is incompatible with gradient ?partitioning",
        "no_sync() was used with ZeRO 2 or 3, which share gradients in every backward pass",
        "let DeepSpeed count: set gradient_accumulation_steps in its config and call engine.backward/engine.step",
    ),
    Pattern(
        "other-error: accelerator-argument",
        r"Accelerator\.__init__\(\) got an unexpected keyword argument"
        r" '(?P<name>dispatch_batches|split_batches|even_batches|use_seedable_sampler|logging_dir|fp16)'",
        "'{name}' is no argument of the installed accelerate any more",
        "dispatch_batches, split_batches, even_batches -> dataloader_config=DataLoaderConfiguration(...); logging_dir"
        ' -> project_dir; fp16=True -> mixed_precision="fp16"',
    ),
    Pattern(
        "other-error: adamw-from-transformers",
        r"cannot import name 'AdamW' from 'transformers",
        "transformers no longer has an AdamW of its own",
        "from torch.optim import AdamW",
    ),
    Pattern(
        "backend-unsupported: triton-missing",
        r"Cannot find a working triton installation|No module named 'triton'",
        "torch.compile (or a fused kernel) needs Triton, which is not installed or does not know this GPU",
        "pip install triton (Linux and NVIDIA GPUs), or leave torch.compile away",
    ),
    Pattern(
        "other-error: tensor-as-bool",
        r"Boolean value of Tensor with more than one value is ambiguous",
        "a tensor with several elements stands in an `if`, `and`, `or` or `in`",
        "say what is meant: (x > 0).any(), .all(), or torch.where; test for presence with `x is not None`",
    ),
    Pattern(
        "other-error: gated-repository",
        r"You are trying to access a gated repo|Access to model \S+ is restricted",
        "the model's owner has to grant access, and this machine is not logged in as somebody who has it",
        "ask for access on the model's page, then `hf auth login` on this machine (or set HF_TOKEN)",
    ),
    Pattern(
        "other-error: hub-unreachable",
        r"Couldn't reach '?[\w./-]+'? on the Hub|LocalEntryNotFoundError|We couldn't connect to"
        r" 'https://huggingface\.co'",
        "the hub cannot be reached from here, and the files are not in the local cache",
        "download them where there is a network and copy the folder; then give its path, with HF_HUB_OFFLINE=1",
    ),
    Pattern(
        "other-error: safetensors-header",
        r"Error while deserializing header: \w+",
        "the file is no whole safetensors file: a broken download, or a Git LFS pointer in its place",
        "look at its size; download it again (`git lfs pull`, or hf download)",
    ),
    Pattern(
        "dataset-field: arrow-mixed",
        r"cannot mix list and non-list, non-null values|cannot mix struct and non-struct",
        "one column holds lists in some rows and plain values in others",
        "make the column one type in all rows before Dataset.from_list (for example always a list)",
    ),
    Pattern(
        "dataset-field: dataset-generation",
        r"An error occurred while generating the dataset",
        "the data files could not be read as one table; the error above this one says which file or column",
        "correct the file that the error above names; rows of a JSONL file need the same fields and types",
        consequence=True,
    ),
)
