"""The memory of environments: kept by worker, whoever acts together."""

import numpy as np
import torch

from rlightning.ops.sequences import sequence_lengths
from rlightning.policy.episode_memory import EpisodeMemory, rows_by_worker
from rlightning.policy.joining import join_rows
from rlightning.types import EnvRet


def env_ret(env_id, rows):
    flags = np.zeros(rows, dtype=bool) if rows else False
    observation = np.zeros((rows, 1) if rows else 1, dtype=np.float32)
    return EnvRet(env_id, observation, flags * 1.0, flags, flags)


def joined(*workers):
    return join_rows([env_ret(*worker) for worker in workers]).to("cpu")


def test_joined_rows_say_whose_they_are():
    assert rows_by_worker(joined(("a-0", 2), ("b-0", None))) == (("a-0", 2), ("b-0", 1))
    assert rows_by_worker(env_ret("a-0", 3)) == (("a-0", 3),)


def test_workers_keep_their_memories_whichever_of_them_act_together():
    memory = EpisodeMemory(1)
    together = joined(("a", 2), ("b", 1))
    assert memory.recall(together)[0].tolist() == [[0.0], [0.0], [0.0]]
    memory.keep(together, torch.tensor([[1.0], [2.0], [3.0]]))
    memory.keep(joined(("b", 1)), torch.tensor([[30.0]]))
    vector, _ = memory.recall(joined(("b", 1), ("c", 1), ("a", 2)))
    assert vector.tolist() == [[30.0], [0.0], [1.0], [2.0]]


def test_step_numbers_count_per_row_and_never_meet():
    memory = EpisodeMemory(0)
    rows, steps = joined(("a", 2), ("b", 1)), []
    for _ in range(3):
        steps.append(memory.recall(rows)[1])
        memory.keep(rows, torch.zeros(3, 0))
    env_major = torch.stack(steps).T.flatten()
    assert sequence_lengths(env_major).tolist() == [3, 3, 3]
    assert len(set(env_major.tolist())) == 9


def test_what_was_saved_comes_back_and_later_steps_do_not_change_it():
    memory, rows = EpisodeMemory(1), joined(("a", 1))
    memory.keep(rows, torch.tensor([[5.0]]))
    saved = memory.state_dict()
    memory.keep(rows, torch.tensor([[6.0]]))
    memory.load_state_dict(saved)
    vector, step = memory.recall(rows)
    assert vector.item() == 5.0
    memory.load_state_dict({})
    fresh, first_step = memory.recall(rows)
    assert fresh.item() == 0.0
    assert step.item() == first_step.item() + 1
