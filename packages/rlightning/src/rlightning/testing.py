"""Check your own environments, policies, buffers and engines against the contracts.

Each ``check_*`` function raises `ContractError` with a sentence that says what was found and what
was expected; it passes silently otherwise. The built-in classes go through the same checks in this
project's own tests. `TargetEnv` is a tiny environment that any working algorithm learns in seconds.
`LocalRuntime` stands for a cluster where a test wants workers without one.
"""

from __future__ import annotations

import copy
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any, final

import gymnasium as gym
import numpy as np
import torch

from rlightning.build import build_data_buffer, build_engine, build_env_group, build_policy_group
from rlightning.config import EnvConfig, MainConfig
from rlightning.errors import ContractError, WorkerLostError
from rlightning.models.action_mask import MASK, has_action_mask
from rlightning.policy.policy_group import PolicyGroup
from rlightning.runtime.base import Done, Failed, Future, Handle, Runtime
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse, PolicyRole, to_numpy
from rlightning.utils.registry import ENVS

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.buffer import DataBuffer
    from rlightning.config import PolicyConfig
    from rlightning.env import BaseEnv
    from rlightning.policy import BasePolicy
    from rlightning.runtime.base import WorkerSpec

__all__ = [
    "LocalRuntime",
    "TargetEnv",
    "check_buffer",
    "check_engine",
    "check_env",
    "check_policy",
    "random_env_ret",
    "random_response",
]


def _expect(condition: bool, message: str) -> None:  # noqa: FBT001  # reads as a sentence
    if not condition:
        raise ContractError(message)


# ---- environments ------------------------------------------------------------------------------


