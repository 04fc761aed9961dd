"""Chooses the chat template that training, sampling and export all share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError
from trimtab.reading import MOST_SETTINGS, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For base models that ship no template. Plain text markers only: nothing is added to the vocabulary.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Input:\\n' + message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)


def chat_template_for(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> str:
    """The template from the settings, else the model's own, else a plain one."""
    chosen = settings.chat_template
    if chosen is not None:
        if "{" in chosen:
            return chosen
        path = Path(chosen).expanduser()
        if not path.is_file():
            raise RequestError.of(
                f"model.chat_template={chosen}: no such file",
                "the setting takes a .jinja file or the template text itself",
                "check the path, or leave the setting out to use the model's own template",
            )
        try:
            return read_text(path, MOST_SETTINGS)
        except OSError as error:
            raise RequestError.of(
                f"model.chat_template={chosen}: the file cannot be read",
                str(error),
                "save it as UTF-8 text, and check its permissions",
            ) from error
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    return own or PLAIN_TEMPLATE
