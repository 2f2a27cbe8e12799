"""Train the policy: python train.py --config-name train_cartpole [a.b=c ...]."""

from rlightning.utils.builders import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
)
from rlightning.utils.config import MainConfig
from rlightning.utils.launch import launch


def main(config: MainConfig) -> None:
    """Build the parts and run them."""
    env_group = build_env_group(config.env)
    policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
    buffer = build_data_buffer(config.buffer.type, config.buffer)
    engine = build_engine(config, env_group, policy_group, buffer)
    engine.run()


if __name__ == "__main__":
    launch(main_func=main, config_path="conf")
