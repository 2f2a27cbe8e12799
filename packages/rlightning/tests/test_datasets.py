"""Recorded episodes: ends, both layouts written and read, what does not fit is refused."""

import importlib
import json

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.build import build_data_buffer
from rlightning.config import BufferConfig
from rlightning.datasets import (
    Episode,
    Fit,
    LeRobotDataset,
    MinariDataset,
    open_dataset,
    write_lerobot,
    write_minari,
)
from rlightning.datasets.space_json import space_from_json, space_to_json
from rlightning.errors import ConfigError, ContractError
from rlightning.types import EnvMeta

pytest.importorskip("h5py")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = spaces.Box(-2, 2, (2,), np.float32)
NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (4, 5, 3), np.uint8),
        "arm": spaces.Dict({"pose": VECTOR}),
        "pair": spaces.Tuple([spaces.Discrete(4), spaces.Box(0, 1, (2,), np.float64)]),
    }
)


def episode(steps, *, space=VECTOR, action_space=BOX, terminated=False, truncated=False, seed=0):
    """Random observations and actions; ends as asked."""
    rng = np.random.default_rng(seed)

    def rows(part):
        if isinstance(part, spaces.Dict):
            return {key: rows(inner) for key, inner in part.spaces.items()}
        if isinstance(part, spaces.Tuple):
            return tuple(rows(inner) for inner in part.spaces)
        part.seed(seed)
        return np.stack([part.sample() for _ in range(steps + 1)])

    flag = np.zeros(steps, bool)
    ends = {"terminated": flag.copy(), "truncated": flag.copy()}
    ends["terminated"][-1], ends["truncated"][-1] = terminated, truncated
    action_space.seed(seed)
    actions = np.stack([action_space.sample() for _ in range(steps)])
    return Episode(rows(space), actions, rng.normal(size=steps).astype(np.float32), **ends)


def same(found, expected):
    """Compare nested observations, dtypes included."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            same(left, right)
    else:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


EPISODES = [
    episode(4, terminated=True, seed=1),
    episode(1, truncated=True, seed=2),
    episode(3, seed=3),
]

# ---- episodes --------------------------------------------------------------------------------


def test_the_observation_after_an_action_is_the_next_one():
    one = episode(3, truncated=True)
    rows = one.transitions()
    same(rows["observation"], one.observations[:3])
    same(rows["next_observation"], one.observations[1:])
    assert rows["truncated"].tolist() == [False, False, True]
    assert rows["terminated"].tolist() == [False] * 3


def test_an_episode_that_just_stops_counts_as_truncated():
    assert episode(2).transitions()["truncated"].tolist() == [False, True]


def test_a_step_whose_outcome_is_unknown_is_left_out():
    """Three frames without a termination: the third action's outcome was never seen."""
    whole = episode(3, truncated=True)
    cut = Episode(
        whole.observations[:3], whole.actions, whole.rewards, whole.terminated, whole.truncated
    )
    rows = cut.transitions()
    assert len(rows["action"]) == 2
    same(rows["next_observation"], whole.observations[1:3])
    assert rows["truncated"].tolist() == [False, True]


def test_a_terminated_last_step_stays_without_its_outcome():
    whole = episode(3, terminated=True)
    cut = Episode(
        whole.observations[:3], whole.actions, whole.rewards, whole.terminated, whole.truncated
    )
    rows = cut.transitions()
    assert rows["terminated"].tolist() == [False, False, True]
    assert rows["truncated"].tolist() == [False] * 3
    assert len(rows["next_observation"]) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": np.zeros((0, 2))}, "no step"),
        ({"rewards": np.zeros(2)}, "3 actions and rewards of shape"),
        ({"observations": np.zeros((5, 3))}, "3 actions and 5 observations"),
        ({"observations": {"a": np.zeros((2, 3))}}, "2 observations of 'a'"),
        ({"terminated": np.array([True, False, False])}, "ends at step 0 already"),
        ({"truncated": np.array([False, True, False])}, "ends at step 1 already"),
    ],
)
def test_episodes_that_contradict_themselves_are_refused(changes, message):
    one = episode(3)
    fields = {name: getattr(one, name) for name in one.__dataclass_fields__} | changes
    with pytest.raises(ContractError, match=message):
        Episode(**fields)


