"""Placement plans: golden plans for known clusters, what any plan holds to, and what is refused."""

import itertools
import json
import random
import time

import pytest

from rlightning.config import ClusterConfig, EnvConfig
from rlightning.errors import PlacementError
from rlightning.runtime.placement import Node, plan
from rlightning.runtime.placement_plan import number_ranges

SETS = {
    "1x1": [(8, 1)],
    "1x8": [(32, 8)],
    "2x4": [(16, 4)] * 2,
    "8x8": [(64, 8)] * 8,
    "mixed": [(32, 8), (16, 2), (8, 0)],
    "cpu1": [(2, 0)],
    "cpu4": [(4, 0)] * 4,
}


def nodes(name):
    return [
        Node(name=f"n{i}", cpus=cpus, gpus=gpus, memory_bytes=64 * 2**30)
        for i, (cpus, gpus) in enumerate(SETS[name])
    ]


def envs(workers=2, gpus=1.0, cpus=1):
    return [
        EnvConfig(
            name="e", backend="b", task="t", num_workers=workers, num_gpus=gpus, num_cpus=cpus
        )
    ]


def planned(node_set, *, env=None, strategy="default", env_strategy="default", **cluster):
    config = ClusterConfig.from_dict(
        {"placement": {"strategy": strategy, "env_strategy": env_strategy}} | cluster
    )
    return plan(config, env or envs(), nodes(node_set))


def rows(made):
    """Which workers stand on which node, as the table says it."""
    where = [*(node.name for node in made.nodes), None]
    listed = {
        name: made._listed([worker for worker in made.workers if worker.node == name])
        for name in where
    }
    return {name: text for name, text in listed.items() if text != "-"}


TWO = {"train_worker_num": 2, "eval_worker_num": 2}

GOLDEN = [
    ("1x8", "default", {None: "train 0-1, eval 0-1, env 0-1, buffer 0"}),
    (
        "1x8",
        "disaggregate",
        {"n0": "train 0-1 (GPU 0-1), eval 0-1 (GPU 2 4), env 0-1 (GPU 3 5), buffer 0"},
    ),
    (
        "1x8",
        "colocate",
        {"n0": "train 0-1 (GPU 0-1), eval 0-1 (GPU 0-1), env 0-1 (GPU 2-3), buffer 0"},
    ),
    ("2x4", "default", {None: "train 0-1, eval 0-1, env 0-1, buffer 0"}),
    (
        "2x4",
        "disaggregate",
        {"n0": "train 0-1 (GPU 0-1), buffer 0", "n1": "eval 0-1 (GPU 0 2), env 0-1 (GPU 1 3)"},
    ),
    (
        "2x4",
        "colocate",
        {"n0": "train 0-1 (GPU 0-1), eval 0-1 (GPU 0-1), env 0-1 (GPU 2-3), buffer 0"},
    ),
    ("8x8", "default", {None: "train 0-1, eval 0-1, env 0-1, buffer 0"}),
    (
        "8x8",
        "disaggregate",
        {
            "n0": "train 0-1 (GPU 0-1), buffer 0",
            "n1": "eval 0 (GPU 0), env 0 (GPU 1)",
            "n2": "eval 1 (GPU 0), env 1 (GPU 1)",
        },
    ),
    (
        "8x8",
        "colocate",
        {"n0": "train 0-1 (GPU 0-1), eval 0-1 (GPU 0-1), env 0-1 (GPU 2-3), buffer 0"},
    ),
    ("mixed", "default", {None: "train 0-1, eval 0-1, env 0-1, buffer 0"}),
    (
        "mixed",
        "disaggregate",
        {
            "n0": "train 0-1 (GPU 0-1), eval 1 (GPU 2), env 1 (GPU 3), buffer 0",
            "n1": "eval 0 (GPU 0), env 0 (GPU 1)",
        },
    ),
    (
        "mixed",
        "colocate",
        {"n0": "train 0-1 (GPU 0-1), eval 0-1 (GPU 0-1), env 0-1 (GPU 2-3), buffer 0"},
    ),
    ("cpu1", "default", {None: "train 0-1, eval 0-1, env 0-1, buffer 0"}),
    ("cpu1", "disaggregate", {"n0": "train 0-1, eval 0-1, env 0-1, buffer 0"}),
    ("cpu1", "colocate", {"n0": "train 0-1, eval 0-1, env 0-1, buffer 0"}),
    ("cpu4", "default", {None: "train 0-1, eval 0-1, env 0-1, buffer 0"}),
    (
        "cpu4",
        "disaggregate",
        {"n0": "train 0-1, buffer 0", "n1": "eval 0, env 0", "n2": "eval 1, env 1"},
    ),
    (
        "cpu4",
        "colocate",
        {"n0": "train 0, eval 0, env 0, buffer 0", "n1": "train 1, eval 1, env 1"},
    ),
]


