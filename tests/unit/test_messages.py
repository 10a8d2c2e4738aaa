"""The wire between the two processes."""

from __future__ import annotations

import msgspec
import pytest
from fakes import request

from gtp_serve import errors
from gtp_serve.engine.messages import (
    Abort,
    EngineStats,
    Events,
    Fatal,
    FromWorker,
    Hello,
    Phase,
    Ready,
    Rejected,
    Stats,
    Stop,
    Stopped,
    Submit,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
    fatal,
    fault_of,
    rejected,
    rejection_of,
)
from gtp_serve.request import FinishReason, TokenEvent


@pytest.mark.parametrize(
    "message",
    [
        Submit(requests=(request("a", temperature=0.5, seed=2**63), request("b"))),
        Abort(rids=("a", "b")),
        Stop(drain_seconds=1.5),
    ],
)
def test_messages_to_the_worker_arrive_as_they_were(message: ToWorker) -> None:
    assert decode_to_worker(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(pid=7),
        Phase(name="load weights", state="running", done=3, total=9),
        Ready(facts={"pid": 7, "dtype": "bfloat16", "seconds": 1.5}),
        Events(
            events=(
                TokenEvent(rid="a", token_ids=(1, 2), logprobs=(-0.5, -1.0), weight_version="0"),
                TokenEvent(rid="b", finish=FinishReason(type="stop", matched=2)),
            )
        ),
        Rejected(rid="a", code="queue-full", message="full", http_status=503),
        Stats(stats=EngineStats(running=3, requests_total={"stop": 1})),
        Fatal(code="too-big", exit_code=4, message="no", details=(("try", "less"),)),
        Stopped(),
    ],
)
def test_messages_from_the_worker_arrive_as_they_were(message: FromWorker) -> None:
    assert decode_from_worker(encode(message)) == message


@pytest.mark.parametrize("frame", [b"", b"\xff\xff", b"\x81\xa4type\xa7Unknown", encode(Stopped())[:-2]])
def test_anything_else_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_from_worker(frame)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_to_worker(encode(Stopped()))


def test_a_field_of_the_wrong_type_is_refused() -> None:
    frame = msgspec.msgpack.encode({"type": "Abort", "rids": [5]})

    with pytest.raises(msgspec.ValidationError, match="rids"):
        decode_to_worker(frame)


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestRejected("no", [("needed", "yes")], param="top_p"),
        errors.RequestRejected("no", code="bad-token-id", param="input_ids"),
        errors.PromptTooLong("long"),
        errors.QueueFull("full"),
        errors.ShuttingDown("late"),
    ],
)
def test_a_rejection_arrives_with_class_code_status_and_param(error: errors.RequestRejected) -> None:
    again = rejection_of(rejected("a", error))

    assert type(again) is type(error)
    assert (again.code, again.http_status, again.param) == (error.code, error.http_status, error.param)
    assert str(again) == str(error)


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (errors.CheckpointCorrupt("short", [("try", "again")]), errors.CheckpointCorrupt),
        (errors.DoesNotFit("big"), errors.DoesNotFit),
        (errors.EngineFault("gone", code="engine-error"), errors.EngineFault),
        (errors.CheckpointError("odd", code="something-new"), errors.CheckpointError),
        (errors.UsageError("bad"), errors.UsageError),
        (errors.GtpServeError("plain"), errors.GtpServeError),
    ],
)
def test_a_fatal_error_arrives_with_class_code_and_exit_code(
    error: errors.GtpServeError, cls: type[errors.GtpServeError]
) -> None:
    again = fault_of(fatal(error))

    assert type(again) is cls
    assert (again.code, again.exit_code, str(again)) == (error.code, error.exit_code, str(error))


def test_a_fatal_error_that_names_an_odd_file_can_still_be_sent() -> None:
    error = errors.CheckpointNotFound("nothing at bad\udcff", [("looked for", "bad\udcff/config.json")])

    message = decode_from_worker(encode(fatal(error)))

    assert isinstance(message, Fatal)
    assert message.message == "nothing at bad\\udcff"
