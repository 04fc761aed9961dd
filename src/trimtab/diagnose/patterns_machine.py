"""Known error texts about the machine: memory, drivers, builds, and kernels that stop."""

from __future__ import annotations

from trimtab.diagnose.pattern import Pattern

MACHINE_PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "out-of-memory: oom-fragmented",
        r"(?:CUDA|HIP|XPU) out of memory\.? Tried to allocate (?P<asked>[\d.]+ "
        r"[KMGT]i?B).{0,400}?(?P<idle>[\d.]+ GiB) is reserved by PyTorch but unallocated",
        "the GPU has no room for {asked} more, while {idle} is reserved but unused: memory is fragmented",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then a smaller batch with gradient accumulation, "
        "shorter sequences, gradient checkpointing",
        only_if=r"(?:[1-9]\d*\.\d+) GiB is reserved by PyTorch but unallocated",
    ),
    Pattern(
        "out-of-memory: oom-cuda",
        r"(?:CUDA|HIP|XPU)(?: error:)? out of memory(?:\.? Tried to allocate (?P<asked>[\d.]+ [KMGT]i?B))?|"
        r"torch(?:\.cuda)?\.OutOfMemoryError|cuda runtime error \(2\)",
        "the GPU has no room left for weights, gradients, optimizer state and activations of this batch (or "
        "another process holds its memory: nvidia-smi)",
        "smaller batch with more gradient accumulation, shorter max_length, gradient checkpointing, LoRA or "
        "8-bit optimizer; if it grows step by step, a tensor keeps its graph: total += loss.item()",
    ),
    Pattern(
        "out-of-memory: oom-mps",
        r"MPS backend out of memory",
        "the Mac's shared memory budget for the GPU is used up",
        "smaller batch or sequence, gradient checkpointing, a smaller model;"
        " PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lifts the limit and may freeze the system",
    ),
    Pattern(
        "out-of-memory: oom-cublas",
        r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_ALLOC_FAILED",
        "the library could not get its workspace: the GPU is full, or an index error broke the CUDA"
        " context before",
        "leave memory free (smaller batch); run once with CUDA_LAUNCH_BLOCKING=1 to see whether an index"
        " was out of range",
    ),
    Pattern(
        "out-of-memory: oom-host",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough"
        r" memory)|std::bad_alloc|numpy.{0,30}ArrayMemoryError|MemoryError",
        "the host memory is used up",
        "load weights straight to the device (device_map, safetensors), fewer DataLoader workers, stream"
        " the data set",
    ),
    Pattern(
        "backend-unsupported: no-cuda-build",
        r"Torch not compiled with CUDA enabled",
        "this torch is a CPU build (or a Mac), and the code says .cuda() or device='cuda'",
        "install a CUDA build of torch, or choose the device once and use it everywhere: cuda, mps or cpu",
    ),
    Pattern(
        "backend-unsupported: no-kernel-image",
        r"no kernel image is available for execution on the device|is not compatible with the current"
        r" PyTorch installation",
        "this build of torch (or of an extension such as flash-attn, bitsandbytes) has no code for this GPU's"
        " compute capability",
        "install a build for it: newest torch with the CUDA version for new GPUs, an older one for old GPUs; "
        "rebuild extensions with TORCH_CUDA_ARCH_LIST set",
    ),
    Pattern(
        "placement-conflict: invalid-ordinal",
        r"invalid device ordinal",
        "the code asks for a GPU number that is not visible here: CUDA_VISIBLE_DEVICES renumbers from 0, or "
        "RANK was used in place of LOCAL_RANK",
        'count from 0 among the visible ones: device = int(os.environ["LOCAL_RANK"]), and nproc_per_node'
        " <= GPUs",
    ),
    Pattern(
        "other-error: assert-embedding",
        r"(?:indexSelect\w*|Indexing\.cu|vectorized_gather_kernel).{0,220}?Assertion `?(?:srcIndex < "
        r"srcSelectDimSize|ind >= ?0 && ind < ind_dim_size)",
        "an embedding or gather got an id beyond its table: new tokens without resize_token_embeddings, a "
        "wrong tokenizer, or positions beyond the model's maximum",
        "model.resize_token_embeddings(len(tokenizer)); check input_ids.max() < vocab_size on the CPU",
    ),
    Pattern(
        "other-error: assert-labels",
        r"Assertion `?t >= 0 && t < n_classes`? failed|nll_loss\w*.{0,160}?Assertion",
        "a label is not between 0 and n_classes - 1 (labels from 1, a wrong num_labels, a pad id that is"
        " not -100)",
        "set num_labels, map labels to 0..n-1, and use -100 for positions to skip",
    ),
    Pattern(
        "other-error: device-assert",
        r"device-side assert triggered",
        "a kernel met an index out of range (token id, position, label); the Python line shown is often"
        " a later one",
        "run the failing batch on the CPU, or with CUDA_LAUNCH_BLOCKING=1, for the true line; check ids < "
        "vocab_size and labels in range",
    ),
    Pattern(
        "other-error: embedding-range",
        r"IndexError: index out of range in self",
        "an embedding got an id beyond its table: added tokens without resize_token_embeddings, a wrong "
        "tokenizer, or a text longer than the position table",
        "model.resize_token_embeddings(len(tokenizer)); truncate to the model's maximum length",
    ),
    Pattern(
        "other-error: target-range",
        r"IndexError: Target -?\d+ is out of bounds",
        "a label is not between 0 and n_classes - 1",
        "set num_labels, map labels to 0..n-1, and use -100 for positions to skip",
    ),
    Pattern(
        "other-error: illegal-access",
        r"an illegal memory access was encountered|unspecified launch failure|misaligned address",
        "a kernel read or wrote outside its memory; the line shown is often a later one. A custom kernel "
        "(Triton, flash-attn) on the wrong current device is a frequent cause in split models",
        "run with CUDA_LAUNCH_BLOCKING=1; switch custom kernels off; torch.cuda.set_device(x.device)"
        " around them",
    ),
    Pattern(
        "backend-unsupported: no-driver",
        r"Found no NVIDIA driver|No CUDA GPUs are available|CUDA driver version is insufficient|NVIDIA "
        r"driver on your system is too old|CUDA unknown error",
        "torch has CUDA, the machine has no usable GPU or driver: not a GPU machine, a container without "
        "--gpus, CUDA_VISIBLE_DEVICES empty, or an old driver",
        "nvidia-smi must work first; give the container the GPUs; update the driver or install a torch"
        " for an older CUDA",
    ),
    Pattern(
        "backend-unsupported: mps-operator",
        r"The operator '(?P<op>\S+)' is not currently (?:implemented|supported) (?:for|on) the MPS"
        r" (?:device|backend)",
        "{op} has no kernel for Apple's GPU in this torch",
        "PYTORCH_ENABLE_MPS_FALLBACK=1 before torch is imported (slower), a newer torch, or this part on"
        " the CPU",
    ),
    Pattern(
        "backend-unsupported: mps-float64",
        r"Cannot convert a MPS Tensor to float64",
        "Apple's GPU has no float64; NumPy arrays and Python floats bring it in",
        "x = x.to(torch.float32) before .to('mps')",
    ),
    Pattern(
        "backend-unsupported: operator-for-backend",
        r"Could not run '(?P<op>\S+)' with arguments from the '(?P<backend>\w+)' backend",
        "{op} is not built for {backend}: a CPU build of an extension (torchvision, custom op), or a sparse "
        "or quantised tensor",
        "install torch and its extensions from the same index and CUDA version",
    ),
    Pattern(
        "backend-unsupported: flash-attention-gpu",
        r"FlashAttention only supports Ampere GPUs or newer",
        "this GPU is older than Ampere",
        'attn_implementation="sdpa"',
    ),
    Pattern(
        "backend-unsupported: flash-attention-missing",
        r"FlashAttention2 has been toggled on, but it cannot be used",
        "flash-attn is asked for and not installed",
        'attn_implementation="sdpa", or install flash-attn',
    ),
    Pattern(
        "placement-conflict: device-string",
        r"Expected one of cpu, cuda.{0,200}? device type at start of device string: (?P<given>\S+)",
        '"{given}" is no device name in torch',
        'write "cuda", "cuda:0", "mps" or "cpu"',
    ),
    Pattern(
        "map-location: load-cuda-checkpoint",
        r"Attempting to deserialize object on a CUDA device but torch\.cuda\.is_available\(\) is False",
        "the checkpoint was saved from a GPU, and there is none here",
        'torch.load(path, map_location="cpu", weights_only=True)',
    ),
    Pattern(
        "map-location: load-cuda-index",
        r"Attempting to deserialize object on CUDA device (?P<index>\d+) but"
        r" torch\.cuda\.device_count\(\) is (?P<count>\d+)",
        "the checkpoint was saved from GPU {index}, and only {count} is visible here",
        'torch.load(path, map_location="cpu", weights_only=True), then model.to(device)',
    ),
    Pattern(
        "backend-unsupported: cuda-library",
        r"lib(?:cud\w+|cublas\w*|nccl|nvrtc\w*)\.so[\w.]*: (?:cannot open shared object file|undefined "
        r"symbol)|undefined symbol: \w*(?:cublas|cudnn|nccl|c10)\w*",
        "a CUDA library is missing or of another version than this build expects",
        "install torch and its extensions from one index in a fresh environment; unset LD_LIBRARY_PATH",
    ),
)
