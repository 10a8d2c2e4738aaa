"""What the tree promises: light imports, one package, no pickle, no drift between descriptive files."""

from __future__ import annotations

import ast
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gtp_serve

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gtp_serve"
SOURCES = ("gtp_serve", "loaders", "server")

#: Modules that import no torch, beside everything in layout, loaders and server.
DECIDING = (
    "gtp_serve",
    "gtp_serve.budget",
    "gtp_serve.config",
    "gtp_serve.engine.client",
    "gtp_serve.engine.messages",
    "gtp_serve.engine.scheduler",
    "gtp_serve.engine.sequence",
    "gtp_serve.engine.step",
    "gtp_serve.engine.updates",
    "gtp_serve.errors",
    "gtp_serve.hardware",
    "gtp_serve.kv.blocks",
    "gtp_serve.kv.prefix",
    "gtp_serve.native_library",
    "gtp_serve.refit.collector",
    "gtp_serve.refit.digest",
    "gtp_serve.refit.geometry",
    "gtp_serve.refit.client",
    "gtp_serve.refit.native_copy",
    "gtp_serve.refit.native_verify",
    "gtp_serve.refit.orders",
    "gtp_serve.refit.pace",
    "gtp_serve.refit.plan",
    "gtp_serve.refit.rank_api",
    "gtp_serve.refit.shared",
    "gtp_serve.refit.source",
    "gtp_serve.refit.transports.buckets",
    "gtp_serve.refit.transports.liveness",
    "gtp_serve.refit.transports.shares",
    "gtp_serve.refit.update",
    "gtp_serve.request",
    "gtp_serve.sizes",
    "gtp_serve.text",
    "gtp_serve.training.ownership",
)
#: Modules among those that do: the demo's writers and the engine process's composition root.
NEEDS_TORCH = {
    "gtp_serve.loaders.convert",
    "gtp_serve.loaders.megatron_writer",
    "gtp_serve.loaders.smollm",
    "gtp_serve.server.engine_process",
}

#: Libraries that run code out of data.  The writers may dump what torch will read; nothing may load.
CODE_LOADERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MAY_DUMP_PICKLES = {"gtp_serve/training/checkpoint_files.py", "loaders/megatron_writer.py"}
RUNS_DATA = re.compile(
    r": (eval|exec|compile|__import__|(torch|pickle|marshal|shelve)\.(load|loads|open)|.*Unpickler)$"
)

#: Imports the modules in turn and prints the first after which torch is loaded.
IMPORT_PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""
HELP_PROBE = """
import sys
from gtp_serve.server.cli import main
try:
    status = main(["--help"])
except SystemExit as stop:
    status = stop.code
print("TORCH" if "torch" in sys.modules else "LIGHT", status or 0)
"""


SDIST = """
import os, sys
from setuptools import build_meta
os.chdir(sys.argv[1])
build_meta.build_sdist(sys.argv[2])
"""


def test_deciding_modules_loaders_and_http_process_import_without_torch() -> None:
    light = [*DECIDING, *modules_of("layout"), *modules_of("loaders"), *modules_of("server")]

    culprit = run_python("-c", IMPORT_PROBE, *(name for name in light if name not in NEEDS_TORCH))

    assert culprit.strip() == ""


def test_help_imports_no_torch_and_exits_with_zero() -> None:
    assert run_python("-c", HELP_PROBE).splitlines()[-1] == "LIGHT 0"


def test_help_answers_within_300_milliseconds() -> None:
    seconds = min(timed_help() for _ in range(5))

    assert seconds < 0.3


