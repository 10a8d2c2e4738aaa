"""What a rank does after a swap: captured steps must still read the memory where the weights are."""

from __future__ import annotations

import pytest
from update_fakes import FakeWeights

from gtp_serve.engine.rank_tasks import Answer, ChecksumNow, CommitNow, RankTasks, RollBackNow
from gtp_serve.errors import EngineFault
from gtp_serve.refit.orders import DiskOrder, StageOrder


def _moved() -> None:
    raise EngineFault("layer 3 has moved", code="moved-parameter")


@pytest.mark.parametrize("what", [CommitNow(update="u", version="2"), RollBackNow()])
def test_a_parameter_that_moved_in_a_swap_ends_the_rank_and_nothing_is_answered(
    what: CommitNow | RollBackNow,
) -> None:
    answers: list[Answer] = []
    weights = FakeWeights(1, lambda report: None, True)
    tasks = RankTasks(1, weights, report=lambda report: None, answer=answers.append, after_swap=_moved)
    weights.stage(
        StageOrder(update="u", version="2", order=DiskOrder(path="/x"), memory="staged", deadline_seconds=9.0)
    )
    with pytest.raises(EngineFault, match="layer 3 has moved"):
        tasks.ask(7, what)
    assert answers == []
    tasks.ask(8, ChecksumNow())  # asks nothing of captured steps
    assert [answer.call for answer in answers] == [8]
