"""Opens a Megatron ``torch_dist`` checkpoint of any grid and layout: description, facts and a source of its
weights.

Read: ``.metadata``, the common state, and on demand the raw bytes of weights.  Never opened: random states,
``_extra_state``, optimizer state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointCorrupt, PickleRefused
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.megatron import OUTPUT_LAYER, StoredName
from gtp_serve.layout.megatron_grid import DeclaredGrid, SavedLayout, StoredTensor, detect_layout
from gtp_serve.layout.megatron_read import Padding, Piece, map_tensors, parse_keys
from gtp_serve.layout.spans import Shard
from gtp_serve.loaders.common_state import CommonState, SavedSizes, common_state, saved_sizes
from gtp_serve.loaders.facts import Facts, SavedGrid, SavedOverrides, TensorPadding
from gtp_serve.loaders.files import FileViews, Part, file_size
from gtp_serve.loaders.items import Items
from gtp_serve.loaders.megatron_folder import Chosen, choose
from gtp_serve.loaders.megatron_model import describe, settle_vocabulary
from gtp_serve.loaders.pickles import MAX_PICKLE_BYTES
from gtp_serve.loaders.torch_dist import Index, IndexedTensor, Place, read_index
from gtp_serve.loaders.torch_zip import ITEM_BYTES, Archive
from gtp_serve.refit.collector import collector_paused
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.source import Rows

COMMON_FILE = "common.pt"
_COMMON_KEY = "common_state/"
#: An item of at most so many bytes is looked at while it is read: what that reads beside the tensor costs little.
_SMALL_BYTES = 1 << 20
#: Prefixes under which some savers nest the model; they are dropped when every weight has them.
_WRAPPERS = ("model.", "module.", "state_dict.")
#: Tensors that are left out by rule: prefix or ending, and what to call it.
_IGNORED_PREFIXES = {
    "optimizer.": "optimizer state",
    "chained_": "optimizer state",
    "opt_param_scheduler": "scheduler state",
    "rng_state": "random state",
    "rerun_state_machine_state": "rerun state",
    "mtp.": "multi-token prediction layers",
}
_IGNORED_ENDINGS = {"._extra_state": "extra state", ".inv_freq": "rotary frequencies"}


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint before it becomes a ``Checkpoint``."""

    path: Path
    config: ModelConfig
    facts: Facts
    source: MegatronSource


class MegatronSource:
    """The weights of a torch_dist checkpoint, one shard for each layer (and expert) of each stored chunk."""

    def __init__(self, pieces: Sequence[Piece], tensors: Mapping[str, IndexedTensor], views: FileViews) -> None:
        self._pieces = [piece for piece in pieces if piece.shard.spans]
        self._shards = tuple(piece.shard for piece in self._pieces)
        self._tensors = tensors
        self._views = views
        self._items = Items(views)
        self._last: tuple[tuple[str, int], Place] | None = None

    def shards(self) -> Sequence[Shard]:
        """All shards that hold anything but padding."""
        return self._shards

    def read(self, index: int) -> memoryview:
        """The shard's bytes inside the mapped file.

        :raises CheckpointCorrupt: when the stored item is not the tensor that the metadata says it is.
        """
        place = self._place(index)
        return self._views.view(place.path, place.offset, place.length)

    def read_into(self, index: int, rows: Sequence[Rows]) -> None:
        """Read the shard's bytes to where they belong.

        :raises CheckpointCorrupt: when the stored item is not the tensor that the metadata says it is.
        """
        place = self._place(index)
        self._views.read_into(place.path, place.offset, place.length, rows, self._shards[index].key)

    @property
    def batches(self) -> bool:
        """Whether ``read_many`` can be used."""
        return self._views.batches

    def read_many(self, parts: Sequence[tuple[int, Sequence[Rows]]]) -> None:
        """Read bytes of several shards to where they belong.

        :raises CheckpointCorrupt: when a stored item is not the tensor that the metadata says it is.
        """
        ready = [self._part(index, rows) for index, rows in parts]
        done = self._views.read_many(ready)
        while done < len(ready):  # an item that is not as the others of its kind
            self._views.read_many([self._plain(*parts[done])])
            done += 1 + self._views.read_many(ready[done + 1 :])

    def _plain(self, index: int, rows: Sequence[Rows]) -> Part:
        """With the item looked at now."""
        place = self._place(index)
        return Part(place.path, place.offset, place.length, rows, self._shards[index].key)

    def _part(self, index: int, rows: Sequence[Rows]) -> Part:
        """With the item looked at while it is read, where it is small and others of its kind have been seen."""
        piece = self._pieces[index]
        tensor, shard = self._tensors[piece.key], piece.shard
        chunk = tensor.chunks[piece.chunk]
        path, offset, length = (place := chunk.place).path, place.offset, place.length
        known = self._items.usual(place, chunk.box.shape, tensor.dtype) if length <= _SMALL_BYTES else None
        if known is None:
            return self._plain(index, rows)
        member, checks = known
        first, size = member.start, member.size
        if size != prod(shard.shape) * ITEM_BYTES[shard.dtype]:
            return self._plain(index, rows)
        return Part(path, offset + first, size, rows, shard.key, checks, first, length)

    def close(self) -> None:
        """Let go of the files."""
        self._last = None
        self._views.close()

    def _place(self, index: int) -> Place:
        piece = self._pieces[index]
        size = prod(piece.shard.shape) * ITEM_BYTES[piece.shard.dtype]
        whole = self._chunk(piece)
        return Place(whole.path, whole.offset + piece.ordinal * size, size)

    def _chunk(self, piece: Piece) -> Place:
        """The bytes of the chunk that a piece is part of.  The last one is kept: parts of a chunk, and pieces of a
        large one, are read one after another."""
        where = (piece.key, piece.chunk)
        last = self._last
        if last is not None and last[0] == where:
            return last[1]
        tensor = self._tensors[piece.key]
        chunk = tensor.chunks[piece.chunk]
        label = f"{chunk.place.path}: the item of {piece.key} at byte {chunk.place.offset}"
        found = self._items.find(chunk.place, chunk.box.shape, tensor.dtype, label)
        self._last = (where, found)
        return found


