"""Models that lie on a full GPU and that nothing has run: an average of the weights, a teacher that was needed before.

Said only once a backward pass has been made: what a step needs has run by then. It looks, and changes nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.diagnose import holders, source
from trimtab.diagnose.finding import Finding, cause_at
from trimtab.rehearse.checks.base import BaseCheck, optimizers_made, trained_by
from trimtab.rehearse.memory_text import size
from trimtab.virtual import origin, state
from trimtab.virtual.origin import Origin

if TYPE_CHECKING:
    from trimtab.rehearse.phases import Phases
    from trimtab.rehearse.process import Process

_SHARE = 0.05
"""The part of a GPU from which on it is worth a word."""
_KEPT = (
    "Keep them on the host, and bring to them what they follow (an average of the weights: "
    '`p.detach().to("cpu")`), hold them in 16 bits, or delete a model that is not needed any more before the '
    "training begins."
)
_COPIED = (
    "Make the copy on the host, where there is room: of a model that has been moved there (model.cpu()), or build a "
    "second one there and give it the first one's values (load_state_dict copies across devices). Where the model is "
    "not needed any more as it is, change it in place."
)


class IdleModels(BaseCheck):
    """Knows which models have run, from who follows the phases."""

    def __init__(self, process: Process, phases: Phases) -> None:
        super().__init__(process)
        self._phases = phases

    def install(self) -> None:
        self._made = optimizers_made()

    def beside(self, finding: Finding, device: str) -> tuple[Finding, int]:
        """The finding of a full GPU, with weights there that nothing runs or trains as its cause, and their bytes."""
        machine = state.machine()
        capacity = (
            next((d.total_bytes for d in machine.devices if str(d.device) == device), 0) if machine else 0
        )
        idle = self._idle(device) if self.process.differentiated else {}
        line, count = max(idle.items(), key=lambda pair: pair[1], default=(None, 0))
        if line is None or count < _SHARE * capacity:
            return finding, 0
        why = f"{size(count)} of weights lie on {device} since this line: no pass runs them, no optimizer trains them"
        place = source.place(line.file, line.line)
        copied = any(
            source.called_name(call) == "deepcopy" for call in source.call_on(place.file, place.line)
        )
        fix = _COPIED if copied and place == finding.where else _KEPT
        return replace(finding, cause=cause_at(place, why), fix=fix, edits=[]), count

    def _idle(self, device: str) -> dict[Origin, int]:
        """The bytes of such weights, by the line that put them there."""
        trained = (p for optimizer in self._made for p in trained_by(optimizer))
        used = {holders.storage_of(one) for one in _on_gpus([*trained, *_held(self._phases.ran)])}
        found: dict[Origin, int] = {}
        modules = (one for one in gc.get_objects() if issubclass(type(one), nn.Module))
        # One that is being copied right now has nothing yet; what it is made of may be whole.
        whole = (one for one in modules if "_parameters" in vars(one) and "_buffers" in vars(one))
        for tensor in _on_gpus(_held(whole)):
            line = origin.moved_of(tensor) or origin.born_of(tensor)
            if line is None or str(tensor.device) != device or (known := holders.storage_of(tensor)) in used:
                continue
            used.add(known)
            found[line] = found.get(line, 0) + tensor.numel() * tensor.element_size()
        return found


def _held(modules: Iterable[nn.Module]) -> Iterable[torch.Tensor]:
    return (one for module in list(modules) for one in (*module.parameters(), *module.buffers()))


def _on_gpus(tensors: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (one for one in tensors if isinstance(getattr(one, "payload", None), torch.Tensor))
