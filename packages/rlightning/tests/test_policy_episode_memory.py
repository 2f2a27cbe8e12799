"""What a policy remembers of environments that are away for a while, or lost."""

import numpy as np
import torch

from rlightning.policy.episode_memory import EpisodeMemory
from rlightning.types import EnvRet


def seen(**info):
    no = torch.zeros(2, dtype=torch.bool)
    return EnvRet("e-0", torch.zeros(2, 1), torch.zeros(2), no, no, info)


def test_an_idle_row_is_remembered_as_it_was():
    memory = EpisodeMemory(1)
    memory.keep(seen(), torch.tensor([[1.0], [2.0]]))
    before, steps = memory.recall(seen())
    memory.keep(seen(_idle=np.array([True, False])), torch.tensor([[5.0], [6.0]]))
    after, later = memory.recall(seen())
    assert after.tolist() == [[1.0], [6.0]]
    assert (later - steps).tolist() == [0, 1]
    assert before.tolist() == [[1.0], [2.0]]


def test_a_lost_episode_is_forgotten_in_its_row_alone():
    memory = EpisodeMemory(1)
    memory.keep(seen(), torch.tensor([[1.0], [2.0]]))
    vector, _ = memory.recall(seen(_lost=torch.tensor([False, True])))
    assert vector.tolist() == [[1.0], [0.0]]
