"""A hundred random schemas: whatever a model with random logits writes, it validates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from fakes_server import byte_tokenizer
from noise_engine import EOS, VOCAB, finish_all, noise_engine

from gtp_serve.engine.engine import Engine
from gtp_serve.engine.grammar import GrammarCompiler
from gtp_serve.request import FinishReason, Grammar, Request, SamplingParams

COUNT = 100


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Objects, lists and scalars with the bounds that keep a random writer short."""
    scalars: list[Callable[[random.Random], dict[str, Any]]] = [_string, _integer, _number, _enum, _pattern, _constant]
    if depth == 0:
        return _object(rng, depth)
    if depth >= 3:
        return rng.choice(scalars)(rng)
    nested = rng.choice([None, None, _object, _list, _either])
    return rng.choice(scalars)(rng) if nested is None else nested(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b c", "naïve", 'd"e', "_", "key1", "key2"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randrange(0, len(names) + 1)),
        "additionalProperties": False,
    }


def _list(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(0, 3)
    return {
        "type": "array",
        "items": random_schema(rng, depth + 1),
        "minItems": least,
        "maxItems": least + rng.randrange(0, 3),
    }


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1), {"type": rng.choice(["null", "boolean"])}]}


def _string(rng: random.Random) -> dict[str, Any]:
    least = rng.randrange(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(0, 9)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    bounds = {"minimum": low, "maximum": low + rng.randrange(0, 1000)}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "maximum": 9999}
    return {"type": "integer", **bounds}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": rng.randrange(-5, 5), "maximum": rng.randrange(6, 20)}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["x", "yes", "yesterday", 1, 2.5, None, True, "\u20ac", "tab\t"], rng.randrange(1, 5))}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[A-Z]{2}-[0-9]{1,3}$", "^(ab|cd){1,3}$", "^\\d{4}-\\d{2}$"])}


def _constant(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice(["k", 7, False])}


def build_engine() -> Engine:
    return noise_engine(GrammarCompiler(byte_tokenizer().to_json, vocab_size=VOCAB, eos_token_ids=(EOS,)))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_outputs_validate_for_a_hundred_random_schemas(temperature: float) -> None:
    rng = random.Random(20)
    schemas = [random_schema(rng) for _ in range(COUNT)]
    requests = [
        Request(
            rid=str(at),
            input_ids=(5,),
            sampling=SamplingParams(
                max_new_tokens=1000,
                temperature=temperature,
                seed=at,
                grammar=Grammar(kind="json_schema", text=json.dumps(schema)),
            ),
        )
        for at, schema in enumerate(schemas)
    ]
    tokenizer, complete = byte_tokenizer(), 0
    for rid, (tokens, end) in finish_all(build_engine(), requests).items():
        assert end.type in ("stop", "length"), (end, schemas[int(rid)])
        if end.type == "length":
            continue
        assert tokens[-1] == EOS
        jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), schemas[int(rid)])
        complete += 1
    assert complete >= 0.95 * COUNT  # the others ran into their limit in the middle of a value


def test_a_complete_grammar_ends_a_request_that_ignores_end_tokens() -> None:
    grammar = Grammar(kind="regex", text="ab")
    request = Request(rid="r", input_ids=(5,), sampling=SamplingParams(ignore_eos=True, grammar=grammar))
    tokens, end = finish_all(build_engine(), [request])["r"]
    assert byte_tokenizer().decode(tokens) == "ab"
    assert end == FinishReason(type="stop")


def test_a_grammar_that_cannot_go_on_fails_its_request_by_name_and_no_other() -> None:
    hard = Grammar(kind="json_schema", text=json.dumps({"type": "string", "pattern": "^(a?){1000}a{1000}$"}))
    requests = [
        Request(rid="hard", input_ids=(5,), sampling=SamplingParams(grammar=hard)),
        Request(rid="plain", input_ids=(5,), sampling=SamplingParams(max_new_tokens=3, ignore_eos=True)),
    ]
    ended = finish_all(build_engine(), requests)
    assert (ended["hard"][1].type, ended["hard"][1].code) == ("abort", "grammar-dead-end")
    assert ended["plain"][1].type == "length"


def test_a_sequence_waits_for_its_grammar_and_decodes_beside_it_go_on() -> None:
    slow = Grammar(kind="json_schema", text=json.dumps({"type": "integer", "multipleOf": 9973, "minimum": 1}))
    requests = [
        Request(rid="plain", input_ids=(5,), sampling=SamplingParams(max_new_tokens=5, ignore_eos=True)),
        Request(rid="slow", input_ids=(5, 6, 7, 8), sampling=SamplingParams(max_new_tokens=8, grammar=slow)),
    ]
    engine = build_engine()
    for request in requests:
        engine.add(request)
    order = []
    while engine.has_work():
        order += [event.rid for event in engine.step() if event.token_ids]
        engine.check_invariants()
    assert order.count("plain") == 5
    assert order.count("slow") >= 1
    assert order.index("slow") > 0