def open_megatron(path: Path, *, iteration: int | None, overrides: SavedOverrides, given: ModelConfig | None) -> Opened:
    """Open a root or an ``iter_*`` folder.

    :param given: what ``overrides.config`` describes.
    :raises CheckpointError: naming the file, the tensor and both shapes where something does not fit.
    """
    chosen = choose(path, iteration)
    with collector_paused():
        return _open_chosen(chosen, overrides, given)


def _open_chosen(chosen: Chosen, overrides: SavedOverrides, given: ModelConfig | None) -> Opened:
    index = read_index(chosen.folder, chosen.root)
    views = FileViews(index.sizes)
    try:
        return _open(chosen, index, views, overrides, given)
    except BaseException:
        views.close()
        raise


def _open(
    chosen: Chosen, index: Index, views: FileViews, overrides: SavedOverrides, given: ModelConfig | None
) -> Opened:
    common = _read_common(chosen, index, views)
    tensors, ignored = _weights(index)
    names = parse_keys(tensors)
    sizes = saved_sizes(common.args, _asked(overrides))
    described = describe(common.args, given, names, tensors, str(chosen.folder))
    if described.config.tied and OUTPUT_LAYER in names:
        names = {key: name for key, name in names.items() if key != OUTPUT_LAYER}
        ignored["head of a tied model"] = 1
    stored = {key: _stored(tensors[key]) for key in names}
    declared = DeclaredGrid(tp=sizes.tp, gtp=sizes.gtp, etp=sizes.etp, egtp=sizes.egtp)
    saved = detect_layout(stored, names, described.config, declared)
    described = settle_vocabulary(described, tensors, saved)
    pieces, padding = map_tensors(stored, names, described.config, saved)
    source = MegatronSource(pieces, tensors, views)
    shapes = logical_tensors(described.config)
    build_plan(source.shards(), [], shapes)  # refuses unless every logical tensor is there exactly once
    _check_used(names, pieces)
    facts = _facts(chosen, index, common, saved, sizes, padding, source.shards(), ignored, described.warnings)
    return Opened(chosen.folder, described.config, facts, source)


def _asked(overrides: SavedOverrides) -> SavedSizes:
    return SavedSizes(
        tp=overrides.tp,
        pp=overrides.pp,
        ep=overrides.ep,
        etp=overrides.etp,
        gtp=overrides.gtp,
        egtp=overrides.egtp,
    )


def _read_common(chosen: Chosen, index: Index, views: FileViews) -> CommonState:
    keys = [key for key in index.blobs if key.startswith(_COMMON_KEY)]
    if len(keys) > 1:
        raise CheckpointCorrupt(f"{chosen.folder} has {len(keys)} common states: {', '.join(sorted(keys)[:3])}")
    if keys:
        place = index.blobs[keys[0]]
        return _unpack_common(views.view(place.path, place.offset, place.length), f"{place.path}: {keys[0]}")
    path = chosen.folder / COMMON_FILE
    if not path.exists():
        return CommonState()
    whole = FileViews({path: file_size(path, chosen.root)})
    try:
        return _unpack_common(whole.view(path, 0, file_size(path, chosen.root)), str(path))
    finally:
        whole.close()


