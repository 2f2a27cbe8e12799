"""The sections of a run's configuration, one model each, with a docstring per field."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from rlightning.config.base import Config, ExtensibleConfig, StrictConfig
from rlightning.config.cluster import ClusterConfig, check_gpus

__all__ = [
    "BufferConfig",
    "EnvConfig",
    "LogConfig",
    "MainConfig",
    "MultitaskConfig",
    "PolicyConfig",
    "SamplerConfig",
    "StorageConfig",
    "TrainConfig",
    "WeightBufferConfig",
]

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class MultitaskConfig(StrictConfig):
    """How one policy serves several entries of ``env``, each of them a task."""

    pad_spaces: bool = False
    """Where tasks differ in the length of observation vectors, or in Box or Discrete actions, pad
    them to the longest; what a task lacks is told by ``observation["action_mask"]``."""
    task_id: bool = False
    """Tell the policy which task a row is from: ``observation["task"]``, the entry's position."""


class EnvConfig(ExtensibleConfig):
    """One group of equal environment workers."""

    name: str
    """What logs call these environments, and metrics where there are several entries."""
    backend: str
    """The environment class: a registered name such as ``gymnasium``, or ``"pkg.module:Name"``."""
    task: str
    """What the backend makes, for ``gymnasium`` an environment id."""
    num_workers: int = Field(default=1, ge=1)
    """Environment workers; each steps `num_envs` rows."""
    num_envs: int = Field(default=1, ge=1)
    """Rows of one vectorised worker; with 1, observations have no leading axis."""
    max_episode_steps: int | None = Field(default=None, ge=1)
    """Steps after which an episode is truncated; the task's own limit where unset."""
    num_cpus: float = Field(default=1, ge=0)
    """CPU cores of one worker on a cluster."""
    num_gpus: float = 0.0
    """GPUs of one worker on a cluster, or a share of one."""
    env_kwargs: Config = Field(default_factory=Config)
    """Keyword arguments of the environment's constructor."""
    init_params: Config | None = None
    """Free-form parameters of backends that want them."""
    policy_setup: str = "widowx"
    """Robot set-up of manipulation suites."""
    evaluate_cfg: Config | None = None
    """Settings of the environment that evaluation replaces and then restores."""
    _multitask: MultitaskConfig = PrivateAttr(default_factory=MultitaskConfig)

    @property
    def multitask(self) -> MultitaskConfig:
        """The section ``multitask`` of the run, of which this is one task."""
        return self._multitask

    def attach_multitask(self, section: MultitaskConfig) -> None:
        """Set `multitask`; `MainConfig` does."""
        self._multitask = section

    @field_validator("num_gpus")
    @classmethod
    def _possible_gpus(cls, value: float) -> float:
        return check_gpus(value)


class SamplerConfig(StrictConfig):
    """How a buffer picks rows."""

    type: Literal["all", "batch", "uniform"]
    """``all`` rows, a ``batch`` without replacement, or ``uniform`` with replacement."""


class StorageConfig(StrictConfig):
    """Where a buffer keeps its rows."""

    mode: Literal["circular", "fixed"] = "circular"
    """Overwrite the oldest rows when full, or stop accepting."""
    type: Literal["unified", "sharded"] = "unified"
    """One storage, or one per buffer worker of a cluster; a local run has one worker."""
    unit: Literal["transition", "episode"] = "transition"
    """What an index and the buffer's length count."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the rows live."""

    @model_validator(mode="after")
    def _sharded_storage_is_on_the_cpu(self) -> Self:
        if self.type == "sharded" and self.device != "cpu":
            raise ValueError("sharded storage lives on the cpu; set device: cpu")
        return self


class BufferConfig(ExtensibleConfig):
    """The buffer between environments and learner."""

    type: str
    """A registered buffer, or ``"pkg.module:Name"``."""
    capacity: int = Field(ge=1)
    """Rows (transitions) it holds at most."""
    sampler: SamplerConfig | None = None
    """How rows are picked; the buffer's own default where unset."""
    auto_truncate_episode: bool = False
    """Push each row of a vectorised environment at its own episode ends."""
    storage: StorageConfig = Field(default_factory=StorageConfig)
    """Where rows live."""
    node_affinity_env: bool = False
    """Accepted, and changes nothing: on a cluster rows go through the trainer."""
    node_affinity_train: bool = False
    """Accepted, and changes nothing: on a cluster rows go through the trainer."""


