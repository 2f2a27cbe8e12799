"""Keys that a configuration sets and that its run would not read: each said once, at the start.

What a section's models refuse never comes here; this is about keys that go with something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlightning.config.base import Config
    from rlightning.config.schema import MainConfig

__all__ = ["unused_keys"]

_FOR_POLICIES_THAT_READ_THEM = {
    "lr": "set policy.optim_cfg.lr",
    "mini_batch_size": "set train.minibatch_size",
    "minibatch_size": "it takes whole batches",
    "micro_batch_size": "it takes whole minibatches",
    "update_epoch": "PPO's is train.ppo_epochs",
    "ppo_epochs": "they are PPO's",
    "clip_ratio": "it is PPO's",
    "entropy_coef": "it is of policies with an entropy bonus",
    "fused_update": "it is PPO's",
}
_OVERLAPPING = ("asyncrl", "async_rsl")
_SAMPLED_BATCHES = (*_OVERLAPPING, "supervised")


def unused_keys(
    config: MainConfig, *, policy: type[Any], buffer: type[Any], envs: Sequence[type[Any]]
) -> Iterator[str]:
    """Yield a sentence for each key that is set and changes nothing in this run.

    Args:
        config: the run, its sections resolved.
        policy: the policy's class; what the user's own read is not known.
        buffer: the buffer's class.
        envs: the class of each entry of ``env``.
    """
    if config.engine == "eval":  # its configuration is that of a run that trained
        return
    for entry, kind in zip(config.env, envs, strict=True):
        for name in ("init_params", "policy_setup"):
            if _is_ours(kind) and _is_set(entry, name, None):
                yield f"env.{name} changes nothing: backend {entry.backend} does not read it"
    for path, is_unused, why in _rules(config, policy, buffer):
        section: Any = config
        *parents, name = path.split(".")
        for parent in parents:
            section = section[parent]
        if is_unused and _is_set(section, name, buffer if parents == ["buffer"] else None):
            yield f"{path} changes nothing: {why}"


def _rules(
    config: MainConfig, policy: type[Any], buffer: type[Any]
) -> Iterator[tuple[str, bool, str]]:
    engine, section, train = config.engine, config.buffer, config.train
    if _is_ours(policy):
        for name, instead in _FOR_POLICIES_THAT_READ_THEM.items():
            unread = name not in policy.TrainExtras.model_fields
            yield f"train.{name}", unread, f"{policy.__name__} does not read it; {instead}"
        for name in ("backend", "policy_kwargs"):
            yield f"policy.{name}", True, f"{policy.__name__} does not read it"
    overlaps = f"engine {engine} collects all the time"
    yield "train.rollout_epoch", engine in _OVERLAPPING, overlaps
    for name in ("rollout_epoch", "max_rollout_steps", "reset_each_rollout"):
        yield f"train.{name}", engine == "supervised", "engine supervised collects nothing"
    sampler = section.sampler.type if section.sampler else buffer.default_sampler
    whole = _is_ours(buffer) and sampler == "all" and engine not in _SAMPLED_BATCHES
    yield "train.batch_size", whole, _rows_of_a_step(policy)
    yield "train.warm_up_rollout_steps", not train.warm_up, "train.warm_up is false"
    replays = "prioritized" in section
    for name in ("priority_exponent", "importance_exponent", "priority_epsilon"):
        unread = replays and not section["prioritized"]
        yield f"buffer.{name}", unread, "buffer.prioritized is false"
    unread = replays and section["n_step"] == 1 and section["gamma"] != train.get("gamma")
    yield "buffer.gamma", unread, "buffer.n_step is 1; the discount is train.gamma"
    none = config.policy.weight_buffer.buffer_strategy == "None"
    yield "policy.weight_buffer.type", none, "policy.weight_buffer.buffer_strategy is None"
    yield "log.mode", config.log.backend == "tensorboard", "log.backend tensorboard has no modes"
    for name in ("node_affinity_env", "node_affinity_train"):
        yield f"buffer.{name}", True, "rows go through the trainer whatever it says"
    if config.cluster is not None:
        interaction = "cluster.rollout_env_interaction"
        yield interaction, True, "environments and eval workers exchange data in one way"


def _rows_of_a_step(policy: type[Any]) -> str:
    """Return why ``train.batch_size`` is not what a gradient step takes."""
    every = "the sampler `all` hands out every row"
    if "minibatch_size" in policy.TrainExtras.model_fields:
        return f"{every}; a gradient step's rows are train.minibatch_size"
    name = policy.__name__
    if _is_ours(policy):
        return f"{every}, and {name} takes them whole"
    return (
        f"{every}, unless {name} reads the key itself; for batches of that size set "
        "buffer.sampler.type: batch"
    )


def _is_set(section: Config, name: str, declaring: type[Any] | None) -> bool:
    """Whether a key has another value than it would have by itself."""
    field = type(section).model_fields.get(name)
    if field is None:
        field = declaring.Extras.model_fields.get(name) if declaring is not None else None
    return field is not None and section.get(name) != field.get_default(call_default_factory=True)


def _is_ours(kind: type[Any]) -> bool:
    return kind.__module__.startswith("rlightning.")
