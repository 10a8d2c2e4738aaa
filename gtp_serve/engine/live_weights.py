"""What is asked about the weights that serve, between two steps: digest, layout, values, memory, groups.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, assert_never

import msgspec

from gtp_serve.engine.all_ranks import AllRanks, Question
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.rank_tasks import (
    Ask,
    ChecksumNow,
    ExportNow,
    JoinNow,
    LeaveNow,
    MemoryNow,
    ReadNow,
    ShardsNow,
    parts_of,
)
from gtp_serve.engine.standstill import Standstill
from gtp_serve.errors import RequestRejected, UpdateFailed, UpdateRefused
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Shape
from gtp_serve.refit.digest import combine
from gtp_serve.refit.orders import (
    Checksum,
    Export,
    Exported,
    FlushCache,
    Join,
    JoinGroup,
    Layout,
    Leave,
    RankExport,
    ReadTensor,
    Release,
    Restore,
    TensorPart,
)
from gtp_serve.refit.update import UpdateMachine

ASK_SECONDS = 120.0
"""For all ranks to answer, while no step runs."""
GROUP_SECONDS = 120.0
"""For all ranks to join or leave a group, while steps run."""
EXPORT_SECONDS = 600.0
"""For all ranks to write their weights into memory, while steps run."""
MAX_VALUES = 1 << 20
"""Of one ReadTensor."""
TAGS = ("weights", "kv_cache")

Command = Checksum | Layout | ReadTensor | Release | Restore | FlushCache


class LiveWeights:
    """Answers questions about one engine's weights."""

    def __init__(
        self,
        engine: Engine,
        ranks: AllRanks,
        machine: UpdateMachine,
        still: Standstill,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._machine = machine
        self._still = still
        self._clock = clock
        self._shapes = logical_tensors(engine.config.model)

    def carry_out(self, command: Command) -> Any:
        """The answer, as JSON can hold it.

        :raises GtpServeError: why there is none; EngineFault when the ranks cannot go on together.
        """
        self._engine.settle()
        match command:
            case Checksum():
                return self._checksum()
            case Layout():
                return self._layout()
            case ReadTensor(name=name, limit=limit):
                return self._read(name, limit)
            case Release(tags=tags):
                return self._release(_checked(tags))
            case Restore(tags=tags):
                return self._restore(_checked(tags))
            case FlushCache():
                self._engine.forget_prefixes()
                return self._machine.status()
            case _:
                assert_never(command)

    def change_group(self, command: Join | Leave) -> Callable[[], Any | None]:
        """Have all ranks join or leave a group; returns what tells whether they have."""
        self._engine.settle()
        group = command.group if isinstance(command, Join) else None
        what = JoinNow(group=command.group) if isinstance(command, Join) else LeaveNow(name=command.name)
        question = self._ranks.ask(what)
        deadline = self._clock() + GROUP_SECONDS
        return lambda: self._joined(question, deadline, group)

    def _joined(self, question: Question, deadline: float, group: JoinGroup | None) -> dict[str, int] | None:
        if question.complete:
            return {"ranks": len(question.bodies())}
        if self._clock() < deadline:
            return None
        self._ranks.forget(question)
        details = [("late", question.missing)]
        if group is not None and group.host:
            others = (
                f"the trainer's rank 0 listens at {group.host}:{group.port} and all of its {group.world_size} members"
            )
            details.append(("check", f"that {others} come"))
        raise UpdateFailed(f"the group was not complete within {GROUP_SECONDS:g} s", details, code="group-late")

    def export(self, command: Export) -> Callable[[], Any | None]:
        """Have all ranks write weights into memory beside their steps; returns what tells where they lie, once they do.

        :raises UpdateRefused: when those weights are not there, or are being overwritten.
        """
        self._check_export(command.update)
        mark = self._export_mark(command.update)
        question = self._ranks.ask(ExportNow(update=command.update, owned=command.owned))
        deadline = self._clock() + EXPORT_SECONDS
        return lambda: self._exported(command, question, mark, deadline)

    def _check_export(self, update: str) -> None:
        machine = self._machine
        current = machine.current
        if update and (current is None or current.id != update or current.state != "verified"):
            raise UpdateRefused(f"update {update[:64]} is not verified here", code="not-verified")
        if not update:
            machine.live.check_whole()
            if current is not None and current.memory == "inplace":
                raise UpdateRefused(
                    f"update {current.id} is being written into the live weights", code="update-under-way"
                )

    def _export_mark(self, update: str) -> object:
        """Equal to an earlier one if the memory that is read has kept its meaning."""
        current = self._machine.current
        if update:
            return current is not None and current.id == update and self._machine.phase == "verified"
        overwritten = current is not None and current.memory == "inplace"
        return (self._machine.live.swaps, self._machine.live.torn, overwritten)

    def _exported(self, command: Export, question: Question, mark: object, deadline: float) -> Exported | None:
        if not question.complete:
            if self._clock() < deadline:
                return None
            self._ranks.forget(question)
            raise UpdateFailed(
                f"the weights were not written out within {EXPORT_SECONDS:g} s",
                [("late", question.missing)],
                code="export-late",
            )
        if self._export_mark(command.update) != mark:
            raise UpdateRefused("other weights came to serve while these were written out", code="weights-changed")
        parts = tuple(msgspec.json.decode(body, type=RankExport) for body in question.bodies())
        current = self._machine.current
        version = current.version if command.update and current is not None else self._machine.live.version
        return Exported(version=version, ranks=parts)

    def _ask(self, what: Ask) -> list[bytes]:
        question = self._ranks.ask(what)
        self._ranks.wait(question, ASK_SECONDS)
        return question.bodies()

    def _checksum(self) -> dict[str, object]:
        current = self._machine.current
        if current is not None and current.memory == "inplace":
            raise UpdateRefused(f"update {current.id} is being written into the live weights", code="update-under-way")
        digests = [msgspec.json.decode(body, type=str) for body in self._ask(ChecksumNow())]
        digest, known = combine(digests), self._machine.live.digest
        if not known and not self._machine.live.torn:
            self._machine.live.digest = digest
        return {
            "version": self._machine.live.version,
            "digest": digest,
            "ranks": digests,
            "matches": digest == known if known else None,
        }

    def _layout(self) -> dict[str, object]:
        return {
            "version": self._machine.live.version,
            "dtype": self._engine.config.dtype,
            "tensors": self._shapes,
            "ranks": [msgspec.json.decode(body) for body in self._ask(ShardsNow())],
        }

    def _read(self, name: str, limit: int) -> dict[str, object]:
        shape = self._shapes.get(name)
        if shape is None:
            raise RequestRejected(f"the model has no tensor {name[:200]!r}", code="unknown-tensor", param="name")
        cut = (max(0, min(limit, shape[0])), *shape[1:])
        if prod(cut) > MAX_VALUES:
            raise RequestRejected(
                f"{cut[0]} rows of {name} are {prod(cut)} values",
                [("needed", f"at most {MAX_VALUES}")],
                code="too-many-values",
                param="limit",
            )
        parts = [part for body in self._ask(ReadNow(name=name, limit=limit)) for part in parts_of(body)]
        return {"name": name, "shape": shape, "values": _nested(assemble(parts, cut), cut)}

    def _release(self, tags: tuple[str, ...]) -> Any:
        if not self._still.is_idle:
            raise UpdateRefused(
                "memory can be released while nothing runs only", [("try", "to pause first")], code="engine-busy"
            )
        self._machine.sleep(tags)
        if "kv_cache" in tags:
            self._engine.preempt_all()
            self._engine.forget_prefixes()
        self._ask(MemoryNow(change="release", tags=tags))
        return self._machine.status()

    def _restore(self, tags: tuple[str, ...]) -> Any:
        self._ask(MemoryNow(change="restore", tags=tags))
        self._machine.live.wake(tags)
        return self._machine.status()


def assemble(parts: Sequence[TensorPart], shape: Shape) -> list[float]:
    """A tensor's values from parts that may overlap and come in any order.

    :raises UpdateFailed: when they do not cover it.
    """
    values: list[float | None] = [None] * prod(shape)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for part in parts:
        run = part.shape[-1]
        for row in range(len(part.values) // max(1, run)):
            at, rest = part.start[-1], row
            for axis in range(len(shape) - 2, -1, -1):
                rest, index = divmod(rest, part.shape[axis])
                at += (part.start[axis] + index) * strides[axis]
            values[at : at + run] = part.values[row * run : (row + 1) * run]
    whole = [value for value in values if value is not None]
    if len(whole) != len(values):
        raise UpdateFailed(f"{len(values) - len(whole)} values are on no rank", code="internal")
    return whole


def _nested(values: Sequence[float], shape: Shape) -> Any:
    if len(shape) <= 1:
        return list(values)
    size = prod(shape[1:])
    return [_nested(values[at * size : (at + 1) * size], shape[1:]) for at in range(shape[0])]


def _checked(tags: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown or not tags:
        shown = ", ".join(tags) or "nothing"
        raise RequestRejected(
            f"{shown} cannot be released or restored", [("needed", " or ".join(TAGS))], code="bad-tag", param="tags"
        )
    return tags
