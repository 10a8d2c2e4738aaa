"""The prefix cache: which blocks hold the KV of which tokens, so that nobody computes it twice.  No torch.

Only full blocks.  A block's name is a digest of all tokens from position 0 to its end, of the weights that
computed them and of the request's salt: equal names mean equal content, and content of other weights has
other names, so there is nothing to flush when weights change.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from gtp_serve.kv.blocks import BlockAllocator

DIGEST_BYTES = 32


def root_digest(*, generation: int, version: str, salt: str) -> bytes:
    """Where a chain starts.

    :param generation: counts changes of the weights, so that a version label that comes back with other
        weights is another root.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (version, salt)]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(generation.to_bytes(8, "little") + framed, digest_size=DIGEST_BYTES).digest()


class PrefixChain:
    """The names of one sequence's full blocks, each made of the one before it and the block's tokens."""

    __slots__ = ("_block_size", "_root", "digests")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self.digests: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Names of all full blocks of ``tokens``, which begin with those of every call before."""
        size, digests = self._block_size, self.digests
        for start in range(len(digests) * size, len(tokens) // size * size, size):
            packed = array("q", tokens[start : start + size]).tobytes()
            parent = digests[-1] if digests else self._root
            digests.append(blake2b(parent + packed, digest_size=DIGEST_BYTES).digest())
        return digests


class PrefixCache:
    """Names of blocks whose content is computed (``find``) or is being computed right now (``claims``).

    Blocks that nobody holds stay findable until ``allocate`` needs them, longest unused first.
    """

    def __init__(self, blocks: BlockAllocator) -> None:
        self._blocks = blocks
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._claims: dict[bytes, object] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known beginning of a chain; retain them before anything else is allocated."""
        found: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks, held once each; forgets idle ones when no blank ones are left.

        :raises ValueError: when fewer are free; nothing changed.
        """
        if count > self._blocks.num_free:
            raise ValueError(f"{count} blocks asked for, {self._blocks.num_free} free")
        for block in self._blocks.evict(max(0, count - self._blocks.num_blank)):
            del self._block_of[self._name_of.pop(block)]
        return self._blocks.allocate(count)

    def put(self, digest: bytes, block: int) -> None:
        """A held block now has the content of this name; the first block of a name is the one that is kept."""
        self._claims.pop(digest, None)
        if digest not in self._block_of:
            self._blocks.keep(block)
            self._block_of[digest] = block
            self._name_of[block] = digest

    def forget(self, blocks: Sequence[int]) -> None:
        """Never find these blocks again: their content is not to be trusted."""
        for block in blocks:
            digest = self._name_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
        self._blocks.forget(blocks)

    # -- content that is on its way ----------------------------------------------------------------

    def claim(self, digests: Iterable[bytes], owner: object) -> None:
        """``owner`` is about to compute these blocks; whoever claimed one before keeps it."""
        for digest in digests:
            if digest not in self._block_of:
                self._claims.setdefault(digest, owner)

    def disclaim(self, digests: Iterable[bytes], owner: object) -> None:
        """``owner`` will not compute what is left of its claims."""
        for digest in digests:
            if self._claims.get(digest) is owner:
                del self._claims[digest]

    def owner(self, digest: bytes) -> object | None:
        """Who is computing this block."""
        return self._claims.get(digest)

    # -- check itself ------------------------------------------------------------------------------

    @property
    def names(self) -> dict[int, bytes]:
        """The name of each block that can be found (a copy)."""
        return dict(self._name_of)

    @property
    def owners(self) -> list[object]:
        """Of all claims."""
        return list(self._claims.values())

    def check_invariants(self) -> None:
        """Names and blocks are one to one, and what can be found is held or idle.

        :raises AssertionError: when they are not (also under ``python -O``).
        """
        if {digest: block for block, digest in self._name_of.items()} != self._block_of:
            raise AssertionError("names and blocks of the prefix cache differ")
        for block in self._name_of:
            if not self._blocks.holders(block) and not self._blocks.is_idle(block):
                raise AssertionError(f"block {block} can be found and is blank")
        if not self._claims.keys().isdisjoint(self._block_of):
            raise AssertionError("a block is claimed and there")
