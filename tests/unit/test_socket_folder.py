"""The folder of the engine's socket: what a killed server left is removed by the next one, and nothing else."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from gtp_serve.engine.socket_folder import SOCKET, SocketFolder
from gtp_serve.errors import EnvironmentFault


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def abandon(folder: SocketFolder) -> None:
    """As a kill does: the lock goes, the files stay."""
    (folder.path / SOCKET).touch()
    os.close(folder._lock)
    folder._lock = -1


def test_it_is_its_owners_only_and_gone_after_remove(own_place: Path) -> None:
    folder = SocketFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert list(own_place.iterdir()) == []


def test_what_a_killed_server_left_goes_with_the_next_start_and_a_live_ones_stays(own_place: Path) -> None:
    left, live = SocketFolder(), SocketFolder()
    abandon(left)
    new = SocketFolder()
    assert sorted(own_place.iterdir()) == sorted([live.path, new.path])
    live.remove()
    new.remove()


def test_a_folder_that_has_no_lock_yet_is_left_alone_for_a_while(own_place: Path) -> None:
    fresh = own_place / "gtp-serve-ipc_fresh"
    fresh.mkdir()
    SocketFolder().remove()
    assert fresh.is_dir()
    long_ago = time.time() - 3600
    os.utime(fresh, (long_ago, long_ago))
    SocketFolder().remove()
    assert not fresh.exists()


def test_nothing_is_removed_that_was_not_made_here(own_place: Path) -> None:
    other = own_place / "gtp-serve-ipc_notes"
    other.mkdir()
    (other / "lock").touch()
    (other / "notes").write_text("mine", encoding="utf-8")
    SocketFolder().remove()
    assert (other / "notes").read_text(encoding="utf-8") == "mine"


def test_no_place_for_it_is_told(monkeypatch: pytest.MonkeyPatch, own_place: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(own_place / "missing"))
    with pytest.raises(EnvironmentFault, match="no folder for the engine's socket"):
        SocketFolder()
