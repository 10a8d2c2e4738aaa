"""What crosses the border between the HTTP process and the engine process: a closed set of msgpack messages.

One message is one zmq frame: a msgspec struct with its type's name as the tag.  ``ToWorker`` goes down,
``FromWorker`` comes up; nothing else is ever decoded, and nothing here can carry code.  No torch.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from gtp_serve.errors import CheckpointError, EngineFault, GtpServeError, RequestRejected, UpdateFailed
from gtp_serve.refit.orders import Control, WeightsStatus
from gtp_serve.request import Request, TokenEvent

DetailPairs = tuple[tuple[str, str], ...]
E = TypeVar("E", bound=GtpServeError)
M = TypeVar("M")


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of one engine; counters (``*_total``) only grow while the process lives."""

    running: int = 0
    """Sequences that hold KV blocks."""
    waiting: int = 0
    """Sequences in the queue, preempted ones included."""
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    prompt_tokens_total: int = 0
    """Prompt tokens computed, each counted once however often it is recomputed."""
    generation_tokens_total: int = 0
    cached_tokens_total: int = 0
    """Prompt tokens that came from the prefix cache when their request was first admitted."""
    prefix_queries_total: int = 0
    """Tokens of admissions, those after a preemption included."""
    prefix_hits_total: int = 0
    """Of these, found in the prefix cache."""
    preemptions_total: int = 0
    non_finite_total: int = 0
    """Requests that failed because their logits were not finite."""
    requests_total: dict[str, int] = {}
    """Ended requests by ``stop``, ``length``, ``abort`` and ``rejected``."""
    steps_total: int = 0
    failed_steps_total: int = 0
    step_seconds_total: float = 0.0
    step_tokens_total: int = 0
    """Tokens fed to the model, recomputed ones included."""
    last_step_age_seconds: float = 0.0
    """Seconds without progress while there is work, or without a sign of life, by the client's clock; else 0."""
    weight_version: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Requests to start; each is answered by Events or by Rejected."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Requests to end; one that is unknown (already ended) is no error."""

    rids: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Take no new requests, finish what is there within ``drain_seconds``, abort the rest, end the process.

    A second Stop can only bring the deadline forward.
    """

    drain_seconds: float


class ControlCall(msgspec.Struct, frozen=True, tag=True):
    """Something that is asked about the weights; answered by ControlDone or ControlRefused."""

    call: int
    command: Control


ToWorker = Submit | Abort | Stop | ControlCall


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The worker's first message: it is connected, so the socket's folder may go."""

    pid: int


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Progress of one start-up phase; ``done`` of ``total`` in the phase's own unit, 0 of 0 without one."""

    name: str
    state: Literal["running", "ok", "failed"]
    detail: str = ""
    seconds: float = 0.0
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves from now on."""

    facts: dict[str, str | int | float]


class Events(msgspec.Struct, frozen=True, tag=True):
    """Everything that one step produced."""

    events: tuple[TokenEvent, ...]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A request that was refused before it took part in any step."""

    rid: str
    code: str
    message: str
    param: str | None = None
    http_status: int = 400
    details: DetailPairs = ()


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Fresh numbers, at most a few a second."""

    stats: EngineStats


class ControlDone(msgspec.Struct, frozen=True, tag=True):
    """A ControlCall was carried out; ``body`` is JSON."""

    call: int
    body: bytes


class ControlRefused(msgspec.Struct, frozen=True, tag=True):
    """A ControlCall was not carried out; ``kind`` is the error's class."""

    call: int
    kind: str
    code: str
    message: str
    details: DetailPairs = ()
    http_status: int = 500


class Weights(msgspec.Struct, frozen=True, tag=True):
    """What serves and what is on its way, after each change."""

    status: WeightsStatus


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; the process ends right after."""

    code: str
    exit_code: int
    message: str
    details: DetailPairs = ()


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that was asked to stop."""


FromWorker = (
    Hello | Phase | Ready | Events | Rejected | Stats | ControlDone | ControlRefused | Weights | Fatal | Stopped
)

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """One frame.

    :raises OverflowError: when an integer needs more than 64 bits.
    """
    return _encoder.encode(message)


def _decoded(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M:
    try:
        return decoder.decode(frame)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


def decode_to_worker(frame: bytes) -> ToWorker:
    """The message in a frame that the client sent.

    :raises msgspec.DecodeError: when it is none (ValidationError when a field has the wrong type).
    """
    return _decoded(_to_worker, frame)


def decode_from_worker(frame: bytes) -> FromWorker:
    """The message in a frame that the worker sent.

    :raises msgspec.DecodeError: when it is none.
    """
    return _decoded(_from_worker, frame)


def rejected(rid: str, error: RequestRejected) -> Rejected:
    """The message for a refused request."""
    return Rejected(
        rid=rid,
        code=error.code,
        message=error.message,
        param=error.param,
        http_status=error.http_status,
        details=error.details,
    )


def rejection_of(message: Rejected) -> RequestRejected:
    """The error that ``rejected`` was given, rebuilt with its class, code and status."""
    cls = _class_of(message.code, RequestRejected) or RequestRejected
    error = cls(message.message, message.details, code=message.code, param=message.param)
    error.http_status = message.http_status
    return error


def refused(call: int, error: GtpServeError) -> ControlRefused:
    """The message for a control call that failed."""
    return ControlRefused(
        call=call,
        kind=type(error).__name__,
        code=error.code,
        message=_printable(error.message),
        details=tuple((label, _printable(text)) for label, text in error.details),
        http_status=http_status_of(error),
    )


def refusal_of(message: ControlRefused) -> GtpServeError:
    """The error that ``refused`` was given, rebuilt with its class, code and status."""
    cls = _class_named(message.kind, GtpServeError) or GtpServeError
    error = cls(message.message, message.details, code=message.code)
    if isinstance(error, RequestRejected):
        error.http_status = message.http_status
    return error


def http_status_of(error: GtpServeError) -> int:
    """The status with which an HTTP server tells of an error."""
    if isinstance(error, RequestRejected):
        return error.http_status
    if isinstance(error, EngineFault):
        return 503
    return 422 if isinstance(error, UpdateFailed | CheckpointError) else 500


def fatal(error: GtpServeError) -> Fatal:
    """The message for an error that ends the engine."""
    return Fatal(
        code=error.code,
        exit_code=error.exit_code,
        message=_printable(error.message),
        details=tuple((label, _printable(text)) for label, text in error.details),
    )


def fault_of(message: Fatal) -> GtpServeError:
    """The error that ``fatal`` was given: its class by code, else by exit code."""
    cls = _class_of(message.code, GtpServeError)
    if cls is None or cls.exit_code != message.exit_code:
        cls = _class_by_exit(message.exit_code)
    return cls(message.message, message.details, code=message.code)


def _printable(text: str) -> str:
    # Names of files need not be text; a lone surrogate must not stop the one message that tells what
    # happened.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _class_of(code: str, root: type[E]) -> type[E] | None:
    if root.default_code == code:
        return root
    found = (_class_of(code, child) for child in root.__subclasses__())
    return next((cls for cls in found if cls is not None), None)


def _class_named(name: str, root: type[GtpServeError]) -> type[GtpServeError] | None:
    if root.__name__ == name:
        return root
    found = (_class_named(name, child) for child in root.__subclasses__())
    return next((cls for cls in found if cls is not None), None)


def _class_by_exit(exit_code: int) -> type[GtpServeError]:
    children = (cls for cls in GtpServeError.__subclasses__() if cls.exit_code == exit_code)
    return next(children, GtpServeError)
