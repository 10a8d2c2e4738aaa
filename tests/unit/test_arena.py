"""Memory of weights: contents change places, addresses do not, and no other thread's memory is touched."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gtp_serve.errors import EngineFault
from gtp_serve.refit import arena as arena_module
from gtp_serve.refit import mapping
from gtp_serve.refit.arena import DeviceArena, MappedArena, open_arena, swap_by_copying
from gtp_serve.refit.mapping import HUGE_PAGE, move_pages

SIZE = 3 * HUGE_PAGE + 4096
COUNT = SIZE // 4


def filled(arena: MappedArena | DeviceArena, live: float, staged: float) -> tuple[Tensor, Tensor]:
    like = torch.empty(COUNT)
    tensors = arena.live(0, like), arena.staged(0, like)
    for tensor, value in zip(tensors, (live, staged), strict=True):
        tensor.copy_(torch.arange(COUNT) * value)
    return tensors


def assert_holds(tensor: Tensor, value: float) -> None:
    assert torch.equal(tensor, torch.arange(COUNT) * value)


def refuse_from(call: int, *, unmap: bool = False) -> Callable[[int, int, int], bool]:
    """Moves pages until the ``call``-th time; a refusal may come after the kernel unmapped the target."""
    calls = 0

    def move(source: int, target: int, size: int) -> bool:
        nonlocal calls
        calls += 1
        if calls < call:
            return move_pages(source, target, size)
        if unmap:
            mapping.unmap(target, size)
        return False

    return move


def test_swap_exchanges_contents_at_the_same_addresses() -> None:
    arena = MappedArena(SIZE)
    live, staged = filled(arena, 1, 2)
    before = live.data_ptr(), staged.data_ptr()

    for first, second in [(2, 1), (1, 2), (2, 1)]:
        arena.swap()
        assert_holds(live, first)
        assert_holds(staged, second)

    assert (live.data_ptr(), staged.data_ptr()) == before


def test_swap_moves_pages_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = MappedArena(SIZE)
    live, _ = filled(arena, 1, 2)
    monkeypatch.setattr(arena_module, "swap_by_copying", None)
    monkeypatch.setattr(arena_module, "_copy_pages", None)

    arena.swap()

    assert_holds(live, 2)


def test_ranges_begin_on_the_border_of_a_huge_page() -> None:
    arena = MappedArena(10)

    addresses = [arena.live(0, torch.empty(2)).data_ptr(), arena.staged(0, torch.empty(2)).data_ptr()]

    assert [address % HUGE_PAGE for address in addresses] == [0, 0]


@pytest.mark.parametrize("unmap", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_kernel_that_refuses_a_move_leads_to_the_same_result(call: int, unmap: bool) -> None:
    arena = MappedArena(SIZE, move=refuse_from(call, unmap=unmap))
    live, staged = filled(arena, 1, 2)

    for first, second in [(2, 1), (1, 2)]:
        arena.swap()
        assert_holds(live, first)
        assert_holds(staged, second)


def test_spare_range_that_a_refused_move_may_have_lost_is_never_moved_onto_again() -> None:
    targets: list[int] = []
    refuse = refuse_from(1, unmap=True)

    def move(source: int, target: int, size: int) -> bool:
        targets.append(target)
        return refuse(source, target, size)

    arena = MappedArena(SIZE, move=move)
    filled(arena, 1, 2)

    arena.swap()
    arena.swap()

    assert len(targets) == 1


def test_address_range_that_somebody_else_took_is_a_fault_and_not_overwritten() -> None:
    foreign: list[int] = []

    def move(source: int, target: int, size: int) -> bool:
        if foreign:
            return False
        if target == live.data_ptr():
            mapping.unmap(target, size)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mapping._FIXED_NOREPLACE
            foreign.append(mapping._LIBC.mmap(target, 4096, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))
            ctypes.memset(target, 7, 4096)
            return False
        return move_pages(source, target, size)

    arena = MappedArena(SIZE, move=move)
    live, _ = filled(arena, 1, 2)

    with pytest.raises(EngineFault, match="address range of the weights was lost"):
        arena.swap()

    assert ctypes.string_at(foreign[0], 4096) == b"\x07" * 4096


def test_swap_by_copying_exchanges_also_what_is_no_whole_chunk() -> None:
    one, other = torch.arange(100, dtype=torch.uint8), torch.arange(100, 200, dtype=torch.uint8)

    swap_by_copying(one, other, chunk=7)

    assert torch.equal(one, torch.arange(100, 200, dtype=torch.uint8))
    assert torch.equal(other, torch.arange(100, dtype=torch.uint8))


def test_device_arena_exchanges_contents_as_the_mapped_one_does() -> None:
    arena = DeviceArena(SIZE, torch.device("cpu"))
    live, staged = filled(arena, 1, 2)
    before = live.data_ptr(), staged.data_ptr()

    arena.swap()

    assert_holds(live, 2)
    assert_holds(staged, 1)
    assert (live.data_ptr(), staged.data_ptr()) == before


def test_arena_of_the_host_is_mapped() -> None:
    assert isinstance(open_arena(SIZE, torch.device("cpu")), MappedArena)


def test_other_threads_memory_survives_a_thousand_swaps() -> None:
    arena = MappedArena(SIZE)
    live, staged = filled(arena, 1, 2)
    stop, failures, rounds = threading.Event(), list[str](), [0, 0]

    def map_and_free(which: int) -> None:
        while not stop.is_set():
            own = [mmap.mmap(-1, 4096 * size) for size in (1, 16, 512, 1024)]
            for number, one in enumerate(own):
                one[0], one[-1] = number + 1, 100 + number
            for number, one in enumerate(own):
                if (one[0], one[-1], sum(one[1:4000])) != (number + 1, 100 + number, 0):
                    failures.append(f"thread {which}: mapping {number} was changed")
                one.close()
            rounds[which] += 1

    threads = [threading.Thread(target=map_and_free, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(1000):
        arena.swap()
    stop.set()
    for thread in threads:
        thread.join()

    assert failures == []
    assert min(rounds) > 0
    assert_holds(live, 1)
    assert_holds(staged, 2)


def test_released_range_gives_its_memory_back_and_takes_values_again() -> None:
    arena = MappedArena(SIZE)
    live, staged = filled(arena, 1, 2)
    address = live.data_ptr()
    before = resident()

    assert arena.release_live() >= SIZE - HUGE_PAGE
    assert arena.release_staged() >= SIZE - HUGE_PAGE

    assert before - resident() > SIZE
    assert live.count_nonzero() == 0
    live.copy_(torch.arange(COUNT) * 5)
    assert live.data_ptr() == address
    assert_holds(live, 5)
    assert staged.count_nonzero() == 0


def test_memory_goes_with_the_last_tensor_of_it() -> None:
    arena = MappedArena(8 << 20)
    tensor = arena.live(0, torch.empty(2 << 20))
    tensor.fill_(1)
    address = tensor.data_ptr()
    del arena
    assert is_mapped(address)

    del tensor

    assert not is_mapped(address)


def test_parameter_without_elements_has_a_tensor() -> None:
    arena = MappedArena(SIZE)

    assert arena.live(0, torch.empty(0, 4)).shape == (0, 4)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        spans = (line.split(" ", 1)[0].split("-") for line in file)
        return any(int(first, 16) <= address < int(last, 16) for first, last in spans)
