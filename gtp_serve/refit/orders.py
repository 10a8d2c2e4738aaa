"""What is asked of an engine about its weights, and what every rank is then told to do: a closed set of structs.

``UpdateRequest`` is what a client asks for; ``StageOrder`` is what each rank stages; ``Vote`` is what a rank
answers.  All of them cross processes as msgpack or JSON; none can carry code.  No torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gtp_serve.layout.spans import Shape, Shard

InFlight = Literal["keep", "recompute", "wait", "abort"]
"""What becomes of running sequences when weights change: they keep the KV of the old weights, their KV is
computed again, the change waits until they have ended (nothing new starts), or they are ended."""

Memory = Literal["staged", "inplace"]
"""A second set of weights that is filled while the first serves, or the live set itself while nothing runs."""

PauseMode = Literal["keep", "recompute", "wait", "abort"]


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Sealed memory of another process on this host: ``/proc/{pid}/fd/{fd}``, a memfd of ``size`` bytes."""

    pid: int
    fd: int
    size: int


class StoredShard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's bytes in a segment: row-major, native byte order, without gaps."""

    shard: Shard
    segment: int
    """Index into the order's segments."""
    offset: int
    digest: str
    """xxh3-128 of the bytes, as 32 hexadecimal digits."""


class DiskOrder(msgspec.Struct, frozen=True, kw_only=True, tag="disk"):
    """A checkpoint as ``open_checkpoint`` reads it."""

    path: str
    iteration: int | None = None
    max_bytes_per_second: int | None = None
    """Bound of the reading, so that a disk shared with others stays usable; None: as fast as it goes."""


class GroupOrder(msgspec.Struct, frozen=True, kw_only=True, tag="distributed"):
    """Trainer ranks and engine ranks in one torch.distributed group: trainers first, then engine ranks in order.

    ``host`` and ``port`` are of the store that engine rank 0 opens; they are filled in when it is open.
    """

    trainers: int
    backend: Literal["gloo", "nccl"] = "gloo"
    bucket_bytes: int = 32 << 20
    host: str = ""
    port: int = 0


