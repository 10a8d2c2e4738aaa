"""Pinned and permitted versions against known advisories, and the check itself."""

from __future__ import annotations

import importlib
import re
import shutil
import tomllib
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("check_advisories")


def project(tmp_path: Path, **changes: tuple[str, str]) -> Path:
    for name in ("pyproject.toml", "requirements-dev.lock", "requirements-docs.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, (old, new) in changes.items():
        path = tmp_path / name.replace("__", ".").replace("_", "-")
        text = path.read_text(encoding="utf-8")
        assert len(re.findall(old, text)) >= 1
        path.write_text(re.sub(old, new, text), encoding="utf-8")
    return tmp_path


def test_s3_nothing_that_is_pinned_or_let_in_has_a_known_advisory(
    check: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(ROOT) == 0, capsys.readouterr().out
    assert re.search(r"[0-9]{3} versions compared", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requirements_dev__lock": ("starlette==.*", "starlette==1.0.0")}, "starlette 1.0.0 .*CVE-2026-48710"),
        ({"requirements_dev__lock": ("Jinja2==.*", "Jinja2==3.1.5")}, "jinja2 3.1.5 .*CVE-2025-27516"),
        ({"requirements_docs__lock": ("mkdocs==.*", "mkdocs==1.2.2")}, "mkdocs 1.2.2 .*CVE-2021-40978"),
        ({"pyproject__toml": ("torch>=[0-9.]+", "torch>=2.9")}, "torch 2.9 .*CVE-2026-24747"),
        ({"pyproject__toml": ("setuptools>=[0-9.]+", "setuptools>=77")}, "setuptools 77 .*CVE-2025-47273"),
    ],
)
def test_s3_an_affected_version_fails_the_check(
    check: Any, changes: dict[str, tuple[str, str]], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(project(tmp_path, **changes)) == 1
    assert re.search(said, capsys.readouterr().out)


def test_s3_a_requirement_without_a_lower_bound_is_refused(check: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uvloop has no lower bound"):
        check.main(project(tmp_path, pyproject__toml=("uvloop>=[0-9.]+", "uvloop")))


def test_s3_an_old_list_says_so_and_fails_nothing(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    told = tomllib.loads((SCRIPTS / "advisories.toml").read_text(encoding="utf-8"))
    for days, old in ((check.OLD_DAYS, False), (check.OLD_DAYS + 1, True)):
        assert check.main(ROOT, told["checked"] + timedelta(days=days)) == 0
        assert ("days old" in capsys.readouterr().out) is old
    assert date(2026, 1, 1) < told["checked"]


def test_s3_each_range_of_the_list_can_be_met_and_each_accepted_one_is_listed(check: Any) -> None:
    told = tomllib.loads((SCRIPTS / "advisories.toml").read_text(encoding="utf-8"))
    every = {advisory for advisories in told["packages"].values() for advisory in advisories}
    assert len(every) > 70
    assert set(told["accepted"]) <= every
    for package, advisories in told["packages"].items():
        for advisory, ranges in advisories.items():
            assert re.fullmatch(r"(CVE|PYSEC)-\d{4}-\d+|GHSA(-[0-9a-z]{4}){3}", advisory), advisory
            assert not check.is_affected(Version("99999"), ranges) or advisory in told["accepted"], (package, advisory)
            parts = re.findall(r"[<>]=?([0-9a-z.]+)", ranges)
            below = [f"{Version(part)}.dev0" for part in parts if Version(part).dev is None]
            assert any(check.is_affected(Version(v), ranges) for v in [*parts, *below, "0"]), (package, advisory)


def test_s1_the_versions_that_safety_leans_on_are_required() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    least = {re.split(r">=", line)[0]: Version(re.split(r">=", line)[1]) for line in told}
    assert least["torch"] >= Version("2.10")
    assert least["starlette"] >= Version("1.0.1")
    assert least["jinja2"] >= Version("3.1.6")
    assert least["safetensors"] >= Version("0.5")


def test_s3_the_reason_for_an_accepted_advisory_holds() -> None:
    for tree in ("gtp_serve", "server", "loaders"):
        for path in (ROOT / tree).rglob("*.py"):
            assert "torch.jit" not in path.read_text(encoding="utf-8"), path