@pytest.mark.parametrize(("node_set", "strategy", "expected"), GOLDEN)
def test_two_workers_of_each_kind_go_where_they_always_went(node_set, strategy, expected):
    assert rows(planned(node_set, strategy=strategy, **TWO)) == expected


def test_the_humanoid_layout_fills_eight_nodes_of_eight_gpus():
    made = planned(
        "8x8",
        env=envs(24),
        strategy="disaggregate",
        env_strategy="device-colocate",
        train_worker_num=24,
        eval_worker_num=24,
        buffer_worker_num=16,
    )
    assert rows(made)["n0"] == "train 0-7 (GPU 0-7), buffer 0 3 6 9 12 15"
    assert rows(made)["n3"] == "eval 0 5 10 15 20 (GPU 0-4), env 0 5 10 15 20 (GPU 0-4)"
    assert rows(made)["n7"] == "eval 4 9 14 19 (GPU 0-3), env 4 9 14 19 (GPU 0-3)"
    shares = {(worker.role, worker.gpus, worker.extra_gpus) for worker in made.workers}
    assert shares == {
        ("train", 1.0, 0.0),
        ("eval", 0.5, 0.0),
        ("env", 0.25, 0.125),  # with what its evaluation and its recording take, half a GPU
        ("buffer", 0.0, 0.0),
    }
    assert made.notes == ("24 of 48 GPUs are shared by workers that asked for more",)


@pytest.mark.parametrize("strategy", ["default", "disaggregate", "colocate"])
def test_without_any_gpu_requests_become_zero_and_one_line_says_so(strategy):
    made = planned("cpu4", strategy=strategy, **TWO)
    assert {worker.gpus for worker in made.workers} == {0.0}
    assert made.bundles == ()
    assert made.notes == (
        "the cluster has no GPU: train and eval and env workers, which ask for 6, use CPUs",
    )


@pytest.mark.parametrize("strategy", ["default", "disaggregate", "colocate"])
def test_more_workers_than_cores_share_them_and_one_line_says_so(strategy):
    made = planned("cpu1", env=envs(gpus=0), strategy=strategy, **TWO)
    assert {worker.cpus for worker in made.workers} == {0.2857}
    assert sum(worker.cpus for worker in made.workers) <= 2
    assert made.notes[-1].startswith("workers share cores: 7 asked for, 2 ")


def test_cores_that_may_not_be_shared_are_refused_by_role_and_number():
    with pytest.raises(PlacementError, match="Ask for fewer workers or cores") as caught:
        planned("cpu1", env=envs(gpus=0, cpus=2), share_cpus=False)
    error = caught.value
    assert (error.role, error.resource, error.asked, error.available) == ("env", "CPU", 7, 2)
    assert "train 1, eval 1, env 4, buffer 1" in str(error)
    assert "cluster.share_cpus: true" in str(error)
    assert planned("cpu4", env=envs(gpus=0), share_cpus=False).notes[1:] == ()


