"""Hydra composition: groups, overrides of every form, interpolation, and readable mistakes."""

import textwrap
from concurrent.futures import ThreadPoolExecutor

import hydra
import pytest
from hydra import initialize_config_dir

from rlightning.config import compose, compose_main
from rlightning.errors import ConfigError

MAIN = """
    defaults:
      - buffer: rollout
      - policy: mine
      - log: quiet
      - _self_
    engine: syncrl
    imports: [mypol]
    env:
      - {name: cp, backend: mujoco, task: CartPole-v1, num_workers: 2, max_episode_steps: 200}
    train: {max_epochs: 2, batch_size: 20, save_dir: "${log.log_dir}/${log.name}/w"}
    cluster: {train_worker_num: 1}
"""

FILES = {
    "a.yaml": MAIN,
    "single.yaml": MAIN.replace("- {name", "{name").replace("    env:\n", "    env:\n  "),
    "broken.yaml": "train: {max_epochs: '${nowhere.at.all}'}",
    "buffer/rollout.yaml": "type: RolloutBuffer\ncapacity: 1000",
    "buffer/replay.yaml": "type: ReplayBuffer\ncapacity: 50",
    "policy/mine.yaml": """
        defaults:
          - backend: plain
        type: MyPolicy
        model_cfg: {action_dim: 4}
        optim_cfg: {lr: 0.01, heads: "${policy.model_cfg.action_dim}"}
    """,
    "policy/backend/plain.yaml": "backend_name: plain",
    "policy/backend/fast.yaml": "backend_name: fast",
    "log/quiet.yaml": "level: INFO\nname: default_exp\nlog_dir: ./runs",
}


@pytest.fixture(scope="module")
def conf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conf")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def test_groups_nested_defaults_and_interpolation_compose(conf):
    config = compose_main(conf, "a")
    assert (config.engine, config.imports) == ("syncrl", ["mypol"])
    assert (config.buffer.type, config.buffer.capacity) == ("RolloutBuffer", 1000)
    assert config.policy.backend.backend_name == "plain"
    assert config.policy.optim_cfg.heads == 4
    assert config.train.save_dir == "./runs/default_exp/w"
    assert [env.num_workers for env in config.env] == [2]
    assert config.cluster.train_worker_num == 1


def test_the_file_may_be_named_with_its_suffix(conf):
    assert compose_main(conf, "a.yaml").engine == "syncrl"


def test_another_option_of_a_group(conf):
    config = compose_main(conf, "a", ["buffer=replay", "policy/backend=fast"])
    assert (config.buffer.type, config.buffer.capacity) == ("ReplayBuffer", 50)
    assert config.policy.backend.backend_name == "fast"


@pytest.mark.parametrize("name", ["a", "single"])
def test_plain_overrides_set_keys_that_files_have_and_leave_out(conf, name):
    overrides = [
        "train.max_epochs=7",
        "train.seed=3",
        "log.name=exp",
        "policy.weight_buffer.buffer_strategy='None'",
        "policy.model_cfg.width=64",
        "train.eval_interval=-1",
        "verbose=false",
    ]
    config = compose_main(conf, name, overrides)
    assert (config.train.max_epochs, config.train.seed, config.log.name) == (7, 3, "exp")
    assert config.policy.weight_buffer.buffer_strategy == "None"
    assert config.policy.model_cfg.width == 64
    assert config.train.save_dir == "./runs/exp/w"
    assert (config.train.eval_interval, config.verbose) == (-1, False)


def test_an_entry_of_a_list_is_set_by_its_index(conf):
    assert compose_main(conf, "a", ["env.0.num_envs=4"]).env[0].num_envs == 4


def test_a_whole_list_is_set(conf):
    config = compose_main(conf, "a", ["env=[{name: x, backend: b, task: T-v0}]"])
    assert [env.task for env in config.env] == ["T-v0"]


def test_a_single_environment_is_set_by_its_key(conf):
    assert compose_main(conf, "single", ["env.num_envs=4"]).env[0].num_envs == 4


def test_plus_adds_and_tilde_removes(conf):
    config = compose_main(conf, "a", ["+policy.model_cfg.new=[1,2]", "~cluster"])
    assert config.policy.model_cfg.new == [1, 2]
    assert config.cluster is None


def test_a_misspelt_override_is_refused_with_a_suggestion(conf):
    with pytest.raises(ConfigError, match=r"unknown key 'trian'\. Did you mean 'train'"):
        compose_main(conf, "a", ["trian.max_epochs=3"])
    with pytest.raises(ConfigError, match=r"'log': unknown key 'levl'\. Did you mean 'level'"):
        compose_main(conf, "a", ["log.levl=INFO"])


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("b", [], r"there is no b\.yaml in .*Found: a, broken, single"),
        ("a", ["=3"], "cannot compose a.yaml"),
        ("a", ["buffer=3"], "cannot compose a.yaml"),
        ("a", ["~nothing"], "cannot compose a.yaml"),
        ("single", ["env=[]"], r"env=\[\]: `env` of single\.yaml is a mapping.*env\.KEY=VALUE"),
        ("a", ["train=[1, 2]"], r"train=\[1, 2\]: `train` of a\.yaml is a mapping of keys"),
        ("a", ["env=[]"], r"field 'env': found \[\]; expected a mapping with name, backend"),
        ("a", ["env=null"], r"field 'env': found None; expected a mapping"),
        ("a", ["buffer=rolout"], "cannot compose a.yaml.*rolout"),
        ("broken", [], "cannot resolve broken.*nowhere"),
        ("a", ["train.max_epochs=???"], "cannot resolve a.*max_epochs"),
        ("a", ["train.max_epochs=many"], r"field 'train\.max_epochs'"),
    ],
)
def test_mistakes_are_configuration_errors(conf, name, overrides, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        compose_main(conf, name, overrides)


def test_a_close_file_name_is_suggested(conf):
    with pytest.raises(ConfigError, match="Did you mean 'single'"):
        compose(conf, "singel")


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(ConfigError, match="Found: no YAML file"):
        compose(tmp_path, "a")


@pytest.mark.parametrize("override", ["train.seed", "log.name=a[b]", "log.log_dir=/x/ü", "+"])
def test_an_override_that_cannot_be_read_is_named_with_what_can(conf, override):
    with pytest.raises(ConfigError) as caught:
        compose(conf, "a", [override])
    message = str(caught.value)
    assert message.startswith(f"{override!r} cannot be read; expected key=value")
    assert message.endswith("""as in 'key="the value"'""")
    assert compose(conf, "a", ['log.name="a[b]"']).log.name == "a[b]"


@pytest.mark.parametrize("override", ["train.seed=0,1", "train.seed=range(3)"])
def test_a_sweep_is_answered_with_the_loop_that_does_it(conf, override):
    with pytest.raises(ConfigError, match=r"train\.seed=.*: one command is one run.*for seed in"):
        compose(conf, "a", [override])


def test_a_script_of_hydra_and_other_threads_may_compose_too(conf):
    with initialize_config_dir(version_base=None, config_dir=str(conf)):
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: compose_main(conf, "a").engine, range(12)))
        assert hydra.compose(config_name="a").engine == "syncrl"
    assert found == ["syncrl"] * 12