class MemoryOrder(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """Shards in sealed memory of trainer processes on this host."""

    segments: tuple[Segment, ...]
    shards: tuple[StoredShard, ...]
    elsewhere: dict[int, tuple[Segment, ...]] = {}
    """Copies of the segments for ranks on other hosts, by rank."""


class StreamOrder(msgspec.Struct, frozen=True, kw_only=True, tag="safetensors"):
    """One safetensors file, Hugging Face's names, in sealed memory on this host."""

    segment: Segment
    digest: str = ""
    """xxh3-128 of the whole file if its sender gave one."""


class FedOrder(msgspec.Struct, frozen=True, kw_only=True, tag="fed"):
    """Whole logical tensors that arrive piece by piece (``Piece``), each broadcast in a group joined before."""

    group: str
    discard: bool = False
    """They are received for their sender's sake only, who is broadcasting them: nothing is written, nothing commits."""


Order = DiskOrder | GroupOrder | MemoryOrder | StreamOrder | FedOrder


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that come next in a fed update, in the order of their broadcasts from the group's rank 0."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    packed: Literal["", "flattened_bucket", "vllm_packed"] = ""
    """One broadcast for each tensor, all of them as the bytes of one, or as buckets of bytes."""
    bucket_bytes: int = 1 << 30
    """``vllm_packed``: a bucket is sent as soon as it holds more than this."""
    group: str = ""
    """Which of the joined groups sends it; empty: the order's.  A trainer's pipeline stages have one each."""


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Join a group that somebody else's trainer holds open, as the field's clients do it."""

    name: str
    host: str
    port: int
    rank_offset: int
    """This engine's rank r becomes ``rank_offset + r``."""
    world_size: int
    backend: Literal["gloo", "nccl"]
    kind: Literal["torch", "stateless"] = "torch"
    """``init_process_group`` with a name (SGLang), or vLLM's StatelessProcessGroup."""
    unique_id: str = ""
    """NCCL's 128 bytes in base64, where the trainer hands them over itself; host and port are not used then."""
    seconds: float = 100.0
    """Until all members must be there."""


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An update as a client asks for it."""

    order: Order
    version: str
    """Label of the new weights: 1 to 128 printable characters without spaces."""
    base: str | None = None
    """The version that must be serving now; None: whichever."""
    in_flight: InFlight = "keep"
    commit: Literal["auto", "manual"] = "auto"
    """As soon as all ranks have verified it, or when told to."""
    memory: Memory | None = None
    """None: as the server was started."""
    deadline_seconds: float | None = None
    """From now to verified, and again from the wish to commit to committed; None: the server's."""
    dry_run: bool = False
    """Stage and verify, then drop it: what would have happened."""
    any_order: bool = False
    """The label may be lower than the live one, used before, or the live one itself: whoever asks keeps no order."""


class StageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank is to stage."""

    update: str
    """The update's id."""
    version: str
    order: Order
    memory: Memory
    deadline_seconds: float


class Vote(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank's word on an update: all its bytes are there and good, or the reason why not."""

    update: str
    rank: int
    error: tuple[str, str, tuple[tuple[str, str], ...]] | None = None
    """Code, message and details; None: good."""
    digest: str = ""
    """Of this rank's staged parameters (see ``refit.digest``)."""
    source_bytes: int = 0
    """Read or received by this rank."""
    target_bytes: int = 0
    """Of this rank's parameters."""
    seconds: dict[str, float] = {}
    """By phase: ``open``, ``plan``, ``transfer``, ``verify``."""
    touched: bool = True
    """Bytes of the set that was to be filled may have been overwritten; False: the set is as it was."""


class Fed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """So many pieces of a fed update are in this rank's staged set, counted from its first."""

    update: str
    rank: int
    pieces: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far a rank is with an update."""

    update: str
    rank: int
    phase: str
    done: int = 0
    total: int = 0


Report = Vote | Fed | Progress
"""What a rank says of an update on its own, whenever there is something to say."""


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a logical tensor with its values, row-major."""

    start: Shape
    shape: Shape
    values: tuple[float, ...]


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An update as it is told to whoever asks; the last 200 are kept."""

    id: str
    version: str
    base: str
    """The version that was serving when it began."""
    state: Literal["staging", "verified", "committed", "aborted", "torn"]
    kind: str
    """``disk``, ``distributed``, ``memory``, ``safetensors``, ``fed``, ``rollback`` or ``label``."""
    in_flight: InFlight = "keep"
    memory: Memory = "staged"
    dry_run: bool = False
    began: float = 0.0
    """Seconds since 1970."""
    seconds: dict[str, float] = {}
    """By phase, the slowest rank's: open, plan, transfer, verify, then wait (for running requests) and total."""
    stall_seconds: float = 0.0
    """During which no step could run."""
    source_bytes: int = 0
    """Of all ranks together."""
    target_bytes: int = 0
    digest: str = ""
    code: str = ""
    """Why it was aborted: short stable name."""
    message: str = ""
    details: tuple[tuple[str, str], ...] = ()
    votes: int = 0
    """Ranks that have voted for it."""
    host: str = ""
    port: int = 0
    """Where a ``distributed`` update's store listens, while it is under way."""


class WeightsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What serves, what is on its way, what has been."""

    version: str
    digest: str = ""
    """Of all ranks' parameters; empty until it was computed for the first time."""
    torn: str = ""
    """Why the weights are not to be served; empty: they are whole."""
    paused: bool = False
    rollback_version: str | None = None
    """What a rollback would restore."""
    memory: Memory = "staged"
    update: UpdateRecord | None = None
    """The one under way."""
    history: tuple[UpdateRecord, ...] = ()
    """Ended ones, newest first."""
    sleeping: tuple[str, ...] = ()
    """What has been released: ``weights``, ``kv_cache``."""


# -- what the HTTP process asks of the engine; each is answered by a JSON-able body or an error -----------------------


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start an update; answered with its UpdateRecord (and, for a group, where its store is)."""

    request: UpdateRequest
    id: str
    """Chosen by the HTTP process; unique."""


class Feed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Next tensors of a fed update; answered when all ranks have them."""

    id: str
    piece: Piece


class EndFeed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All tensors of a fed update have been sent: verify, and commit if it is to be committed by itself."""

    id: str
    version: str | None = None
    """Label of the new weights, where it is known only now; None: as it was begun."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Commit a verified update; answered at once with its UpdateRecord, which says when it is done."""

    id: str


class AbortUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop an update that is not committed."""

    id: str
    reason: str = "aborted by the client"


class RollBack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Back to the version before, bit for bit."""

    in_flight: InFlight = "keep"


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run no step from now on; answered when none runs (``wait``: when all that were running have ended)."""

    mode: PauseMode = "keep"


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run steps again."""


class Relabel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The same weights under another label."""

    version: str


class Checksum(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Digest of every live parameter on every rank, computed now between two steps."""


class Layout(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Logical tensors with shapes, and every rank's parameters as shards."""


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have all ranks join somebody's group; answered when they have."""

    group: JoinGroup


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have all ranks leave a group."""

    name: str


class ReadTensor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A logical tensor as it lies in the live parameters, its first ``limit`` rows (of dimension 0)."""

    name: str
    limit: int


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give memory back to the machine while nothing runs: ``weights``, ``kv_cache``."""

    tags: tuple[str, ...]


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take it again; released weights are not served until an update has filled them."""

    tags: tuple[str, ...]


class Export(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have each rank write parameters into sealed memory while steps run; answered with ``Exported``, or refused with
    ``weights-changed`` when other weights came to serve meanwhile.  The memory is kept until the next Export.
    """

    owned: tuple[tuple[Shard, ...], ...]
    """What each rank gives: its shards with only those spans that are wanted of it; none: let the memory go."""
    update: str = ""
    """A verified update whose weights are wanted; empty: those that serve."""


class RankExport(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's weights lie; no segment when it gives none."""

    segment: Segment | None = None
    shards: tuple[StoredShard, ...] = ()


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What an Export is answered with."""

    version: str
    ranks: tuple[RankExport, ...]


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget the prefix cache; running requests keep their KV."""


Control = (
    Begin
    | Feed
    | EndFeed
    | Commit
    | AbortUpdate
    | RollBack
    | Pause
    | Resume
    | Relabel
    | Checksum
    | Layout
    | Join
    | Leave
    | ReadTensor
    | Release
    | Restore
    | FlushCache
    | Export
)