@pytest.mark.parametrize("strategy", ["default", "disaggregate", "colocate"])
def test_a_worker_with_more_cores_than_any_node_is_refused(strategy):
    with pytest.raises(PlacementError, match="env worker 0 asks for 9 CPUs and no node has more"):
        planned("cpu4", env=envs(cpus=9), strategy=strategy)


@pytest.mark.parametrize(
    ("node_set", "changes", "role", "advice"),
    [
        ("1x1", {}, "eval", "cluster.placement.strategy: colocate"),
        ("1x1", {"strategy": "disaggregate"}, "eval", "cluster.placement.strategy: colocate"),
        ("1x1", {"strategy": "colocate"}, "env", "env_strategy: device-colocate"),
        ("2x4", {"train_each_gpu_num": 8}, "train", "Lower cluster.train_each_gpu_num"),
        ("2x4", {"eval_worker_num": 8, "strategy": "disaggregate"}, "eval", "or add nodes"),
    ],
)
def test_too_few_gpus_are_refused_with_who_asked_what_there_is_and_what_to_do(
    node_set, changes, role, advice
):
    started = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        planned(node_set, **changes)
    assert time.monotonic() - started < 1
    error = caught.value
    assert (error.role, error.resource) == (role, "GPU")
    assert error.available == sum(gpus for _, gpus in SETS[node_set])
    assert f"{role} worker" in str(error)
    assert f"the cluster has {error.available}" in str(error)
    assert advice in str(error)


def test_one_gpu_is_enough_for_all_where_they_may_share_it():
    made = planned("1x1", env=envs(1), strategy="colocate", env_strategy="device-colocate")
    assert [worker.gpus for worker in made.workers] == [0.3333, 0.3333, 0.1667, 0.0]
    assert [worker.extra_gpus for worker in made.workers] == [0.0, 0.0, 0.0833, 0.0]
    assert {worker.bundle for worker in made.workers} == {0, None}
    halves = planned("1x1", env=envs(gpus=0), train_each_gpu_num=0.5, eval_each_gpu_num=0.5)
    assert [worker.gpus for worker in halves.workers] == [0.5, 0.5, 0, 0, 0]
    assert halves.notes == ()


def test_shares_of_a_gpu_are_packed_and_whole_gpus_stay_together():
    made = planned(
        "1x8",
        env=envs(4, gpus=0.25),
        strategy="disaggregate",
        train_worker_num=2,
        train_each_gpu_num=2,
        eval_worker_num=2,
        eval_each_gpu_num=0.5,
    )
    assert [bundle.gpu_ids for bundle in made.bundles] == [(0, 1), (2, 3), (4,), (5,)]
    assert [worker.gpus for worker in made.of("train")] == [2, 2]
    assert {worker.bundle for worker in (*made.of("eval"), *made.of("env"))} == {2, 3}
    assert [bundle.cpus for bundle in made.bundles] == [1, 1, 3, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "colocate", "train_each_gpu_num": 2},
        {"strategy": "disaggregate", "env_strategy": "device-colocate", "eval_each_gpu_num": 2},
    ],
)
def test_workers_with_several_gpus_cannot_share_them(changes):
    with pytest.raises(PlacementError, match="GPUs"):
        planned("1x8", **changes)


def test_an_environment_shares_its_gpu_with_its_evaluation_and_its_recording():
    made = planned("1x8", env=envs(1))
    worker = made.of("env")[0]
    assert (worker.gpus, worker.extra_gpus) == (0.5, 0.25)
    several = planned("1x8", env=envs(1, gpus=2))
    worker = several.of("env")[0]
    assert (worker.gpus, worker.extra_gpus) == (2, 0)
    assert several.notes == (
        "environments with several GPUs are evaluated and recorded without one",
    )


def test_unequal_numbers_of_train_and_eval_workers_are_colocated_pair_by_pair():
    made = planned("2x4", env=envs(gpus=0), strategy="colocate", eval_worker_num=3)
    assert rows(made) == {"n0": "train 0 (GPU 0), eval 0-2 (GPU 0-2), env 0-1, buffer 0"}
    train, first = made.of("train")[0], made.of("eval")[0]
    assert train.bundle == first.bundle
    assert (train.gpus, first.gpus, made.of("eval")[1].gpus) == (0.5, 0.5, 1.0)