class WeightBufferConfig(StrictConfig):
    """How weights travel from TRAIN to EVAL workers."""

    type: Literal["WeightBuffer", "CPUWeightBuffer", "ShardedWeightBuffer"] = "WeightBuffer"
    """The buffer's class."""
    buffer_strategy: Literal["None", "Double", "Shared", "Sharded"] = "Double"
    """``None`` applies weights directly; the others keep a published snapshot."""

    @model_validator(mode="after")
    def _strategy_has_its_class(self) -> Self:
        needed = {"Shared": "CPUWeightBuffer", "Sharded": "ShardedWeightBuffer"}
        want = needed.get(self.buffer_strategy)
        if want and self.type != want:
            raise ValueError(f"buffer_strategy {self.buffer_strategy} needs type: {want}")
        return self


class PolicyConfig(ExtensibleConfig):
    """The policy, its network and its optimizer."""

    type: str
    """A registered policy, or ``"pkg.module:Name"``."""
    backend: Config | None = None
    """Free-form settings of a model backend."""
    train_num_gpus: float = 1.0
    """GPUs of a train worker; the same setting as ``cluster.train_each_gpu_num``: give one."""
    eval_num_gpus: float = 1.0
    """GPUs of an eval worker; the same setting as ``cluster.eval_each_gpu_num``: give one."""
    model_cfg: Config | None = None
    """Free-form settings of the network; read them as ``self.config.model_cfg``."""
    optim_cfg: Config | None = None
    """Free-form settings of the optimizer; handed to ``setup_optimizer``."""
    rollout_mode: Literal["sync", "async"] = "sync"
    """Whether ``rollout_step`` is a plain function or a coroutine."""
    router_type: Literal["simple", "node_affinity"] = "simple"
    """How environments are assigned to eval workers: in turn, or on their own node where one is."""
    weight_buffer: WeightBufferConfig = Field(default_factory=WeightBufferConfig)
    """How weights reach the eval workers."""
    policy_kwargs: Config | None = None
    """Free-form settings of a wrapped algorithm."""
    train_config: Any = Field(default=None, exclude=True)
    """The ``train`` section, which `MainConfig` puts here so that policies can read it."""

    @field_validator("train_config")
    @classmethod
    def _is_no_key(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, TrainConfig):
            raise ValueError("it is no key: the section `train` stands here; set train.KEY instead")
        return value


