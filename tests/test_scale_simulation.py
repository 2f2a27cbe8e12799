"""The simulation of throughput agrees with arithmetic where that is possible."""

import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def sim():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import scale_sim

        yield scale_sim
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in ("scale_sim", "common"):
            sys.modules.pop(name, None)


def costs(sim, **changes):
    names = ("frame_s", "send_byte_s", "receive_byte_s", "copy_byte_s", "weights_byte_s", "call_s")
    return sim.Costs(**dict.fromkeys(names, 0.0) | changes)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_where_data_costs_nothing_workers_add_up(sim, direct, workers):
    layout = (1, workers, workers, workers, 1)
    found = sim.simulate(costs(sim), layout, direct=direct)
    single = sim.PUBLISHED["1 process"]
    assert found["rollout"] == pytest.approx(workers * single[5], rel=1e-3)
    assert found["efficiency"] == 1.0
    if workers == 1:
        assert found["training"] == pytest.approx(single[6], rel=1e-3)


def test_a_driver_that_copies_everything_is_what_all_wait_for(sim):
    """4 GB/s, and three observations and five small parts pass through the driver per step."""
    made = costs(sim, send_byte_s=1 / 4e9, receive_byte_s=1 / 4e9)
    rates = [sim.simulate(made, (1, n, n, 1, 1), direct=False) for n in (1, 4, 16, 64)]
    efficiency = [rate["efficiency"] for rate in rates]
    assert efficiency == sorted(efficiency, reverse=True)
    observation, response, action = (
        sim.ENVS * sim.ASSUMED[name]
        for name in ("observation_bytes", "response_bytes", "action_bytes")
    )
    per_step_s = (3 * observation + 2 * response + action) / 4e9
    assert rates[-1]["rollout"] < sim.ENVS / per_step_s
    assert rates[-1]["rollout"] > 0.5 * sim.ENVS / per_step_s


def test_handing_data_over_directly_is_never_slower_where_calls_are_cheap(sim):
    made = costs(sim, frame_s=2e-5, send_byte_s=1e-10, receive_byte_s=2e-10, call_s=1e-4)
    for layout in sim.layouts().values():
        planes = [sim.simulate(made, layout, direct=direct) for direct in (False, True)]
        assert planes[1]["rollout"] >= 0.97 * planes[0]["rollout"]
        assert planes[1]["training"] >= 0.97 * planes[0]["training"]