def test_only_remote_roles_are_placed():
    made = planned("cpu4", strategy="disaggregate", remote_eval=False, remote_storage=False)
    assert [worker.name for worker in made.workers] == ["train-0", "env-0", "env-1"]
    rest = planned("cpu4", strategy="colocate", remote_train=False, remote_eval=False)
    assert [worker.name for worker in rest.workers] == ["env-0", "env-1", "buffer-0"]
    nothing = dict.fromkeys(("remote_train", "remote_eval", "remote_env", "remote_storage"), False)
    assert plan(ClusterConfig(**nothing), envs(), []).workers == ()


def test_a_cluster_without_nodes_is_refused():
    with pytest.raises(PlacementError, match="ray start --head"):
        plan(ClusterConfig(), envs(), [])


@pytest.mark.parametrize(
    ("node_set", "changes", "storages"),
    [
        ("8x8", {"train_worker_num": 24}, 3),
        ("8x8", {"train_worker_num": 1}, 1),
        ("cpu4", {}, 1),
        ("1x8", {"remote_train": False}, 1),
    ],
)
def test_an_automatic_number_of_storages_is_one_per_node_of_train_workers(
    node_set, changes, storages
):
    made = planned(node_set, strategy="disaggregate", buffer_worker_num="auto", **changes)
    assert len(made.of("buffer")) == storages
    if changes.get("train_worker_num") == 24:
        assert [worker.node for worker in made.of("buffer")] == ["n0", "n1", "n2"]


def test_reserved_memory_is_counted_and_missing_memory_is_named():
    made = planned("1x8", buffer_worker_num=2, buffer_each_memory_gb=30)
    assert [worker.memory_bytes for worker in made.of("buffer")] == [30_000_000_000] * 2
    with pytest.raises(PlacementError, match=r"buffer worker 2 reserves 30 GB .*cluster has 68.7"):
        planned("1x8", buffer_worker_num=3, buffer_each_memory_gb=30)


def test_settings_that_the_strategy_does_not_use_are_said():
    pool = [{"name": "p", "num_node": 1, "num_gpus": 1}]
    made = planned("1x8", env_strategy="device-colocate", resource_pool=pool)
    assert made.notes == (
        "resource_pool is not used: cluster.placement.mode is auto",
        "env_strategy is not used: cluster.placement.strategy is default",
    )


# ---- by hand ------------------------------------------------------------------------------------


def pool(name, num_node=1, num_gpus=4, **roles):
    return {"name": name, "num_node": num_node, "num_gpus": num_gpus, **roles}


def manual(node_set, *pools, env=None, **cluster):
    config = {"placement": {"mode": "manual"}, "resource_pool": list(pools)} | cluster
    return plan(ClusterConfig.from_dict(config), env or envs(), nodes(node_set))


SPLIT = (pool("train", train="0-1"), pool("rollout", eval="0-1", env="2,3"))


def test_pools_are_carried_out_to_the_index():
    made = manual("2x4", *SPLIT, **TWO)
    assert rows(made) == {
        "n0": "train 0-1 (GPU 0-1), buffer 0",
        "n1": "eval 0-1 (GPU 0-1), env 0-1 (GPU 2-3)",
    }


def test_pools_keep_their_nodes_where_there_is_no_gpu():
    made = manual("cpu4", *SPLIT, **TWO)
    assert rows(made) == {"n0": "train 0-1, buffer 0", "n1": "eval 0-1, env 0-1"}
    two_each = manual("cpu4", *SPLIT, env=envs(4), eval_worker_num=2, train_each_gpu_num=2)
    assert rows(two_each) == {"n0": "train 0, buffer 0", "n1": "eval 0-1, env 0-3"}


