"""An actor-critic in a hundred lines: the smallest policy that learns. Make it yours."""

import torch
from torch import nn
from torch.distributions import Categorical

from rlightning.config import Config
from rlightning.policy import BasePolicy
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.registry import POLICIES


def mlp(inputs: int, outputs: int, width: int) -> nn.Sequential:
    """Return two hidden tanh layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )


@POLICIES.register("MyPolicy")
class MyPolicy(BasePolicy):
    """Advantage actor-critic with clipped ratios, for vector observations and discrete actions."""

    class TrainExtras(Config):
        """Keys of the ``train`` section that this policy reads; others are refused."""

        value_coef: float = 0.5
        update_epoch: int = 4
        mini_batch_size: int = 256
        clip_ratio: float = 0.2
        entropy_coef: float = 0.01

    # --- Network and optimizer -------------------------------------------------------------

    def construct_network(self, env_meta, *args, **kwargs):
        """Create the networks; `model_cfg` is free-form."""
        observation_dim = env_meta.observation_space.shape[0]
        width = self.config.model_cfg.hidden_size
        self.actor = mlp(observation_dim, int(env_meta.action_space.n), width)
        self.critic = mlp(observation_dim, 1, width)

    def setup_optimizer(self, optim_cfg):
        """Create the optimizer; it is saved with every checkpoint because it is an attribute."""
        params = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(params, lr=optim_cfg.lr)

    # --- Acting ----------------------------------------------------------------------------

    def rollout_step(self, env_ret: EnvRet, **kwargs) -> PolicyResponse:
        """Choose an action for every row of a vectorised environment."""
        observation = env_ret.observation.float()
        distribution = Categorical(logits=self.actor(observation))
        action = distribution.probs.argmax(-1) if self.deterministic else distribution.sample()
        return PolicyResponse(
            env_id=env_ret.env_id,
            action=action,
            log_prob=distribution.log_prob(action),
            value=self.critic(observation).squeeze(-1),
            final_value=self._value_of_cut_episodes(env_ret),
        )

    def _value_of_cut_episodes(self, env_ret):
        """Return the value of each finished episode's own last observation, zero elsewhere.

        With `value` and `final_value`, the buffer adds `advantage` and `return` to the batch.
        """
        rows = env_ret.info.get("_final_obs")
        if rows is None:
            return torch.zeros(env_ret.observation.shape[:-1])
        return self.critic(env_ret.info["final_obs"].float()).squeeze(-1) * rows

    def postprocess(self, env_ret=None, policy_resp=None):
        """Nothing to do between a rollout and the buffer."""

    # --- Learning --------------------------------------------------------------------------

    def update_dataset(self, data):
        """Keep the batch: a TensorDict of flat `[rows, ...]` tensors."""
        self.dataset = data

    def train(self, *args, **kwargs):
        """Update the networks; what is returned becomes `train/...` metrics."""
        settings, data = self.config.train_config, self.dataset
        advantage = data["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
        for _ in range(settings.update_epoch):
            for rows in torch.randperm(len(data)).split(settings.mini_batch_size):
                batch = data[rows]
                distribution = Categorical(logits=self.actor(batch["observation"]))
                ratio = (distribution.log_prob(batch["action"]) - batch["log_prob"]).exp()
                clipped = ratio.clamp(1 - settings.clip_ratio, 1 + settings.clip_ratio)
                gain = torch.min(ratio * advantage[rows], clipped * advantage[rows]).mean()
                value_loss = (
                    (self.critic(batch["observation"]).squeeze(-1) - batch["return"])
                    .square()
                    .mean()
                )
                entropy = distribution.entropy().mean()
                loss = settings.value_coef * value_loss - gain - settings.entropy_coef * entropy
                self.check_finite("loss", loss)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.log_metric("value_loss", value_loss.item())
                self.log_metric("entropy", entropy.item())
