"""Checks each value of ``serve``, wherever it was set, and makes the options of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from gtp_serve.config import AttentionBackend, Quant
from gtp_serve.errors import UsageError
from gtp_serve.server.admin_key import check_key, read_key
from gtp_serve.server.options import DEADLINE_SECONDS, Flavour, SavedGrid, ServeOptions
from gtp_serve.server.settings import Value
from gtp_serve.sizes import parse_size

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_ATTENTION = {
    "fa2": "flash-attn", "flash-attn": "flash-attn", "flashinfer": "flashinfer",
    "torch-native": "torch", "torch-sdpa": "torch", "triton": "triton", "triton-attn": "triton",
}  # fmt: skip
"""As other servers call them too."""
_SOURCES = ("command line", "environment", "file")
_MAX_ORIGINS = 64


class Given:
    """The values that were set; what was not has the server's own."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def source(self, key: str) -> str:
        """Which source set it."""
        return self._values[key].source

    def place(self, key: str) -> str:
        """As an error names it."""
        return self._values[key].place

    def value(self, key: str) -> Any:
        """As it was set: a text, a bool or a list of texts."""
        return self._values[key].value

    def text(self, key: str) -> str | None:
        """As it was set."""
        found = self._values.get(key)
        return None if found is None else found.value

    def texts(self, key: str) -> tuple[str, ...]:
        """Of a list."""
        found = self._values.get(key)
        return () if found is None else tuple(found.value)

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self._values.get(key)
        return default if found is None else bool(found.value)

    def path(self, key: str) -> Path | None:
        """A file or folder."""
        text = self.text(key)
        return None if text is None else Path(text)

    def choice(self, key: str, names: Mapping[str, str], choices: tuple[str, ...], default: str) -> Any:
        """One of some words, or another name of one."""
        text = self.text(key)
        value = default if text is None else names.get(text.lower().replace("_", "-"), text)
        if value not in choices:
            raise self.wrong(key, ", ".join(choices))
        return value

    def integer(self, key: str, low: int, high: int) -> int | None:
        """A whole number in a range."""
        text = self.text(key)
        if text is None:
            return None
        if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return int(text)

    def real(self, key: str, low: float, high: float, possible: str) -> float | None:
        """A number in a range."""
        text = self.text(key)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise self.wrong(key, possible)
        return value

    def seconds(self, key: str, low: float, default: float) -> float:
        """A time of at most a day."""
        found = self.real(key, low, 86400.0, f"seconds from {low:g} to 86400")
        return default if found is None else found

    def size(self, key: str) -> int | None:
        """Bytes."""
        text = self.text(key)
        return None if text is None else parse_size(text)

    def secret(self, key: str) -> str | None:
        """A key given as itself or as a file; the stronger source wins.

        :raises UsageError: when one source gives both, or it is no key.
        """
        other = f"{key}_file"
        both = [name for name in (key, other) if name in self]
        if not both:
            return None
        chosen = min(both, key=lambda name: _SOURCES.index(self.source(name)))
        if len(both) == 2 and self.source(key) == self.source(other):
            raise UsageError(f"{self.place(key)} and {self.place(other)} exclude each other", [("try", "one of them")])
        place, text = self.place(chosen), self.text(chosen) or ""
        return check_key(place, read_key(place, text) if chosen == other else text)

    def wrong(self, key: str, possible: str) -> UsageError:
        """The refusal of a value."""
        return UsageError(f"{self.place(key)} '{self.text(key)}' is not possible", [("possible", possible)])


