"""The composition root: from a configuration to the parts of a run.

A local run and a cluster are built here from the same parts, which cannot tell which they are in.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from rlightning.cluster import current_cluster, open_cluster
from rlightning.config import Config, EnvConfig, resolve_extras
from rlightning.config.unused import unused_keys
from rlightning.errors import ConfigError
from rlightning.types import PolicyRole
from rlightning.utils.logger import get_logger
from rlightning.utils.registry import BUFFERS, ENGINE, ENVS, POLICIES, WEIGHTS
from rlightning.utils.seeding import derive_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.buffer import DataBuffer
    from rlightning.cluster import Cluster
    from rlightning.config import BufferConfig, ClusterConfig, MainConfig, PolicyConfig
    from rlightning.engine import BaseEngine
    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup

__all__ = [
    "build_data_buffer",
    "build_engine",
    "build_env_group",
    "build_policy_group",
    "check_config",
    "define_env_instance_cfgs",
    "open_cluster",
]

_log = get_logger("build")


def check_config(config: MainConfig) -> None:
    """Check every name and key of a run before anything is built; fill declared defaults.

    Raises:
        UnknownNameError: a policy, environment, buffer or engine does not exist.
        ConfigError: a key is declared by nobody, or a combination cannot work.
    """
    _engine_class(config)
    for env in config.env:
        kind = _env_class(env.backend)
        _resolve(env, kind, path="env")
        _check_evaluation(env, kind)
        if config.train.record_episodes:
            kind.check_frames("train.record_episodes")
    _resolve(config.buffer, _buffer_class(config.buffer.type), path="buffer")
    _resolve(config.policy, _policy_class(config.policy.type), path="policy")
    _resolve_train(config)
    _check_batch(config)
    _check_discount(config)
    _check_cluster(config)


def build_env_group(
    env_cfgs: EnvConfig | Sequence[EnvConfig], preprocess_fn: Any = None
) -> EnvGroup:
    """Return the group of all environment workers.

    Args:
        env_cfgs: one entry per kind of worker; `num_workers` of each are made.
        preprocess_fn: from a `PolicyResponse` to the action its environment takes: one function
            for all, or a list with one per entry.

    Raises:
        ValueError: a list of functions has another length than the entries.
    """
    from rlightning.env import EnvGroup
    from rlightning.env.task_spaces import task_names
    from rlightning.env.utils.utils import default_env_preprocess_fn

    entries: list[EnvConfig] = [env_cfgs] if isinstance(env_cfgs, EnvConfig) else list(env_cfgs)
    given = default_env_preprocess_fn if preprocess_fn is None else preprocess_fn
    functions = list(given) if isinstance(given, (list, tuple)) else [given] * len(entries)
    if len(functions) != len(entries):
        raise ConfigError(
            f"preprocess_fn has {len(functions)} functions for {len(entries)} env entries; give "
            "one per entry, or one function for all"
        )
    workers: list[EnvConfig] = []
    per_worker: list[Any] = []
    tasks: list[str] = []
    names = task_names([entry.name for entry in entries])
    for entry, function, task in zip(entries, functions, names, strict=True):
        _resolve(entry, _env_class(entry.backend), path="env")
        workers += define_env_instance_cfgs(entry, entry.num_workers)
        per_worker += [function] * entry.num_workers
        tasks += [task] * entry.num_workers
    cluster = current_cluster()
    make = cluster.make_env if cluster is not None and cluster.config.remote_env else None
    return EnvGroup(workers, per_worker, make=make, tasks=tasks)


def define_env_instance_cfgs(env_cfg: EnvConfig, num_workers: int = 1) -> list[EnvConfig]:
    """Return `num_workers` independent copies of a worker's configuration."""
    return [copy.deepcopy(env_cfg) for _ in range(num_workers)]


def build_policy_group(
    policy_cls: str,
    policy_cfg: PolicyConfig,
    cluster_cfg: ClusterConfig | None = None,
    backend: str = "nccl",
    is_colocated: bool = False,  # noqa: FBT001, FBT002  # the documented signature
) -> PolicyGroup:
    """Return the TRAIN and EVAL instances of a policy as one group.

    Args:
        policy_cls: a registered name, or ``"pkg.module:Name"``.
        policy_cfg: the ``policy`` section.
        cluster_cfg: the ``cluster`` section; None for a local run.
        backend: of collective communication on a cluster; unused in a local run.
        is_colocated: whether TRAIN and EVAL share a GPU on a cluster; unused in a local run.
    """
    from rlightning.policy import PolicyGroup

    del backend, is_colocated
    cluster = current_cluster()
    if cluster is None and cluster_cfg is not None and cluster_cfg.asks_for_workers:
        raise ConfigError(
            "`cluster:` asks for a distributed run, and no cluster is open: start the run with "
            "launch, or build and run its parts inside `with open_cluster(config):`"
        )
    kind = _policy_class(policy_cls)
    _resolve(policy_cfg, kind, path="policy")
    if policy_cfg.train_config is not None:
        resolve_extras(
            policy_cfg.train_config,
            [kind.TrainExtras],
            path="train",
            owner=kind.__name__,
            refuse_others=False,
        )
    return PolicyGroup(
        _policies(kind, policy_cfg, PolicyRole.TRAIN),
        _policies(kind, policy_cfg, PolicyRole.EVAL),
        policy_cfg,
        weight_buffer=_build_weight_buffer(policy_cfg),
    )


