"""A buffer that lives elsewhere: rows go ahead, and what is wrong with one is told later."""

import numpy as np
import pytest

from rlightning.buffer import ReplayBuffer
from rlightning.buffer.buffer_proxy import BufferProxy
from rlightning.config import BufferConfig
from rlightning.runtime.base import WorkerSpec
from rlightning.testing import LocalRuntime
from rlightning.types import BatchedData, EnvRet, PolicyResponse


class Picky:
    """Refuses every row, and can be saved all the same."""

    def __init__(self, config, *, seed, **stages):
        self.rows = 0

    def add_batched_transition(self, env_rets, responses, truncations=None, *, is_eval=False):
        self.rows += 1
        raise ZeroDivisionError(f"row {self.rows} is odd")

    def size(self):
        return 0

    def state_dict(self):
        return {"rows": self.rows}


def elsewhere(kind, **changes):
    def spawn(make, args):
        return LocalRuntime().spawn(WorkerSpec(name="buffer-0", make=make, args=args))

    config = BufferConfig.from_dict({"type": "ReplayBuffer", "capacity": 4, **changes})
    return BufferProxy(kind, config, 0, {}, spawn)


@pytest.fixture
def buffer():
    return elsewhere(Picky)


def add(buffer):
    env_ret = EnvRet("e-0", np.zeros(3, np.float32))
    response = PolicyResponse("e-0", action=np.zeros(1, np.int64))
    buffer.add_batched_transition(
        BatchedData(["e-0"], [env_ret]), BatchedData(["e-0"], [response]), [False]
    )


def test_a_row_that_fails_is_told_by_a_later_call_and_what_there_is_can_be_saved(buffer):
    for _ in range(3):
        add(buffer)
    assert buffer.state_dict() == {"rows": 3}
    with pytest.raises(ZeroDivisionError, match="row 1 is odd"):
        buffer.size()
    assert buffer.state_dict() == {"rows": 3}, "although two more are odd"


def test_not_more_than_a_few_rows_go_ahead(buffer):
    for _ in range(16):
        add(buffer)
    with pytest.raises(ZeroDivisionError, match="row 1 is odd"):
        add(buffer)
    assert buffer.state_dict() == {"rows": 16}


@pytest.mark.parametrize(("unit", "needs"), [("transition", False), ("episode", True)])
def test_whether_a_rollout_ends_with_an_answer_is_read_of_the_buffer_that_is_there(unit, needs):
    buffer = elsewhere(ReplayBuffer, storage={"unit": unit})
    assert buffer.needs_bootstrap_response is needs
