"""Write docs/reference/configuration.md from the configuration models and their docstrings.

python scripts/configuration_page.py           writes the page
python scripts/configuration_page.py --check   exits 1 where it is out of date
"""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "packages" / "rlightning" / "src" / "rlightning"
PAGE = ROOT / "docs" / "reference" / "configuration.md"

SECTIONS = (
    ("MainConfig", "config/schema.py", "The run"),
    ("EnvConfig", "config/schema.py", "`env`, one entry per kind of environment"),
    ("MultitaskConfig", "config/schema.py", "`multitask`"),
    ("GymEnv.Extras", "env/gym_env.py", "`env`, further keys of `gymnasium`, `mujoco` and `ale`"),
    ("WireConfig", "config/wire.py", "`env`, further keys of `env_server` and of `--rlightning`"),
    ("ActionSpaceConfig", "config/wire.py", "`env.action_space`"),
    ("ObservationConfig", "config/wire.py", "`env.observation`"),
    ("RemoteEnv.Extras", "env/remote_env.py", "`env`, further keys of `env_server`"),
    ("BufferConfig", "config/schema.py", "`buffer`"),
    ("SamplerConfig", "config/schema.py", "`buffer.sampler`"),
    ("StorageConfig", "config/schema.py", "`buffer.storage`"),
    ("DataBuffer.Extras", "buffer/data_buffer.py", "`buffer`, further keys of every buffer"),
    (
        "RolloutBuffer.Extras",
        "buffer/rollout_buffer.py",
        "`buffer`, further keys of `RolloutBuffer`",
    ),
    ("ReplayBuffer.Extras", "buffer/replay_buffer.py", "`buffer`, further keys of `ReplayBuffer`"),
    (
        "DatasetBuffer.Extras",
        "buffer/dataset_buffer.py",
        "`buffer`, further keys of `DatasetBuffer`, beside `ReplayBuffer`'s",
    ),
    (
        "PriorReplayBuffer.Extras",
        "buffer/prior_replay_buffer.py",
        "`buffer`, further keys of `PriorReplayBuffer`, beside `DatasetBuffer`'s",
    ),
    ("PolicyConfig", "config/schema.py", "`policy`"),
    ("BasePolicy.Extras", "policy/base_policy.py", "`policy`, further keys of every policy"),
    ("WeightBufferConfig", "config/schema.py", "`policy.weight_buffer`"),
    ("ImageConfig", "models/image_config.py", "`policy.model_cfg` of every built-in, images"),
    ("NetworkConfig", "models/network_config.py", "`policy.model_cfg` of `PPOPolicy`, the network"),
    ("PPOModelConfig", "policy/ppo_config.py", "`policy.model_cfg` of `PPOPolicy`, normalisation"),
    (
        "RecurrentPPOModelConfig",
        "policy/recurrent_ppo_policy.py",
        "`policy.model_cfg`, further keys of `RecurrentPPOPolicy`",
    ),
    (
        "QNetworkConfig",
        "models/q_networks.py",
        "`policy.model_cfg` of `SACPolicy`, `TD3Policy`, `DQNPolicy` and `RLPDPolicy`",
    ),
    (
        "CriticConfig",
        "models/q_networks.py",
        "`policy.model_cfg`, further keys of `SACPolicy`, `TD3Policy` and `RLPDPolicy`",
    ),
    ("DQNModelConfig", "policy/dqn_policy.py", "`policy.model_cfg`, further keys of `DQNPolicy`"),
    (
        "SupervisedModelConfig",
        "policy/supervised_policy.py",
        "`policy.model_cfg` of `SimpleSupervisedPolicy`, beside the network's",
    ),
    ("PPOOptimConfig", "policy/ppo_config.py", "`policy.optim_cfg` of `PPOPolicy`"),
    ("A2COptimConfig", "policy/a2c_policy.py", "`policy.optim_cfg` of `A2CPolicy`"),
    ("SACOptimConfig", "policy/sac_policy.py", "`policy.optim_cfg` of SAC and RLPD"),
    ("TD3OptimConfig", "policy/td3_policy.py", "`policy.optim_cfg` of `TD3Policy`"),
    ("DQNOptimConfig", "policy/dqn_policy.py", "`policy.optim_cfg` of `DQNPolicy`"),
    (
        "SupervisedOptimConfig",
        "policy/supervised_policy.py",
        "`policy.optim_cfg` of `SimpleSupervisedPolicy`",
    ),
    ("TrainConfig", "config/schema.py", "`train`"),
    (
        "OffPolicyTrainConfig",
        "policy/off_policy.py",
        "`train`, further keys of SAC, TD3, DQN and RLPD",
    ),
    ("SACTrainConfig", "policy/sac_policy.py", "`train`, further keys of SAC and RLPD"),
    ("RLPDTrainConfig", "policy/rlpd_policy.py", "`train`, further keys of `RLPDPolicy`"),
    ("TD3TrainConfig", "policy/td3_policy.py", "`train`, further keys of `TD3Policy`"),
    ("DQNTrainConfig", "policy/dqn_policy.py", "`train`, further keys of `DQNPolicy`"),
    (
        "SupervisedTrainConfig",
        "policy/supervised_policy.py",
        "`train`, further keys of `SimpleSupervisedPolicy`",
    ),
    ("PPOTrainConfig", "policy/ppo_config.py", "`train`, further keys of `PPOPolicy`"),
    (
        "RecurrentPPOTrainConfig",
        "policy/recurrent_ppo_policy.py",
        "`train`, further keys of `RecurrentPPOPolicy`, beside PPO's",
    ),
    (
        "VTracePPOTrainConfig",
        "policy/vtrace_ppo_policy.py",
        "`train`, further keys of `VTracePPOPolicy`, beside PPO's",
    ),
    ("A2CTrainConfig", "policy/a2c_policy.py", "`train`, further keys of `A2CPolicy`"),
    ("AsyncRLEngine.TrainExtras", "engine/async_rl.py", "`train`, further keys of `asyncrl`"),
    (
        "EvaluationEngine.TrainExtras",
        "engine/evaluation_engine.py",
        "`train`, further keys of `eval`",
    ),
    ("ClusterConfig", "config/cluster.py", "`cluster`"),
    ("ClusterConfig.PlacementConfig", "config/cluster.py", "`cluster.placement`"),
    ("ResourcePoolConfig", "config/cluster.py", "`cluster.resource_pool`, one entry per pool"),
    ("LogConfig", "config/schema.py", "`log`"),
)


