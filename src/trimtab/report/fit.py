"""The page of a fit, from what `trimtab fit --json` prints: what fits, how fast it would be, and the config to take.

Memory was executed, speed is an estimate, and both are called what they are. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimtab.monitor.wording import count_of, duration
from trimtab.report.charts import Chart, Line, Mark, figure, length
from trimtab.report.frame import facts, folded, note, page, plain, raw_table, section, text
from trimtab.report.memory import KINDS, in_order, keys, shade_of, size_of

Told = Mapping[str, Any]
BESIDE = "reserved and CUDA's own"
"""What a GPU holds beside the tensors."""
FAR = 2.5
"""What needs so many times the largest GPU would press all else into a corner of the chart."""
FIRST = 20
"""Rows of the table that are not folded away."""
_GIB = 2**30
_LAID = {
    "single": "whole",
    "data_parallel": "a copy on each",
    "sharded": "sharded (FSDP2)",
    "split": "layers split",
}
_KEPT = {"half": "half of the activations", "checkpointed": "checkpointing"}


def is_fit(content: Any) -> bool:
    """Whether this is what a fit prints."""
    return isinstance(content, Mapping) and isinstance(content.get("options"), list) and "margin" in content


def fit_page(told: Told) -> str:
    """The whole page."""
    kind = "clean" if told.get("best") else "warning" if told.get("stopped") else "fault"
    model = told.get("model") or "a model"
    what = f"Fit of {model}"
    return page(
        what,
        [
            f"<h1>Fit of <code>{text(model)}</code></h1>",
            section(_answer(told), _head(told), kind=kind),
            section("What was executed", [_chart(told["options"]), *_tables(told)]),
            section("The config", [_config(told)]),
            section("Not executed", [_not_executed(told)], kind="warning"),
        ],
    )


def words(option: Told) -> str:
    """A layout in words."""
    parts = [_LAID.get(option["strategy"], option["strategy"]), _KEPT.get(option.get("kept", ""), "")]
    return ", ".join(filter(None, [*parts, option.get("quantize")]))


def _answer(told: Told) -> str:
    best, options = told.get("best"), told["options"]
    if best is None:
        nothing = "nothing that was executed fits" if told.get("stopped") else "nothing fits"
        nearest = min(options, key=lambda one: one["needed_bytes"] / one["capacity_bytes"], default=None)
        return f"{nothing}; nearest comes {_named(nearest)}" if nearest else nothing
    return f"fits: {best['gpus']} × {best['gpu']}, {words(best)}"


def _head(told: Told) -> Iterable[str]:
    best = told.get("best")
    if best is not None:
        speed, seconds = best.get("tokens_a_second_estimate"), best.get("step_seconds_estimate")
        yield facts(
            {
                "rows at once": f"{best['micro_batch']:,} (passes a step: {best['gradient_accumulation_steps']:,})",
                "longest row": f"{best['length']:,} tokens",
                "needs": f"{size_of(best['needed_bytes'])} of {size_of(best['capacity_bytes'])}",
                "speed": f"{speed:,.0f} tokens/s (an estimate)" if speed else "no figures for an estimate",
                **({"a step takes": f"{duration(seconds)} (an estimate)"} if seconds else {}),
            }
        )
    executed = f"{count_of(len(told['options']), 'layout')} executed on virtual GPUs"
    took = f" in {told['seconds']:.0f} s" if "seconds" in told else ""
    yield note(
        f"{executed}{took}. Fits: what torch reserves and CUDA's own in {1 - told['margin']:.0%} of the GPU's memory."
    )
    if told.get("stopped"):
        yield note("Stopped before the search was over: what was executed until then.")
    speeds = any(option.get("tokens_a_second_estimate") for option in told["options"])
    if speeds and told.get("estimate_assumes"):
        yield note(
            f"Times are an estimate, nothing was measured: {'; '.join(map(str, told['estimate_assumes']))}."
        )


def _chart(options: Sequence[Told]) -> str:
    """Speed against memory; a mark for each kind of GPU at its capacity."""
    estimated = [option for option in options if option.get("tokens_a_second_estimate")]
    most = FAR * max((option["capacity_bytes"] for option in estimated), default=0)
    known = [option for option in estimated if option["needed_bytes"] <= most] or estimated
    several = len({option["gpu"] for option in known}) > 1
    lines: dict[str, list[Told]] = {}
    for option in known:
        does = "fits" if option["fits"] else "does not fit"
        lines.setdefault(f"{does} on {option['gpu']}" if several else does, []).append(option)
    capacities = {option["gpu"]: option["capacity_bytes"] / _GIB for option in known}
    chart = Chart(
        "Estimated speed against the memory that the fullest GPU needs",
        "GiB needed",
        "tokens/s (an estimate)",
        [
            Line(
                name,
                [(one["needed_bytes"] / _GIB, one["tokens_a_second_estimate"]) for one in dots],
                names=[_named(one) for one in dots],
            )
            for name, dots in lines.items()
        ],
        kind="dots",
        marks=sorted(
            (Mark(place, f"{gpu}: {place:.0f} GiB") for gpu, place in capacities.items()),
            key=lambda mark: mark.at,
        ),
    )
    beyond = len(estimated) - len(known)
    apart = (
        f"{count_of(beyond, 'layout')} that need{'s' * (beyond == 1)} more than {FAR:g} times the largest GPU"
    )
    return (figure(chart) + (note(f"Not drawn: {apart}.") if beyond else "")) if known else ""


def _named(option: Told) -> str:
    rows = f"{option['micro_batch']} × {option['length']:,} tokens"
    return f"{option['gpus']} × {option['gpu']}, {words(option)}, {rows}"


def _tables(told: Told) -> Iterable[str]:
    options = told["options"]
    longest = max((option["length"] for option in options), default=0)
    yield note(f"Rows have {longest:,} tokens where no other length is said.") if options else ""
    yield _table(options[:FIRST], told.get("best"), longest)
    used = {kind: 0 for option in options for kind, held in (option.get("kinds") or {}).items() if held}
    yield keys({kind: _shade(kind) for kind, _ in in_order({**used, BESIDE: 0})}) if used else ""
    if options[FIRST:]:
        more = count_of(len(options) - FIRST, "layout")
        yield folded(f"{more} more", _table(options[FIRST:], None, longest))


def _table(options: Sequence[Told], best: Told | None, longest: int) -> str:
    head = [
        "answer",
        "GPUs",
        "layout",
        "rows × passes",
        "step (estimate)",
        "tokens/s (estimate)",
        "peak",
        "reserved",
    ]
    rows = ([*_in_html(_cells(option, option == best, longest)), _share(option)] for option in options)
    return raw_table([*head, "of the GPU"], rows, cards=True)


def _in_html(cells: Sequence[str]) -> list[str]:
    """What is read at a glance stays on one line."""
    return [
        f'<span class="whole">{text(cell)}</span>' if place in (0, 1, 3) else text(cell)
        for place, cell in enumerate(cells)
    ]


def _cells(option: Told, best: bool, longest: int) -> list[str]:
    speed, seconds = option.get("tokens_a_second_estimate"), option.get("step_seconds_estimate")
    shorter = f" of {option['length']:,}" if option["length"] < longest else ""
    return [
        "✓ best" if best else "✓ fits" if option["fits"] else "✗ too large",
        f"{option['gpus']} × {option['gpu']}",
        words(option),
        f"{option['micro_batch']} × {option['gradient_accumulation_steps']}" + shorter,
        duration(seconds) if seconds else "–",
        f"{speed:,.0f}" if speed else "–",
        size_of(option["peak_bytes"]),
        size_of(option["reserved_bytes"]),
    ]


def _share(option: Told) -> str:
    """How full the fullest GPU is, by kind as far as it is known."""
    capacity = option["capacity_bytes"]
    kinds = dict(in_order(option.get("kinds") or {}))
    beyond = max(0, option["needed_bytes"] - sum(kinds.values()))
    shown = {**kinds, BESIDE: beyond} if kinds else {"": option["needed_bytes"]}
    shades = {kind: _shade(kind) for kind in shown} if kinds else None
    bar = length(shown, max(capacity, sum(shown.values())), shades)
    share = f"{option['needed_bytes'] / capacity:.0%} of {size_of(capacity)}" if capacity else "–"
    return f"{bar}{text(share)}"


def _shade(kind: str) -> int:
    return len(KINDS) if kind == BESIDE else shade_of(kind)


def _config(told: Told) -> str:
    if not told.get("config"):
        return ""
    whole = f"<pre>{text(told['config'])}</pre>"
    return note("Saved as a file, `trimtab train` takes it as it is.") + folded(
        "config.yaml", whole, opened=True
    )


def _not_executed(told: Told) -> str:
    """Each reason once, with all the layouts that it stands against."""
    by_reason: dict[str, list[str]] = {}
    for layout, why in (told.get("not_executed") or {}).items():
        by_reason.setdefault(plain(why), []).append(str(layout))
    return facts({"; ".join(layouts): why for why, layouts in by_reason.items()})
