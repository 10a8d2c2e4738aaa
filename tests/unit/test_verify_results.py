"""The script that decides whether a run of the suite counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "verify_results.py"

PASSED = '<testcase classname="tests.unit.test_a" name="one"/>'
OTHER = '<testcase classname="tests.unit.test_b.TestMachine" name="two"/>'
FAILED = '<testcase classname="tests.unit.test_a" name="bad"><failure message="assert 1 == 2"/></testcase>'
SKIPPED = (
    '<testcase classname="tests.unit.test_b" name="two">'
    '<skipped type="pytest.skip" message="needs eight cores"/></testcase>'
)
SKIPPED_WITHOUT_REASON = SKIPPED.replace("needs eight cores", "unconditional skip")
XFAILED = SKIPPED.replace("pytest.skip", "pytest.xfail")
XFAILED_WITHOUT_REASON = XFAILED.replace("needs eight cores", "")


def test_good_run_is_accepted_and_counted(tmp_path: Path) -> None:
    status, output = verify(tmp_path, PASSED, OTHER)

    assert (status, output) == (0, "verify: 2 tests ran in 2 files, 0 skipped with a reason\n")


def test_skip_with_a_reason_beside_a_test_that_ran_is_accepted(tmp_path: Path) -> None:
    status, output = verify(tmp_path, PASSED, OTHER, SKIPPED)

    assert (status, output) == (0, "verify: 2 tests ran in 2 files, 1 skipped with a reason\n")


def test_xfail_with_a_reason_counts_as_run(tmp_path: Path) -> None:
    assert verify(tmp_path, PASSED, XFAILED)[0] == 0


@pytest.mark.parametrize(
    ("cases", "fault"),
    [
        pytest.param([PASSED], "no test of tests/unit/test_b.py ran", id="file not collected"),
        pytest.param([PASSED, PASSED, SKIPPED], "no test of tests/unit/test_b.py ran", id="file skips whole"),
        pytest.param([OTHER, PASSED, FAILED], "failed: tests.unit.test_a::bad", id="failure"),
        pytest.param([], "only 0 tests ran; more than 1 must", id="nothing ran"),
        pytest.param(
            [PASSED, OTHER, SKIPPED_WITHOUT_REASON],
            "skipped without a reason: tests.unit.test_b::two",
            id="skip without a reason",
        ),
        pytest.param(
            [PASSED, OTHER, XFAILED_WITHOUT_REASON],
            "xfailed without a reason: tests.unit.test_b::two",
            id="xfail without a reason",
        ),
    ],
)
def test_run_that_only_looks_green_is_refused_by_name(tmp_path: Path, cases: list[str], fault: str) -> None:
    status, output = verify(tmp_path, *cases)

    assert status == 1
    assert f"verify: {fault}\n" in output


def test_missing_junit_file_is_refused(tmp_path: Path) -> None:
    status, output = run_script(tmp_path / "absent.xml", tmp_path)

    assert status == 1
    assert "absent.xml cannot be read" in output


def test_real_pytest_run_with_a_file_that_skips_whole_is_refused(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    tests.joinpath("test_ran.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    tests.joinpath("test_idle.py").write_text("import pytest\npytest.importorskip('no_such_module_here')\n")
    config = tmp_path / "pytest.ini"
    config.write_text("[pytest]\n")
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-c", str(config), "--junitxml=junit.xml", "tests"]
    subprocess.run(pytest_run, cwd=tmp_path, check=True, capture_output=True)

    status, output = run_script(tmp_path / "junit.xml", tests)

    assert status == 1
    assert "verify: no test of tests/test_idle.py ran\n" in output
    assert "test_ran.py" not in output


def verify(folder: Path, *cases: str) -> tuple[int, str]:
    """Exit status and output for these testcases, in a tree with two test files and one for a GPU."""
    for name in ("unit/test_a.py", "unit/test_b.py", "gpu/test_kernels.py"):
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    junit = folder / "junit.xml"
    junit.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return run_script(junit, folder / "tests")


def run_script(junit: Path, tests: Path) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), str(junit), "--tests", str(tests), "--more-than", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stderr == ""
    return result.returncode, result.stdout
