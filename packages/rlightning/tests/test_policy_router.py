"""Routing: even, near, sticky where asked, and around the dead."""

import random
from collections import Counter

import pytest

from rlightning.errors import WorkerLostError
from rlightning.policy.router import NodeAffinityRouter, SimpleRouter, build_router


def ask(*env_ids, rows=1):
    return dict.fromkeys(env_ids, rows)


def test_requests_are_spread_evenly_and_the_same_each_time():
    router = SimpleRouter([None, None])
    want = {"a": 0, "b": 1, "c": 0, "d": 1}
    assert router.assign(ask("a", "b", "c", "d")) == want
    assert router.assign(ask("a", "b", "c", "d")) == want
    assert list(router.assign(ask("d", "a"))) == ["d", "a"]


def test_workers_get_even_numbers_of_rows_not_of_requests():
    router = SimpleRouter([None, None])
    assert router.assign({"big": 8, "a": 2, "b": 2, "c": 4}) == {"big": 0, "a": 1, "b": 1, "c": 1}


def test_who_is_busy_gets_less():
    router = SimpleRouter([None] * 3)
    assert router.assign(ask("a", "b", "c"), loads=[5, 0, 1]) == {"a": 1, "b": 1, "c": 2}


def test_environments_are_answered_on_their_node():
    router = NodeAffinityRouter(["x", "y", "y"], {"a": "x", "b": "x", "c": "y", "d": "y"})
    assert router.assign(ask("a", "b", "c", "d")) == {"a": 0, "b": 0, "c": 1, "d": 2}


@pytest.mark.parametrize("node", ["z", None])
def test_an_environment_without_a_worker_near_goes_to_whoever_has_least_to_do(node):
    router = NodeAffinityRouter(["x", None], {"a": "x", "far": node})
    assert router.assign(ask("a", "far")) == {"a": 0, "far": 1}
    assert router.assign(ask("unknown")) == {"unknown": 0}


def test_a_sticky_environment_stays_with_its_worker():
    router = SimpleRouter([None, None], sticky=True)
    assert router.assign(ask("a", "b")) == {"a": 0, "b": 1}
    assert router.assign(ask("b", "a")) == {"b": 1, "a": 0}
    assert router.assign(ask("b")) == {"b": 1}
    assert router.assign(ask("c")) == {"c": 0}
    assert router.assign(ask("d")) == {"d": 1}
    assert router.assign(ask("a", "b"), loads=[9, 0]) == {"a": 0, "b": 1}


def test_the_dead_get_nothing_and_what_stuck_to_them_is_told():
    router = SimpleRouter([None, None], sticky=True)
    router.assign(ask("a", "b", "c", "d"))
    assert router.mark_dead(1) == ["b", "d"]
    assert router.alive == [0]
    assert set(router.assign(ask("a", "b", "c", "d")).values()) == {0}
    router.mark_alive(1)
    assert router.assign(ask("a", "b", "new")) == {"a": 0, "b": 0, "new": 1}
    assert SimpleRouter([None, None]).mark_dead(0) == []


def test_affinity_reaches_across_nodes_while_a_worker_is_dead_and_returns():
    router = NodeAffinityRouter(["x", "y"], {"a": "x", "b": "y"})
    router.mark_dead(0)
    assert router.assign(ask("a", "b")) == {"a": 1, "b": 1}
    router.mark_alive(0)
    assert router.assign(ask("a", "b")) == {"a": 0, "b": 1}
    router.mark_alive(0, node="y")
    assert router.assign(ask("a", "b")) == {"a": 0, "b": 1}
    assert router.assign(ask("b"), loads=[0, 3]) == {"b": 0}


def test_an_environment_that_moved_sticks_anew():
    router = NodeAffinityRouter(["x", "y"], {"a": "x"}, sticky=True)
    assert router.assign(ask("a")) == {"a": 0}
    router.move("a", "y")
    assert router.assign(ask("a")) == {"a": 1}


@pytest.mark.parametrize("kind", [SimpleRouter, NodeAffinityRouter])
def test_without_anybody_alive_the_error_says_so(kind):
    router = kind([None, None])
    router.mark_dead(0)
    router.mark_dead(1)
    with pytest.raises(WorkerLostError, match="none of 2 eval workers is alive"):
        router.assign(ask("a"))


def test_the_configured_router_is_built():
    assert type(build_router("simple", [None])) is SimpleRouter
    router = build_router("node_affinity", ["x"], {"a": "x"}, sticky=True)
    assert type(router) is NodeAffinityRouter
    assert router.sticky


@pytest.mark.parametrize("sticky", [False, True])
def test_whatever_dies_and_returns_the_living_share_all_work_evenly(sticky):
    generator = random.Random(3)
    router = SimpleRouter([None] * 4, sticky=sticky)
    env_ids = [f"e{index}" for index in range(16)]
    for _ in range(300):
        worker = generator.randrange(4)
        if worker in router.alive and len(router.alive) > 1:
            router.mark_dead(worker)
        else:
            router.mark_alive(worker)
            router.release(env_ids)
        chosen = router.assign(ask(*env_ids))
        assert set(chosen) == set(env_ids)
        counts = Counter(chosen.values())
        assert set(counts) <= set(router.alive)
        if not sticky:
            assert max(counts.values()) - min(counts.values()) <= 1
        assert router.assign(ask(*env_ids)) == chosen