class TrainConfig(ExtensibleConfig):
    """The training loop."""

    max_epochs: int = Field(ge=0)
    """Epochs (rollout, update, weight sync) to run in total, resumed ones included."""
    batch_size: int = Field(default=64, ge=1)
    """Rows handed to ``update_dataset`` by samplers that pick a batch."""
    max_rollout_steps: int = -1
    """Steps of one rollout; -1 rolls out until the buffer is full."""
    max_eval_rollout_steps: int = -1
    """Most steps of one evaluation; what has not ended by then is reported as unfinished."""
    lr: float = 3e-4
    """Learning rate for policies that read it here."""
    parallel: Literal["ddp"] | None = None
    """Data parallelism of several train workers."""
    eval_interval: int = -1
    """Evaluate every that many epochs; -1 only at the end."""
    save_interval: int = -1
    """Save a checkpoint every that many epochs; -1 only at the end."""
    save_dir: str | None = None
    """Where checkpoints go; ``<run directory>/checkpoints`` where unset."""
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seeds everything; where unset one is drawn, logged and saved."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Keep only that many of the newest ``epoch_<n>``; unset keeps all."""
    save_best: bool = True
    """Save ``best`` when an evaluation's mean return is the highest so far."""
    rollout_epoch: int = Field(default=1, ge=1)
    """Rollouts per epoch."""
    reset_each_rollout: bool = False
    """Reset the environments before each rollout instead of continuing their episodes."""
    warm_up: bool = False
    """Run one dummy rollout and update first, then start again; never on resume."""
    warm_up_rollout_steps: int = Field(default=10, ge=1)
    """Steps of that dummy rollout."""
    eval_episodes: int = Field(default=10, ge=1)
    """Episodes of one evaluation, shared evenly over the tasks (each gets at least one) and then
    over their evaluation environments."""
    record_episodes: int = Field(default=0, ge=0)
    """Episodes that each evaluation also writes to ``<run directory>/videos``, as one mp4."""
    eval_at_start: bool = False
    """Evaluate the untrained policy too."""
    check_finite: bool = True
    """Stop before an optimizer step on NaN or infinity, and say where it came from."""
    torch_threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; unset leaves torch's choice. One is fastest for small networks."""
    mini_batch_size: int | None = None
    """For policies that read it: rows of one gradient step."""
    micro_batch_size: int | None = None
    """For policies that read it: rows of one forward pass."""
    update_epoch: int | None = None
    """For policies that read it: passes over the data."""
    ppo_epochs: int | None = None
    """For PPO policies: passes over the data."""
    minibatch_size: int | None = None
    """For PPO policies: rows of one gradient step."""
    clip_ratio: float | None = None
    """For PPO policies: how far the probability ratio may move."""
    entropy_coef: float | None = None
    """For PPO policies: weight of the entropy bonus."""
    fused_update: Literal["off", "auto"] | None = None
    """For PPO policies: whether small networks take the hand-written gradient step."""

    @field_validator(
        "max_rollout_steps", "max_eval_rollout_steps", "eval_interval", "save_interval"
    )
    @classmethod
    def _minus_one_or_positive(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError(f"found {value}; expected a positive number, or -1 for off")
        return value


class LogConfig(StrictConfig):
    """Logs, metrics and where the run directory goes."""

    level: str = "DEBUG"
    """Lowest level that reaches the console: DEBUG, INFO, WARNING, ERROR or CRITICAL."""
    backend: Literal["tensorboard", "wandb", "swanlab", "trackio", "mlflow"] = "tensorboard"
    """Where metrics go beside ``metrics.jsonl`` and ``metrics.csv``."""
    project: str = Field(default="default_project", min_length=1)
    """First folder below `log_dir`, and the project's name in a metrics service."""
    name: str = Field(default="default_exp", min_length=1)
    """The run's folder below the project, and its name in a metrics service."""
    log_dir: str = "./runs"
    """Where all runs go."""
    mode: Literal["online", "offline", "shared", "disabled", "cloud", "local"] | None = None
    """Mode of the metrics service; its own default where unset."""

    @field_validator("level", mode="before")
    @classmethod
    def _known_level(cls, value: Any) -> Any:
        level = {"WARINING": "WARNING"}.get(str(value).upper(), str(value).upper())
        if level not in LEVELS:
            raise ValueError(f"found {value!r}; expected one of {', '.join(LEVELS)}")
        return level


class MainConfig(StrictConfig):
    """A whole run."""

    engine: str | None = None
    """The training loop: ``syncrl`` or another registered engine."""
    env: list[EnvConfig]
    """One entry per group of equal workers; a single mapping is a list of one."""
    multitask: MultitaskConfig = Field(default_factory=MultitaskConfig)
    """How one policy serves several entries of `env`."""
    buffer: BufferConfig
    """The buffer."""
    policy: PolicyConfig
    """The policy."""
    train: TrainConfig
    """The training loop's settings."""
    cluster: ClusterConfig | None = None
    """Present: the run is distributed with Ray."""
    log: LogConfig = Field(default_factory=LogConfig)
    """Logging."""
    debug: bool = True
    """Collect and print a timing table."""
    verbose: bool = True
    """Show progress."""
    imports: list[str] = Field(default_factory=list)
    """Modules to import first, so that they register their classes."""
    _run: Any = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _one_gpu_setting_per_role(self) -> Self:
        if self.cluster is None:
            return self
        for role in ("train", "eval"):
            names = {"cluster": f"{role}_each_gpu_num", "policy": f"{role}_num_gpus"}
            given = {
                f"{section}.{name}": self[section][name]
                for section, name in names.items()
                if name in self[section].model_fields_set
            }
            if len(set(given.values())) > 1:
                found = " and ".join(f"{name} is {value}" for name, value in given.items())
                raise ValueError(f"{found}: they are one setting. Give one of them")
            for value in given.values():
                setattr(self.cluster, names["cluster"], check_gpus(value))
                setattr(self.policy, names["policy"], value)
        return self

    @model_validator(mode="after")
    def _environments_read_the_multitask_section(self) -> Self:
        for entry in self.env:
            entry.attach_multitask(self.multitask)
        return self

    @model_validator(mode="after")
    def _policies_read_the_train_section(self) -> Self:
        self.policy.train_config = self.train
        return self

    @property
    def run(self) -> Any:
        """The `RunContext` of the run that this configures; None before it is opened."""
        return self._run

    def attach_run(self, context: Any) -> None:
        """Set `run`."""
        self._run = context

    @field_validator("env", mode="before")
    @classmethod
    def _single_environment_is_a_list(cls, value: Any) -> Any:
        if not value:
            raise ValueError(
                f"found {value!r}; expected a mapping with name, backend and task, or a list"
            )
        return value if isinstance(value, list) else [value]
