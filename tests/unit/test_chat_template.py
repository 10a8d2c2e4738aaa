"""Chat templates: what they may use, what they may not reach, and that each render ends soon and small."""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from gtp_serve.errors import RequestRejected, UsageError
from gtp_serve.loaders.chat_template import ChatTemplate, TemplateLimits

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SECONDS = 0.3
LIMITS = TemplateLimits(output_bytes=1 << 20, work=1 << 23, seconds=SECONDS)


def render(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source, limits=LIMITS).render(messages, variables=variables)


def rejection(source: str, **variables: Any) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        render(source, **variables)
    return caught.value


# What a template may use


def test_blocks_take_their_line_with_them() -> None:
    source = "{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n"
    assert render(source) == "user\n"


def test_loops_keep_all_of_jinjas_loop_facts() -> None:
    source = (
        "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex }}"
        "{{ loop.nextitem is defined }}{% endfor %}{% for x in [] %}a{% else %}none{% endfor %}"
    )
    assert render(source) == "0/2False2True1/2True1Falsenone"


def test_loops_can_break_continue_recurse_and_unpack() -> None:
    source = (
        "{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}"
        "{% endif %}{{ x }}"
        "{% endfor %}{% for x in [1, [2, [3]]] recursive %}{% if x is sequence %}({{ loop(x) }})"
        "{% else %}{{ x }}"
        "{% endif %}{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
    )
    assert render(source) == "131(2(3))a1"


def test_json_keeps_characters_and_escapes_nothing_for_html() -> None:
    assert render("{{ {'a': '<é&\"'} | tojson }}") == '{"a": "<é&\\""}'
    assert render("{{ [1, {'b': none}] | tojson(indent=2) }}") == '[\n  1,\n  {\n    "b": null\n  }\n]'
    assert render("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}") == (
        '{"a":"\\u00e9","b":1}'
    )


def test_the_generation_tag_only_marks() -> None:
    assert render("{% generation %}{{ messages[1].content }}{% endgeneration %}!") == "yo!"


def test_the_date_is_todays() -> None:
    assert render("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))


def test_tools_and_documents_are_defined_even_when_nobody_gives_any() -> None:
    assert render("{{ tools is none }}{{ documents is none }}{{ enable_thinking is defined }}") == "TrueTrueFalse"
    assert render("{{ tools[0].name }}{{ enable_thinking }}", tools=[{"name": "f"}], enable_thinking=False) == "fFalse"


def test_special_tokens_are_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", special_tokens={"bos_token": "<s>"})
    assert template.render(MESSAGES) == "<s>hi"


def test_keys_that_are_none_are_left_out_of_messages() -> None:
    assert render("{{ messages[0].content is defined }}", [{"role": "a", "content": None}]) == "False"


def test_a_template_that_refuses_says_why() -> None:
    error = rejection("{{ raise_exception('roles must alternate') }}")
    assert error.code == "chat-template-refused"
    assert error.message == "the chat template refuses these messages: roles must alternate"
    assert error.http_status == 400


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].nope.x }}", "{{ 1 / 0 }}", "{{ none + 1 }}", "{{ missing() }}", "{% include 'x' %}"],
)
def test_a_template_that_fails_costs_its_request_only(source: str) -> None:
    error = rejection(source)
    assert error.code == "chat-template-failed"
    assert "Error" not in error.message, "no class names in what a client sees"
    assert "/" not in error.message or "1 / 0" in source


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{",
        "{% endfor %}",
        "{{ 1 | nofilter }}",
        "{% for i in " + "(" * 3000 + "1" + ")" * 3000 + " %}{% endfor %}",
    ],
)
def test_a_template_that_is_not_jinja_is_a_usage_error(source: str) -> None:
    with pytest.raises(UsageError, match="the chat template") as caught:
        ChatTemplate(source)
    assert len(str(caught.value)) < 600


# What a request may say


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "add_generation_prompt",
        "chat_template",
        "tokenize",
        "raise_exception",
        "strftime_now",
        "namespace",
        "range",
        "dict",
        "cycler",
        "joiner",
        "loop",
        "self",
        "super",
        "caller",
        "varargs",
        "kwargs",
        "lipsum",
        "eos_token",
    ],
)
def test_t1_a_request_cannot_take_the_name_of_a_helper(name: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}", special_tokens={"eos_token": "</s>"})
    with pytest.raises(RequestRejected, match=name):
        template.render(MESSAGES, variables={name: "evil"})
    assert template.render(MESSAGES) == "hi"


@pytest.mark.parametrize("name", ["", "a b", "__class__", "_x", "1a", "a" * 200 + "-"])
def test_a_request_cannot_use_odd_names(name: str) -> None:
    with pytest.raises(RequestRejected, match="cannot be the name"):
        ChatTemplate("x").render(MESSAGES, variables={name: 1})


def test_a_request_cannot_pass_many_variables_or_deep_ones() -> None:
    with pytest.raises(RequestRejected, match="at most 64"):
        ChatTemplate("x").render(MESSAGES, variables={f"v{i}": 1 for i in range(65)})
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(RequestRejected, match="nested more than 64 deep"):
        ChatTemplate("x").render([{"role": "user", "content": deep}])


@pytest.mark.parametrize("value", [object(), b"bytes", {1: 2}, open])
def test_only_json_values_reach_a_template(value: Any) -> None:
    with pytest.raises(RequestRejected, match=r"messages\[0\]"):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": value}])


def test_a_message_must_be_an_object() -> None:
    with pytest.raises(RequestRejected, match=r"messages\[1\] is not an object"):
        ChatTemplate("x").render([*MESSAGES[:1], "text"])  # type: ignore[list-item]


