"""``gtp-serve doctor``: each thing that can be wrong with a machine is found and told what to do about."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gtp_serve.hardware import Gpu, Hardware, Memory, TorchBuild
from gtp_serve.server import cli, doctor
from gtp_serve.server.doctor import Finding

MACHINE = Hardware(
    cores=8,
    ram=Memory(total=64 << 30, available=32 << 30),
    cpu_flags=frozenset({"avx2", "avx512f"}),
    gpus=(),
    torch=TorchBuild(version="2.13.0", cuda=None),
)
GPU = Gpu(name="NVIDIA H200", memory=Memory(total=140 << 30, available=139 << 30))


def test_an_old_python_is_wrong() -> None:
    assert doctor.check_python((3, 10, 2)) == Finding("python", "wrong", "3.10.2", "needs 3.11 or newer")
    assert doctor.check_python((3, 12, 0)).state == "ok"


def test_missing_and_old_packages_are_named_and_extras_are_not_asked_for() -> None:
    needs = ["numpy>=1.26", "starlette>=0.46", "torch>=2.11", 'gguf>=0.17; extra == "demo"']
    have = {"numpy": "1.9.3", "torch": "2.13.0+cpu"}

    found = doctor.check_packages(needs, have.get)
    assert (found.state, found.text) == ("wrong", "numpy is 1.9.3, needed 1.26; starlette is missing")
    assert doctor.check_packages(needs, (have | {"numpy": "2.0", "starlette": "0.46"}).get).state == "ok"
    assert doctor.check_packages([], have.get).state == "note"


def test_devices_are_told_as_torch_can_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.check_devices(MACHINE) == Finding("device", "ok", "cpu, 8 cores, AVX-512")
    cuda = replace(MACHINE, torch=TorchBuild(version="2.13.0", cuda="13.0"))
    assert doctor.check_devices(cuda).state == "note"
    assert "NVIDIA H200 (140.0 GiB)" in doctor.check_devices(replace(cuda, gpus=(GPU,))).text
    assert doctor.check_devices(replace(MACHINE, torch=None)).state == "wrong"
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert "a build without CUDA" in doctor.check_devices(MACHINE).text


def test_too_little_memory_and_few_files_are_told() -> None:
    assert doctor.check_memory(MACHINE).state == "ok"
    little = replace(MACHINE, ram=Memory(total=8 << 30, available=100 << 20))
    assert doctor.check_memory(little).text == "100.0 MiB free of 8.0 GiB"
    assert doctor.check_memory(little).state == "wrong"
    assert [doctor.check_files(n).state for n in (256, 65536, resource.RLIM_INFINITY)] == ["note", "ok", "ok"]


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    assert doctor.check_folder(tmp_path).state == "ok"
    assert list(tmp_path.iterdir()) == []
    assert "cannot be written: No such file" in doctor.check_folder(tmp_path / "none").text


def test_a_port_in_use_is_wrong_and_says_by_whom() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = doctor.check_port("127.0.0.1", port)
    assert (found.state, found.text) == ("wrong", f"127.0.0.1:{port} is in use")
    assert f"--port {port + 1}" in found.do
    assert doctor.check_port("127.0.0.1", port).state == "ok"


def test_settings_that_the_server_would_refuse_are_wrong(tmp_path: Path) -> None:
    assert doctor.check_settings({}, tmp_path).text == "none outside the command line"
    assert doctor.check_settings({"GTP_SERVE_TP": "2"}, tmp_path).text == "1 set outside the command line"
    assert doctor.check_settings({"GTP_SERVE_TP": "0"}, tmp_path).state == "wrong"
    odd = doctor.check_settings({"GTP_SERVE_MAX_RUNING": "8", "GTP_SERVE_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    assert (odd.state, odd.text) == ("note", "GTP_SERVE_MAX_RUNING is no setting, GTP_SERVE_MAX_RUNNING is")
    (tmp_path / "gtp-serve.toml").write_text("prot = 1\n")
    assert doctor.check_settings({}, tmp_path).do == "nearest: port"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('undefined symbol: x')", "fails: ImportError: undefined symbol: x"),
        ("import os; os.kill(os.getpid(), 11)", "ended its process with signal 11"),
        ('print(\'{"sum": 7.0, "gpus": []}\')', "adds eight ones to"),
        ("pass", "fails: it said nothing"),
    ],
)
def test_a_torch_that_does_not_run_is_wrong(code: str, said: str) -> None:
    found = doctor.check_torch(MACHINE, [sys.executable, "-c", code])
    assert found.state == "wrong"
    assert said in found.text


def test_a_torch_that_runs_is_fine() -> None:
    good = 'print(\'{"sum": 8.0, "gpus": [8.0, 8.0]}\')'
    found = doctor.check_torch(MACHINE, [sys.executable, "-c", good])
    assert found.text.startswith("2.13.0 computes on the cpu and 2 GPUs")


def test_the_command_ends_with_1_when_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("python", "ok", "3.12"), Finding("port", "wrong", "taken", "another")]
    monkeypatch.setattr(doctor, "look", lambda *_: iter(findings))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "  ok  python      3.12\n  !!  port        taken\n                  another\n\n1 thing is wrong\n"
    )
    monkeypatch.setattr(doctor, "look", lambda *_: iter(findings[:1]))
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wrong"] == 0
    assert cli.main(["doctor", "--port", "70000"]) == 2
