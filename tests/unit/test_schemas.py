from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp_serve.errors import RequestRejected
from gtp_serve.server.body import check_media_type, parse_json_object
from gtp_serve.server.calls import Call, parse_call
from gtp_serve.server.schemas import (
    AT_DEFAULT,
    CALL,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SAMPLING,
    SAMPLING_AT_DEFAULT,
    Number,
)


def read(**body: Any) -> Call:
    names = itertools.count()
    given = body if "input_ids" in body else {"text": "x", **body}
    return parse_call(given, lambda: f"new{next(names)}")


def refusal(**body: Any) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        read(**body)
    json.dumps({"message": str(caught.value), "param": caught.value.param}, allow_nan=False)
    return caught.value


def sampling(**params: Any) -> Any:
    return read(sampling_params=params).prompts[0].sampling


def numbers(field: Number) -> list[tuple[Any, bool]]:
    """(value, whether it is allowed) at each border and of each wrong kind."""
    step = 1 if field.kind == "int" else 1e-6 * max(1.0, abs(field.high))
    values: list[tuple[Any, bool]] = [
        (field.low, not field.above),
        (field.low - step, field.also == field.low - step),
        (field.high, True),
        (field.high + step, False),
        (1 << 70, False),
        (-(1 << 70), False),
        (float("inf"), False),
        (float("-inf"), False),
        (float("nan"), False),
        (True, False),
        ("1", False),
        ([1], False),
        ({}, False),
        (None, True),
    ]
    values += [(0.5, False)] if field.kind == "int" else []
    values += [(field.also, True)] if field.also is not None else []
    return values


@pytest.mark.parametrize("name", [name for name, field in SAMPLING.items() if field.kind != "bool"])
def test_h1_each_number_takes_its_range_and_nothing_else(name: str) -> None:
    for value, allowed in numbers(SAMPLING[name]):
        params = {name: value} | ({"max_new_tokens": 1 << 30} if name == "min_new_tokens" else {})
        if allowed:
            expected = SAMPLING[name].default if value is None else value
            assert getattr(sampling(**params), name) == expected, value
        else:
            error = refusal(sampling_params=params)
            assert (error.code, error.param) == ("invalid-value", f"sampling_params.{name}"), value


@pytest.mark.parametrize("name", [*CALL, *(name for name, field in SAMPLING.items() if field.kind == "bool")])
def test_each_flag_takes_true_false_and_null_only(name: str) -> None:
    wrap = (lambda value: {"sampling_params": {name: value}}) if name in SAMPLING else (lambda value: {name: value})
    for value in (True, False, None):
        read(**wrap(value))
    wrong: tuple[Any, ...] = (0, 1, "true", [], {}, float("nan"))
    for value in wrong:
        assert refusal(**wrap(value)).param in (name, f"sampling_params.{name}")


@pytest.mark.parametrize("name", AT_DEFAULT)
def test_a_field_of_a_later_version_is_taken_at_its_default_and_refused_by_name_otherwise(name: str) -> None:
    for value in (None, *AT_DEFAULT[name][0]):
        read(**{name: value})
    for value in (17, "x", [3]):
        error = refusal(**{name: value})
        assert (error.code, error.param) == ("not-supported", name)
        assert str(error).startswith(f"{name} is not supported")


@pytest.mark.parametrize("name", SAMPLING_AT_DEFAULT)
def test_a_sampling_field_of_a_later_version_likewise(name: str) -> None:
    for value in (None, *SAMPLING_AT_DEFAULT[name][0]):
        sampling(**{name: value})
    assert refusal(sampling_params={name: 17}).param == f"sampling_params.{name}"