def test_a_pool_without_gpus_deals_its_places_to_its_nodes_in_turn():
    made = manual(
        "cpu4",
        pool("all", 3, 0, train=0, eval="1-2", env="0-5"),
        env=envs(6),
        eval_worker_num=2,
    )
    assert rows(made) == {
        "n0": "train 0, env 0 3, buffer 0",
        "n1": "eval 0, env 1 4",
        "n2": "eval 1, env 2 5",
    }


def test_indices_number_the_gpus_of_all_nodes_of_a_pool_and_may_be_shared():
    made = manual(
        "8x8",
        pool("all", 2, 8, train="8-9", eval="0-1", env="0-1", buffer="0,8"),
        env=envs(4),
        buffer_worker_num=2,
        **TWO,
    )
    assert rows(made) == {
        "n0": "eval 0-1 (GPU 0-1), env 0-3 (GPU 0-1), buffer 0",
        "n1": "train 0-1 (GPU 0-1), buffer 1",
    }
    assert {(worker.gpus, worker.extra_gpus) for worker in made.of("env")} == {(0.1667, 0.0833)}


def test_a_pool_takes_the_nodes_it_names_and_others_take_what_is_left():
    made = manual(
        "2x4",
        pool("train", train="0-1"),
        pool("rollout", node_ids=["n0"], eval="0-1", env="2-3"),
        **TWO,
    )
    assert rows(made) == {
        "n0": "eval 0-1 (GPU 0-1), env 0-1 (GPU 2-3)",
        "n1": "train 0-1 (GPU 0-1), buffer 0",
    }


def test_a_worker_with_several_gpus_takes_several_indices():
    made = manual(
        "2x4",
        pool("train", train="0-3"),
        pool("b", eval=0, env="0-1"),
        train_worker_num=2,
        train_each_gpu_num=2,
    )
    assert [bundle.gpu_ids for bundle in made.bundles] == [(0, 1), (2, 3), (0,), (1,)]


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([pool("a", train="0-1", eval="4", env="0-1")], "uses the index 4 and has 4 GPUs"),
        ([pool("a", train="0-2", eval="0", env="0-1")], "gives 3 indices to train and 2 train"),
        ([pool("a", train="0-1", eval="0-1")], "gives 0 indices to env and 2 env workers need 2"),
        ([pool("a", 2, 8, train="0-1", eval="0-1", env="0-1")], "asks for 2 nodes with 8 GPUs and"),
        ([pool("a", 3, 4, train="0-1", eval="0-1", env="0-1")], "and 2 are left for it"),
        (
            [pool("a", train="0-1", node_ids=["n7"])],
            r"the node 'n7', which is not in the cluster. Nodes: n0, n1",
        ),
        (
            [pool("a", node_ids=["n0"], train="0-1"), pool("b", node_ids=["n0"], eval="0-1")],
            "A node is in one pool only",
        ),
    ],
)
def test_pools_that_cannot_be_carried_out_are_refused(pools, message):
    with pytest.raises(PlacementError, match=message):
        manual("2x4", *pools, **TWO)


def test_the_gpus_of_one_worker_are_on_one_node():
    pools = [pool("a", 2, [1, 4], train="0-1", eval="2", env="2")]
    with pytest.raises(PlacementError, match="GPUs of several nodes"):
        manual("2x4", *pools, train_each_gpu_num=2, env=envs(1))


# ---- any plan -----------------------------------------------------------------------------------


def random_runs(count):
    generator = random.Random(7)
    for _ in range(count):
        strategy = generator.choice(["default", "disaggregate", "colocate"])
        yield {
            "node_set": generator.choice(list(SETS)),
            "env": envs(
                generator.randint(1, 9), generator.choice([0, 0.25, 1]), generator.randint(1, 3)
            ),
            "strategy": strategy,
            "env_strategy": generator.choice(["default", "device-colocate"]),
            "train_worker_num": generator.randint(1, 5),
            "eval_worker_num": generator.randint(1, 5),
            "train_each_gpu_num": generator.choice([0, 0.5, 1]),
            "eval_each_gpu_num": generator.choice([0, 0.3, 1]),
            "buffer_worker_num": generator.choice([1, 2, "auto"]),
        }


