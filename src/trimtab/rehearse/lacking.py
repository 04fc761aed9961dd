"""Errors that only say what this machine lacks and a GPU's would have: a CPU kernel, gloo, a CUDA build, a package.

They tell nothing about the program. Each is known by its words; nothing is tried here.
"""

from __future__ import annotations

import re


def words(text: str) -> frozenset[str]:
    """A set of names, written as a text."""
    return frozenset(text.split())


_CUDA_ONLY = words(
    """
    amp_C apex awq_ext bitsandbytes causal_conv1d cupy cudf cuml cutlass deep_ep deep_gemm deepspeed_kernels exllamav2
    exllamav2_kernels fbgemm_gpu flash_attn flash_attn_2_cuda flash_attn_interface flash_mla flashinfer fused_layer_norm
    grouped_gemm hqq_aten liger_kernel mamba_ssm marlin megablocks natten nvtx pycuda pynvml sageattention sgl_kernel
    spconv tensorrt tensorrt_llm torch_tensorrt torchsparse transformer_engine transformer_engine_torch triton
    tinycudann unsloth unsloth_zoo vllm xformers
    """
)
"""Packages that are made for CUDA, and not to be had without it."""
_NARROW = r"Half|BFloat16|ComplexHalf|Float8\w*|Float4\w*|UInt16|UInt32|UInt64"
_NO_TYPE = re.compile(rf"(\S+) not implemented for '({_NARROW})'|not supported for ({_NARROW})\b")
_NO_KERNEL = re.compile(r"Could not run '(\S+)' with arguments from the '(\w+)' backend")
_OF_THE_CPU = re.compile(
    r"\(CPU\)|(?:implemented|supported|available) (?:on|for|in) (?:the )?CPU\b|\bCPU (?:kernel|implementation)|\w_cpu\b"
    r"|mkldnn_\w|mkldnn bf|onednn",
    re.I,
)
_OF_THE_SHELL = re.compile(
    r"Virtual(?:Tensor|Parameter|Generator)|HostTensor|HostParameter|trimtab|virtual GPU|"
    r"data pointer of Tensor that doesn't have storage|cannot be called on meta tensors|"
    r"not implemented for 'Meta'|Cannot copy out of meta tensor",
    re.I,
)
_SYMBOL = re.compile(
    r"module 'torch\._C\S*' has no attribute '(\w+)'|cannot import name '(\w+)' from 'torch\._C|"
    r"'_OpNamespace' '(\w+)' object has no attribute|"
    r"(?:module 'torch\S*' has no attribute|cannot import name) '(\w*(?:NCCL|Nccl|nccl|CUDA|cudnn|cublas)\w*)'"
)
_BUILD = re.compile(
    r"CUDA_HOME|\bnvcc\b|Error building extension|Error compiling objects for extension|"
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|CUDA driver|no CUDA-capable device|"
    r"lib(?:cu\w+|nv\w+|nccl)\.so|\bNVML\b|nvidia-smi|without CUDA support|CUDA extension|cpp_extension",
    re.I,
)
_LIBRARY = re.compile(r"([\w.+-]+\.so[\d.]*): cannot open shared object file")
_OTHER_BUILD = re.compile(
    r"(?:Could not load this library: \S*?|^\S*?)([\w.+-]+\.so[\d.]*)(?:$|: undefined symbol)"
)
_GLOO = re.compile(
    r"ProcessGroupGloo|\[gloo|\bgloo/|backend gloo|with Gloo|Invalid scalar type|Cannot use ReduceOp", re.I
)
_REFUSED = re.compile(r"Unhandled|not support|unsupported|not implemented", re.I)


def of_the_build(error: BaseException) -> str:
    """What this build of torch, or this machine, lacks and a machine with GPUs has; nothing when it is not that."""
    text = str(error)
    if found := _SYMBOL.search(text):
        name = next(filter(None, found.groups()))
        return f"{name} is there only in a build with CUDA"
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        last = (error.name or "").rpartition(".")[2]
        if package in _CUDA_ONLY or "cuda" in last.lower() or (last.startswith("_C") and package != last):
            return f"{error.name} is made for CUDA and is not installed here"
        if any(re.search(rf"\b{name}\b", text) for name in _CUDA_ONLY):
            return "it asks for a package that is made for CUDA and is not installed here"
    if found := _LIBRARY.search(text):
        return f"the library {found[1]} is not on this machine"
    if isinstance(error, OSError | ImportError) and (found := _OTHER_BUILD.search(text)):
        return f"the library {found[1]} cannot be loaded here: it was built for another version of torch"
    missing = str(getattr(error, "filename", None) or "")
    if isinstance(error, FileNotFoundError) and missing.rpartition("/")[2] in ("nvcc", "nvidia-smi", "ptxas"):
        return f"{missing} comes with CUDA, and is not here"
    if not isinstance(error, KeyError) and (found := _BUILD.search(text)):
        return f"there is no CUDA on this machine to build with or to ask ({found[0]})"
    return ""


def of_the_stand_in(error: BaseException) -> str:
    """What the CPU's kernels lack that stand in for CUDA's; the error is of a call with tensors on a virtual GPU."""
    text = str(error)
    if found := _NO_TYPE.search(text):
        return f"the CPU kernel that stands in for CUDA's has no {found[2] or found[3]}"
    if (found := _NO_KERNEL.search(text)) and found[2] != "CUDA":
        return f"{found[1]} has no kernel on the CPU to stand in for CUDA's"
    if _OF_THE_CPU.search(text) and "not implemented for" not in text:
        return "this is a limit of the CPU kernel that stands in for CUDA's"
    return ""


def of_the_transport(error: BaseException, in_collective: bool) -> str:
    """What gloo lacks that stands in for NCCL."""
    text = str(error)
    if _GLOO.search(text) or (in_collective and _REFUSED.search(text)):
        return "gloo, which stands in for NCCL, cannot do this"
    return ""


def of_the_shell(error: BaseException) -> bool:
    """Whether the words are about what a virtual tensor is made of, which no program on a GPU would ever see."""
    return bool(_OF_THE_SHELL.search(str(error)))
