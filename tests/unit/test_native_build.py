"""What is compiled for the native library, and what is taken from an earlier build: with a compiler that only notes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gtp_serve.ops.cpu import build as module
from gtp_serve.ops.cpu.build import BuildError, build

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo compiler 1; exit; }
echo "$@" >> "$0.calls"
case "$*" in *broken*) echo "x.cpp:1: error: it is broken" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "compiler"
    script.write_text(COMPILER)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return script


def taken_calls(compiler: Path) -> list[str]:
    """Since the last time; the last one links."""
    log = Path(f"{compiler}.calls")
    calls = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    assert calls, "the compiler was not called"
    assert "-shared" in calls[-1]
    return calls[:-1]


def compiled(calls: list[str]) -> list[str]:
    """Sources, and for kernels the instruction set."""
    words = [call.split() for call in calls]
    sources = [Path(call[call.index("-c") + 1]).name for call in words]
    sets = [
        next((word.removeprefix("-DGTP_ISA=") for word in call if word.startswith("-DGTP_ISA=")), "") for call in words
    ]
    return sorted(f"{source} {name}".strip() for source, name in zip(sources, sets, strict=True))


def test_all_instruction_sets_that_a_kind_of_machine_may_have_are_compiled(compiler: Path, tmp_path: Path) -> None:
    others = sorted(path.name for path in module.SOURCES.glob("*.cpp") if path.name != "kernels.cpp")
    names = ["avx2", "avx512", "avx512bf16", "generic"]

    build(tmp_path / "x86.so", machine="x86_64")
    assert compiled(taken_calls(compiler)) == sorted([*others, *(f"kernels.cpp {name}" for name in names)])
    build(tmp_path / "arm.so", machine="aarch64")
    assert compiled(taken_calls(compiler)) == sorted([*others, "kernels.cpp generic"])
    assert (tmp_path / "arm.so").read_text() == "made\n"


def test_sets_that_are_not_wanted_are_left_out_and_the_table_is_told(compiler: Path, tmp_path: Path) -> None:
    build(tmp_path / "x.so", machine="x86_64", sets=["avx2", "generic"])

    calls = taken_calls(compiler)
    assert [name for name in compiled(calls) if name.startswith("kernels")] == [
        "kernels.cpp avx2",
        "kernels.cpp generic",
    ]
    (table,) = [call for call in calls if "library.cpp" in call]
    assert [word for word in table.split() if "WITHOUT" in word] == ["-DGTP_WITHOUT_avx512", "-DGTP_WITHOUT_avx512bf16"]


def test_what_would_become_the_same_is_not_compiled_again(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, kept = tmp_path / "native", tmp_path / "kept"
    sources.mkdir()
    for name in ("kernels.cpp", "read.cpp", "pool.h"):
        (sources / name).write_text(name)
    monkeypatch.setattr(module, "SOURCES", sources)

    def names(**options: object) -> list[str]:
        build(tmp_path / "x.so", machine="aarch64", kept=kept, **options)  # type: ignore[arg-type]
        return compiled(taken_calls(compiler))

    assert names() == ["kernels.cpp generic", "read.cpp"]
    assert names() == []
    (sources / "read.cpp").write_text("changed")
    assert names() == ["read.cpp"]
    (sources / "pool.h").write_text("changed")
    assert names() == ["kernels.cpp generic", "read.cpp"]
    assert names(flags=["-g"]) == ["kernels.cpp generic", "read.cpp"]
    assert len(list(kept.iterdir())) == 2  # of the last build only
    compiler.write_text(COMPILER.replace("compiler 1", "compiler 2"))
    assert names(flags=["-g"]) == ["kernels.cpp generic", "read.cpp"]


def test_a_compiler_that_fails_is_told_in_its_own_line_and_leaves_what_was(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("before")

    with pytest.raises(BuildError, match=r"compiler failed: x\.cpp:1: error: it is broken"):
        build(tmp_path / "x.so", flags=["-Dbroken"], kept=tmp_path / "kept")

    assert (tmp_path / "x.so").read_text() == "before"
    assert list((tmp_path / "kept").glob("*")) == []
