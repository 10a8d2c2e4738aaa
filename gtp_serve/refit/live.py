"""What serves now, and what could be served again.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from gtp_serve.errors import UpdateRefused
from gtp_serve.refit.digest import combine
from gtp_serve.refit.versions import Labels


class Live:
    """The weights of one engine: their label and digest, whether they are whole, and the set before."""

    def __init__(self, version: str) -> None:
        self.labels = Labels(version)
        self.digest = ""
        """Once it is known."""
        self.torn = ""
        """Why there are no whole weights; empty when there are."""
        self.sleeping: tuple[str, ...] = ()
        """Memory that was given back."""
        self.swaps = 0
        """How often other weights came to serve, or none."""
        self.before: tuple[str, str] | None = None
        """Label and digest of what a rollback would restore."""

    @property
    def version(self) -> str:
        """Label of what serves, or of what served last."""
        return self.labels.live

    def replace(self, version: str, ranks: Sequence[str], *, keeps_old: bool) -> None:
        """Other weights serve.

        :param ranks: digests, in order.
        :param keeps_old: the set that served is still there.
        """
        self.before = (self.version, self.digest) if keeps_old and not self.torn else None
        self.labels.set_live(version)
        self.torn, self.digest = "", combine(ranks)
        self.swaps += 1

    def tear(self, why: str) -> None:
        """There are no whole weights from now on."""
        self.before, self.torn, self.digest = None, why, ""
        self.swaps += 1

    def sleep(self, tags: Sequence[str]) -> None:
        """Memory is given back; without that of the weights there are no whole ones until an update."""
        self.sleeping = tuple(sorted({*self.sleeping, *tags}))
        if "weights" in tags:
            self.tear("their memory was released")

    def wake(self, tags: Sequence[str]) -> None:
        """Memory is there again."""
        self.sleeping = tuple(tag for tag in self.sleeping if tag not in tags)

    def check_memory(self) -> None:
        """Refuse what needs the memory of the weights.

        :raises UpdateRefused: it is released.
        """
        if "weights" in self.sleeping:
            raise UpdateRefused(
                "the memory of the weights is released", [("try", "to restore it first")], code="weights-released"
            )

    def check_whole(self) -> None:
        """Refuse what needs whole weights.

        :raises UpdateRefused: there are none.
        """
        if self.torn:
            raise UpdateRefused(f"there are no whole weights: {self.torn}", code="weights_torn")

    def check_before(self) -> tuple[str, str]:
        """What a rollback would restore.

        :raises UpdateRefused: there is nothing.
        """
        if self.before is None:
            raise UpdateRefused(
                "there is no version to go back to",
                [("kept", "the one before, in staged mode, until the next update begins to arrive")],
                code="nothing-to-roll-back",
            )
        return self.before