def test_every_package_of_the_tree_is_in_the_packages_list() -> None:
    folders = {init.parent for init in walk(PACKAGE, "__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}

    assert set(pyproject()["tool"]["setuptools"]["packages"]) == names


def test_server_and_loaders_are_links_to_the_top_level_folders() -> None:
    assert {name: os.readlink(PACKAGE / name) for name in ("server", "loaders")} == {
        "server": "../server",
        "loaders": "../loaders",
    }


def test_wheel_holds_server_and_loaders_inside_the_package_only(tmp_path: Path) -> None:
    source = copy_of_the_source(tmp_path / "source")

    run_python(
        *("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--wheel-dir", str(tmp_path), str(source)),
    )

    (wheel,) = tmp_path.glob("*.whl")
    entries = zipfile.ZipFile(wheel).namelist()
    assert {entry.split("/")[0] for entry in entries} == {
        "gtp_serve",
        f"gtp_serve-{gtp_serve.__version__}.dist-info",
    }
    assert {str(path.relative_to(ROOT)) for path in packaged()} <= set(entries)


def test_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    source = copy_of_the_source(tmp_path / "source")

    run_python("-W", "ignore", "-c", SDIST, str(source), str(tmp_path))

    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    missing = [path for path in packaged() if not (unpacked / path.relative_to(ROOT)).is_file()]
    assert missing == []


def test_only_the_checkpoint_writers_import_pickle() -> None:
    users = {str(path.relative_to(ROOT)) for path in sources() if imported_names(path) & CODE_LOADERS}

    assert users <= MAY_DUMP_PICKLES


def test_nothing_is_unpickled_or_evaluated() -> None:
    calls = {f"{path.relative_to(ROOT)}: {call}" for path in sources() for call in called_names(path)}

    assert [call for call in calls if RUNS_DATA.search(call)] == []


def test_test_folders_have_unique_file_names_and_no_packages() -> None:
    counts = Counter(path.name for path in walk(ROOT / "tests", ".py"))

    assert "__init__.py" not in counts
    assert [name for name, count in counts.items() if count > 1] == []


def test_lock_pins_every_dependency_and_names_no_host() -> None:
    lock = (ROOT / "requirements-dev.lock").read_text()
    pinned = set(re.findall(r"^([A-Za-z0-9_.-]+)==[0-9][^\s+]*$", lock, re.MULTILINE))
    project = pyproject()["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in ("dev", "hf", "demo", "te") for line in project["optional-dependencies"][extra]),
    ]

    names = {normal(re.split(r"[\[<>=!~]", line)[0]) for line in wanted} - {"gtp-serve"}
    assert names - {normal(name) for name in pinned} == set()
    lines = [line for line in lock.splitlines() if not line.startswith("#")]
    assert len(lines) == len(pinned)


def test_changelog_tells_of_this_version() -> None:
    assert f"## [{gtp_serve.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_readme_is_short_and_names_the_command_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()

    assert len(readme.splitlines()) <= 150
    assert re.search(r"^ +make test\b", readme, re.MULTILINE)
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def packaged() -> list[Path]:
    """Files that an installation needs: code, the page, the mark of types."""
    return [*walk(PACKAGE, ".py"), *walk(PACKAGE, ".html"), PACKAGE / "py.typed"]


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def walk(folder: Path, ending: str, *, follow: bool = True) -> Iterator[Path]:
    """Files below a folder whose name ends so, hidden folders and byte code apart."""
    for where, folders, files in os.walk(folder, followlinks=follow):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        yield from (Path(where, name) for name in sorted(files) if name.endswith(ending))


def sources() -> Iterator[Path]:
    """Every Python file of the product, each once."""
    return (path for folder in SOURCES for path in walk(ROOT / folder, ".py", follow=False))


def modules_of(package: str) -> list[str]:
    paths = sorted(walk(PACKAGE / package, ".py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def copy_of_the_source(target: Path) -> Path:
    target.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def imported_names(path: Path) -> set[str]:
    """Top-level names of every import statement in a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def called_names(path: Path) -> set[str]:
    """Dotted text of whatever a file calls."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}


def timed_help() -> float:
    """Of the processor: on a busy machine the clock on the wall tells of other programs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_python("-c", HELP_PROBE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def run_python(*arguments: str) -> str:
    """Standard output of an interpreter that sees this tree; a failure shows the error output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout
