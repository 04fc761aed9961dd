"""The page of a run: what came out, how it went, what it said, where it ran, and what it was asked for.

It tells what the run's folder holds; what is not there is said to be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimtab.monitor.wording import count_of, duration, size
from trimtab.report import clips
from trimtab.report.curves import Panel, draw, panels
from trimtab.report.frame import (
    cut,
    facts,
    folded,
    note,
    page,
    plain,
    prose,
    raw_table,
    said,
    section,
    table,
    text,
)
from trimtab.report.layers import layer_map
from trimtab.report.pictures import shown
from trimtab.report.run_facts import Event, Row, RunFacts, moment

STEPS_SHOWN = 12
"""Steps whose completions are on the page; the others are in metrics.jsonl."""
_KINDS = {"finished": "clean", "interrupted": "warning", "unfinished": "warning", "failed": "fault"}
_APART = (
    "status",
    "steps",
    "planned_steps",
    "recipe",
    "error",
    "ended",
    "eval_loss",
    "metrics",
    "samples",
    "completions",
    "evaluations",
)
_RENAMED = {"train seconds": "trained for", "rewards": "reward weights", "speed": "fast parts"}
_PARTS = {
    **{part: part for part in ("weights", "gradients", "optimizer", "activations", "cache", "other")},
    "pool": "reserved beyond",
    "overhead": "CUDA's own",
    "reserved": "an engine's",
}
"""Parts of a device's memory, and what they are called here."""


def run_page(run: RunFacts) -> str:
    """The whole page; what a reader looks for first stands first."""
    contents: dict[str, tuple[str, Iterable[str]]] = {
        "results": ("Results", [_results(run)]),
        "curves": ("Curves", _curves(run)),
        "completions": ("Completions", _completions(run)),
        "answers": (f"{'Clips' if _spoken(run) else 'Answers'} before and after", [_answers(run)]),
        "health": ("Health", _health(run.events())),
        "plan": ("Plan", _plan(run)),
        "data": ("Data", _data(run.data)),
        "config": ("Settings", _settings(run)),
    }
    parts = {name: section(title, inside, name=name) for name, (title, inside) in contents.items()}
    links = "".join(f'<a href="#{name}">{contents[name][0]}</a>' for name, part in parts.items() if part)
    return page(
        f"{run.status}: {run.title}",
        [
            f"<h1>Run <code>{text(run.path.resolve().name)}</code>: {text(run.title)}</h1>",
            section(run.status_line, _head(run), kind=_KINDS[run.status]),
            f"<nav>{links}</nav>",
            *parts.values(),
        ],
    )


def _head(run: RunFacts) -> Iterable[str]:
    for event in run.events():
        if event.kind == "fault":
            at = "" if event.step is None else f" (step {text(event.step)})"
            yield f"<p><strong>{text(event.said)}</strong>{at}</p>"
            # Stacks are long, and stand under Health.
            yield "" if event.step is None else f"<pre>{cut(event.more)}</pre>"
    yield from (f"<p>{text(gone)}.</p>" for gone in run.missing)
    told: dict[str, Any] = {"model": run.setting("model", "name"), "method": run.setting("method")}
    told |= {k.replace("_", " "): v for k, v in run.summary.items() if k not in _APART}
    if "train_seconds" in run.summary:
        told["train seconds"] = duration(run.summary["train_seconds"])
    told = {_RENAMED.get(name, name): value for name, value in told.items()}
    times = [row["time"] for row in run.rows]
    if times:
        told |= {"first logged": moment(times[0]), "last logged": moment(times[-1])}
    yield facts(told, wide=True)


def _results(run: RunFacts) -> str:
    """Figures before and after; a figure that the run did not have is left out."""
    pairs = {"held-out loss": run.summary.get("eval_loss"), **(run.summary.get("metrics") or {})}
    rows = []
    for name, pair in pairs.items():
        if not isinstance(pair, Mapping) or pair.get("before") is pair.get("after") is None:
            continue
        rows.append((name, *_change(pair.get("before"), pair.get("after"))))
    logged = [row["loss"] for row in run.of_phase("train") if row.get("loss") is not None]
    if len(logged) > 1 and not run.rewarded:  # its loss says nothing about how good the answers are
        rows.append(("train loss, first and last logged", *_change(logged[0], logged[-1])))
    notes = []
    if run.rewarded and rows:
        notes.append("Mean rewards are those of the first and of the last fifth of the logged steps.")
    if any(name.startswith("held-out") for name, *_ in rows):
        notes.append("Held-out figures are those of the untouched and of the kept weights.")
    return table(["", "before", "after", "change"], rows) + (note(" ".join(notes)) if notes else "")


