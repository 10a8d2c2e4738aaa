"""What was found, line by line, and how long a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Report:
    """What was found, printed line by line as it comes."""

    facts: dict[str, object] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def fact(self, name: str, value: object, unit: str = "") -> None:
        """A number or a name."""
        self.facts[name] = value
        shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
        print(f"  {name:<44} {shown} {unit}".rstrip(), flush=True)

    def holds(self, name: str, good: bool, detail: str = "") -> None:
        """Something that must be so."""
        if not good:
            self.failed.append(name)
        print(f"  {'ok    ' if good else 'FAILED'} {name} {detail}".rstrip(), flush=True)

    def skip(self, what: str, why: str) -> None:
        """Something that was not looked at."""
        self.skipped.append(f"{what}: {why}")

    def finish(self) -> int:
        """The last lines, and the exit code."""
        for line in self.skipped:
            print(f"  skipped {line}")
        print(f"failed: {', '.join(self.failed)}" if self.failed else "all of it held")
        return 1 if self.failed else 0


class Timer:
    """Seconds per call on one device, the median of several measurements."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], object], count: int, repeats: int = 3) -> float:
        """Of one call out of ``count`` in a row."""
        call()
        return sorted(self._once(call, count) for _ in range(repeats))[repeats // 2]

    def _once(self, call: Callable[[], object], count: int) -> float:
        self.wait()
        started = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - started) / count

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
