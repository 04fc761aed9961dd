"""Known error texts about the machine: memory, drivers, builds, and kernels that stop."""

from __future__ import annotations

from trimtab.diagnose.pattern import read_table

MACHINE_PATTERNS = read_table(
    r"""
out-of-memory: oom-fragmented
  text (?:CUDA|HIP|XPU) out of memory\.? Tried to allocate (?P<asked>[\d.]+ [KMGT]i?B).{0,400}?(?P<idle>[\d.]+
       GiB) is reserved by PyTorch but unallocated
  only (?:[1-9]\d*\.\d+) GiB is reserved by PyTorch but unallocated
  why  the GPU has no room for {asked} more, while {idle} is reserved but unused: memory is fragmented
  fix  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then a smaller batch with gradient accumulation,
       shorter sequences, gradient checkpointing
out-of-memory: oom-cuda
  text (?:CUDA|HIP|XPU)(?: error:)? out of memory(?:\.? Tried to allocate (?P<asked>[\d.]+
       [KMGT]i?B))?|torch(?:\.cuda)?\.OutOfMemoryError|cuda runtime error \(2\)
  why  the GPU has no room left for weights, gradients, optimizer state and activations of this batch (or
       another process holds its memory: nvidia-smi)
  fix  smaller batch with more gradient accumulation, shorter max_length, gradient checkpointing, LoRA or 8-bit
       optimizer; if it grows step by step, a tensor keeps its graph: total += loss.item()
out-of-memory: oom-mps
  text MPS backend out of memory
  why  the Mac's shared memory budget for the GPU is used up
  fix  smaller batch or sequence, gradient checkpointing, a smaller model; PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0
       lifts the limit and may freeze the system
out-of-memory: oom-cublas
  text CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_ALLOC_FAILED
  why  the library could not get its workspace: the GPU is full, or an index error broke the CUDA context before
  fix  leave memory free (smaller batch); run once with CUDA_LAUNCH_BLOCKING=1 to see whether an index was out
       of range
out-of-memory: oom-host
  text DefaultCPUAllocator: (?:can't allocate memory|not enough
       memory)|std::bad_alloc|numpy.{0,30}ArrayMemoryError|MemoryError
  why  the host memory is used up
  fix  load weights straight to the device (device_map, safetensors), fewer DataLoader workers, stream the data
       set
backend-unsupported: no-cuda-build
  text Torch not compiled with CUDA enabled
  why  this torch is a CPU build (or a Mac), and the code says .cuda() or device='cuda'
  fix  install a CUDA build of torch, or choose the device once and use it everywhere: cuda, mps or cpu
backend-unsupported: no-kernel-image
  text no kernel image is available for execution on the device|is not compatible with the current PyTorch
       installation
  why  this build of torch (or of an extension such as flash-attn, bitsandbytes) has no code for this GPU's
       compute capability
  fix  install a build for it: newest torch with the CUDA version for new GPUs, an older one for old GPUs;
       rebuild extensions with TORCH_CUDA_ARCH_LIST set
placement-conflict: invalid-ordinal
  text invalid device ordinal
  why  the code asks for a GPU number that is not visible here: CUDA_VISIBLE_DEVICES renumbers from 0, or RANK
       was used in place of LOCAL_RANK
  fix  count from 0 among the visible ones: device = int(os.environ["LOCAL_RANK"]), and nproc_per_node <= GPUs
other-error: assert-embedding
  text (?:indexSelect\w*|Indexing\.cu|vectorized_gather_kernel).{0,220}?Assertion `?(?:srcIndex <
       srcSelectDimSize|ind >= ?0 && ind < ind_dim_size)
  why  an embedding or gather got an id beyond its table: new tokens without resize_token_embeddings, a wrong
       tokenizer, or positions beyond the model's maximum
  fix  model.resize_token_embeddings(len(tokenizer)); check input_ids.max() < vocab_size on the CPU
other-error: assert-labels
  text Assertion `?t >= 0 && t < n_classes`? failed|nll_loss\w*.{0,160}?Assertion
  why  a label is not between 0 and n_classes - 1 (labels from 1, a wrong num_labels, a pad id that is not -100)
  fix  set num_labels, map labels to 0..n-1, and use -100 for positions to skip
other-error: device-assert
  text device-side assert triggered
  why  a kernel met an index out of range (token id, position, label); the Python line shown is often a later
       one
  fix  run the failing batch on the CPU, or with CUDA_LAUNCH_BLOCKING=1, for the true line; check ids <
       vocab_size and labels in range
other-error: embedding-range
  text IndexError: index out of range in self
  why  an embedding got an id beyond its table: added tokens without resize_token_embeddings, a wrong tokenizer,
       or a text longer than the position table
  fix  model.resize_token_embeddings(len(tokenizer)); truncate to the model's maximum length
other-error: target-range
  text IndexError: Target -?\d+ is out of bounds
  why  a label is not between 0 and n_classes - 1
  fix  set num_labels, map labels to 0..n-1, and use -100 for positions to skip
other-error: illegal-access
  text an illegal memory access was encountered|unspecified launch failure|misaligned address
  why  a kernel read or wrote outside its memory; the line shown is often a later one. A custom kernel (Triton,
       flash-attn) on the wrong current device is a frequent cause in split models
  fix  run with CUDA_LAUNCH_BLOCKING=1; switch custom kernels off; torch.cuda.set_device(x.device) around them
backend-unsupported: no-driver
  text Found no NVIDIA driver|No CUDA GPUs are available|CUDA driver version is insufficient|NVIDIA driver on
       your system is too old|CUDA unknown error
  why  torch has CUDA, the machine has no usable GPU or driver: not a GPU machine, a container without --gpus,
       CUDA_VISIBLE_DEVICES empty, or an old driver
  fix  nvidia-smi must work first; give the container the GPUs; update the driver or install a torch for an
       older CUDA
backend-unsupported: mps-operator
  text The operator '(?P<op>\S+)' is not currently (?:implemented|supported) (?:for|on) the MPS
       (?:device|backend)
  why  {op} has no kernel for Apple's GPU in this torch
  fix  PYTORCH_ENABLE_MPS_FALLBACK=1 before torch is imported (slower), a newer torch, or this part on the CPU
backend-unsupported: mps-float64
  text Cannot convert a MPS Tensor to float64
  why  Apple's GPU has no float64; NumPy arrays and Python floats bring it in
  fix  x = x.to(torch.float32) before .to('mps')
backend-unsupported: operator-for-backend
  text Could not run '(?P<op>\S+)' with arguments from the '(?P<backend>\w+)' backend
  why  {op} is not built for {backend}: a CPU build of an extension (torchvision, custom op), or a sparse or
       quantised tensor
  fix  install torch and its extensions from the same index and CUDA version
backend-unsupported: flash-attention-gpu
  text FlashAttention only supports Ampere GPUs or newer
  why  this GPU is older than Ampere
  fix  attn_implementation="sdpa"
backend-unsupported: flash-attention-missing
  text FlashAttention2 has been toggled on, but it cannot be used
  why  flash-attn is asked for and not installed
  fix  attn_implementation="sdpa", or install flash-attn
placement-conflict: device-string
  text Expected one of cpu, cuda.{0,200}? device type at start of device string: (?P<given>\S+)
  why  "{given}" is no device name in torch
  fix  write "cuda", "cuda:0", "mps" or "cpu"
map-location: load-cuda-checkpoint
  text Attempting to deserialize object on a CUDA device but torch\.cuda\.is_available\(\) is False
  why  the checkpoint was saved from a GPU, and there is none here
  fix  torch.load(path, map_location="cpu", weights_only=True)
map-location: load-cuda-index
  text Attempting to deserialize object on CUDA device (?P<index>\d+) but torch\.cuda\.device_count\(\) is
       (?P<count>\d+)
  why  the checkpoint was saved from GPU {index}, and only {count} is visible here
  fix  torch.load(path, map_location="cpu", weights_only=True), then model.to(device)
backend-unsupported: cuda-library
  text lib(?:cud\w+|cublas\w*|nccl|nvrtc\w*)\.so[\w.]*: (?:cannot open shared object file|undefined
       symbol)|undefined symbol: \w*(?:cublas|cudnn|nccl|c10)\w*
  why  a CUDA library is missing or of another version than this build expects
  fix  install torch and its extensions from one index in a fresh environment; unset LD_LIBRARY_PATH
"""
)