def _change(before: Any, after: Any) -> tuple[str, str, str]:
    """Two figures and what lies between them, all with as many places."""
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return plain(before) or "–", plain(after) or "–", ""
    largest = max(abs(before), abs(after))
    if not 0.01 <= largest < 10_000:
        return plain(before), plain(after), f"{after - before:+.4g}"
    places = 3 if largest < 10 else 2 if largest < 100 else 1
    return f"{before:.{places}f}", f"{after:.{places}f}", f"{after - before:+.{places}f}"


def _curves(run: RunFacts) -> Iterable[str]:
    rows = run.of_phase("train", "eval")
    if not rows:
        yield "<p>No step was logged.</p>"
        return
    wanted, rest = panels(rows)
    yield _drawn(wanted, rows)
    if run.rewarded and not any("kl" in row for row in rows):
        why = ": with grpo.beta=0 there is no reference to measure it by" * (run.setting("grpo", "beta") == 0)
        yield note(f"KL was not logged{why}.")
    if rest:
        yield folded(f"All else that was logged ({count_of(len(rest), 'curve')})", _drawn(rest, rows))


def _drawn(wanted: Iterable[Panel], rows: Sequence[Row]) -> str:
    return f'<div class="curves">{"".join(draw(panel, rows) for panel in wanted)}</div>'


def _completions(run: RunFacts) -> Iterable[str]:
    steps = [row for row in run.of_phase("completions") if row.get("samples")]
    if not steps:
        if run.rewarded:
            yield "<p>None was logged (grpo.show_completions says how many of each logged step).</p>"
        return
    shown = spread_out(steps, STEPS_SHOWN)
    if len(shown) < len(steps):
        yield note(f"{len(shown)} of {len(steps):,} logged steps, evenly spread; all are in metrics.jsonl.")
    if all(len(row["samples"]) == 1 for row in shown):
        yield _samples([row["samples"][0] for row in shown], [row["step"] for row in shown])
        return
    for number, row in enumerate(shown):
        samples = row["samples"]
        named = f"Step {row['step']}, {count_of(len(samples), 'completion')}"
        yield folded(named, _samples(samples), opened=number in (0, len(shown) - 1))


def _samples(samples: Sequence[Mapping[str, Any]], steps: Sequence[int] = ()) -> str:
    """A row for each completion; with its step where `steps` has one for each."""
    functions = list(dict.fromkeys(name for sample in samples for name in sample.get("rewards", {})))
    return raw_table(
        [*(["step"] if steps else []), "prompt", "completion", *functions, "advantage"],
        (
            [
                *(f"{step:,}" for step in steps[place : place + 1]),
                *(said(sample.get(key, "")) for key in ("prompt", "completion")),
                *(text(plain(sample.get("rewards", {}).get(name)) or "–") for name in functions),
                text(plain(sample.get("advantage")) or "–"),
            ]
            for place, sample in enumerate(samples)
        ),
        cards=True,
    )


def spread_out(rows: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the rows, evenly spread, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(n * (len(rows) - 1) / (most - 1))] for n in range(most)]


def _spoken(run: RunFacts) -> bool:
    return any(sample.get("clips") for sample in run.summary.get("samples") or [])


def _answers(run: RunFacts) -> str:
    samples = run.summary.get("samples")
    if not samples:
        prompts = run.setting("samples", "prompts") or []
        answers = run.baseline.get("answers") or []
        pairs = zip(prompts, answers, strict=False)
        samples = [{"prompt": prompt, "before": before} for prompt, before in pairs]
    if _spoken(run):
        return clips.shown(run.path, samples)
    told = [key for key in ("expected",) if any(key in sample for sample in samples)]
    head = ["prompt", *told, "before", "after"]
    cells = [
        [said("missing" if sample.get(key) is None else sample[key]) for key in head] for sample in samples
    ]
    if not any(sample.get("pictures") for sample in samples):
        return raw_table(head, cells, cards=True)
    seen = [shown(run.path, sample.get("pictures"), str(sample.get("prompt", ""))) for sample in samples]
    rows = ([picture, *row] for picture, row in zip(seen, cells, strict=True))
    return raw_table(["picture", *head], rows, cards=True)