# ---- Minari ----------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [VECTOR, NESTED], ids=["plain", "nested"])
@pytest.mark.parametrize("actions", [BOX, spaces.Discrete(3, start=1)], ids=["box", "discrete"])
def test_minari_gives_back_what_was_written(tmp_path, space, actions):
    written = [
        episode(n, space=space, action_space=actions, terminated=n == 4, truncated=n == 2, seed=n)
        for n in (4, 2, 3)
    ]
    write_minari(tmp_path / "d", written, observation_space=space, action_space=actions, author="a")
    dataset = open_dataset(tmp_path / "d")
    assert isinstance(dataset, MinariDataset)
    assert (dataset.n_episodes, dataset.n_steps, dataset.metadata["author"]) == (3, 9, "a")
    assert dataset.observation_space == space
    assert dataset.action_space == actions
    for found, expected in zip(dataset, written, strict=True):
        same(found.observations, expected.observations)
        for name in ("actions", "rewards", "terminated", "truncated"):
            same(getattr(found, name), getattr(expected, name))


def test_minari_s_own_files_are_laid_out_as_minari_does(tmp_path):
    """As its documentation describes them: names of groups, arrays, attributes and metadata."""
    import h5py

    write_minari(tmp_path, EPISODES, observation_space=VECTOR, action_space=BOX)
    metadata = json.loads((tmp_path / "data" / "metadata.json").read_text())
    assert (metadata["total_episodes"], metadata["total_steps"]) == (3, 8)
    assert metadata["data_format"] == "hdf5"
    described = json.loads(metadata["observation_space"])
    assert (described["type"], described["dtype"], described["shape"]) == ("Box", "float32", [3])
    with h5py.File(tmp_path / "data" / "main_data.hdf5") as file:
        assert sorted(file) == ["episode_0", "episode_1", "episode_2"]
        first = file["episode_0"]
        assert set(first) == {"observations", "actions", "rewards", "terminations", "truncations"}
        assert (first.attrs["id"], first.attrs["total_steps"]) == (0, 4)
        assert first["observations"].shape == (5, 3)
        assert first["actions"].shape == (4, 2)


def test_more_than_ten_minari_episodes_stay_in_order(tmp_path):
    many = [episode(n + 1, seed=n) for n in range(12)]
    write_minari(tmp_path, many, observation_space=VECTOR, action_space=BOX)
    assert [len(one) for one in MinariDataset(tmp_path)] == list(range(1, 13))


def test_minari_refuses_what_it_cannot_keep(tmp_path):
    short = Episode(np.zeros((2, 3)), np.zeros((2, 2)), np.zeros(2), np.zeros(2), np.zeros(2))
    spaces_given = {"observation_space": VECTOR, "action_space": BOX}
    with pytest.raises(ContractError, match="what followed the last action"):
        write_minari(tmp_path / "a", [short], **spaces_given)
    with pytest.raises(ContractError, match=r"observes .*says"):
        write_minari(tmp_path / "b", [episode(2, space=NESTED)], **spaces_given)
    write_minari(tmp_path / "c", EPISODES, **spaces_given)
    with pytest.raises(ConfigError, match="a dataset already"):
        write_minari(tmp_path / "c", EPISODES, **spaces_given)


@pytest.mark.parametrize(
    "space", [VECTOR, NESTED, spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)], ids=str
)
def test_spaces_survive_json(space):
    assert space_from_json(space_to_json(space)) == space


def test_spaces_without_arrays_are_refused():
    with pytest.raises(ContractError, match="Text"):
        space_from_json('{"type": "Text"}')
    with pytest.raises(ContractError, match="cannot be kept"):
        space_to_json(spaces.Text(4))


