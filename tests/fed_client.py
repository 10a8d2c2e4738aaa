"""An engine client that takes fed updates: it knows which tensors have come and has no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from fakes_server import FakeClient, engine_config

from gtp_serve.errors import UpdateFailed, UpdateRefused
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.refit.orders import AbortUpdate, Begin, Control, EndFeed, Feed, Piece
from gtp_serve.server.state import Serving


class FedClient(FakeClient):
    """Commits an update whose end is told when each tensor has come."""

    def __init__(self, *, tied: bool = False, **fields: Any) -> None:
        super().__init__(**fields)
        self.config = replace(engine_config(), model=replace(engine_config().model, tied=tied))
        self.fed: list[str] = []
        self.bad: set[str] = set()
        """Names that are refused."""

    async def control(self, command: Control) -> Any:
        if isinstance(command, Begin):
            self.fed = []
            if self.weights.update is not None:
                raise UpdateRefused("an update is under way", code="update-under-way")
        if isinstance(command, Feed):
            return self._feed(command)
        if isinstance(command, EndFeed):
            return self._end(command)
        if isinstance(command, AbortUpdate) and self.weights.update is not None:
            self.commands.append(command)
            return msgspec.to_builtins(self.end_update("aborted", code="aborted", message=command.reason))
        return await super().control(command)

    def _feed(self, command: Feed) -> Any:
        self.commands.append(command)
        assert self.weights.update is not None
        assert self.weights.update.id == command.id
        wrong = [name for name in command.piece.names if name in self.bad]
        if wrong:
            self.end_update("aborted", code="tensors-refused", message=f"this model has no {wrong[0]}")
            raise UpdateFailed(f"this model has no {wrong[0]}", code="tensors-refused")
        self.fed += command.piece.names
        return msgspec.to_builtins(self.record(command.id))

    def _end(self, command: EndFeed) -> Any:
        self.commands.append(command)
        missing = set(logical_tensors(self.config.model)) - set(self.fed)
        record = self.record(command.id)
        if missing:
            self.end_update("aborted", code="tensors-missing", message=f"never came: {sorted(missing)[0]}")
        else:
            version = command.version if command.version is not None else record.version
            self.set_weights(update=msgspec.structs.replace(record, version=version))
            self.end_update("committed")
        return msgspec.to_builtins(record)

    def serving(self) -> Serving:
        return Serving(client=self, engine=self.config, tokenizer=None, name="fake")

    def asked(self, kind: type[Control]) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]


def pieces(client: FedClient, count: int = 3, group: str = "g") -> list[Piece]:
    tensors = logical_tensors(client.config.model)
    names = list(tensors)
    cut = [names[index::count] for index in range(count)]
    return [
        Piece(
            names=tuple(part), dtypes=("float32",) * len(part), shapes=tuple(tensors[one] for one in part), group=group
        )
        for part in cut
    ]


def one(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(names=(name,), dtypes=("float32",), shapes=(shape,), group="g")
