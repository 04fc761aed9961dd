"""The small files of a model's folder, looked at before any library opens them: what they are, and what they claim.

A folder comes from anywhere. A pipe in a file's place would hold the run up, sizes that no model has would
take the machine's memory, and libraries answer a wrong value with whatever error comes first. Here each is told with
the file and the key. Reads only; never looks at weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.config.facts import kernel_home
from trimtab.errors import RequestError
from trimtab.reading import MOST_SETTINGS, read_json_object, read_text

CONFIG = "config.json"
_OBJECTS = (
    *(CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("preprocessor_config.json", "processor_config.json", "adapter_config.json"),
)
"""Files that hold one object, of some kilobytes; a tokenizer's list of added tokens makes it megabytes."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_SMALL = 32 << 20
_CHANGE = "fetch the model again, or give the folder of a whole one"

# The largest that a size can be: far above any model, far below what cannot be held.
_SIZES = {
    "hidden_size": 2**20,
    "d_model": 2**20,
    "n_embd": 2**20,
    "intermediate_size": 2**24,
    "d_ff": 2**24,
    "num_hidden_layers": 4096,
    "num_layers": 4096,
    "n_layer": 4096,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "num_heads": 2**16,
    "n_head": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**26,
    "num_codebooks": 2**12,
    "codebook_size": 2**24,
    "max_position_embeddings": 2**40,
    "n_positions": 2**40,
    "image_size": 2**16,
    "patch_size": 2**16,
    "num_channels": 2**12,
}
_MOST = 2**53
_KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


def check_folder_files(folder: Path, *, trusted: Sequence[str] = ()) -> None:
    """Refuse a folder whose settings cannot be what they should; one without them is for others to judge."""
    for name in _OBJECTS:
        file = folder / name
        if not _stands(file):
            continue
        content = read_json_object(file, f"the model's {name}", _CHANGE, _SMALL)
        if name == CONFIG:
            check_config(content, file, trusted=trusted)
    for name in _TEMPLATES:
        if _stands(folder / name):
            read_text(folder / name, MOST_SETTINGS)
    for file in (*folder.glob("*.json"), *folder.glob("*.txt"), *folder.glob("*.model")):
        if not file.is_file() and not file.is_dir():
            raise RequestError.of(
                f"{file} is no file",
                "it is a link to nothing, a pipe, a socket or a device, and would be waited for",
                "remove it, or " + _CHANGE,
            )


def has_tokenizer(folder: Path) -> bool:
    """Whether anything in the folder may be a tokenizer, by its name."""
    names = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.vocab")
    return any(True for name in names for _ in folder.glob(name))


def check_config(content: Mapping[str, Any], file: Path, *, trusted: Sequence[str] = ()) -> None:
    """Refuse sizes that no model has, and code that the config would fetch."""
    for key, value in _entries(content, ""):
        name = key.rpartition(".")[2]
        if name in _KERNELS and isinstance(value, str) and "/" in value and kernel_home(value) not in trusted:
            raise RequestError.of(
                f"{file}: {key} is {value[:100]!r}",
                "it names a kernel on the hub: code that would be fetched and run here",
                f"remove it, or read that code and, if you trust it, --trust-remote-code {kernel_home(value)[:100]}",
            )
        why = _wrong(name, value)
        if why is not None:
            shown = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "a huge number"
            raise RequestError.of(
                f"{file}: {key} is {shown[:100]}",
                why,
                f"write the number that belongs to the weights, or {_CHANGE}",
            )


def _wrong(name: str, value: Any) -> str | None:
    most = _SIZES.get(name)
    if most is None:
        if isinstance(value, float) and math.isnan(value):
            return "it is not a number, and all that is computed with it would not be one"
        huge = isinstance(value, int) and abs(value) > _MOST
        return f"no number of a model is beyond {_MOST:,}" if huge else None
    if value is None or isinstance(value, list | dict):
        return None  # optional, or one for each layer or side: the architecture's to judge
    if isinstance(value, bool) or not isinstance(value, int):
        return "it is a count, and must be a whole number"
    if value < 1:
        return "a model has at least one of them"
    return f"no model has more than {most:,}" if value > most else None


def _entries(content: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Every key with its value, those of the parts' own configs as `text_config.hidden_size`."""
    for key, value in content.items():
        here = f"{above}{key}"
        if isinstance(value, Mapping):
            # An inner mapping is a config of a part, or a table of names such as id2label.
            yield from _entries(value, f"{here}.")
        else:
            yield here, value


def _stands(file: Path) -> bool:
    """Whether something of this name is there, be it a file or not."""
    return file.exists() or file.is_symlink()
