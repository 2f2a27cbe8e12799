"""Coroutine policies: inference mode for each of several interleaved steps, and nowhere else."""

import asyncio
import gc
import threading

import numpy as np
import pytest
import torch
from torch import nn

from rlightning.config import PolicyConfig
from rlightning.errors import ContractError
from rlightning.policy import BasePolicy, PolicyGroup
from rlightning.policy.answering import Answerer
from rlightning.policy.inference import InferenceModeAwaitable
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse


class Acting(BasePolicy):
    def construct_network(self, env_meta, *args, **kwargs):
        self.actor = nn.Linear(1, 1)
        self.order = []
        self.modes = []

    def setup_optimizer(self, optim_cfg): ...
    def postprocess(self, env_ret=None, policy_resp=None): ...
    def update_dataset(self, data): ...
    def train(self, *args, **kwargs): ...

    async def rollout_step(self, env_ret, **kwargs):
        for stage in range(3):
            self.order.append((env_ret.env_id, stage))
            self.modes.append(torch.is_inference_mode_enabled())
            assert not torch.is_grad_enabled()
            await asyncio.sleep(0)
        if env_ret.observation < 0:
            raise OSError("bad observation")
        return PolicyResponse(env_ret.env_id, action=self.actor(env_ret.observation.view(1, 1)))


def group_of(kind, mode="async"):
    config = PolicyConfig.from_dict({"type": "P", "rollout_mode": mode})
    group = PolicyGroup([], [kind(config, "eval")], config)
    group.init_eval(env_meta=EnvMeta())
    return group


def batch(*values):
    ids = [f"e-{index}" for index in range(len(values))]
    rets = [EnvRet(env_id, np.float32(v)) for env_id, v in zip(ids, values, strict=True)]
    return BatchedData(ids, rets)


def test_interleaved_steps_each_run_in_inference_mode():
    group = group_of(Acting)
    responses = group.rollout_batch(batch(1, 2))
    policy = group.eval_list[0]
    assert policy.order == [(env_id, stage) for stage in range(3) for env_id in ("e-0", "e-1")]
    assert policy.modes == [True] * 6
    assert responses.ids() == ("e-0", "e-1")
    assert not responses["e-1"].action.requires_grad
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_the_mode_is_off_while_the_coroutine_waits():
    between = []

    async def step():
        await asyncio.sleep(0)
        return torch.is_inference_mode_enabled()

    async def other():
        between.append(torch.is_inference_mode_enabled())

    async def run():
        async def awaited():
            return await InferenceModeAwaitable(step())

        return await asyncio.gather(awaited(), other())

    assert asyncio.run(run()) == [True, None]
    assert between == [False]


def test_a_step_that_raises_leaves_the_policy_usable():
    group = group_of(Acting)
    with pytest.raises(OSError, match="bad observation"):
        group.rollout_batch(batch(-1, 1, -1))
    steps = len(group.eval_list[0].order)
    assert not torch.is_inference_mode_enabled()
    assert len(group.rollout_batch(batch(1, 2))) == 2
    assert len(group.eval_list[0].order) == steps + 6, "a step of the failed batch went on"


def test_an_exception_thrown_into_a_waiting_step_reaches_it():
    seen = []

    async def step():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(torch.is_inference_mode_enabled())
            raise

    async def run():
        async def awaited():
            await InferenceModeAwaitable(step())

        task = asyncio.create_task(awaited())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert seen == [True]


def test_a_plain_function_in_async_mode_says_what_to_do():
    class Plain(Acting):
        def rollout_step(self, env_ret, **kwargs):
            return PolicyResponse(env_ret.env_id, action=1)

    with pytest.raises(ContractError, match=r"Plain\.rollout_step is no coroutine function"):
        group_of(Plain).rollout_batch(batch(1))


def test_a_coroutine_function_in_sync_mode_says_what_to_do():
    with pytest.raises(ContractError, match=r"rollout_step is a coroutine.*rollout_mode: async"):
        group_of(Acting, mode="sync").rollout_batch(batch(1))


class Slow(Acting):
    """Notes the version of its weights, and a weight itself, at every stage of a step."""

    def construct_network(self, env_meta, *args, **kwargs):
        super().construct_network(env_meta)
        self.seen = []
        self.inside = threading.Event()

    async def rollout_step(self, env_ret, **kwargs):
        stages = []
        for _ in range(5):
            stages.append((self.weights_version, float(self.actor.weight[0, 0])))
            self.inside.set()
            await asyncio.sleep(0.01)
        self.seen.append(stages)
        return PolicyResponse(env_ret.env_id, action=self.actor(env_ret.observation.view(1, 1)))


def test_weights_are_imported_between_steps_and_never_while_one_waits():
    group = group_of(Slow)
    policy = group.eval_list[0]
    payload = policy.export_weights()
    (before,) = {float(policy.actor.weight.detach()[0, 0])}
    payload["weights"]["actor"]["weight"] = torch.full((1, 1), before + 1)

    def learner():
        assert policy.inside.wait(10)
        policy.import_weights(7, payload)

    thread = threading.Thread(target=learner)
    thread.start()
    group.rollout_batch(batch(1, 2, 3))
    thread.join(10)
    assert not thread.is_alive()
    assert policy.seen == [[(-1, before)] * 5] * 3
    group.rollout_batch(batch(1))
    assert policy.seen[-1] == [(7, before + 1)] * 5


def test_what_binds_to_the_event_loop_works_in_every_step():
    class Limited(Acting):
        def construct_network(self, env_meta, *args, **kwargs):
            super().construct_network(env_meta, *args, **kwargs)
            self.slots = asyncio.Semaphore(1)

        async def rollout_step(self, env_ret, **kwargs):
            async with self.slots:
                return await super().rollout_step(env_ret, **kwargs)

    group = group_of(Limited)
    for _ in range(2):
        assert len(group.rollout_batch(batch(1, 2, 3))) == 3


def test_an_answerer_that_is_collected_while_another_loop_runs_closes_its_own():
    async def run():
        await asyncio.sleep(0)
        answerers.clear()
        gc.collect()

    answerers = [Answerer(group_of(Acting).eval_list[0])]
    answerers[0].answer(list(batch(1).values()))
    loop = answerers[0]._event_loop().get_loop()
    asyncio.run(run())
    assert loop.is_closed()