def test_no_plan_asks_a_node_for_more_than_it_has_or_forgets_a_worker():
    made_plans = 0
    for settings in random_runs(300):
        try:
            made = planned(**settings)
        except PlacementError:
            continue
        made_plans += 1
        names = [worker.name for worker in made.workers]
        assert len(names) == len(set(names))
        assert len(made.of("train")) == settings["train_worker_num"]
        assert len(made.of("env")) == settings["env"][0].num_workers
        for node in made.nodes:
            mine = [worker for worker in made.workers if worker.node == node.name]
            assert sum(worker.cpus for worker in mine) <= node.cpus + 1e-9
            gpus = [gpu for b in made.bundles if b.node == node.name for gpu in b.gpu_ids]
            assert len(gpus) == len(set(gpus)) <= node.gpus
        for index, bundle in enumerate(made.bundles):
            members = [worker for worker in made.workers if worker.bundle == index]
            assert members
            assert {worker.node for worker in members} == {bundle.node}
            asked = sum(worker.gpus + 2 * worker.extra_gpus for worker in members)
            assert asked <= bundle.gpus + 1e-6
            assert sum(worker.cpus for worker in members) <= bundle.cpus + 1e-4
        if settings["strategy"] == "colocate":
            pairs = itertools.zip_longest(made.of("train"), made.of("eval"))
            assert all(a.node == b.node for a, b in pairs if a and b)
    assert made_plans > 100


def test_the_order_of_nodes_does_not_matter():
    config = ClusterConfig.from_dict({"placement": {"strategy": "disaggregate"}, **TWO})
    cluster = nodes("mixed")
    assert plan(config, envs(), cluster) == plan(config, envs(), cluster[::-1])


def test_environments_of_several_entries_are_numbered_on():
    entries = [*envs(2, gpus=0), *envs(1, gpus=0, cpus=3)]
    made = plan(ClusterConfig(), entries, nodes("1x8"))
    assert [(worker.index, worker.cpus) for worker in made.of("env")] == [(0, 1), (1, 1), (2, 3)]


# ---- shown --------------------------------------------------------------------------------------


def test_a_plan_is_shown_as_a_table_with_its_notes():
    made = planned("mixed", strategy="disaggregate", env=envs(gpus=0))
    assert made.describe() == (
        "placement disaggregate: 3 nodes, 56 CPUs, 10 GPUs\n"
        "node  CPUs  GPUs  memory  workers\n"
        "n0    2/32  1/8   64 GiB  train 0 (GPU 0), buffer 0\n"
        "n1    3/16  1/2   64 GiB  eval 0 (GPU 0), env 0-1\n"
        "n2    0/8   0/0   64 GiB  -"
    )
    anywhere = planned("cpu1").describe().splitlines()
    assert anywhere[0] == "placement default: 1 node, 2 CPUs, 0 GPUs"
    assert anywhere[3] == "anywhere  2/2   0/0   -       train 0, eval 0, env 0-1, buffer 0"
    assert [line[:11] for line in anywhere[4:]] == ["note: the c", "note: worke"]


def test_a_plan_is_plain_data():
    made = planned("1x8", strategy="colocate")
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain == made.to_dict()
    assert plain["strategy"] == "colocate"
    assert plain["workers"][0] == {
        "role": "train",
        "index": 0,
        "node": "n0",
        "bundle": 0,
        "cpus": 1.0,
        "gpus": 0.5,
        "memory_bytes": 0,
        "extra_gpus": 0.0,
    }
    assert plain["bundles"][0] == {"node": "n0", "gpu_ids": [0], "cpus": 2.0, "memory_bytes": 0}


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([2, 0, 1, 5], "0-2 5"), ([0, 2, 4], "0 2 4")]
)
def test_numbers_are_listed_as_ranges(numbers, text):
    assert number_ranges(numbers) == text