def _policies(kind: type[Any], policy_cfg: PolicyConfig, role: PolicyRole) -> list[Any]:
    """Return the instances of a role: one in this process, or workers of the cluster."""
    cluster = current_cluster()
    if cluster is None or not cluster.config.is_remote(role):
        return [kind(policy_cfg, role)]
    section = cluster.config
    count = section.train_worker_num if role is PolicyRole.TRAIN else section.eval_worker_num
    return [cluster.make_policy(kind, policy_cfg, role, index) for index in range(count)]


def _build_weight_buffer(policy_cfg: PolicyConfig) -> Any:
    weights, cluster = policy_cfg.weight_buffer, current_cluster()
    if weights.buffer_strategy == "None":
        return None
    kind = WEIGHTS.get(weights.type)
    if weights.buffer_strategy == "Sharded" and cluster is not None:
        return kind(cluster.config.train_worker_num if cluster.config.remote_train else 1)
    return kind()


def build_data_buffer(  # noqa: PLR0913  # the documented signature
    buffer_cls: str,
    buffer_cfg: BufferConfig,
    obs_preprocessor: Any = None,
    reward_preprocessor: Any = None,
    env_ret_preprocess_fn: Any = None,
    policy_resp_preprocess_fn: Any = None,
    preprocess_fn: Any = None,
    postprocess_fn: Any = None,
    *,
    seed: int | None = None,
) -> DataBuffer:
    """Return the buffer; None leaves a stage of its pipeline as it is, see `DataBuffer`.

    Args:
        buffer_cls: a registered name, or ``"pkg.module:Name"``.
        buffer_cfg: the ``buffer`` section.
        obs_preprocessor: from an observation to what is stored.
        reward_preprocessor: from a reward to what is stored.
        env_ret_preprocess_fn: writes what is stored of an `EnvRet`.
        policy_resp_preprocess_fn: writes what is stored of a `PolicyResponse`.
        preprocess_fn: writes a row; calls the four above.
        postprocess_fn: from the rows of an episode to transitions.
        seed: seeds the sampler.
    """
    given = {
        "obs_preprocessor": obs_preprocessor,
        "reward_preprocessor": reward_preprocessor,
        "env_ret_preprocess_fn": env_ret_preprocess_fn,
        "policy_resp_preprocess_fn": policy_resp_preprocess_fn,
        "preprocess_fn": preprocess_fn,
        "postprocess_fn": postprocess_fn,
    }
    stages = {name: stage for name, stage in given.items() if stage is not None}
    kind = _buffer_class(buffer_cls)
    _resolve(buffer_cfg, kind, path="buffer")
    cluster = current_cluster()
    if cluster is None and buffer_cfg.storage.type == "sharded":
        _log.info(
            "buffer.storage.type: sharded is one storage per buffer worker of a cluster; this run "
            "has one worker, and so one storage, as with unified"
        )
    if cluster is not None and cluster.config.remote_storage:
        return _storage_workers(cluster, kind, buffer_cfg, seed, stages)  # type: ignore[no-any-return]  # has its surface
    buffer: DataBuffer = kind(buffer_cfg, seed=seed, **stages)
    return buffer