def _unpack_common(data: memoryview, origin: str) -> CommonState:
    if bytes(data[:2]) != b"PK":
        raise PickleRefused(
            f"{origin} is not a zip archive as torch.save has written since 1.6; older forms are "
            "pickles in a row, which are not read"
        )
    archive = Archive(data, origin)
    if "data.pkl" in archive.members and archive.members["data.pkl"].size > MAX_PICKLE_BYTES:
        raise CheckpointCorrupt(f"{origin} holds a pickle of {archive.members['data.pkl'].size} bytes")
    return common_state(archive.value(), origin)


def _weights(index: Index) -> tuple[dict[str, IndexedTensor], Counter[str]]:
    """Weights by their Megatron key, and how many tensors each rule left out."""
    ignored: Counter[str] = Counter()
    weights: dict[str, IndexedTensor] = {}
    for key, tensor in index.tensors.items():
        rule = _ignored(key)
        if rule is None:
            weights[key] = tensor
        else:
            ignored[rule] += 1
    return _unwrapped(weights), ignored


def _ignored(key: str) -> str | None:
    bare = key
    while (wrapper := next((w for w in _WRAPPERS if bare.startswith(w)), None)) is not None:
        bare = bare.removeprefix(wrapper)
    for prefix, rule in _IGNORED_PREFIXES.items():
        if bare.startswith(prefix):
            return rule
    stem = bare.partition("/")[0]
    return next((rule for ending, rule in _IGNORED_ENDINGS.items() if stem.endswith(ending)), None)


def _unwrapped(weights: dict[str, IndexedTensor]) -> dict[str, IndexedTensor]:
    while weights and (wrapper := next((w for w in _WRAPPERS if all(k.startswith(w) for k in weights)), None)):
        weights = {key.removeprefix(wrapper): tensor for key, tensor in weights.items()}
    return weights


def _stored(tensor: IndexedTensor) -> StoredTensor:
    return StoredTensor(tensor.shape, tensor.dtype, tuple(chunk.box for chunk in tensor.chunks))


def _check_used(names: Mapping[str, StoredName], pieces: Sequence[Piece]) -> None:
    """Each weight key fills something; one without a chunk would otherwise pass unseen."""
    used = {piece.key for piece in pieces}
    unused = sorted(key for key in names if key not in used)
    if unused:
        raise CheckpointCorrupt(f"{len(unused)} weight key(s) have no chunk: {', '.join(unused[:5])}")


def _facts(
    chosen: Chosen,
    index: Index,
    common: CommonState,
    saved: SavedLayout,
    sizes: SavedSizes,
    padding: Sequence[Padding],
    shards: Sequence[Shard],
    ignored: Counter[str],
    warnings: tuple[str, ...],
) -> Facts:
    by_dtype: Counter[str] = Counter()
    for shard in shards:
        by_dtype[shard.dtype] += sum(span.local.volume for span in shard.spans) * ITEM_BYTES[shard.dtype]
    expert = saved.expert
    grid = SavedGrid(
        tp=saved.dense.tp,
        gtp=saved.dense.gtp,
        pp=sizes.pp or 1,
        ep=sizes.ep or 1,
        etp=expert.tp if expert is not None else sizes.etp or saved.dense.tp,
        egtp=expert.gtp if expert is not None else sizes.egtp or 1,
    )
    extra = sum("_extra_state" in key for key in index.blobs)
    notes = [f"{count} tensors of {rule} are not read" for rule, count in ignored.items()]
    if extra:
        notes.append(f"{extra} _extra_state items are not read")
    tokenizer = [common.args.raw(name) for name in ("tokenizer_model", "tokenizer_name_or_path")] if common.args else []
    return Facts(
        format="megatron",
        format_text=f"Megatron torch_dist ({_common_kind(common)})",
        layout=saved.kind,
        saved=grid,
        fc1_permuted=saved.fc1_permuted,
        padding=tuple(TensorPadding(key=p.key, stored_rows=p.stored_rows, real_rows=p.real_rows) for p in padding),
        iteration=chosen.iteration if chosen.iteration is not None else common.iteration,
        iterations=chosen.iterations,
        weight_bytes=sum(by_dtype.values()),
        optimizer_bytes=sum(
            chunk.place.length
            for key, t in index.tensors.items()
            if _ignored(key) == "optimizer state"
            for chunk in t.chunks
        ),
        parameters=sum(span.local.volume for shard in shards for span in shard.spans),
        dtypes=tuple(by_dtype.most_common()),
        num_tensors=len({span.name for shard in shards for span in shard.spans}),
        warnings=(*chosen.warnings, *warnings),
        notes=tuple(notes),
        saved_tokenizer=next((t for t in tokenizer if isinstance(t, str)), None),
    )


def _common_kind(common: CommonState) -> str:
    if not common.origin:
        return "no common state"
    return COMMON_FILE if common.origin.endswith(COMMON_FILE) else "common state inside"