def test_t5_text_of_a_message_is_never_run() -> None:
    assert render("{{ messages[0].content }}", [{"content": "{{ 7 * 7 }}{% for %}"}]) == "{{ 7 * 7 }}{% for %}"


# What a template cannot reach

ESCAPES = [
    "{{ messages.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].__setitem__('role', 'x') }}",
    "{{ raise_exception.__globals__['sys'] }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__base__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ loop.__class__ }}",
    "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ environment }}{{ context }}{{ meter }}",
    "{{ 'x'.encode().__class__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_t3_an_escape_gives_nothing_or_an_error(source: str) -> None:
    messages = [dict(m) for m in MESSAGES]
    try:
        text = render(source, messages)
    except (RequestRejected, UsageError):
        text = ""
    assert text.replace("[, ]", "").replace("Undefined", "").strip("[] ,") == ""
    assert messages == MESSAGES


# That each render ends soon and small

BOMBS = {
    "constant repeat": "{{ 'a' * 1000000000 }}",
    "constant repeat in set": "{% set x = 'a' * 1000000000 %}{{ x|length }}",
    "variable repeat": "{% set n = 1000000000 %}{{ 'a' * n }}{{ n * 'a' }}",
    "list repeat": "{% set x = [1] * 1000000000 %}",
    "constant padding": "{% set x = 'a'|center(1000000000) %}",
    "method padding": "{{ 'a'.ljust(1000000000)|length }}",
    "method padding by item": "{{ 'a'['rjust'](1000000000)|length }}",
    "method padding by attr filter": "{{ ('a'|attr('zfill'))(1000000000)|length }}",
    "printf width": "{{ '%1000000000d' % 1 }}",
    "printf width from an argument": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format width from an argument": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format filter": "{{ '%999999999d'|format(1) }}",
    "big number": "{{ 9 ** (9 ** 9) }}",
    "big product": ("{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"),
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000)|length }}",
    "replace filter": "{{ ('a' * 100000)|replace('a', 'b' * 100000)|length }}",
    "join": "{{ ('a' * 100000).join(range(100000)|map('string'))|length }}",
    "join filter": "{{ range(100000)|join('a' * 100000)|length }}",
    "indent": "{{ ('a\n' * 100000)|indent(9999)|length }}",
    "json indent": "{{ [[[[[[messages]]]]]]|tojson(indent='x' * 900000)|length }}",
    "json separators": "{{ [1, 2, 3]|tojson(separators=('a' * 900000, ':'))|length }}",
    "map of padding": "{{ range(100000)|map('center', 10000)|list|length }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list|length }}",
    "bytes": "{{ (1).to_bytes(1000000000)|length }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(100000)|length }}",
    "empty loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "printing loops": "{% for a in range(3000) %}{% for b in range(3000) %}a{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching macro": ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"),
    "doubling by plus": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"
    ),
    "doubling by tilde": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "doubling by block": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
    ),
    "hoarding slices": (
        "{% set n = namespace(l=[]) %}{% set b = 'a' * 900000 %}{% for i in range(99999) %}"
        "{% set n.l = [b[1:], n.l] %}{% endfor %}"
    ),
    "hoarding lists": "{% for i in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "static text in a loop": "{% set x %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
}
NESTED = (
    "{% set n = namespace(x=('a',), y=('a',)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}"
    "{% set n.y = (n.y, n.y) %}{% endfor %}"
)
SHARED = {
    "printed": "{{ n.x }}",
    "as JSON": "{{ n.x|tojson }}",
    "compared": "{{ n.x == n.y }}",
    "in a list": "{{ n.x in [n.y] }}",
    "by a test": "{{ n.x is eq(n.y) }}",
    "by select": "{{ [n.x]|select('eq', n.y)|list|length }}",
    "sorted": "{{ [n.x, n.y]|sort|length }}",
    "as a key": "{{ {n.x: 1}|length }}",
    "as an index": "{{ {}[n.x] }}",
    "by get": "{{ {}.get(n.x) }}",
    "unique": "{{ [n.x]|unique|list|length }}",
    "formatted": "{{ '%s' % (n.x,) }}",
    "joined": "{{ n.x ~ 'a' }}",
}
BOMBS |= {f"shared parts {name}": NESTED + source for name, source in SHARED.items()}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_t2_a_bomb_costs_one_request_little_time_and_little_memory(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    error = rejection(source)
    assert error.code in ("chat-template-limit", "chat-template-failed", "chat-template-unsafe")
    assert time.monotonic() - begun < SECONDS + 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB"


def test_after_a_bomb_the_same_template_serves_the_next_request() -> None:
    template = ChatTemplate("{{ 'x' * (messages|length * 300000) }}", limits=LIMITS)
    with pytest.raises(RequestRejected, match="more than 1048576 characters"):
        template.render(MESSAGES * 10)
    assert len(template.render(MESSAGES)) == 600000


def test_output_is_bounded_in_bytes_not_characters() -> None:
    template = ChatTemplate("{{ messages[0].content }}", limits=TemplateLimits(output_bytes=100))
    assert template.render([{"content": "é" * 50}]) == "é" * 50
    with pytest.raises(RequestRejected, match="more than 100 bytes"):
        template.render([{"content": "é" * 51}])


def test_a_long_conversation_is_well_inside_the_bounds() -> None:
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content|trim + '</>' }}{% endfor %}"
    messages = [{"role": "user", "content": f"{i} " + "word " * 100} for i in range(2000)]
    text = ChatTemplate(source).render(messages)
    assert text.count("</>") == 2000
    assert len(text) > 1_000_000


def test_renders_in_many_threads_do_not_mix() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }},{% endfor %}")

    def once(number: int) -> bool:
        return template.render([{"content": str(number)}] * 20) == f"{number}," * 20

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(once, range(200)))
