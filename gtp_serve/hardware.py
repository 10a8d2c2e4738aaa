"""What this machine offers, found without torch: cores, memory (as a container sees it), GPUs, CPU flags.

Paths are parameters so that tests can describe another machine.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
NATIVE_OPS = Path(__file__).parent / "ops" / "cpu" / "_native.so"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes in all and bytes that can still be taken."""

    total: int
    available: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as its driver reports it."""

    name: str
    memory: Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """The installed torch, read from its version file."""

    version: str
    cuda: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Everything that the serve command decides by."""

    cores: int
    ram: Memory
    cpu_flags: frozenset[str]
    gpus: tuple[Gpu, ...]
    torch: TorchBuild | None
    native_ops: bool = False
    """The native CPU ops were built with this package."""


def find_hardware(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> Hardware:
    """Look at this machine; takes milliseconds without a GPU and up to a second with one."""
    torch = find_torch()
    return Hardware(
        cores=count_cores(cgroup=cgroup),
        ram=read_memory(proc=proc, cgroup=cgroup),
        cpu_flags=read_cpu_flags(proc=proc),
        gpus=find_gpus() if torch is not None and torch.cuda is not None else (),
        torch=torch,
        native_ops=NATIVE_OPS.exists(),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def count_cores(*, cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: its affinity, and a container's quota rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _read(cgroup / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        quota, period = int(words[0]), int(words[1])
    else:
        quota = _number(_read(cgroup / "cpu" / "cpu.cfs_quota_us")) or 0
        period = _number(_read(cgroup / "cpu" / "cpu.cfs_period_us")) or 0
    if quota > 0 and period > 0:
        return max(1, min(allowed, -(-quota // period)))
    return max(1, allowed)


def count_threads(cores: int, *, environment: Mapping[str, str] = os.environ) -> int:
    """Threads of one operation: one for each core, unless the user's ``OMP_NUM_THREADS`` says otherwise."""
    asked = _number(environment.get("OMP_NUM_THREADS", ""))
    return asked if asked else cores


def read_memory(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> Memory:
    """Host memory, cut to the tightest container limit above this process."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(proc / "meminfo"), re.MULTILINE))
    total = int(fields.get("MemTotal", 0)) * 1024 or _physical_memory()
    available = int(fields.get("MemAvailable", 0)) * 1024 or total // 2
    for limit, used in _cgroup_limits(proc, cgroup):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Memory(total=total, available=available)


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limits(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each group above this process that has a limit."""
    match = re.search(r"^0::/(.*)$", _read(proc / "self" / "cgroup"), re.MULTILINE)
    parts = [part for part in (match.group(1) if match else "").split("/") if part not in ("", "..")]
    folders = [cgroup.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    found = []
    for folder in folders:
        limit = _number(_read(folder / "memory.max"))
        if limit is not None:
            used = _number(_read(folder / "memory.current")) or 0
            found.append((limit, max(0, used - _reclaimable(folder, "inactive_file"))))
    legacy = cgroup / "memory"
    limit = _number(_read(legacy / "memory.limit_in_bytes"))
    if limit is not None and limit < 1 << 60:
        used = _number(_read(legacy / "memory.usage_in_bytes")) or 0
        found.append((limit, max(0, used - _reclaimable(legacy, "total_inactive_file"))))
    return found


def _reclaimable(folder: Path, field: str) -> int:
    match = re.search(rf"^{field} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    return int(match.group(1)) if match else 0


def read_cpu_flags(*, proc: Path = _PROC) -> frozenset[str]:
    """The kernel's names of the CPU's instruction sets."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _read(proc / "cpuinfo"), re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def find_torch() -> TorchBuild | None:
    """Version and CUDA version of the installed torch, without importing it (that takes seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = _read(Path(spec.origin).parent / "version.py")
    version = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return TorchBuild(version=version.group(1) if version else "?", cuda=cuda.group(1) if cuda else None)


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that the driver lists; none when there is no driver or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(answer.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs in nvidia-smi's lines ``name, total MiB, free MiB``; other lines are passed over."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.rsplit(",", 2)]
        if len(words) == 3 and words[1].isdigit() and words[2].isdigit():
            memory = Memory(total=int(words[1]) << 20, available=int(words[2]) << 20)
            found.append(Gpu(name=words[0], memory=memory))
    return tuple(found)
