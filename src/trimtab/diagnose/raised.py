"""From an exception that a program raised to a finding: kind and fix from the known texts, the line from the source.

The line that fails is the innermost of the user's own; the line to change is looked for by what the error says: the
arguments of the trainer that dropped a column, the checkpoint call that is re-entrant, the cast to half precision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from trimtab.diagnose import (
    casts,
    raised_adapters,
    raised_backward,
    raised_batches,
    raised_calls,
    raised_counts,
    raised_data,
    raised_devices,
    raised_graph,
    raised_half,
    raised_idle,
    raised_index,
    raised_inference,
    raised_keys,
    raised_labels,
    raised_layers,
    raised_leaves,
    raised_loader,
    raised_losses,
    raised_output,
    raised_ranks,
    raised_shape,
    shared_graph,
    source,
)
from trimtab.diagnose.explain import match_message
from trimtab.diagnose.finding import CARRIED, UNKNOWN, Cause, Finding, Place, cause_at
from trimtab.diagnose.logtext import clean_lines, frames, is_library
from trimtab.diagnose.rules_common import Verdict


def diagnose_exception(error: BaseException, places: Sequence[Place]) -> Finding:
    """The finding for an exception; `places` are its frames, innermost first."""
    known: Finding | None = getattr(getattr(error, "fault", None), "_finding", None)
    if known is not None:
        return known
    own = [p for p in places if source.is_user_file(p.file)]
    if (carried := getattr(error, CARRIED, None)) is not None:
        return _from_worker(Finding.from_dict(carried), error, own)
    own = [*_remote_places(error), *own]
    where = own[0] if own else (places[0] if places else None)
    library = _library_line(places, where)
    text = ": ".join(filter(None, (type(error).__name__, str(error))))
    finding = Finding(kind="other-error", message=text, where=where, library=library)
    context = "\n".join(f"{p.file} {p.code}" for p in places)
    name = why = ""
    fields: dict[str, str] = {}
    if matched := match_message(text, context):
        pattern, fields = matched
        name, why = pattern.name, pattern.cause.format_map(fields)
        finding.kind, finding.fix = pattern.kind, pattern.fix.format_map(fields)
        finding.cause = _specific(name, error, own, why) or cause_at(where, why)
    elif where is not None:
        finding.fix = UNKNOWN
    if (verdict := _verdict(name, error)) is not None:
        finding.cause, finding.edits = verdict.cause or finding.cause, verdict.edits
        finding.fix, finding.kind = verdict.fix or finding.fix, verdict.kind or finding.kind
    elif isinstance(error, KeyError):
        raised_keys.explain(finding, error, why)
    elif name == "model-output-field":
        raised_output.explain(finding, error, own, fields["type"], fields["name"], why)
    elif name not in _RULES:
        raised_shape.explain(finding, error, places)
    return finding


def _from_worker(finding: Finding, error: BaseException, own: Sequence[Place]) -> Finding:
    """What was found in the worker that raised an error; a trainer that took a column away stands only here."""
    key = re.search(r"KeyError: '([^']*)'", finding.message)
    if finding.kind == "dataset-field" and key is not None:
        asked = KeyError(key[1]).with_traceback(error.__traceback__)
        why = "the trainer removes the columns that the model's forward does not take, and the collator needs this one"
        taken = _specific("key-in-data", asked, own, why)
        if taken is not None:
            finding.cause = taken
            finding.fix = "TrainingArguments(remove_unused_columns=False)"
    return finding


def _remote_places(error: BaseException) -> list[Place]:
    """The program's lines in a traceback that another process sent as text, innermost first."""
    remote = type(error.__cause__).__name__.endswith("RemoteTraceback")
    text = str(error.__cause__) if remote else str(error)
    if "Traceback (most recent call last)" not in text:
        return []
    found = [at for _, at in frames(clean_lines(text)) if source.is_user_file(at.file)]
    return found[::-1]


def _library_line(places: Sequence[Place], where: Place | None) -> Place | None:
    """The innermost line that is neither torch's nor the user's, if it is deeper than the user's."""
    for place in places:
        if place == where:
            return None
        in_torch = f"{os.sep}torch{os.sep}" in place.file
        if not in_torch and not place.file.startswith("<") and is_library(place.file):
            return place
    return None


def _specific(name: str, error: BaseException, own: Sequence[Place], why: str) -> Cause | None:
    rule = _RULES.get(name)
    if rule is None or not own:
        return None
    for file in dict.fromkeys(p.file for p in own):
        if line := rule(file, own, error):
            return source.cause(file, line, why)
    return None


def _verdict(name: str, error: BaseException) -> Verdict | None:
    """What the failing call's own values show; the first rule that knows it speaks."""
    return next((said for rule in _VERDICTS.get(name, ()) if (said := rule(error)) is not None), None)