class TargetEnv(gym.Env[np.ndarray[Any, Any], Any]):
    """Shows a target; the reward is how close the action comes. Episodes of ten steps.

    Discrete: one of three targets, one-hot; reward 1 for naming it. Continuous: a number in
    [-1, 1]; reward minus the squared distance. The best return is 10, or 0.
    """

    LENGTH = 10

    def __init__(self, *, continuous: bool = False) -> None:
        self._continuous = continuous
        size = 1 if continuous else 3
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = (
            gym.spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else gym.spaces.Discrete(size)
        )
        self._steps = 0
        self._target = np.zeros(size, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        self._steps = 0
        return self._draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        """Score the action and show the next target."""
        if self._continuous:
            reward = -float(np.square(np.asarray(action)[0] - self._target[0]))
        else:
            reward = float(self._target[int(action)] == 1.0)
        self._steps += 1
        return self._draw(), reward, False, self._steps >= self.LENGTH, {}

    def _draw(self) -> np.ndarray[Any, Any]:
        if self._continuous:
            self._target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        else:
            self._target = np.eye(3, dtype=np.float32)[self.np_random.integers(3)]
        return self._target.copy()


def check_env(env: BaseEnv | EnvConfig, *, steps: int = 300, seed: int = 0) -> None:
    """Check an environment worker against what policies and buffers rely on.

    Checks types and ids, that observations lie in the space, shapes of rewards and flags, that
    episodes which end hand over their last observation and go on by themselves, and that the same
    seed gives the same first observation.

    Args:
        env: the worker, or its configuration; closed afterwards.
        steps: random steps to take.
        seed: of the environment and the random actions.
    """
    worker: BaseEnv = (
        ENVS.get(env.backend)(env, worker_index=0) if isinstance(env, EnvConfig) else env
    )
    try:
        _check_worker(worker, steps=steps, seed=seed)
    finally:
        worker.close()


def _check_worker(env: BaseEnv, *, steps: int, seed: int) -> None:
    meta = env.init()
    _check_meta(env, meta)
    first = env._reset(seed=seed)
    again = env._reset(seed=seed)
    _expect(
        _equal(first.observation, again.observation),
        "reset with the same seed twice gave two different first observations",
    )
    _check_ret(env, meta, again)
    meta.action_space.seed(seed)
    ret = again
    lengths = np.zeros(meta.num_envs or 1, dtype=int)
    for _ in range(steps):
        action = _random_actions(meta, ret.observation)
        ret = env._step(PolicyResponse(env.env_id, action=action))
        _check_ret(env, meta, ret)
        ended = np.atleast_1d(to_numpy(ret.last_terminated) | to_numpy(ret.last_truncated))
        lengths = np.where(ended, 0, lengths + 1)
        _check_final(meta, ret, ended)


def _check_meta(env: BaseEnv, meta: EnvMeta) -> None:
    _expect(
        isinstance(meta, EnvMeta), f"init returned a {type(meta).__name__}; expected an EnvMeta"
    )
    for name in ("observation_space", "action_space"):
        space = getattr(meta, name)
        _expect(
            isinstance(space, gym.Space),
            f"{name} is a {type(space).__name__}; expected a gymnasium.Space of ONE environment",
        )
    _expect(
        (meta.num_envs or 1) == env.num_envs,
        f"EnvMeta.num_envs is {meta.num_envs}; the worker has {env.num_envs} rows",
    )


def _check_ret(env: BaseEnv, meta: EnvMeta, ret: Any) -> None:
    _expect(
        isinstance(ret, EnvRet),
        f"reset or step returned a {type(ret).__name__}; expected an EnvRet",
    )
    _expect(
        ret.env_id == env.env_id, f"env_id is {ret.env_id!r}; expected the worker's {env.env_id!r}"
    )
    rows = meta.num_envs or 1
    shape = () if rows == 1 else (rows,)
    for name in ("last_reward", "last_terminated", "last_truncated"):
        found = np.shape(to_numpy(getattr(ret, name)))
        _expect(found == shape, f"{name} has shape {found}; expected {shape} for {rows} rows")
    for name in ("last_terminated", "last_truncated"):
        kind = np.asarray(to_numpy(getattr(ret, name))).dtype
        _expect(kind.kind == "b", f"{name} has dtype {kind}; expected bool")
    for row in range(rows):
        observation = (
            _row(to_numpy(ret.observation), row) if rows > 1 else to_numpy(ret.observation)
        )
        _expect(
            meta.observation_space.contains(observation),
            f"row {row}'s observation is not in {meta.observation_space}: it is {observation!r}",
        )


def _check_final(meta: EnvMeta, ret: EnvRet, ended: np.ndarray[Any, Any]) -> None:
    mask = np.atleast_1d(to_numpy(ret.info.get("_final_obs", np.zeros_like(ended))))
    _expect(
        bool((mask == ended).all()),
        f"episodes ended in rows {np.flatnonzero(ended).tolist()}, but info['_final_obs'] marks "
        f"{np.flatnonzero(mask).tolist()}: hand over each finished episode's last observation",
    )
    for row in np.flatnonzero(ended):
        final = to_numpy(ret.info["final_obs"])
        final = _row(final, row) if (meta.num_envs or 1) > 1 else final
        _expect(
            meta.observation_space.contains(final),
            f"info['final_obs'] of row {row} is not in {meta.observation_space}: {final!r}",
        )


# ---- policies ----------------------------------------------------------------------------------


def random_env_ret(meta: EnvMeta, *, seed: int = 0) -> EnvRet:
    """Return an `EnvRet` with a random observation of `meta`'s space in every row."""
    meta.observation_space.seed(seed)
    rows = meta.num_envs or 1
    observation = _stack_samples(meta.observation_space, rows)
    shape = () if rows == 1 else (rows,)
    no = np.zeros(shape, dtype=bool)
    return EnvRet(meta.env_id or "check-0", observation, np.zeros(shape, np.float32), no, no.copy())


def random_response(meta: EnvMeta, env_id: str, **fields: Any) -> PolicyResponse:
    """Return a `PolicyResponse` with a random action in every row, and further `fields`."""
    return PolicyResponse(
        env_id, action=_stack_samples(meta.action_space, meta.num_envs or 1), **fields
    )


def check_policy(policy_class: type[BasePolicy], config: PolicyConfig, meta: EnvMeta) -> None:
    """Check a policy class against what environments, buffers and checkpoints rely on.

    Checks that TRAIN and EVAL instances build, that actions fit the action space, that weights and
    everything else in the policy's state reach an EVAL instance and survive a checkpoint, and that
    acting is possible again after an error.

    Args:
        policy_class: the class.
        config: its ``policy`` section, with ``train_config`` set.
        meta: spaces and rows of an environment worker.
    """
    train = policy_class(copy.deepcopy(config), PolicyRole.TRAIN)
    train.init_train(config.train_config, env_meta=meta)
    actor = policy_class(copy.deepcopy(config), PolicyRole.EVAL)
    actor.init_eval(env_meta=meta)
    actor.import_weights(0, train.export_weights())
    _check_same_state(train, actor, "after a weight sync")
    group = PolicyGroup([train], [actor], config)
    env_ret = random_env_ret(meta)
    response = group.rollout_batch(BatchedData([env_ret.env_id], [env_ret])).values()[0]
    _check_action(meta, response)
    for parameter in train.parameters():
        if parameter.is_floating_point():
            with torch.no_grad():
                parameter.add_(0.25)
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "policy.pt")
        train.save_checkpoint(path)
        actor.load_checkpoint(path)
    _check_same_state(train, actor, "after save_checkpoint and load_checkpoint")
    train.import_training_state(train.export_training_state())


