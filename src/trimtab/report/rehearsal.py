"""The page of a rehearsal, from its record (the JSON of `trimtab rehearse --json`): verdict, findings, layers, memory.

Fields that an older record lacks are left out of the page. It judges nothing and reads no other file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.monitor.wording import count_of
from trimtab.rehearse.report import TRIED
from trimtab.rehearse.session import DECIDING, WORDS
from trimtab.rehearse.written import Files, sentence
from trimtab.report.code import Sources, fix_of, place
from trimtab.report.collectives import collectives_parts
from trimtab.report.frame import LONGEST_NAME, cut, note, page, prose, raw_facts, raw_table, section, text
from trimtab.report.layers import layer_map
from trimtab.report.memory import memory_parts, size_of

Told = Mapping[str, Any]


def rehearsal_page(told: Told) -> str:
    """The whole page."""
    sources: Sources = told.get("sources") or {}
    findings, beyond = told["findings"], told.get("beyond") or []
    verdict, target = told["verdict"], told.get("target") or ""
    parts = {
        "layers": ("Which layer is where", [layer_map(told.get("placement") or {})]),
        "memory": ("Memory", memory_parts(told["memory"], sources)),
        "collectives": ("What the ranks exchanged", collectives_parts(told.get("collectives") or [])),
    }
    return page(
        f"{verdict}: {target}",
        [
            f"<h1>Rehearsal of <code>{text(target)}</code></h1>",
            section(_summary(told), _head(told), kind=verdict),
            *(_finding(number, finding, sources) for number, finding in enumerate(findings, 1)),
            *(
                _finding(number, finding, sources, "with the fixes above made: ")
                for number, finding in enumerate(beyond, len(findings) + 1)
            ),
            *(section(title, inside, name=name) for name, (title, inside) in parts.items()),
            _not_proven(told, sources),
        ],
    )


def _summary(told: Told) -> str:
    faults = sum(finding["severity"] == "fault" for finding in told["findings"])
    where = " in shapes" if told.get("shapes_only") else ""
    said = {
        "clean": "ran without a fault",
        "fault": f"{faults} fault{'s' * (faults != 1)}",
        "unproven": "it could not be told",
    }
    return f"{told['verdict']}{where}: {said[told['verdict']]}"


def _head(told: Told) -> Iterable[str]:
    steps = told["steps"]
    counted = count_of(steps, "optimizer step") if isinstance(steps, int) else f"{steps} optimizer steps"
    yield f"<p>{text(counted)}, {told['seconds']:.1f} s</p>"
    yield from (f"<p>{prose(line)}</p>" for line in told.get("notes") or [])
    files = sentence(Files.from_dict(told.get("files") or {}), most=20)
    yield f"<p>{text(f'Files: {files}')}</p>" if files else ""


def _finding(number: int, finding: Told, sources: Sources, when: str = "") -> str:
    rows = [
        ("says", cut(finding.get("message", ""), shown=prose)),
        ("where", place(finding.get("where"), sources)),
    ]
    rows += [
        ("inside", place(finding.get("library"), sources)),
        ("module", cut(finding.get("module") or "", LONGEST_NAME)),
    ]
    for tensor in finding.get("tensors") or []:
        shape = ", ".join(map(str, tensor["shape"]))
        rows.append(
            ("tensor", cut(f"{tensor['name']}: {tensor['device']} {tensor['dtype']} [{shape}]", LONGEST_NAME))
        )
    if cause := finding.get("cause"):
        shown = "" if _same_line(cause, finding.get("where")) else place(cause, sources)
        rows.append(("cause", f"{shown}<div>{prose(cause.get('why', ''))}</div>"))
    tried = finding.get("tried") or ""
    fix = fix_of(finding["fix"]) if finding.get("fix") else ""
    rows.append(("fix" if tried != "remains" else "tried, does not help", fix))
    if tried in TRIED:
        rows.append(("tried", text(TRIED[tried])))
    elif fix and not tried and not finding.get("savings") and not finding.get("lack"):
        rows.append(("tried", "not tried"))
    rows += [
        ("also", f"{text(other['kind'])} {place(other.get('where') or other.get('cause'), {})}")
        for other in finding.get("follows") or []
    ]
    times = f", {count_of(finding['count'], 'time')}" if finding.get("count", 1) > 1 else ""
    title = f"{number}. {when}{finding['kind']} ({finding['severity']}{times})"
    return section(title, [raw_facts(rows), _savings(finding)], kind=finding["severity"])


def _same_line(one: Told, other: Told | None) -> bool:
    return other is not None and (one["file"], one["line"]) == (other["file"], other["line"])


def _savings(finding: Told) -> str:
    """What would save memory, each as it was rehearsed."""
    rows = (
        (
            saving["change"],
            " ".join(saving.get("settings") or []),
            size_of(saving["need_bytes"]),
            size_of(saving["saved_bytes"]),
            "yes" if saving["fits"] else "no",
        )
        for saving in finding.get("savings") or []
    )
    head = ["change", "settings", "needs", "saves", "fits"]
    listed = [[text(cell) for cell in row] for row in rows]
    if not any(row[1] for row in listed):  # a script has no settings of ours
        head, listed = [head[0], *head[2:]], [[row[0], *row[2:]] for row in listed]
    shown = raw_table(head, listed, cards=True)
    return f"<h3>What would save memory, rehearsed</h3>{shown}" if shown else ""


def _not_proven(told: Told, sources: Sources) -> str:
    """Where values were asked for, of which shapes have none."""
    asked_at: dict[str, list[str]] = {}
    watched = 0
    for asked in told.get("asked") or []:
        if asked["how"] == "watch":
            watched += 1
            continue
        places = [shown for name in ("where", "inside") if (shown := place(asked.get(name), sources))]
        hows = asked_at.setdefault("<br>".join(places) or text(asked["op"]), [])
        hows.append(asked["how"])
    proven: list[tuple[str, str]] = []
    unproven: list[tuple[str, str]] = []
    for shown, hows in asked_at.items():
        said = ", ".join(dict.fromkeys(WORDS.get(how, how) for how in hows))
        (unproven if set(hows) & set(DECIDING) else proven).append((said, shown))
    own = "whether losses and gradients are finite, and how large they are"
    below = note(f"Watched by Trimtab itself, at {count_of(watched, 'line')} of its own: {own}.")
    title = "Not known: these values were asked for, and nothing was seen to hang on them"
    parts = [
        section("Not proven: these values were not computed", [raw_facts(unproven)], kind="unproven"),
        section(title, [raw_facts(proven), below if watched else ""]),
    ]
    return "\n".join(filter(None, parts))
