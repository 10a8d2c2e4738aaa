"""What is said where TransformerEngine is missing, too old or not whole."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch

from gtp_serve.errors import EnvironmentFault
from gtp_serve.training import te
from gtp_serve.training.placement import TrainPlacement

#: Importing the package fails as it does where it is not installed.
WITHOUT = """
import sys
sys.modules["transformer_engine"] = None
import gtp_serve.training, gtp_serve.training.te, gtp_serve.training.linear
print(gtp_serve.training.__name__)
"""


def build() -> object:
    return te.column_linear("a", 8, 8, TrainPlacement(dtype=torch.float32))


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)


def test_training_is_imported_without_transformer_engine() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)

    assert (result.returncode, result.stdout, result.stderr) == (0, "gtp_serve.training\n", "")


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    with pytest.raises(EnvironmentFault) as caught:
        build()

    assert str(caught.value) == 'TransformerEngine is not installed; try: pip install "gtp-serve[te]"'


@pytest.mark.parametrize("version", ["1.14.0", "2.9", "2.18.1", "2.18.0.post1+abc"])
def test_older_package_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(EnvironmentFault) as caught:
        build()

    assert caught.value.message == f"TransformerEngine {version} cannot shard weights"
    assert caught.value.details[0] == ("needed", "2.19 or newer")


@pytest.mark.parametrize("version", ["2.19.0", "2.20.2", "2.100", "3.0.0.dev0"])
@pytest.mark.parametrize("fault", [RuntimeError("only a meta package"), OSError("libcublas.so.13 is missing")])
def test_package_without_its_libraries_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, version: str, fault: Exception
) -> None:
    def fail(name: str) -> Any:
        raise fault

    pretend(monkeypatch, version)
    monkeypatch.setattr(te, "import_module", fail)
    with pytest.raises(EnvironmentFault) as caught:
        build()

    assert caught.value.message == f"TransformerEngine {version} is installed and cannot be imported: {fault}"
    assert caught.value.details == (
        ("try", f'pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]=={version}"'),
    )