def find_class(tree: ast.Module, path: str) -> ast.ClassDef:
    """Return the class at a dotted path."""
    body: list[ast.stmt] = tree.body
    found = None
    for name in path.split("."):
        found = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == name)
        body = found.body
    assert found is not None
    return found


def is_a_key(node: ast.AnnAssign) -> bool:
    """Whether users write a field: what is left out of written configurations is none."""
    keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
    return not any(keyword.arg == "exclude" for keyword in keywords)


def default_of(node: ast.AnnAssign) -> str:
    """Return a field's default as it is written."""
    value = node.value
    if value is None:
        return "required"
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        arguments = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in arguments:
            return ast.unparse(arguments["default"])
        return "its own defaults" if "default_factory" in arguments else "required"
    return ast.unparse(value)


def rows(cls: ast.ClassDef) -> list[str]:
    """Return a table row per documented field."""
    lines = []
    for node, following in zip(cls.body, cls.body[1:], strict=False):
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if not isinstance(node, ast.AnnAssign) or not documented or not is_a_key(node):
            continue
        text = " ".join(str(following.value.value).split()).replace("|", "\\|").replace("``", "`")
        kind = ast.unparse(node.annotation).replace("|", "\\|")
        lines.append(f"| `{ast.unparse(node.target)}` | `{kind}` | `{default_of(node)}` | {text} |")
    return lines


def render() -> str:
    """Return the whole page."""
    parts = [
        "# Configuration",
        "",
        "Every key, its type and its default. Unknown keys are refused with a suggestion;",
        "`model_cfg`, `optim_cfg`, `env_kwargs`, `policy_kwargs` and `init_params` are free-form,",
        "and the class that reads one checks it. Any key is set on the command line as `a.b=c`;",
        "an entry of an `env` list as `env.0.num_envs=4`.",
        "",
        "The command line wins over the file, and the file over the default. That stays so with",
        "`--resume`: weights, optimizers, counters and generators are the checkpoint's; so is",
        "the seed where none is set. Other settings are those of now; `run.log` lists changes.",
    ]
    for path, file, title in SECTIONS:
        cls = find_class(ast.parse((SOURCE / file).read_text(encoding="utf-8")), path)
        table = rows(cls)
        assert table, path
        parts += [
            "",
            f"## {title}",
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
            *table,
        ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page, or compare with it."""
    text = render()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(
            "docs/reference/configuration.md is out of date: python scripts/configuration_page.py"
        )
        raise SystemExit(1)


if __name__ == "__main__":
    main()