# ---- LeRobot ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_lerobot_gives_back_all_but_the_last_observation(tmp_path, version):
    write_lerobot(tmp_path, EPISODES, fps=20, task="reach", version=version)
    dataset = open_dataset(tmp_path)
    assert isinstance(dataset, LeRobotDataset)
    assert (dataset.n_episodes, dataset.n_steps) == (3, 8)
    for found, expected in zip(dataset, EPISODES, strict=True):
        same(found.observations["state"], expected.observations[:-1])
        for name in ("actions", "rewards", "terminated", "truncated"):
            same(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_lerobot_s_files_are_laid_out_as_lerobot_does(tmp_path, version):
    import pyarrow.parquet as parquet

    write_lerobot(tmp_path, EPISODES, fps=20, task="reach", version=version)
    info = json.loads((tmp_path / "meta" / "info.json").read_text())
    assert info["codebase_version"] == version
    assert (info["fps"], info["total_frames"], info["splits"]) == (20, 8, {"train": "0:3"})
    assert info["features"]["observation.state"] == {
        "dtype": "float32",
        "shape": [3],
        "names": None,
    }
    name = "episode_000001" if version == "v2.1" else "file-000"
    table = parquet.read_table(tmp_path / "data" / "chunk-000" / f"{name}.parquet")
    if version == "v2.1":
        assert table["index"].to_pylist() == [4]
        lines = (tmp_path / "meta" / "episodes.jsonl").read_text().splitlines()
        assert json.loads(lines[1]) == {"episode_index": 1, "tasks": ["reach"], "length": 1}
        stats = (tmp_path / "meta" / "episodes_stats.jsonl").read_text().splitlines()
        assert json.loads(stats[0])["stats"]["action"]["count"] == [4]
    else:
        assert table["index"].to_pylist() == list(range(8))
        assert table["frame_index"].to_pylist() == [0, 1, 2, 3, 0, 0, 1, 2]
        rows = parquet.read_table(tmp_path / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
        assert rows["dataset_from_index"].to_pylist() == [0, 4, 5]
        assert rows["dataset_to_index"].to_pylist() == [4, 5, 8]
        stats = json.loads((tmp_path / "meta" / "stats.json").read_text())
        actions = np.concatenate([one.actions for one in EPISODES]).astype(np.float64)
        np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0))
        np.testing.assert_allclose(stats["action"]["std"], actions.std(0))
        assert stats["action"]["count"] == [8]
    np.testing.assert_allclose(table["timestamp"].to_numpy()[-1], (len(table) != 1) * 0.1)


def test_lerobot_episodes_may_cross_row_groups_and_files(tmp_path):
    """As large datasets have them: a file boundary in the middle of an episode."""
    import pyarrow.parquet as parquet

    write_lerobot(tmp_path, EPISODES, fps=20, task="reach")
    folder = tmp_path / "data" / "chunk-000"
    table = parquet.read_table(folder / "file-000.parquet")
    parquet.write_table(table.slice(0, 6), folder / "file-000.parquet", row_group_size=3)
    parquet.write_table(table.slice(6), folder / "file-001.parquet")
    assert [len(one) for one in LeRobotDataset(tmp_path)] == [4, 1, 3]


