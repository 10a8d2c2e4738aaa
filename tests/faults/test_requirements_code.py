"""What no file of the product may do, read from its source; and what its safety must not depend on."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import append_item, edit_metadata, write_hf, write_megatron
from gadgets import GADGETS, archive, gadget

from gtp_serve.server.cli import main
from gtp_serve.server.failures import EXIT_OK

ROOT = Path(__file__).parents[2]
TREES = ("gtp_serve", "server", "loaders")


def sources() -> Iterator[tuple[str, ast.Module]]:
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not any((ROOT / parent).is_symlink() for parent in map(str, Path(name).parents)):
                yield name, ast.parse(path.read_text(encoding="utf-8"))


SOURCES = dict(sources())

#: Modules whose readers run what they read, and the files that use one of them to write only.
RUNS_WHAT_IT_READS = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
}
WRITERS = {"gtp_serve/training/checkpoint_files.py", "loaders/megatron_writer.py"}
#: Calls that run what they are given, by their whole name; and methods that unpickle, by their last.
RUNS = {"eval", "exec", "compile", "builtins.eval", "builtins.exec", "os.system", "os.popen", "ast.literal_eval"}
RUNS |= {"runpy.run_path", "runpy.run_module", "code.interact"}
UNPICKLES = {
    "recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip


def imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def called(tree: ast.Module) -> Iterator[tuple[str, str, ast.Call]]:
    """(whole name, last name, call)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            whole = ast.unparse(node.func)
            yield whole, whole.rpartition(".")[2], node


def test_d4_no_source_file_reads_a_pickle() -> None:
    assert len(SOURCES) > 150
    for name, tree in SOURCES.items():
        modules = {module.partition(".")[0] for module in imported(tree)}
        if name in WRITERS:
            used = {whole for whole, _, _ in called(tree) if whole.startswith("pickle.")}
            assert used == {"pickle.dumps"}, name
            modules.discard("pickle")
        assert not modules & RUNS_WHAT_IT_READS, name
        wholes = {whole for whole, _, _ in called(tree)}
        assert not wholes & {"torch.load", "np.load", "numpy.load", "torch.hub.load", "torch.jit.load"}, name


def test_d4_and_t5_nothing_is_evaluated() -> None:
    for name, tree in SOURCES.items():
        for whole, last, call in called(tree):
            assert whole not in RUNS, f"{name}:{call.lineno} calls {whole}"
            assert last not in UNPICKLES, f"{name}:{call.lineno} calls {whole}"
            if last in ("run", "Popen", "check_output", "call") and whole.startswith("subprocess."):
                shell = next((k.value for k in call.keywords if k.arg == "shell"), None)
                assert shell is None, f"{name}:{call.lineno} asks for a shell"


def is_narrowing(test: ast.expr) -> bool:
    """``x is not None`` and ``isinstance``: they tell a type checker something, and hold whatever comes in."""
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


def test_d7_no_check_of_anything_that_comes_in_is_an_assert() -> None:
    for name, tree in SOURCES.items():
        if name.startswith("gtp_serve/training/"):
            continue  # a trainer's own process
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                assert is_narrowing(node.test), f"{name}:{node.lineno} asserts {ast.unparse(node.test)}"


_WITHOUT_ASSERTS = """
import json, sys
from pathlib import Path
assert False, "this process was to run without asserts"
from gtp_serve.errors import CheckpointError
from gtp_serve.loaders import open_checkpoint
told = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        checkpoint = open_checkpoint(path)
        for _ in checkpoint.tensors():
            pass
        told[path.name] = "loaded"
    except CheckpointError as error:
        told[path.name] = error.message
print(json.dumps(told))
"""


def set_first(name: str, number: int, metadata: Any) -> None:
    setattr(next(iter(metadata.storage_data.values())), name, number)


