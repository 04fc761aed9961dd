"""Names of `torch._C` that only a CUDA build has, beyond those under torch.cuda itself (cuda.py).

torch's own Python takes them: resetting the compiler, tuning, settings of libraries, copies into given tensors. What
has an answer without hardware gets it; what has none says that it is not simulated, and only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.virtual.properties import DeviceProperties
from trimtab.virtual.state import NotSimulated
from trimtab.virtual.wording import words


class AllocatorState:
    """The state of a memory pool of CUDA graphs, of which there are none."""


# Settings of libraries that are not there: kept, and without effect. Each has a setter and a getter.
_SETTINGS: dict[str, tuple[str, Any]] = {
    "_cuda_set_cudnn_benchmark_limit": ("_cuda_get_cudnn_benchmark_limit", 10),
    "_cudnn_set_conv_benchmark_empty_cache": ("_cuda_get_conv_benchmark_empty_cache", False),
    "_cuda_setCublasWorkspaceSize": ("_cuda_getCublasWorkspaceSize", 33554432),
    "_cuda_setCublasLtWorkspaceSize": ("_cuda_getCublasLtWorkspaceSize", 33554432),
    "_cuda_setMemoryMetadata": ("_cuda_getMemoryMetadata", ""),
    "_cuda_cudaCachingAllocator_enable": ("_cuda_cudaCachingAllocator_is_enabled", True),
    "_cuda_record_untuned_enable": ("_cuda_record_untuned_is_enabled", False),
    "_cuda_tunableop_enable": ("_cuda_tunableop_is_enabled", False),
    "_cuda_tunableop_tuning_enable": ("_cuda_tunableop_tuning_is_enabled", True),
    "_cuda_tunableop_set_max_tuning_duration": ("_cuda_tunableop_get_max_tuning_duration", 30),
    "_cuda_tunableop_set_max_tuning_iterations": ("_cuda_tunableop_get_max_tuning_iterations", 100),
    "_cuda_tunableop_set_filename": ("_cuda_tunableop_get_filename", ""),
    "_cuda_tunableop_set_rotating_buffer_size": ("_cuda_tunableop_get_rotating_buffer_size", 0),
}
_NOTHING = words(
    """
    _set_cached_tensors_enabled _cuda_tunableop_set_numerical_check_tolerances _set_storage_access_error_msg
    _set_storage_data_ptr_access_error_msg _cuda_tunableop_write_file_on_exit
    """
)
_EMPTY = words("_cuda_tunableop_get_results _cuda_tunableop_get_validators")
_LACKING = words(
    """
    _cuda_changeCurrentAllocator _cuda_customAllocator _cuda_getAllocator _cuda_cudaHostAllocator
    _cuda_cudaCachingAllocator_raw_alloc _cuda_cudaCachingAllocator_raw_delete _cuda_getStreamFromExternal
    _cuda_getCurrentBlasHandle _cuda_getCurrentSolverHandle _cuda_jiterator_compile_and_launch_kernel
    _cuda_jiterator_compile_and_launch_kernel _cuda_getCheckpointState _cuda_setCheckpointPoolState
    _cuda_checkPoolLiveAllocations _cuda_allocationTraceback _cuda_tunableop_read_file
    _construct_CUDA_Tensor_From_Storage_And_Metadata _nccl_all_gather _nccl_all_reduce _nccl_broadcast
    _nccl_init_rank _nccl_reduce _nccl_reduce_scatter _nccl_unique_id
    """
)


def names() -> dict[str, Any]:
    """Each name with what it is while virtual GPUs are in force."""
    found: dict[str, Any] = {
        "_cuda_CUDAAllocator_AllocatorState": AllocatorState,
        "_CudaDeviceProperties": DeviceProperties,
        "_cuda_isHistoryEnabled": lambda: False,
        "_gather_out": _gather_out,
        "_scatter_out": _scatter_out,
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **dict.fromkeys(_EMPTY, lambda: ()),
        **{name: _lacking(name) for name in _LACKING},
    }
    for setter, (getter, value) in _SETTINGS.items():
        found[setter], found[getter] = _setting(value)
    return found


def _setting(value: Any) -> tuple[Callable[..., None], Callable[[], Any]]:
    kept = [value]

    def change(new: Any, *_: Any) -> None:
        kept[0] = new

    return change, lambda: kept[0]


def _lacking(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotSimulated(
            f"torch._C.{name} is not simulated by virtual GPUs: there is no CUDA library behind them."
        )

    return refuse


def _gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([tensor.to(out.device) for tensor in tensors], dim, out=out)


def _scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int = 0, streams: Any = None
) -> list[torch.Tensor]:
    chunks = tensor.split([target.size(dim) for target in out], dim)
    return [target.copy_(chunk) for target, chunk in zip(out, chunks, strict=True)]
