"""Which layer is where: a map of devices by layers, and the same in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from trimtab.report.frame import note, raw_table, text

_MOST = 400
"""Modules of a map: beyond, a cell would be less than a pixel."""


def layer_map(placement: Mapping[str, str | Sequence[str]]) -> str:
    """A row for each device with a cell for each module, in the model's order; and which modules those are."""
    held = {name: [where] if isinstance(where, str) else list(where) for name, where in placement.items()}
    devices = sorted({device for where in held.values() for device in where}, key=_in_order)
    if not held:
        return ""
    drawn = ""
    if 1 < len(held) <= _MOST:
        stems = list(dict.fromkeys(_stem(name) for name in held))
        rows = "".join(
            f"<span>{text(who)}</span><div>{_cells(held, stems, same[0])}</div>"
            for who, same in _alike(held, devices)
        )
        drawn = f'<div class="map" aria-hidden="true">{rows}</div>'
        drawn += note("A cell is a module, in the model's order; the colour changes with the kind of module.")
    listed = [
        (text(who), f"<code>{text(named)}</code>")
        for who, same in _alike(held, devices)
        for _, named in layers_by_device(_of(held, same[0]))
    ]
    return drawn + raw_table(["device", "modules"], listed)


def layers_by_device(device_map: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each device with its modules; neighbouring layers of one device share a name, as `model.layers.0-11`."""
    by_device: dict[str, list[str]] = {}
    for (stem, device), group in groupby(device_map.items(), key=lambda item: (_stem(item[0]), item[1])):
        names = [name for name, _ in group]
        numbers = [name.rpartition(".")[2] for name in names]
        several = f"{stem}.{numbers[0]}-{numbers[-1]}".removeprefix(".")
        joined = several if len(names) > 1 else names[0] or "(whole model)"
        by_device.setdefault(str(device), []).append(joined)
    return [(device, ", ".join(names)) for device, names in by_device.items()]


def together(devices: Sequence[str]) -> str:
    """Several devices in few words."""
    if len(devices) == 1:
        return devices[0]
    return f"{devices[0]} {'to' if len(devices) > 2 else 'and'} {devices[-1]}, each"


def _of(held: Mapping[str, Sequence[str]], device: str) -> dict[str, str]:
    return {name: device for name, where in held.items() if device in where}


def _alike(held: Mapping[str, Sequence[str]], devices: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Neighbouring devices that hold the same are one row."""
    groups = (list(group) for _, group in groupby(devices, key=lambda device: list(_of(held, device))))
    return [(together(group), group) for group in groups]


def _cells(held: Mapping[str, Sequence[str]], stems: Sequence[str], device: str) -> str:
    """Modules of one kind have one colour, which changes with the kind."""
    cells = []
    for name, where in held.items():
        shade = "on odd" if stems.index(_stem(name)) % 2 else "on"
        marked = f' class="{shade}"' if device in where else ""
        cells.append(f'<i{marked} title="{text(name)}"></i>')
    return "".join(cells)


def _stem(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return stem if last.isdigit() else name


def _in_order(device: str) -> tuple[str, int, str]:
    kind, _, number = device.partition(":")
    return kind, int(number) if number.isdigit() else -1, device