def test_d7_the_same_files_are_refused_without_asserts(tmp_path: Path) -> None:
    runs, marker = tmp_path / "runs", tmp_path / "marker"
    write_megatron(runs / "good")
    for number, name in enumerate(GADGETS):
        folder, _ = write_megatron(runs / f"metadata-{number}")
        (folder / ".metadata").write_bytes(gadget(name, marker))
        folder, _ = write_megatron(runs / f"common-{number}")
        append_item(folder, "common_state/shard_0_1", archive(gadget(name, marker)))
    for name, number in (("offset", 10**12), ("length", 10**12), ("offset", -5)):
        folder, _ = write_megatron(runs / f"{name}-{number}")
        edit_metadata(folder, partial(set_first, name, number))
    write_hf(runs / "cut")
    whole = (runs / "cut" / "model.safetensors").read_bytes()
    (runs / "cut" / "model.safetensors").write_bytes(whole[:-1])

    done = subprocess.run(
        [sys.executable, "-O", "-c", _WITHOUT_ASSERTS, str(runs)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.pop("good") == "loaded"
    assert len(told) == 2 * len(GADGETS) + 4
    assert "loaded" not in told.values()
    assert not marker.exists()


@pytest.mark.parametrize("command", ["inspect", "convert", "inspect --json"])
def test_d8_commands_that_read_checkpoints_run_nothing_of_them(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    words = command.split()

    def run(path: Path) -> int:
        rest = [str(tmp_path / "out"), "--to", "hf"] if words[0] == "convert" else []
        return main([words[0], str(path), *rest, *words[1:]])

    for number, name in enumerate(GADGETS):
        folder, _ = write_megatron(tmp_path / f"run-{number}")
        (folder / ".metadata").write_bytes(gadget(name, marker))
        assert run(folder) != EXIT_OK
        folder, _ = write_megatron(tmp_path / f"blob-{number}")
        append_item(folder, "common_state/shard_0_1", archive(gadget(name, marker)))
        assert run(folder) != EXIT_OK
    write_hf(tmp_path / "hf", auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (tmp_path / "hf" / "modeling.py").write_text(f"open({str(marker)!r}, 'w')", encoding="utf-8")
    run(tmp_path / "hf")
    assert not marker.exists()
    assert "Traceback" not in capsys.readouterr().err


#: Texts on which a pattern that looks back takes time: long runs, and long runs with a wrong end.
HOSTILE = [
    unit * (3000 // len(unit)) + end for unit in ("a", "1", " ", "%", "{", "a.", "a1", "\\", '"') for end in ("", "!")
]
PURE = ("gtp_serve.layout", "gtp_serve.loaders", "gtp_serve.server", "gtp_serve.refit")


def own_patterns() -> dict[str, re.Pattern[str]]:
    found: dict[str, re.Pattern[str]] = {}
    for name in PURE:
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__, f"{name}."):
            if module.name.endswith("__main__"):
                continue
            for key, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
                    found[f"{module.name}.{key}"] = value
    return found


def test_t4_no_pattern_of_ours_looks_back_without_end() -> None:
    patterns = own_patterns()
    assert len(patterns) > 15
    for name, pattern in patterns.items():
        started = time.process_time()
        for text in HOSTILE:
            pattern.search(text)
            pattern.fullmatch(text)
        assert time.process_time() - started < 5, name


def test_s2_no_decoder_of_pictures_sound_or_archives_is_needed() -> None:
    """Nothing that serving imports reads media; the engine's own tree is in the lock file."""
    media = {
        "PIL",
        "pillow",
        "cv2",
        "opencv-python",
        "av",
        "soundfile",
        "librosa",
        "torchvision",
        "torchaudio",
        "decord",
    }
    for name, tree in SOURCES.items():
        modules = {module.partition(".")[0] for module in imported(tree)}
        assert not modules & media, name
        assert not modules & {"tarfile", "lzma", "bz2"}, name
        # The demo reads one wheel whose digest is in the source; torch archives have a reader of their own.
        assert "zipfile" not in modules or name in {"server/demo_package.py"}, name
    lock = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
    pinned = {line.partition("==")[0].lower() for line in lock.splitlines() if "==" in line}
    assert not pinned & {name.lower() for name in media}


#: Ways to run a module that is found at run time, and the files that look its name up in a table of their own.
FINDS_MODULES = {"import_module", "__import__", "load_module", "exec_module", "run_path", "run_module"}
FROM_OWN_TABLE = {
    "gtp_serve/__init__.py": "_FROM[name]",
    "gtp_serve/refit/__init__.py": "_PUBLIC[name]",
    "server/cli.py": "f'gtp_serve.server.{_MODULES.get(command, command)}'",
}


def test_d6_no_module_is_imported_by_a_name_from_a_file() -> None:
    """Names of modules are written in the source; under another name a way to import is not passed on."""
    found: dict[str, set[str]] = {}
    for name, tree in SOURCES.items():
        assert "spec_from_file_location" not in ast.dump(tree), name
        aliases = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).rpartition(".")[2] in FINDS_MODULES
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for _, last, call in called(tree):
            if last in FINDS_MODULES | aliases and not isinstance(call.args[0], ast.Constant):
                found.setdefault(name, set()).add(ast.unparse(call.args[0]))
    assert found == {name: {argument} for name, argument in FROM_OWN_TABLE.items()}
    readers = [tree for name, tree in SOURCES.items() if name.startswith("loaders/")]
    assert len(readers) > 30
    assert not {one for tree in readers for one in imported(tree) if one.partition(".")[0] in ("importlib", "runpy")}
