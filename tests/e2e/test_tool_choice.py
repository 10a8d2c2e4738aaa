"""``tool_choice``: what must be called is called, whatever the model would rather say."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import openai
import pytest
from fakes_server import FakeClient, FakeServer, byte_ids, byte_tokenizer, serving
from noise_engine import EOS, VOCAB, finish_all, noise_engine

from gtp_serve.engine.engine import Engine
from gtp_serve.engine.grammar import GrammarCompiler
from gtp_serve.engine.tool_grammar import MAX_CALLS
from gtp_serve.errors import RequestRejected
from gtp_serve.loaders.chat_template import ChatTemplate
from gtp_serve.loaders.tokenizer import Tokenizer
from gtp_serve.request import Grammar, Request, SamplingParams
from gtp_serve.server.grammar_process import judge
from gtp_serve.server.openai.tool_choice import read_offer
from gtp_serve.server.openai.tools import split_calls

pytestmark = pytest.mark.e2e

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/small"}, "b": {"$ref": "#/$defs/small"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": -9, "maximum": 99}},
    },
    'say "it"': {
        "properties": {"text": {"type": "string", "maxLength": 12}, "loud": {"type": "boolean"}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "pick": {
        "type": "object",
        "properties": {"of": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 3}},
        "required": ["of"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()] + [
    {"type": "function", "function": {"name": "now"}}
]
NO_ARGUMENTS = {"type": "object", "maxProperties": 0}
TAGS = "{# <tool_call> #}"
LLAMA = """{{ '{"name": "x", "parameters": ' }}"""
CHOICES: list[Any] = [
    "required",
    {"type": "function", "function": {"name": "add"}},
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": name}} for name in ("pick", 'say "it"')],
        },
    },
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer().to_json, vocab_size=VOCAB, eos_token_ids=(EOS,))


def engine_of(compiler: GrammarCompiler) -> Engine:
    return noise_engine(compiler, context=2100)


def allowed_names(choice: Any) -> set[str]:
    if choice == "required":
        return {*SCHEMAS, "now"}
    if choice["type"] == "function":
        return {choice["function"]["name"]}
    return {one["function"]["name"] for one in choice["allowed_tools"]["tools"]}


def check_calls(calls: Sequence[Any], choice: Any) -> None:
    for call in calls:
        name = call["function"]["name"]
        assert name in allowed_names(choice)
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS.get(name, NO_ARGUMENTS))


@pytest.mark.parametrize("template", [TAGS, LLAMA, ""], ids=["tagged", "parameters", "bare"])
def test_a_model_of_noise_makes_valid_calls_of_allowed_tools_and_nothing_else(
    compiler: GrammarCompiler, template: str
) -> None:
    wanted: dict[str, tuple[Any, bool, frozenset[str]]] = {}
    requests = []
    for at, choice in enumerate(CHOICES):
        offer = read_offer({"tools": TOOLS, "tool_choice": choice})
        for one_call in (True, False):
            for seed in range(4):
                rid = f"{at}-{one_call}-{seed}"
                wanted[rid] = (choice, one_call, offer.names)
                sampling = SamplingParams(
                    max_new_tokens=2000, seed=seed, temperature=1.0, grammar=offer.grammar(template, one_call=one_call)
                )
                requests.append(Request(rid=rid, input_ids=(5,), sampling=sampling))
    counts: set[int] = set()
    whole = 0
    for rid, (tokens, end) in finish_all(engine_of(compiler), requests).items():
        choice, one_call, names = wanted[rid]
        text = byte_tokenizer().decode([token for token in tokens if token != EOS])
        rest, calls = split_calls(text, names)
        check_calls(calls, choice)
        if end.type == "length":  # white space without end, or ever more calls
            continue
        assert (end.type, rest) == ("stop", ""), text
        single = one_call or (isinstance(choice, dict) and choice["type"] == "function")
        assert 1 <= len(calls) <= (1 if single else MAX_CALLS), text
        assert ("<tool_call>" in text) == (template == TAGS)
        assert ('"parameters": ' in text) == (template == LLAMA)
        counts.add(len(calls))
        whole += 1
    assert whole >= 0.9 * len(requests)
    assert len(counts) > 1


def test_calls_are_told_as_they_are_written() -> None:
    arguments = '{"n": 123456789012345678901234567890, "s": "</tool_call>", "b": 1.50}'
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'

    rest, (call,) = split_calls(text, {"add"})

    assert (rest, call["function"]["arguments"]) == ("", arguments)
    for broken in (text.replace("1.50", "NaN"), text.replace("1.50", "1.50,"), text.replace('"n":', "3:"), text[:-3]):
        assert split_calls(broken, {"add"}) == (broken, [])
    assert split_calls("[" * 10_000, {"add"}) == ("[" * 10_000, [])


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "integer", "multipleOf": 999983}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"unevaluatedProperties": False},
        {"properties": 1},
    ],
)
def test_parameters_that_cannot_be_enforced_are_refused(compiler: GrammarCompiler, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = read_offer({"tools": tools, "tool_choice": "required"}).grammar("", one_call=True)
    assert grammar is not None

    verdict = judge(grammar, compiler)

    assert verdict.grammar is None
    assert verdict.message


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"callees": [], "most": 1, "tagged": true, "key": "arguments"}'])
def test_a_callers_own_description_is_held_to_its_form(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(RequestRejected):
        compiler.compile(Grammar(kind="tool_calls", text=text)).result()


class Judge:
    """Grammars are compiled here, not in a child."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    async def check(self, grammar: Grammar) -> Grammar:
        verdict = judge(grammar, self._compiler)
        if verdict.grammar is None:
            raise RequestRejected(verdict.message, verdict.details, code="bad-grammar")
        return verdict.grammar