@pytest.mark.parametrize(
    ("body", "param", "right"),
    [
        ({"sampling_params": {"max_tokens": 8}}, "sampling_params.max_tokens", "max_new_tokens"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature", "temperature"),
        ({"sampling_params": {"input_ids": [1]}}, "sampling_params.input_ids", "input_ids"),
        ({"max_tokens": 8}, "max_tokens", "sampling_params.max_new_tokens"),
        ({"temperature": 8}, "temperature", "sampling_params.temperature"),
        ({"prompt": "x"}, "prompt", "text"),
        ({"streem": True}, "streem", "stream"),
        ({"zzzzzzzz": None}, "zzzzzzzz", None),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_right_one(
    body: dict[str, Any], param: str, right: str | None
) -> None:
    error = refusal(**body)
    assert (error.code, error.param, error.did_you_mean) == ("unknown-field", param, right)


def test_the_message_for_a_foreign_name_is_the_documented_one() -> None:
    error = refusal(sampling_params={"max_tokens": 8})
    message = "unknown field 'max_tokens' in sampling_params; on /generate it is 'max_new_tokens'"
    assert str(error) == message


def test_null_means_the_default_everywhere() -> None:
    names = [*SAMPLING, *SAMPLING_AT_DEFAULT, "stop", "stop_token_ids", "seed"]
    call = read(sampling_params=dict.fromkeys(names), **dict.fromkeys([*CALL, *AT_DEFAULT, "rid", "stream"]))
    assert call == read()
    assert read(sampling_params=None) == read()


def test_zero_is_zero_and_not_left_out() -> None:
    chosen = sampling(temperature=0, sampling_seed=0, min_p=0, min_new_tokens=0)
    assert (chosen.temperature, chosen.sampling_seed) == (0.0, 0)
    assert refusal(sampling_params={"top_k": 0}).param == "sampling_params.top_k"
    assert refusal(sampling_params={"n": 0}).param == "sampling_params.n"


def test_seed_is_taken_for_sampling_seed() -> None:
    assert sampling(seed=7).sampling_seed == 7
    assert refusal(sampling_params={"seed": 7, "sampling_seed": 7}).param == "sampling_params.seed"
    assert refusal(sampling_params={"seed": -1}).param == "sampling_params.seed"


def test_stops_are_strings_within_bounds() -> None:
    assert sampling(stop="a").stop == ("a",)
    assert sampling(stop=["a", "b"]).stop == ("a", "b")
    bad: tuple[Any, ...] = (
        [""],
        "",
        ["a"] * (MAX_STOPS + 1),
        "a" * (MAX_STOP_CHARS + 1),
        3,
        [3],
        {},
        [["a"]],
    )
    for stop in bad:
        assert refusal(sampling_params={"stop": stop}).param == "sampling_params.stop"
    for ids in ([-1], [1.0], ["1"], 3, [True], [1 << 70], [1] * 1000):
        assert refusal(sampling_params={"stop_token_ids": ids}).param == "sampling_params.stop_token_ids"


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ({}, "text", "missing-field"),
        ({"text": None}, "text", "missing-field"),
        ({"text": []}, "text", "empty-prompt"),
        ({"text": 3}, "text", "invalid-value"),
        ({"text": ["a", 3]}, "text[1]", "invalid-value"),
        ({"input_ids": []}, "input_ids", "empty-prompt"),
        ({"input_ids": [[]]}, "input_ids[0]", "empty-prompt"),
        ({"input_ids": [1, "2"]}, "input_ids", "invalid-value"),
        ({"input_ids": [1, True]}, "input_ids", "invalid-value"),
        ({"input_ids": [-1]}, "input_ids", "bad-token-id"),
        ({"input_ids": [10**20]}, "input_ids", "bad-token-id"),
        ({"input_ids": [1.5]}, "input_ids", "invalid-value"),
        ({"input_ids": [[1], 2]}, "input_ids[1]", "invalid-value"),
        ({"input_ids": "1"}, "input_ids", "invalid-value"),
        ({"text": "a", "input_ids": [1]}, "input_ids", "invalid-value"),
        ({"text": ["a"] * 2000}, "text", "invalid-value"),
        ({"text": ["a"] * 1000, "sampling_params": {"n": 2}}, "sampling_params.n", "invalid-value"),
        ({"text": "a", "stream": "all"}, "stream", "invalid-value"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "invalid-value"),
        ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params", "invalid-value"),
        ({"text": ["a"], "sampling_params": [3]}, "sampling_params[0]", "invalid-value"),
        ({"text": "a", "rid": ""}, "rid", "invalid-value"),
        ({"text": "a", "rid": "a\nb"}, "rid", "invalid-value"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "duplicate-rid"),
        ({"text": "a", "return_logprob": 1}, "return_logprob", "invalid-value"),
    ],
)
def test_a_wrong_prompt_or_option_is_refused_by_name(prompt: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_call(prompt, lambda: "new")
    assert (caught.value.param, caught.value.code) == (param, code)


def test_lists_and_samples_are_named_after_the_callers_rid() -> None:
    assert [p.rid for p in read(rid="r").prompts] == ["r"]
    assert [p.rid for p in read(rid="r", sampling_params={"n": 2}).prompts] == ["r_0", "r_1"]
    both = read(text=["a", "b"], rid="r", sampling_params={"n": 2})
    assert [p.rid for p in both.prompts] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
    assert [p.text for p in both.prompts] == ["a", "a", "b", "b"]
    assert both.as_list
    assert read(text=["a"]).as_list
    assert not read().as_list


def test_each_prompt_of_a_list_may_have_its_own_parameters() -> None:
    call = read(text=["a", "b"], sampling_params=[{"n": 1}, {"temperature": 0}], return_logprob=[True, False])
    assert [p.sampling.temperature for p in call.prompts] == [1.0, 0.0]
    assert [p.return_logprob for p in call.prompts] == [True, False]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"\xff\xfe",
        b"[" * 3000 + b"]" * 3000,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"1" * 5000,
        b'{"text": NaN}',
        b'{"text": 1e999}',
        b'{"text": -Infinity}',
        b'{"text": "\\ud83d"}',
        b'{"text": "a"} x',
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_not_a_json_object_is_refused_in_words(raw: bytes) -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_json_object(raw)
    assert caught.value.code == "invalid-json"
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"text": "a", "text": "b"}', "text"),
        (b'{"text": "a", "te\\u0078t" : "b"}', ""),
        (b'{"sampling_params": {"n": 1, "n": 2}}', "n"),
        (b'{"x": [{"k\\\\": 1, "k\\\\": 2}]}', "k"),
    ],
)
def test_a_key_that_comes_twice_is_refused(raw: bytes, name: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_json_object(raw)
    assert caught.value.code == "duplicate-key"
    assert (caught.value.param or "").startswith(name)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.one_of(st.none(), st.integers(-5, 5), st.text('ab":\\ {}', max_size=8)),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text('a":\\', max_size=3), inner, max_size=3)
            ),
            max_leaves=12,
        ),
        max_size=5,
    )
)
def test_any_object_without_double_keys_is_taken_as_it_is(value: dict[str, Any]) -> None:
    assert parse_json_object(json.dumps(value).encode()) == value
    assert parse_json_object(json.dumps(value, ensure_ascii=False).encode()) == value


def test_only_json_or_no_media_type_is_taken() -> None:
    for good in ("", "application/json", "application/json; charset=utf-8", "Application/Vnd.X+JSON"):
        check_media_type(good)
    for bad in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        with pytest.raises(RequestRejected) as caught:
            check_media_type(bad)
        assert caught.value.http_status == 415