def _health(events: Sequence[Event]) -> Iterable[str]:
    if not any(event.kind != "note" for event in events):
        yield "<p>Nothing amiss was written: no stop, no stall, no number that is not finite.</p>"
    yield raw_table(
        ["", "step", "what"],
        (
            [
                event.kind,
                "" if event.step is None else f"{event.step:,}",
                text(event.said) + (folded("all of it", f"<pre>{text(event.more)}</pre>") * bool(event.more)),
            ]
            for event in events
        ),
    )


def _plan(run: RunFacts) -> Iterable[str]:
    plan = run.plan
    reasons: Mapping[str, Any] = plan.get("reasons") or {}
    chosen: Mapping[str, Any] = plan.get("speed") or {}
    values = {
        **{name: plan.get(name) for name in ("device", "precision", "scaler", "strategy")},
        "weights": plan.get("weight_precision"),
        "trained weights": plan.get("trainable_precision"),
        "processes": plan.get("processes"),
        "launcher": plan.get("launcher"),
        "device_map": count_of(len(plan["device_map"]), "module") if plan.get("device_map") else None,
        **{f"speed.{name}": value for name, value in chosen.items() if f"speed.{name}" in reasons},
    }
    yield table(
        ["decision", "choice", "why"],
        (
            (name.replace("_", " "), plain(values.get(name)), reasons.get(name, ""))
            for name in dict.fromkeys([*values, *reasons])
            if values.get(name) is not None or name in reasons
        ),
        cards=True,
    )
    yield from (f"<p>{prose(line)}</p>" for line in plan.get("notes") or [])
    if plan.get("device_map"):
        yield "<h3>Layers by device</h3>"
        yield layer_map(plan["device_map"])
    memory: Mapping[str, Any] = plan.get("memory") or {}
    if memory:
        measured = _measured(run)
        used = [part for part in _PARTS if any(share.get(part) for share in memory.values())]
        yield "<h3>Memory</h3>"
        yield table(
            ["device", *(_PARTS[part] for part in used), "needed", "capacity", "measured peak"],
            (
                (
                    device,
                    *(size(share.get(part, 0)) for part in [*used, "needed", "capacity"]),
                    size(measured[device]) if device in measured else "not measured",
                )
                for device, share in memory.items()
            ),
            cards=True,
        )
        executed = all(share.get("executed") for share in memory.values())
        how = (
            "was executed on virtual GPUs before the run"
            if executed
            else "is the estimate made before the run"
        )
        whole = "" if executed else " On the CPU the peak is that of the whole process."
        yield note(f"All but the measured peak {how}.{whole}")


def _measured(run: RunFacts) -> dict[str, int]:
    """The highest memory that the run wrote down, by device."""
    device, found = str(run.plan.get("device")), dict[str, int]()
    for row in run.of_phase("train"):
        for key, value in row.items():
            what, _, name = key.partition("/")
            if what == "peak_memory_bytes" and isinstance(value, int):
                found[name or device] = max(found.get(name or device, 0), value)
    return found


def _data(data: Mapping[str, Any]) -> Iterable[str]:
    yield _source({name: value for name, value in data.items() if name not in ("train", "eval")})
    for name, title in (("train", "Training source"), ("eval", "Held-out source")):
        if isinstance(data.get(name), Mapping):
            yield f"<h3>{title}</h3>"
            yield _source(data[name])


def _source(told: Mapping[str, Any]) -> str:
    """Facts of the data; each reason for dropping rows with the first row that it met."""
    first = told.get("first_dropped") or {}
    dropped = (f"{n:,}: {why} (first: {first.get(why)})" for why, n in (told.get("dropped") or {}).items())
    shown = {**told, "first_dropped": None, "dropped": "\n".join(dropped)}
    return facts({name.replace("_", " "): value for name, value in shown.items()})


def _settings(run: RunFacts) -> Iterable[str]:
    if run.config_text:
        yield folded("config.yaml", f"<pre>{text(run.config_text)}</pre>")
