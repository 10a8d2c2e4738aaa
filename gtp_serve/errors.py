"""Every error that gtp-serve raises on purpose, as one tree.

    GtpServeError
     |- UsageError             exit 2   a flag, a config value, a call that cannot mean anything
     |- CheckpointError        exit 3   something on disk is not what it must be
     |   |- CheckpointNotFound            no checkpoint at this path
     |   |- CheckpointCorrupt             a file is short, damaged or lies about itself
     |   |- PickleRefused                 a pickle names something outside the allow-list
     |   |- LayoutMismatch                shapes, grids or saved arguments contradict one another
     |   |- UnsupportedModel              a model that this server does not know
     |   `- NoTokenizer                   text was asked for and no tokenizer is there
     |- DoesNotFit             exit 4   weights or KV cache are larger than the memory given
     |- EnvironmentFault       exit 5   the machine lacks something: a port, a package, a device
     |- EngineFault            exit 6   an engine process died, stalled or cannot go on
     |- UpdateFailed           exit 7   new weights were not taken; the old ones go on serving
     `- RequestRejected        HTTP     a client's request that is answered with 4xx or 503
         |- QueueFull          503
         |- NotReady           503
         |- ShuttingDown       503
         |- WeightsTorn        503
         |- UpdateRefused      409        an update that cannot be started or carried on; nothing has changed
         |   `- UnknownUpdate  404
         `- PromptTooLong      400

A message is one sentence that says what was seen; ``details`` are labelled lines that say what was needed
and what to do.  ``str(error)`` joins them, so that nothing is lost where only a string survives.

Names from files and from peers end up in messages, and messages in terminals, logs and replies: control
characters in a message come out escaped, and a text that is longer than any sentence is cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Details = Sequence[tuple[str, str]]

MAX_TEXT = 2000
"""Characters of a message."""
MAX_DETAIL = 32_768
"""Of a detail: the last lines of a process that died fit in."""

_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""In a sentence: line ends, escape sequences, what turns the direction of writing, half characters."""
_HALF = re.compile(r"[\ud800-\udfff]")
"""In a detail, which may have several lines: what no encoding takes."""


def _fit(text: str, most: int, unfit: re.Pattern[str]) -> str:
    text = unfit.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text[: most + 1])
    return text if len(text) <= most else text[: most - 3] + "..."


class GtpServeError(Exception):
    """Root of the tree.

    :param message: one sentence, no trailing full stop.
    :param details: labelled lines, for example ``("try", "--tp 2")``.
    :param code: short stable name that ``gtp-serve explain`` knows; defaults to the class's own.
    """

    default_code = "internal"
    exit_code = 1

    def __init__(self, message: str, details: Details = (), *, code: str | None = None) -> None:
        self.message = _fit(message, MAX_TEXT, _UNFIT)
        super().__init__(self.message)
        self.details = tuple([(label, _fit(text, MAX_DETAIL, _HALF)) for label, text in details])
        self.code = code or self.default_code

    def __str__(self) -> str:
        return "; ".join([self.message, *(f"{label}: {text}" for label, text in self.details)])


class UsageError(GtpServeError):
    """A flag, a configuration value or a call that cannot mean anything."""

    default_code = "usage"
    exit_code = 2


class CheckpointError(GtpServeError):
    """Something on disk is not what it must be."""

    default_code = "ckpt"
    exit_code = 3


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint at the path."""

    default_code = "ckpt-not-found"


class CheckpointCorrupt(CheckpointError):
    """A file is short, damaged or lies about itself."""

    default_code = "ckpt-corrupt"


class PickleRefused(CheckpointError):
    """A pickle names something outside the allow-list; nothing of it was run."""

    default_code = "ckpt-pickle"


class LayoutMismatch(CheckpointError):
    """Shapes, chunk grids or saved arguments contradict one another or the model."""

    default_code = "ckpt-layout"


class UnsupportedModel(CheckpointError):
    """A model that this server does not know."""

    default_code = "ckpt-unsupported"


class NoTokenizer(CheckpointError):
    """Text was asked for and no tokenizer is there."""

    default_code = "no-tokenizer"


class DoesNotFit(GtpServeError):
    """Weights or KV cache are larger than the memory that was given."""

    default_code = "too-big"
    exit_code = 4


class EnvironmentFault(GtpServeError):
    """The machine lacks something: a port, a package, a device."""

    default_code = "environment"
    exit_code = 5


class EngineFault(GtpServeError):
    """An engine process died, stalled or cannot go on."""

    default_code = "worker-died"
    exit_code = 6


class UpdateFailed(GtpServeError):
    """New weights were not taken: a peer was lost or late, or what arrived is not what was announced."""

    default_code = "update-failed"
    exit_code = 7


class RequestRejected(GtpServeError):
    """A client's request that is answered with an HTTP error and never reaches a model step.

    :param param: dotted path of the field at fault, for example ``sampling_params.top_p``.
    :param did_you_mean: the nearest field that exists, where a name was wrong.
    """

    default_code = "invalid-value"
    http_status = 400

    def __init__(
        self,
        message: str,
        details: Details = (),
        *,
        code: str | None = None,
        param: str | None = None,
        did_you_mean: str | None = None,
    ) -> None:
        super().__init__(message, details, code=code)
        self.param = param
        self.did_you_mean = did_you_mean


class PromptTooLong(RequestRejected):
    """Prompt plus new tokens do not fit the context or the KV cache."""

    default_code = "prompt-too-long"


class QueueFull(RequestRejected):
    """The server holds as many waiting requests as it may."""

    default_code = "queue-full"
    http_status = 503


class NotReady(RequestRejected):
    """The engine is still starting."""

    default_code = "not-ready"
    http_status = 503


class ShuttingDown(RequestRejected):
    """The server is ending and takes no new requests."""

    default_code = "shutting-down"
    http_status = 503


class WeightsTorn(RequestRejected):
    """The live weights are partly overwritten; nothing is served until a good update has landed."""

    default_code = "weights_torn"
    http_status = 503


class UpdateRefused(RequestRejected):
    """An update that cannot be started or carried on as things are; nothing has changed."""

    default_code = "update-refused"
    http_status = 409


class UnknownUpdate(UpdateRefused):
    """There is no update of this id."""

    default_code = "unknown-update"
    http_status = 404