def test_a_dataset_from_elsewhere_ends_with_success_or_is_cut_off(tmp_path):
    """Lists of variable length, no rewards, `next.success` instead of `next.terminated`."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    (tmp_path / "meta").mkdir()
    (tmp_path / "data").mkdir()
    features = {
        "observation.state": {"dtype": "float32", "shape": [2]},
        "observation.images.top": {"dtype": "video", "shape": [4, 4, 3]},
        "action": {"dtype": "float32", "shape": [1]},
        "next.success": {"dtype": "bool", "shape": [1]},
        "episode_index": {"dtype": "int64", "shape": [1]},
    }
    info = {
        "codebase_version": "v2.0",
        "total_episodes": 2,
        "total_frames": 4,
        "features": features,
    }
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    table = {
        "observation.state": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]],
        "action": [[0.1], [0.2], [0.3], [0.4]],
        "next.success": [False, True, False, False],
        "episode_index": [0, 0, 1, 1],
    }
    parquet.write_table(arrow.table(table), tmp_path / "data" / "a.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset.left_out == ["observation.images.top"]
    first, second = dataset
    assert first.terminated.tolist() == [False, True]
    assert len(first.transitions()["action"]) == 2
    assert not second.terminated.any()
    assert len(second.transitions()["action"]) == 1
    assert first.rewards.tolist() == [0.0, 0.0]
    camera = spaces.Dict({"images": spaces.Dict({"top": spaces.Box(0, 255, (4, 4, 3), np.uint8)})})
    with pytest.raises(ConfigError, match=r"top are videos, which are not read.*use_videos=False"):
        Fit(dataset, camera, spaces.Box(-1, 1, (1,)))


# ---- pictures --------------------------------------------------------------------------------

SEEN = spaces.Dict(
    {
        "images": spaces.Dict(
            {
                "top": spaces.Box(0, 255, (4, 5, 3), np.uint8),
                "depth": spaces.Box(0, 255, (3, 2, 1), np.uint8),
            }
        ),
        "state": VECTOR,
    }
)
FILMED = [episode(4, space=SEEN, terminated=True, seed=1), episode(2, space=SEEN, seed=2)]


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_lerobot_gives_back_pictures_to_the_pixel(tmp_path, version):
    write_lerobot(tmp_path, FILMED, fps=10, task="look", version=version)
    dataset = open_dataset(tmp_path)
    assert dataset.left_out == []
    for found, expected in zip(dataset, FILMED, strict=True):
        for name in ("top", "depth"):
            same(found.observations["images"][name], expected.observations["images"][name][:-1])
        same(found.observations["state"], expected.observations["state"][:-1])


def test_pictures_are_laid_out_as_lerobot_does(tmp_path):
    import pyarrow.parquet as parquet

    write_lerobot(tmp_path, FILMED, fps=10, task="look")
    info = json.loads((tmp_path / "meta" / "info.json").read_text())
    assert info["features"]["observation.images.top"] == {
        "dtype": "image",
        "shape": [4, 5, 3],
        "names": ["height", "width", "channels"],
    }
    table = parquet.read_table(tmp_path / "data" / "chunk-000" / "file-000.parquet")
    cell = table["observation.images.top"][0].as_py()
    assert cell.keys() == {"bytes", "path"}
    assert cell["bytes"].startswith(b"\x89PNG")
    stats = json.loads((tmp_path / "meta" / "stats.json").read_text())["observation.images.top"]
    pixels = np.concatenate([one.observations["images"]["top"][:-1] for one in FILMED]) / 255
    np.testing.assert_allclose(np.ravel(stats["mean"]), pixels.mean((0, 1, 2)))
    np.testing.assert_allclose(np.ravel(stats["std"]), pixels.std((0, 1, 2)))
    assert (np.shape(stats["min"]), stats["count"]) == ((3, 1, 1), [6])


def without_cells(tmp_path, cells):
    """Put pictures into files, and `cells` (None: no column) where they were."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    name = "observation.images.top"
    write_lerobot(tmp_path, FILMED[1:], fps=10, task="look")
    file = tmp_path / "data" / "chunk-000" / "file-000.parquet"
    table = parquet.read_table(file)
    folder = tmp_path / "images" / name / "episode_000000"
    folder.mkdir(parents=True)
    for number, cell in enumerate(table[name].to_pylist()):
        (folder / f"frame_{number:06d}.png").write_bytes(cell["bytes"])
    at = table.column_names.index(name)
    table = table.remove_column(at)
    if cells is not None:
        table = table.add_column(at, name, arrow.array(cells))
    parquet.write_table(table, file)
    return LeRobotDataset(tmp_path)


FOLDER = "images/observation.images.top/episode_000000"


@pytest.mark.parametrize(
    "cells",
    [
        None,
        [f"{FOLDER}/frame_000000.png", f"{FOLDER}/frame_000001.png"],
        [{"bytes": None, "path": f"frame_{n:06d}.png"} for n in range(2)],
    ],
    ids=["no column", "paths", "names"],
)
def test_pictures_may_be_files(tmp_path, cells):
    (found,) = without_cells(tmp_path, cells)
    same(found.observations["images"]["top"], FILMED[1].observations["images"]["top"][:-1])


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["a.png", "b.png"], "frame 0: the picture 'a.png' is neither in its cell nor a file in"),
        ([b"no", b"picture"], "episode 0: observation.images.top, frame 0: .* cannot be read"),
    ],
    ids=["no file", "no picture"],
)
def test_a_picture_that_is_not_there_is_named(tmp_path, cells, message):
    with pytest.raises(ContractError, match=message):
        list(without_cells(tmp_path, cells))


def test_a_picture_of_another_size_than_was_said_is_refused(tmp_path):
    write_lerobot(tmp_path, FILMED, fps=10, task="look")
    file = tmp_path / "meta" / "info.json"
    info = json.loads(file.read_text())
    info["features"]["observation.images.top"]["shape"] = [3, 9, 9]  # channels may come first
    file.write_text(json.dumps(info))
    dataset = LeRobotDataset(tmp_path)
    assert dataset.observation_fields["images", "top"].shape == (9, 9, 3)
    with pytest.raises(ContractError, match=r"a picture of \[4, 5, 3\].*says \[9, 9, 3\]"):
        list(dataset)


def test_cameras_fit_by_their_own_name_and_others_are_not_even_decoded(tmp_path, monkeypatch):
    write_lerobot(tmp_path, FILMED, fps=10, task="look")
    wanted = spaces.Dict({"top": SEEN["images"]["top"], "state": VECTOR})
    decoded = []
    monkeypatch.setattr(
        "rlightning.datasets.lerobot.decode",
        lambda cell, field: decoded.append(field) or np.zeros(field.shape, np.uint8),
    )
    one = next(iter(Fit(open_dataset(tmp_path), wanted, BOX)))
    assert {key: leaf.shape for key, leaf in one.observations.items()} == {
        "top": (4, 4, 5, 3),
        "state": (4, 3),
    }
    assert {field.shape for field in decoded} == {(4, 5, 3)}