def _check_same_state(train: BasePolicy, actor: BasePolicy, when: str) -> None:
    want, have = train.get_param_fingerprint(), actor.get_param_fingerprint()
    _expect(
        want.keys() == have.keys(),
        f"{when}, TRAIN has the tensors {sorted(want)} and EVAL has {sorted(have)}",
    )
    different = [name for name in want if want[name] != have[name]]
    _expect(not different, f"{when}, EVAL differs from TRAIN in {different}")


def _check_action(meta: EnvMeta, response: PolicyResponse) -> None:
    rows = meta.num_envs or 1
    expected = tuple(meta.action_space.shape or ())
    found = tuple(np.shape(to_numpy(response.action)))
    allowed = [(rows, *expected)] if rows > 1 else [expected, (1, *expected)]
    _expect(found in allowed, f"the action has shape {found}; expected {allowed[-1]}")


# ---- buffers and engines -----------------------------------------------------------------------


def check_buffer(make_buffer: Callable[[], DataBuffer]) -> None:
    """Check that transitions come out of a buffer as they went in.

    Two rows are stepped six times with numbered observations; one episode terminates and one is
    truncated on the way. Every transition that can be sampled must join an observation with the
    action, reward and next observation that belong to it.

    Args:
        make_buffer: returns an empty buffer with a capacity of 64 or more.
    """
    buffer = make_buffer()
    meta = EnvMeta("check-0", gym.spaces.Discrete(100), gym.spaces.Box(-1e6, 1e6, (1,)), 2)
    buffer.init([meta], ["check-0"])
    steps = 6
    for step in range(steps + 1):
        observation = np.array([[10.0 * step], [10.0 * step + 1000]], np.float32)
        terminated, truncated = np.array([step == 2, False]), np.array([False, step == 4])
        info: dict[str, Any] = {}
        if terminated.any() or truncated.any():
            info = {"_final_obs": terminated | truncated, "final_obs": observation - 1}
        reward = observation[:, 0] / 10
        env_ret = EnvRet("check-0", observation, reward, terminated, truncated, info)
        response = PolicyResponse("check-0", action=np.array([step, step + 50]), tag=observation)
        buffer.add_transition("check-0", env_ret, response, step == steps)
    data = buffer.get_all()
    _expect(
        len(data) == 2 * steps,
        f"{2 * steps} transitions went in, {len(data)} came out",
    )
    for index in range(len(data)):
        row = data[index]
        now, action = float(row["observation"]), int(row["action"])
        second = now >= 1000
        step = round((now - 1000 * second) / 10)
        ended = (step + 1 == 2 and not second) or (step + 1 == 4 and second)
        _expect(
            action == step + 50 * second and float(row["tag"]) == now,
            f"observation {now} came out with action {action} and tag {float(row['tag'])}",
        )
        _expect(
            float(row["reward"]) == (now + 10) / 10,
            f"observation {now} came out with reward {float(row['reward'])}, another step's",
        )
        _expect(
            float(row["next_observation"]) == now + 10 - ended,
            f"observation {now} came out with next observation {float(row['next_observation'])}; "
            f"expected {now + 10 - ended}: an episode's end keeps its own last observation",
        )
        flags = bool(row["terminated"]), bool(row["truncated"])
        _expect(
            flags == (ended and not second, ended and second),
            f"observation {now} came out with terminated, truncated = {flags}",
        )
    buffer.clear()
    _expect(buffer.size() == 0, f"after clear the buffer holds {buffer.size()} transitions")


