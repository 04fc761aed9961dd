"""Chat templates that write as well-known model families do, each with one trait that is hard to carry over."""

from __future__ import annotations

GENERIC_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A default system text, as SmolLM2 and Qwen2.5 have it.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + GENERIC_CHATML
)
# An empty thought before the last answer, thoughts removed from earlier ones, tool answers gathered in one turn.
THINKING = """
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
    {{- m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- else %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# Asks with an opened thought that finished answers do not have.
OPENED_THOUGHT = GENERIC_CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# TinyLlama's chat model: turns end with EOS.
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# BOS from the template, contents trimmed.
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# A system block that is always there, with today's date.
LLAMA_3_DATED = (
    "{% set has = messages[0]['role'] == 'system' %}"
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' }}"
    "{{ (messages[0]['content'] if has else '') + '<|eot_id|>' }}"
    "{% for m in (messages[1:] if has else messages) %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The system text inside the first user turn, BOS before each user turn.
LLAMA_2 = (
    "{% set has = messages[0]['role'] == 'system' %}"
    "{% for m in (messages[1:] if has else messages) %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if has and loop.first %}{{ '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# No place for a system text: the template refuses it.
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# The system text goes to the last user turn, and is lost once an answer follows.
SYSTEM_IN_LAST = (
    "{% set has = messages[0]['role'] == 'system' %}{{ bos_token }}"
    "{% for m in (messages[1:] if has else messages) %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if has and loop.last %}{{ messages[0]['content'] + '\n\n' }}{% endif %}{{ m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Plain text markers, a default system text.
ALPACA = (
    "{% if messages[0]['role'] != 'system' %}{{ 'Below is an instruction that describes a task.\n\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'user' %}{{ '### Instruction:\n' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ '### Response:\n' + m['content'] + eos_token + '\n\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
# Braces in the text that a Go template would take for its own.
BRACES = (
    "{% for m in messages %}{{ '{{' + m['role'] + '}}: ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '{{assistant}}: ' }}{% endif %}"
)
# Numbers its turns: no TEMPLATE can.
NUMBERED = (
    "{% for m in messages %}{{ '#' ~ loop.index ~ ' ' + m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '#' ~ (messages | length + 1) ~ ' assistant: ' }}{% endif %}"
)
SHOUTING = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
SYSTEM_AT_THE_END = (
    "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% for m in messages if m['role'] == 'system' %}{{ 'rules: ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TOOLS = "{% if tools %}{{ 'Tools: ' + tools | tojson + '\n' }}{% endif %}" + GENERIC_CHATML

EXACT = {
    "chatml": GENERIC_CHATML,
    "default system": DEFAULT_SYSTEM,
    "thinking": THINKING,
    "opened thought": OPENED_THOUGHT,
    "zephyr": ZEPHYR,
    "llama 3": LLAMA_3,
    "llama 3 dated": LLAMA_3_DATED,
    "llama 2": LLAMA_2,
    "no system": NO_SYSTEM,
    "alpaca": ALPACA,
    "braces": BRACES,
    "tools": TOOLS,
}