def test_a_policy_learns_from_pictures_of_a_dataset(tmp_path):
    only = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    write_lerobot(tmp_path, [episode(5, space=only, truncated=True)], fps=10, task="look")
    config = BufferConfig.from_dict(
        {"type": "DatasetBuffer", "capacity": 8, "dataset": str(tmp_path)}
    )
    buffer = build_data_buffer("DatasetBuffer", config, seed=0)
    buffer.init([EnvMeta("e-0", BOX, only, 1)], ["e-0"])
    (batch,) = buffer.sample(4)
    assert batch["observation"].dtype == torch.uint8
    assert batch["observation"].shape == (4, 8, 8, 3)


# ---- what fits an environment ----------------------------------------------------------------


def test_the_only_observation_fits_whatever_it_is_called(tmp_path):
    write_lerobot(tmp_path, EPISODES, fps=20, task="reach")
    dataset = open_dataset(tmp_path)
    plain = next(iter(Fit(dataset, VECTOR, BOX)))
    same(plain.observations, EPISODES[0].observations[:-1])
    named = next(iter(Fit(dataset, spaces.Dict({"state": VECTOR}), BOX)))
    same(named.observations, {"state": EPISODES[0].observations[:-1]})


def test_further_observations_are_left_out_and_numbers_take_the_environment_s_dtype(tmp_path):
    many = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float64), "b": VECTOR})
    write_minari(tmp_path, [episode(3, space=many)], observation_space=many, action_space=BOX)
    wanted = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32)})
    one = next(iter(Fit(open_dataset(tmp_path), wanted, BOX)))
    assert list(one.observations) == ["a"]
    assert one.observations["a"].dtype == np.float32


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (VECTOR, spaces.Box(-1, 1, (4,)), r"takes actions Box.*\(4,\).*has actions float32\[2\]"),
        (VECTOR, spaces.Discrete(3), r"takes actions Discrete\(3\).*has actions float32\[2\]"),
        (spaces.Box(-1, 1, (5,)), BOX, r"observes Box.*\(5,\).*nothing to fit the observation"),
        (spaces.Dict({"x": VECTOR, "y": BOX}), BOX, r"nothing to fit x .*y .*are \(float32"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sides_named(
    tmp_path, observation_space, action_space, message
):
    write_minari(tmp_path, EPISODES, observation_space=VECTOR, action_space=BOX)
    with pytest.raises(ConfigError, match=message):
        Fit(open_dataset(tmp_path), observation_space, action_space)


def test_an_action_that_the_environment_does_not_have_is_refused(tmp_path):
    actions = spaces.Discrete(5)
    one = episode(3, action_space=actions)
    one.actions[:] = [0, 4, 1]
    write_minari(tmp_path, [one], observation_space=VECTOR, action_space=actions)
    with pytest.raises(ContractError, match=r"episode 0 .* actions from 0 to 4; .* takes 0 to 2"):
        next(iter(Fit(open_dataset(tmp_path), VECTOR, spaces.Discrete(3))))


def test_a_folder_without_a_dataset_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no dataset in .*; expected"):
        open_dataset(tmp_path)
    with pytest.raises(ConfigError, match="no Minari dataset"):
        open_dataset(tmp_path, "minari")
    with pytest.raises(ConfigError, match="no LeRobot dataset"):
        open_dataset(tmp_path, "lerobot")


def as_minari(folder):
    write_minari(folder, EPISODES, observation_space=VECTOR, action_space=BOX)


def as_lerobot(folder):
    write_lerobot(folder, EPISODES, fps=10, task="t")


@pytest.mark.parametrize(("module", "write"), [("h5py", as_minari), ("pyarrow", as_lerobot)])
def test_a_missing_library_is_named_with_the_extra(tmp_path, monkeypatch, module, write):
    real = importlib.import_module

    def without(name, *args):
        if name.split(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args)

    monkeypatch.setattr("rlightning.datasets.requirements.importlib.import_module", without)
    with pytest.raises(ConfigError, match=rf"need {module} .*rlightning\[datasets\]"):
        write(tmp_path)
