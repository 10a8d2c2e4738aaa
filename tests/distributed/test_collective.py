"""A group's meeting place must outlive the group: torch goes back to it by its path when the group is destroyed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from gtp_serve.engine.collective import join_group
from gtp_serve.engine.ranks import Meeting

pytestmark = pytest.mark.distributed


def test_a_group_that_ends_late_touches_no_file_that_was_opened_since(tmp_path: Path) -> None:
    """The descriptor's number is free again once the leader has closed it, and the next file to be opened gets it."""
    descriptor = os.memfd_create("ranks")
    meeting = Meeting(descriptor=descriptor, rank=0, size=1, form_seconds=30, step_seconds=30)
    group = join_group(meeting, "cpu")
    os.close(descriptor)
    bystander = tmp_path / "weights"
    bystander.write_bytes(b"somebody's weights")

    with bystander.open("r+b") as file:
        assert file.fileno() == descriptor
        del group
        gc.collect()

    assert bystander.read_bytes() == b"somebody's weights"