class NoiseClient(FakeClient):
    """Replies are those of the engine with the noisy model."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        super().__init__(script=self._reply)
        self._compiler = compiler

    def _reply(self, request: Request) -> Sequence[int]:
        ((tokens, _),) = finish_all(engine_of(self._compiler), [request]).values()
        return tokens


def tagged_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer._template = ChatTemplate(TAGS + "{{ messages[0].content }}{{ tools | length if tools else 0 }}")
    return tokenizer


def test_the_openai_client_gets_calls_whole_and_streamed(compiler: GrammarCompiler) -> None:
    async def check(server: FakeServer) -> None:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=http) as client:
            for choice in CHOICES:
                asked: dict[str, Any] = {
                    "model": "m",
                    "messages": [{"role": "user", "content": "hi"}],
                    "tools": TOOLS,
                    "tool_choice": choice,
                    "parallel_tool_calls": False,
                    "max_tokens": 400,
                    "seed": 3,
                }
                whole = (await client.chat.completions.create(**asked)).choices[0]
                assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
                (call,) = whole.message.tool_calls or []
                check_calls([call.model_dump()], choice)
                stream = await client.chat.completions.create(**asked, stream=True)
                parts = [chunk.choices[0] async for chunk in stream]
                assert "".join(part.delta.content or "" for part in parts) == ""
                (streamed,) = [one for part in parts for one in part.delta.tool_calls or []]
                assert streamed.function == call.function or (
                    streamed.function is not None
                    and (streamed.function.name, streamed.function.arguments)
                    == (call.function.name, call.function.arguments)
                )
                assert parts[-1].finish_reason == "tool_calls"
                assert {len(one.input_ids) for one in server.client.requests} == {len(b"hi4")}

    async def run() -> None:
        options: dict[str, Any] = {"client": NoiseClient(compiler), "grammars": Judge(compiler), "context": 2100}
        async with serving(tokenizer=tagged_tokenizer(), **options) as server:
            await check(server)

    asyncio.run(run())


def test_one_call_at_most_is_also_told_where_nothing_is_enforced() -> None:
    text = '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'

    async def run() -> None:
        async with serving(client=FakeClient(script=lambda request: [*byte_ids(text.encode()), EOS])) as server:
            for parallel, expected in ((True, 2), (False, 1)):
                body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 200}
                reply = await server.http.post("/v1/chat/completions", json={**body, "parallel_tool_calls": parallel})
                assert len(reply.json()["choices"][0]["message"]["tool_calls"]) == expected

    asyncio.run(run())


def test_random_tools_are_called_validly(compiler: GrammarCompiler) -> None:
    rng = random.Random(4)
    kinds = [
        {"type": "integer", "minimum": 0, "maximum": 50},
        {"type": "string", "maxLength": 6},
        {"enum": ["x", 2, None]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    ]
    requests, schemas = [], {}
    for at in range(24):
        properties = {
            name: rng.choice(kinds) for name in rng.sample(["a", "b c", "d\u20ac", 'e"'], rng.randrange(1, 4))
        }
        required = rng.sample(sorted(properties), rng.randrange(len(properties) + 1))
        schemas[str(at)] = {"properties": properties, "required": required, "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": schemas[str(at)]}}]
        grammar = read_offer({"tools": tools, "tool_choice": "required"}).grammar(rng.choice([TAGS, ""]), one_call=True)
        sampling = SamplingParams(max_new_tokens=1500, seed=at, grammar=grammar)
        requests.append(Request(rid=str(at), input_ids=(5,), sampling=sampling))
    whole = 0
    for rid, (tokens, end) in finish_all(engine_of(compiler), requests).items():
        _, calls = split_calls(byte_tokenizer().decode([one for one in tokens if one != EOS]), {f"f{rid}"})
        whole += end.type == "stop"
        for call in calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[rid])
        assert len(calls) == 1 or end.type == "length"
    assert whole >= 22