def check_engine(config: MainConfig) -> None:
    """Check that an engine runs a configuration to its end, saves, and can be resumed from that.

    Args:
        config: a short run; its folders are replaced by temporary ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = config.model_copy(deep=True)
        config.attach_run(None)
        config.log.log_dir, config.train.save_dir = folder, None
        engine = build_engine(
            config,
            build_env_group(config.env),
            build_policy_group(config.policy.type, config.policy),
            build_data_buffer(config.buffer.type, config.buffer),
        )
        engine.run()
        epochs = config.train.max_epochs
        _expect(
            engine.epoch == epochs,
            f"the engine counts {engine.epoch} epochs; train.max_epochs is {epochs}",
        )
        last = engine.run_context.checkpoint_dir / "epoch_last"
        _expect((last / "manifest.json").is_file(), "the engine left no checkpoint epoch_last")


# ---- helpers -----------------------------------------------------------------------------------


def _random_actions(meta: EnvMeta, observation: Any) -> Any:
    """Draw an action per row; of a row's own, where the observation holds a mask of them."""
    space, rows = meta.action_space, meta.num_envs or 1
    if has_action_mask(meta.observation_space, space) and isinstance(space, gym.spaces.Discrete):
        masks = np.asarray(to_numpy(observation[MASK]), dtype=np.int8).reshape(rows, -1)
        actions = np.array([space.sample(mask=mask) for mask in masks])
        return actions if rows > 1 else actions[0]
    return _stack_samples(space, rows)


def _stack_samples(space: Any, rows: int) -> Any:
    samples = [space.sample() for _ in range(rows)]
    if rows == 1:
        return samples[0] if not np.isscalar(samples[0]) else np.asarray(samples[0])
    batched: Any = gym.vector.utils.create_empty_array(space, rows)
    return gym.vector.utils.concatenate(space, samples, batched)


def _row(value: Any, row: Any) -> Any:
    if isinstance(value, dict):
        return {key: _row(item, row) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_row(item, row) for item in value)
    return value[row]


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[k], second[k]) for k in first)
    if isinstance(first, tuple):
        return all(_equal(a, b) for a, b in zip(first, second, strict=True))
    return bool(np.array_equal(to_numpy(first), to_numpy(second)))


# ---- workers -----------------------------------------------------------------------------------


@final
class LocalRuntime(Runtime):
    """Workers that are objects of this process; calls are carried out at once, for any time."""

    def __init__(self) -> None:
        self._handles: list[_LocalHandle] = []

    def spawn(self, spec: WorkerSpec) -> Handle:
        """Make the worker's object here."""
        handle = _LocalHandle(spec.name, spec.make(*spec.args))
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """Forget all workers."""
        for handle in self._handles:
            handle.stop()
        self._handles.clear()


@final
class _LocalHandle(Handle):
    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self._target = target

    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        del timeout_s
        if self._target is None:
            return Failed(WorkerLostError(self.name, reason="it was stopped"))
        try:
            return Done(getattr(self._target, method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # raised where the answer is asked for
            return Failed(error)

    def stop(self) -> None:
        self._target = None
