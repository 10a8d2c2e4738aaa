"""The store moves a decoder's parameters once; digest and verification look at every byte of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_files import SMALL, SMALL_MOE, random_tensors
from parity.model_harness import PagedRun, TensorSource, fill
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UpdateFailed
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.refit.apply import Target, apply_plan
from gtp_serve.refit.arena import MappedArena
from gtp_serve.refit.digest import combine, digest_bytes, digest_parameter
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.store import WeightStore
from gtp_serve.refit.verify import rank_digest, verify

TIED = replace(SMALL, tied=True)


def decoder_of(config: ModelConfig = SMALL) -> Decoder:
    return build_decoder(config, dtype=torch.float32, device="cpu")


def fill_staged(store: WeightStore, tensors: dict[str, Tensor]) -> None:
    source = TensorSource(tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    apply_plan(build_plan(source.shards(), store.shards, shapes), source, store.staged)


def logits_of(decoder: Decoder) -> Tensor:
    run = PagedRun(decoder)
    return run.step([(run.add(), [1, 2, 3, 4, 5])])[0]


def copies(store: WeightStore) -> list[Tensor]:
    return [target.tensor.clone() for target in store.live]


def addresses(decoder: Decoder) -> list[int]:
    return [target.tensor.data_ptr() for target in decoder.targets()]


# -- store -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, SMALL_MOE, TIED], ids=["dense", "moe", "tied"])
def test_swap_serves_the_staged_weights_at_the_same_addresses_and_back(config: ModelConfig) -> None:
    decoder = decoder_of(config)
    store = WeightStore(decoder.targets())
    old, new = random_tensors(config, 1), random_tensors(config, 2)
    fill(decoder, old)
    before, where = logits_of(decoder), addresses(decoder)
    fresh = decoder_of(config)
    fill(fresh, new)

    fill_staged(store, new)
    assert torch.equal(logits_of(decoder), before)
    store.swap()
    after = logits_of(decoder)
    store.swap()

    assert torch.equal(after, logits_of(fresh))
    assert torch.equal(logits_of(decoder), before)
    assert addresses(decoder) == where


def test_every_parameter_lies_in_the_store_and_the_targets_are_the_decoders() -> None:
    decoder = decoder_of(SMALL_MOE)

    store = WeightStore(decoder.targets())

    theirs = decoder.targets()
    assert [t.shard for t in store.live] == [t.shard for t in theirs]
    assert [t.tensor.data_ptr() for t in store.live] == [t.tensor.data_ptr() for t in theirs]
    first = min(addresses(decoder))
    assert all(0 <= address - first < store.num_bytes for address in addresses(decoder))


def test_staged_targets_are_stated_as_the_live_ones_and_overlap_nothing() -> None:
    store = WeightStore(decoder_of(SMALL_MOE).targets())

    for number, target in enumerate(store.staged):
        target.tensor.fill_(number)
    for target in store.live:
        target.tensor.fill_(-1)

    assert [t.shard for t in store.staged] == [t.shard for t in store.live]
    assert [float(t.tensor.min()) for t in store.staged] == list(range(len(store.staged)))
    assert [float(t.tensor.max()) for t in store.staged] == list(range(len(store.staged)))


def test_weights_take_the_memory_of_one_set_of_parameters() -> None:
    decoder = decoder_of()

    store = WeightStore(decoder.targets())

    parameters = sum(target.tensor.nbytes for target in decoder.targets())
    assert parameters <= store.num_bytes <= parameters + 256 * len(decoder.targets())


def test_rotary_tables_are_no_weights() -> None:
    decoder = decoder_of()
    table = decoder.rotary.inv_freq_R.data_ptr()

    store = WeightStore(decoder.targets())

    assert decoder.rotary.inv_freq_R.data_ptr() == table
    assert not any(t.tensor.data_ptr() == table for t in store.live)


def test_part_of_a_tensor_that_cannot_be_found_is_refused() -> None:
    with torch.inference_mode():
        part = torch.empty(4, 4)[:2]
    box = Box.whole((2, 4))

    with pytest.raises(ValueError, match="part of a larger parameter"):
        WeightStore([Target(Shard("half", (2, 4), "float32", (Span("w", box, box),)), part)])


def test_two_tensors_in_the_same_memory_are_refused() -> None:
    one = torch.empty(4)
    other = torch.from_numpy(one.numpy())
    box = Box.whole((4,))
    targets = [Target(Shard(key, (4,), "float32", (Span(key, box, box),)), t) for key, t in (("a", one), ("b", other))]

    with pytest.raises(ValueError, match="b: another tensor lies in the same memory"):
        WeightStore(targets)


def test_released_staged_set_can_be_filled_again() -> None:
    decoder = decoder_of()
    store = WeightStore(decoder.targets(), arena=None)
    fill(decoder, random_tensors(SMALL, 1))
    fill_staged(store, random_tensors(SMALL, 2))

    assert store.release_staged() > 0
    assert all(int(t.tensor.count_nonzero()) == 0 for t in store.staged)
    fill_staged(store, random_tensors(SMALL, 3))
    store.swap()

    fresh = decoder_of()
    fill(fresh, random_tensors(SMALL, 3))
    assert torch.equal(logits_of(decoder), logits_of(fresh))


def test_store_over_an_arena_that_copies_gives_the_same_weights() -> None:
    results = []
    for move in (None, lambda source, target, size: False):
        decoder = decoder_of(SMALL_MOE)
        size = WeightStore(decoder_of(SMALL_MOE).targets()).num_bytes
        store = WeightStore(decoder.targets(), arena=MappedArena(size, move=move))
        fill(decoder, random_tensors(SMALL_MOE, 1))
        fill_staged(store, random_tensors(SMALL_MOE, 2))
        store.swap()
        results.append((rank_digest(store.live), rank_digest(store.staged)))

    assert results[0] == results[1]


# -- digest ----------------------------------------------------------------------------------------


def test_digest_of_a_refit_is_that_of_a_cold_load() -> None:
    decoder, fresh = decoder_of(SMALL_MOE), decoder_of(SMALL_MOE)
    store = WeightStore(decoder.targets())
    fill(decoder, random_tensors(SMALL_MOE, 1))
    old = rank_digest(store.live)
    fill(fresh, random_tensors(SMALL_MOE, 2))

    fill_staged(store, random_tensors(SMALL_MOE, 2))
    store.swap()

    assert rank_digest(store.live) == rank_digest(fresh.targets()) != old
    assert rank_digest(store.staged) == old


def test_one_flipped_bit_anywhere_changes_the_digest() -> None:
    store = WeightStore(decoder_of().targets())
    for target in store.live:
        target.tensor.fill_(1.0)
    seen = {rank_digest(store.live)}
    places = [(number, index) for number, t in enumerate(store.live) for index in (0, t.tensor.numel() - 1)]

    for number, index in places:
        words = store.live[number].tensor.view(-1).view(torch.int32)
        words[index] ^= 1
        seen.add(rank_digest(store.live))
        words[index] ^= 1

    assert len(seen) == 1 + len(places)


def test_digest_covers_padding() -> None:
    config = replace(SMALL, vocab_rows=21)
    decoder = build_decoder(config, dtype=torch.float32, device="cpu", tp_rank=1, tp_size=2, collective=_Second())
    fill(decoder, random_tensors(config))
    before = rank_digest(decoder.targets())
    table = decoder.embedding.weight
    assert decoder.embedding.count < table.shape[0]

    table[-1, 0] = 1.0

    assert rank_digest(decoder.targets()) != before


class _Second:
    rank, size, capturable = 1, 2, False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


def test_digest_depends_on_name_shape_and_type() -> None:
    data = bytes(16)
    box = ()
    shards = [
        Shard("a", (4,), "float32", box),
        Shard("b", (4,), "float32", box),
        Shard("a", (2, 2), "float32", box),
        Shard("a", (8,), "bfloat16", box),
        Shard("a", (8,), "float16", box),
    ]

    assert len({digest_parameter(shard, [data]) for shard in shards}) == len(shards)


def test_digest_is_the_same_however_the_bytes_are_cut_and_with_several_threads() -> None:
    shard = Shard("a", (8,), "uint8", ())
    store = WeightStore(decoder_of().targets())
    for number, target in enumerate(store.live):
        target.tensor.fill_(number)

    assert digest_parameter(shard, [b"abcdefgh"]) == digest_parameter(shard, [b"abc", b"", b"defgh"])
    assert rank_digest(store.live, threads=3) == rank_digest(store.live)


def test_digests_are_those_of_the_published_algorithm() -> None:
    # xxh3-128 of nothing, as its reference implementation prints it
    assert digest_bytes(b"") == "99aa06d3014798d86001c324468d497f"
    assert combine(["ab", "cd"]) == digest_bytes(b"abcd")


# -- verify ----------------------------------------------------------------------------------------

DTYPES = ["float32", "bfloat16", "float16"]


def one_target(dtype: str, rows: int = 3, columns: int = 4) -> Target:
    """Rows 0..1 are rows 7..8 of ``q``; the others are rows of ``k`` from 0 on."""
    tensor = torch.ones(rows, columns, dtype=getattr(torch, dtype))
    spans = (
        Span("q", Box((0, 0), (2, columns)), Box((7, 0), (2, columns))),
        Span("k", Box((2, 0), (rows - 2, columns)), Box((0, 0), (rows - 2, columns))),
    )
    return Target(Shard("qk", (rows, columns), dtype, spans), tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_parameters_pass_and_have_the_digest(dtype: str) -> None:
    target = one_target(dtype)
    limits = torch.finfo(target.tensor.dtype)
    target.tensor[0] = torch.tensor([limits.max, limits.min, limits.tiny, -0.0])

    assert verify([target]) == rank_digest([target])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_that_is_not_finite_is_named_with_tensor_and_row(dtype: str, value: float) -> None:
    target = one_target(dtype)
    target.tensor[1, 3] = value

    with pytest.raises(UpdateFailed, match=r"^q: row 8 \(element \[8, 3\]\) is not a finite number") as caught:
        verify([target])
    assert caught.value.code == "not-finite"

    target.tensor[1, 3] = 0
    target.tensor[2, 0] = value
    with pytest.raises(UpdateFailed, match=r"^k: row 0 \(element \[0, 0\]\)"):
        verify([target], threads=2)


def test_value_in_a_later_piece_is_found_at_its_place() -> None:
    target = one_target("bfloat16", rows=3000, columns=512)
    target.tensor[2500, 100] = float("nan")

    with pytest.raises(UpdateFailed, match=r"^k: row 2498 \(element \[2498, 100\]\)"):
        verify([target])


def test_nan_with_any_payload_is_found() -> None:
    for bits in (0x7F81, 0x7FC0, 0xFF81, 0x7F80):
        target = one_target("bfloat16")
        target.tensor[0, 0] = torch.from_numpy(np.array([bits], np.uint16)).view(torch.bfloat16)[0]
        with pytest.raises(UpdateFailed, match="row 7"):
            verify([target])


def test_verifying_can_be_given_up() -> None:
    def stop() -> None:
        raise UpdateFailed("given up")

    with pytest.raises(UpdateFailed, match="given up"):
        verify([one_target("float32")], keep_on=stop)