def _storage_workers(
    cluster: Cluster, kind: type[Any], buffer_cfg: BufferConfig, seed: int | None, stages: Any
) -> Any:
    """Return the storage of a cluster: one worker, or several that share the rows."""
    from rlightning.buffer.sharded_buffer import ShardedBuffer

    count = len(cluster.plan.of("buffer"))
    if count == 1:
        return cluster.make_buffer(kind, buffer_cfg, seed, stages)
    if buffer_cfg.storage.type != "sharded" or buffer_cfg.get("prioritized"):
        raise ConfigError(
            f"{count} storage workers (cluster.buffer_worker_num) divide the rows among them, which"
            " needs buffer.storage.type: sharded, and buffer.prioritized: false"
        )
    share = buffer_cfg.model_copy(update={"capacity": buffer_cfg.capacity // count})
    seeds = [seed if seed is None else derive_seed(seed, "buffer", index) for index in range(count)]
    shards = [
        cluster.make_buffer(kind, share, own_seed, stages, index)
        for index, own_seed in enumerate(seeds)
    ]
    return ShardedBuffer(shards, capacity=buffer_cfg.capacity)


def build_engine(
    config: MainConfig,
    env_group: EnvGroup,
    policy_group: PolicyGroup,
    buffer: DataBuffer | None = None,
) -> BaseEngine:
    """Return the training loop that ``config.engine`` names, ready to run."""
    kind = _engine_class(config)
    _resolve_train(config)
    unused = unused_keys(
        config,
        policy=POLICIES.get(config.policy.type),
        buffer=BUFFERS.get(config.buffer.type),
        envs=[ENVS.get(entry.backend) for entry in config.env],
    )
    for sentence in unused:
        _log.warning("%s", sentence)
    engine: BaseEngine = kind(config, env_group, policy_group, buffer)
    return engine


def _policy_class(name: str) -> type[Any]:
    from rlightning.policy import BasePolicy

    return _checked(POLICIES.get(name), BasePolicy, f"policy {name!r}")


def _env_class(name: str) -> type[Any]:
    from rlightning.env import BaseEnv

    return _checked(ENVS.get(name), BaseEnv, f"backend {name!r}")


def _buffer_class(name: str) -> type[Any]:
    from rlightning.buffer import DataBuffer

    return _checked(BUFFERS.get(name), DataBuffer, f"buffer {name!r}")


def _engine_class(config: MainConfig) -> type[Any]:
    from rlightning.engine import BaseEngine

    if config.engine is None:
        raise ConfigError(f"`engine` is not set; choose one of {', '.join(ENGINE.names())}")
    return _checked(ENGINE.get(config.engine), BaseEngine, f"engine {config.engine!r}")


def _checked(kind: type[Any], base: type[Any], name: str) -> type[Any]:
    if not issubclass(kind, base):
        raise ConfigError(f"{name} is {kind!r}; expected a subclass of {base.__name__}")
    return kind


def _resolve_train(config: MainConfig) -> None:
    kinds = [POLICIES.get(config.policy.type), _engine_class(config)]
    resolve_extras(
        config.train,
        [getattr(kind, "TrainExtras", Config) for kind in kinds],
        path="train",
        owner=" and ".join(f"{kind.__name__}.TrainExtras" for kind in kinds),
    )


def _check_batch(config: MainConfig) -> None:
    """Refuse a batch that never fills: some engines would wait for it, others never learn."""
    sampler, capacity = config.buffer.sampler, config.buffer.capacity
    kind = sampler.type if sampler else BUFFERS.get(config.buffer.type).default_sampler
    if kind != "all" and config.train.batch_size > capacity:
        raise ConfigError(
            f"train.batch_size is {config.train.batch_size} and buffer.capacity is {capacity}: a "
            "batch never fills. Raise buffer.capacity or lower train.batch_size"
        )


def _check_discount(config: MainConfig) -> None:
    """Refuse two discounts where buffer and policy both compute returns."""
    buffer, train = config.buffer.get("gamma"), config.train.get("gamma")
    estimates = config.buffer.get("gae_lambda") is not None  # a replay's matters to n-step only
    if estimates and None not in (buffer, train) and buffer != train:
        raise ConfigError(
            f"buffer.gamma is {buffer} and train.gamma is {train}: {config.policy.type} learns one "
            "value function. Write train.gamma: ${buffer.gamma}"
        )


def _check_cluster(config: MainConfig) -> None:
    """Refuse several workers of a kind where they would have to live in this process."""
    section = config.cluster
    if section is None:
        return
    if section.enable_offload and config.engine in ("asyncrl", "async_rsl"):
        raise ConfigError(
            f"cluster.enable_offload lets actors and learners take turns on a device; engine "
            f"{config.engine} lets them work at the same time. Set one or the other"
        )
    for role, count in (("train", section.train_worker_num), ("eval", section.eval_worker_num)):
        if count > 1 and not section.is_remote(role):
            raise ConfigError(
                f"cluster.{role}_worker_num is {count}, and cluster.remote_{role} is false: this "
                f"process holds one. Set remote_{role}: true, or {role}_worker_num: 1"
            )


def _check_evaluation(env: EnvConfig, kind: type[Any]) -> None:
    """Refuse what ``evaluate_cfg`` says before a run has trained up to its first evaluation."""
    from rlightning.env.env_group import evaluation_config

    if env.evaluate_cfg is None:
        return
    try:
        section = EnvConfig.from_dict(evaluation_config(env).to_dict())
        _resolve(section, kind, path="env.evaluate_cfg")
    except ConfigError as error:
        raise ConfigError(f"evaluate_cfg of env {env.name!r}: {error}") from error


def _resolve(section: Any, kind: type[Any], *, path: str) -> None:
    resolve_extras(
        section, [getattr(kind, "Extras", Config)], path=path, owner=f"{kind.__name__}.Extras"
    )
