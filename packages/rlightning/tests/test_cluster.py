"""The `cluster:` section without a cluster: what is loaded, what is refused, what stays here."""

import subprocess
import sys

import pytest

import rlightning.cluster as cluster_module
from rlightning.build import check_config, open_cluster
from rlightning.cluster import current_cluster
from rlightning.config import MainConfig
from rlightning.errors import ConfigError


def configuration(cluster=None, **sections):
    content = {
        "engine": "syncrl",
        "env": {"name": "cp", "backend": "gymnasium", "task": "CartPole-v1"},
        "buffer": {"type": "RolloutBuffer", "capacity": 32},
        "policy": {"type": "PPOPolicy"},
        "train": {"max_epochs": 1, "seed": 0},
        **sections,
    }
    return MainConfig.from_dict(content | ({} if cluster is None else {"cluster": cluster}))


NOTHING = {f"remote_{part}": False for part in ("train", "eval", "storage", "env")}


@pytest.mark.parametrize("cluster", [None, NOTHING])
def test_where_nothing_is_remote_no_cluster_is_opened(cluster):
    config = configuration(cluster)
    check_config(config)
    with open_cluster(config) as opened:
        assert opened is None
        assert current_cluster() is None


def test_a_local_run_beside_an_open_cluster_stays_here():
    config = configuration()
    with cluster_module._as_current(object()):
        assert current_cluster() is not None
        with open_cluster(config):
            assert current_cluster() is None
        assert current_cluster() is not None


def loaded_after(code):
    """Return which of Ray and torch a fresh process has loaded after running `code`."""
    program = f"{code}\nimport sys\nprint('ray' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    return result.stdout.split()[-2:]


def test_a_local_run_does_not_load_ray(tmp_path):
    code = f"""
from rlightning.config import MainConfig
from rlightning.launch import run_main, train_main
config = MainConfig.from_dict({{
    "engine": "syncrl", "verbose": False, "debug": False,
    "env": {{"name": "cp", "backend": "gymnasium", "task": "CartPole-v1"}},
    "buffer": {{"type": "RolloutBuffer", "capacity": 8}},
    "policy": {{"type": "PPOPolicy"}},
    "train": {{"max_epochs": 1, "seed": 0, "eval_episodes": 1}},
    "log": {{"log_dir": {str(tmp_path)!r}, "level": "ERROR"}},
}})
run_main(train_main, config)
"""
    assert loaded_after(code) == ["False", "True"]


def test_a_worker_that_steps_gymnasium_environments_loads_no_torch():
    code = """
from rlightning.config import EnvConfig
from rlightning.env.env_proxy import make_env
from rlightning.env.gym_env import GymEnv
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.runtime.host import Host, WorkerSetup
from rlightning.types import PolicyResponse
import numpy as np
config = EnvConfig(name="cp", backend="gymnasium", task="CartPole-v1", num_envs=2)
host = Host(WorkerSetup(seed=1))
host.adopt(make_env(GymEnv, config, 0, default_env_preprocess_fn, "e-0", "train"))
response = PolicyResponse("e-0", action=np.zeros(2, int))
for method, args in (("init", ()), ("_reset", ()), ("_step", (response,))):
    result, _ = host.call(method, args, {})
    assert not hasattr(result, "raise_"), result
"""
    assert loaded_after(code) == ["False", "False"]


def test_without_ray_a_cluster_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rlightning.runtime.ray", raising=False)
    with pytest.raises(ConfigError, match=r"rlightning\[ray\]"), open_cluster(configuration({})):
        pass


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"train_worker_num": 2, "remote_train": False}, "remote_train"),
        ({"eval_worker_num": 2, "remote_eval": False}, "remote_eval"),
    ],
)
def test_several_workers_in_one_process_are_refused(cluster, message):
    with pytest.raises(ConfigError, match=message):
        check_config(configuration(cluster))