_TWO_TYPES = (
    *("conv-input-dtype", "expected-scalar", "attention-dtype", "index-put-dtype"),
    *("matmul-dtype", "rnn-dtype", "types-differ"),
)
_INDEX = (raised_index.out_of_range,)
_ROWS = (raised_loader.missing_row, raised_loader.unequal)
_VERDICTS: dict[str, tuple[Callable[[BaseException], Verdict | None], ...]] = {
    "": (
        raised_devices.replica_asked,
        raised_losses.sides,
        raised_counts.too_long,
        raised_batches.lone_row,
        raised_counts.too_many_steps,
        raised_loader.missing_row,
        raised_calls.target_type,
        raised_calls.hidden_size,
        raised_calls.unexpected_keyword,
    ),
    "ddp-ready-twice-checkpoint": (raised_graph.reentrant_flag,),
    "checkpoint-no-grad-input": (raised_graph.reentrant_flag,),
    "inference-tensor": (raised_inference.inference_tensor,),
    "device-assert": _INDEX,
    "assert-embedding": _INDEX,
    "assert-labels": _INDEX,
    "embedding-range": _INDEX,
    "target-range": _INDEX,
    "ragged": _ROWS,
    "collate-type": _ROWS,
    "unable-to-tensor": _ROWS,
    "removed-argument": (raised_calls.unexpected_keyword,),
    "target-modules": (raised_calls.adapter_targets,),
    "half-overflow": (raised_calls.half_range,),
    "result-type": (raised_calls.target_type,),
    "non-leaf-optimizer": (raised_leaves.no_leaf,),
    "shapes": (raised_layers.layer_width,),
    "pickle-local": (raised_layers.not_sent,),
    "expected-long": (raised_labels.not_whole,),
    "backward-twice": (
        raised_leaves.lost_parameter,
        shared_graph.accumulated,
        shared_graph.hoisted,
        raised_leaves.carried,
        raised_leaves.kept_state,
    ),
    "no-grad-fn": (raised_graph.left_off,),
    "non-scalar-backward": (raised_backward.several_values,),
    "gradient-count": (raised_backward.gradient_count,),
    "unused-in-graph": (raised_backward.marked_late,),
    "numpy-of-grad": (raised_calls.numpy_of_grad,),
    "assigned-parameter": (raised_calls.assigned_parameter,),
    "copied-with-graph": (raised_leaves.copied_with_graph,),
    "whole-numbers-trained": (raised_calls.whole_parameter,),
    "empty-parameter-list": (raised_adapters.loaded_frozen, raised_leaves.empty_list),
    "no-pad-token": (raised_labels.no_pad_token,),
    "loss-none": (raised_labels.none_given,),
    "leaf-inplace": (raised_calls.leaf_in_place,),
    "ddp-no-gradient": (raised_idle.wrapped_frozen,),
    "no-inf-checks": (raised_idle.stepped_without,),
    "gather-list": (raised_ranks.list_of_parts,),
    "ddp-models-differ": (raised_ranks.built_of_own_rows,),
    "old-type-of-gpu-tensor": (raised_devices.old_type,),
    "dataparallel-first-device": (raised_devices.first_device,),
    **dict.fromkeys(_TWO_TYPES, (casts.failing,)),
    "embedding-indices-dtype": (raised_losses.float_ids, raised_half.cast_ids),
    "batch-size-of-target": (raised_losses.sides,),
    "size-mismatch": (raised_counts.other_shapes,),
    "unsafe-autocast": (raised_half.on_probabilities,),
    "unscale-fp16": (raised_half.narrow_weights,),
    "scaler-bf16": (raised_half.narrow_weights,),
    "half-on-cuda": (casts.refused,),
}
"""For an error by its text's name: rules that look at the values, before those that only read the source."""

Rule = Callable[[str, Sequence[Place], BaseException], "int | None"]
_RULES: dict[str, Rule] = {
    "key-of-column": raised_data.missing_column,
    "key-in-data": raised_data.missing_column,
    "columns-dropped": raised_data.trainer_dataset,
    "no-loss": raised_data.trainer_dataset,
    "ddp-ready-twice-checkpoint": raised_graph.reentrant,
    "checkpoint-no-grad-input": raised_graph.reentrant,
    "ddp-unused": raised_graph.unused_branch,
    "no-grad-fn": raised_graph.without_grad,
    "invalid-ordinal": raised_data.device_number,
    "rnn-hidden": raised_data.stray_local,
    "collate-type": raised_data.row_maker,
    "ragged": raised_data.row_maker,
    "sparse-gradient": raised_data.maker,
    "dataparallel-first-device": raised_data.maker,
    "device-assert": raised_data.index_tensor,
    "assert-embedding": raised_data.index_tensor,
    "assert-labels": raised_data.index_tensor,
    "embedding-range": raised_data.index_tensor,
    "target-range": raised_data.index_tensor,
    "list-for-tensor": raised_data.collator_return,
    "meta-copy": raised_data.left_on_meta,
    "stale-store": raised_data.trusted_world_size,
    "store-connect": raised_data.trusted_world_size,
}