def to_options(given: Given) -> ServeOptions:
    """The options of ``serve``.

    :raises UsageError: naming what was set, where, and what is possible.
    """
    _check_pairs(given)
    ckpt = given.path("ckpt")
    if ckpt is None:
        raise UsageError("which checkpoint?", [("need", "--ckpt PATH"), ("try", "gtp-serve --ckpt /path/to/run")])
    port = given.integer("port", 0, 65535)
    return ServeOptions(
        ckpt=ckpt,
        iteration=given.integer("iteration", 0, (1 << 63) - 1),
        manifest=given.path("manifest"),
        tokenizer=given.path("tokenizer"),
        no_tokenizer=given.switch("no_tokenizer", False),
        chat_template=given.path("chat_template"),
        name=given.text("name"),
        dtype=given.choice("dtype", _DTYPES, ("auto", "float32", "bfloat16", "float16"), "auto"),
        context=given.integer("context", 1, 1 << 30),
        tp=given.integer("tp", 1, 1024) or 1,
        device=given.choice("device", {}, ("auto", "cpu", "cuda"), "auto"),
        mem_fraction=given.real("mem_fraction", 0.01, 1.0, "a share from 0.01 to 1, for example 0.9"),
        kv_memory=given.size("kv_memory"),
        max_running=given.integer("max_running", 1, 4096),
        max_waiting=given.integer("max_waiting", 1, 1 << 20),
        prefix_cache=given.switch("prefix_cache", True),
        graphs=given.switch("graphs", True),
        attention=given.choice("attention_backend", _ATTENTION, get_args(AttentionBackend), "auto"),
        quant=given.choice("quant", {}, get_args(Quant), "none"),
        threads=given.integer("threads", 1, 1024),
        deterministic=given.switch("deterministic", False),
        host=given.text("host") or "127.0.0.1",
        port=30000 if port is None else port,
        drain_timeout=given.seconds("drain_timeout", 0, 30.0),
        page=given.switch("page", True),
        log=given.choice("log", {}, ("text", "json"), "text"),
        verbosity=int(given.switch("verbose", False)) - int(given.switch("quiet", False)),
        metrics_aliases=_flavours(given),
        otlp=given.text("otlp"),
        api_key=given.secret("api_key"),
        admin_key=given.secret("admin_key"),
        tls_cert=given.path("tls_cert"),
        tls_key=given.path("tls_key"),
        cors=_origins(given),
        refit_memory=given.choice("refit_memory", {}, ("auto", "staged", "inplace"), "auto"),
        refit_timeout=given.seconds("refit_timeout", 1, DEADLINE_SECONDS),
        refit_host=given.text("refit_host"),
        saved=SavedGrid(
            config=given.text("saved_config"),
            **{name: given.integer(f"saved_{name}", 1, 1 << 16) for name in ("tp", "gtp", "etp", "egtp")},
        ),
    )


def _check_pairs(given: Given) -> None:
    if given.switch("no_tokenizer", False) and "tokenizer" in given:
        raise UsageError("--tokenizer and --no-tokenizer exclude each other", [("try", "one of them")])
    if given.switch("verbose", False) and given.switch("quiet", False):
        raise UsageError("-v and -q exclude each other", [("try", "one of them")])
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if one in given and other not in given:
            raise UsageError(f"{given.place(one)} needs {other} beside it")


def _flavours(given: Given) -> tuple[Flavour, ...]:
    """``vllm``, ``sglang`` or both with a comma between them."""
    words = (given.text("metrics_aliases") or "").split(",") if "metrics_aliases" in given else []
    if not set(words) <= set(get_args(Flavour)):
        raise given.wrong("metrics_aliases", ", ".join(get_args(Flavour)))
    return tuple(dict.fromkeys(words))  # type: ignore[arg-type]


def _origins(given: Given) -> tuple[str, ...]:
    """Origins as browsers send them: scheme, host and port, nothing after."""
    origins = given.texts("cors")
    for origin in origins:
        scheme, _, host = origin.partition("://")
        plain = origin.isascii() and origin.isprintable() and origin == origin.lower()
        if scheme not in ("http", "https") or not host or not plain or any(char in host for char in "/?#@* "):
            raise UsageError(
                f"{given.place('cors')} has '{origin}'",
                [("possible", "origins such as https://lab.example or http://localhost:8080, in lower case")],
            )
    if len(origins) > _MAX_ORIGINS:
        raise UsageError(f"{given.place('cors')} has {len(origins)} origins", [("possible", f"up to {_MAX_ORIGINS}")])
    return origins
