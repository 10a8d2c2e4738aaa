"""Templates render as in transformers, feature by feature; both run the same Jinja source."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gtp_serve.loaders.chat_template import ChatTemplate

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds <é> & more",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {
    "type": "function",
    "function": {"name": "find", "arguments": {"q": "a<b", "n": 1.5, "deep": [1, None, True]}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "first "}, {"type": "text", "text": "second"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "42", "name": "find"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 42."},
    {"role": "user", "content": "Thanks\n\n"},
]

SOURCES = {
    "system turn by slicing": (
        "{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{{ messages[0].content.strip() }}"
        "{% else %}{% set rest = messages %}{% endif %}{{ rest | length }}"
    ),
    "content parts": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}"
        "{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}|{% endfor %}"
    ),
    "tools as JSON": (
        "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=4) }}{% endfor %}"
        "{% else %}none{% endif %}"
    ),
    "tool calls": (
        "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}{% for c in m.tool_calls %}"
        '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}{% endif %}{% endfor %}"
    ),
    "thinking removed": (
        "{% for m in messages %}{% set text = m.content if m.content is string else '' %}"
        "{% if '</think>' in text %}"
        "{{ text.split('</think>')[-1].lstrip('\\n') }}{% endif %}{% endfor %}"
    ),
    "last user turn by reverse": (
        "{% set ns = namespace(last=-1, found=false) %}{% for m in messages[::-1] %}"
        "{% set i = messages|length - 1 - loop.index0 %}"
        "{% if not ns.found and m.role == 'user' %}{% set ns.last = i %}{% set ns.found = true %}"
        "{% endif %}{% endfor %}"
        "{{ ns.last }}"
    ),
    "macro": (
        "{% macro turn(role, text, end=true) %}<{{ role }}>{{ text | trim }}{% if end %}</"
        "{{ role }}>{% endif %}{% endmacro %}"
        "{{ turn('a', ' b ') }}{{ turn('c', 'd', end=false) }}"
    ),
    "filters": (
        "{{ messages | map(attribute='role') | unique | join(', ') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ [3, 1, 2] | sort | first }}{{ {'b': 1, 'a': 2} | dictsort }}"
        "{{ 'x' | upper ~ 1 ~ none }}{{ messages | rejectattr('content') | list | length }}"
        "{{ 'aXb' | replace('X', '-') }}{{ 'a\\nb' | indent(2) }}{{ 3.14159 | round(2) }}"
        "{{ nothing | default('d', true) }}{{ [1, 2, 3] | sum }}"
    ),
    "text methods": (
        "{{ 'a-b-c'.split('-')[1] }}{{ ' x '.strip() }}{{ 'abc'.startswith('a') }}"
        "{{ 'Ab'.lower().title() }}{{ 'ab'.replace('a', 'c') }}"
        "{{ '{} {x:>4}'.format(1, x=2) }}{{ '%s is %05d' % ('n', 7) }}{{ '-'.join(['a', 'b']) }}"
        "{{ 'x'.ljust(3) }}|{{ 'k: v'.partition(': ') }}"
    ),
    "whitespace control": (
        "{% for m in messages -%}\n    {{- m.role -}}\n    {% if loop.first %}\n first {% endif %}"
        "\n\n{% endfor %}\n  {# note #}\nend\n"
    ),
    "arithmetic": (
        "{{ 7 // 2 }}{{ 7 % 3 }}{{ 2 ** 10 }}{{ 1 + 2.5 }}{{ [1] + [2] }}{{ 'ab' * 3 }}{{ -3 }}{{ 10 / 4 }}"
    ),
    "comparison chains": (
        "{{ 1 < 2 <= 2 }}{{ 'a' in 'abc' }}{{ 'tool' not in ['a'] }}{{ messages[0] == messages[0] }}"
    ),
    "loop controls": ("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"),
    "generation": ("{% for m in messages %}{% generation %}{{ m.role }}{% set x = 1 %}{% endgeneration %}{% endfor %}"),
    "prompt": "{{ bos_token }}{% if add_generation_prompt %}<assistant>{% endif %}{{ undefined_name }}",
    "dict and items": (
        "{% for k, v in dict(a=1, b=messages[0]).items() %}{{ k }}={{ v }};{% endfor %}"
        "{{ range(3) | list }}{{ none }}{{ true }}"
    ),
    "call block": (
        "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}in{% endcall %}"
        "{% filter upper %}abc{% endfilter %}"
    ),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_template_renders_as_in_transformers(source: str, tools: Any) -> None:
    expected = render_jinja_template(
        conversations=[[{k: v for k, v in m.items() if v is not None} for m in MESSAGES]],
        tools=tools,
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
    )[0][0]
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert template.render(MESSAGES, variables={"tools": tools}) == expected
    assert expected.strip() != ""
