"""Checkpoints: whole or absent after any kill, newest first, and never a way to run code."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch

from rlightning.checkpoint import (
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_plain,
    load_weights,
    prune_checkpoints,
    save_checkpoint,
)
from rlightning.config import EnvConfig
from rlightning.env.gym_env import GymEnv
from rlightning.errors import CheckpointError


def content(epoch=1, **changes):
    fields = {
        "policy": "module:Policy",
        "epoch": epoch,
        "env_steps": epoch * 100,
        "weights": {"actor": {"weight": torch.full((3,), float(epoch))}},
        "training": {"epoch": epoch},
        "config_yaml": f"epoch: {epoch}\n",
    }
    return Checkpoint(**(fields | changes))


def save(folder, name, epoch=1, **changes):
    return save_checkpoint(
        folder,
        name,
        content(epoch, **changes),
        write_policy_file=lambda path: torch.save({"epoch": epoch}, path),
    )


def weight(path):
    return float(load_weights(path)["actor"]["weight"][0])


def test_what_was_saved_is_loaded(tmp_path):
    path = save(tmp_path / "deep" / "checkpoints", "epoch_1", 1)
    loaded = load_checkpoint(path)
    assert (loaded.policy, loaded.epoch, loaded.env_steps) == ("module:Policy", 1, 100)
    assert loaded.config_yaml == "epoch: 1\n"
    assert loaded.training == {"epoch": 1}
    assert weight(path) == 1
    assert load_plain(path.parent / "epoch_1.pt") == {"epoch": 1}
    assert sorted(item.name for item in path.parent.iterdir()) == ["epoch_1", "epoch_1.pt"]
    assert sorted(item.name for item in path.iterdir()) == [
        "config.yaml",
        "manifest.json",
        "training.pt",
        "weights.pt",
    ]


def test_a_path_may_be_text(tmp_path):
    path = save(tmp_path, "epoch_1")
    assert load_checkpoint(str(find_checkpoint(str(tmp_path)))).epoch == 1
    assert load_weights(str(path)).keys() == load_weights(path).keys()


def test_the_manifest_says_what_wrote_it_and_hashes_every_file(tmp_path):
    path = save(tmp_path, "epoch_1")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["versions"].keys() == {"rlightning", "torch", "numpy"}
    assert manifest["files"].keys() == {"config.yaml", "training.pt", "weights.pt"}
    assert all(len(entry["sha256"]) == 64 for entry in manifest["files"].values())
    assert manifest["files"]["weights.pt"]["size_bytes"] == (path / "weights.pt").stat().st_size


def test_numpy_values_keep_dtype_shape_and_value(tmp_path):
    frozen = np.arange(3)
    frozen.flags.writeable = False
    training = {
        "scalar": np.array(3, np.int64),
        "reversed": np.arange(3)[::-1],
        "read_only": frozen,
        "wide": np.array([2**63], np.uint64),
        "image": np.zeros((2, 3, 1), np.uint8),
        "none": np.zeros((0, 2), np.float32),
        "flags": np.array([True, False]),
        "number": np.float64(0.1),
        "nested": [({"a": np.ones(1)},), OrderedDict(b=1)],
        "text": "ü",
        "bytes": b"\x00\xff",
        "big": 2**70,
    }
    loaded = load_checkpoint(save(tmp_path, "a", training=training)).training
    assert loaded.keys() == training.keys()
    for name, value in training.items():
        if isinstance(value, np.ndarray):
            assert isinstance(loaded[name], np.ndarray), name
            assert loaded[name].dtype == value.dtype, name
            assert loaded[name].shape == value.shape, name
            assert np.array_equal(loaded[name], value), name
    assert loaded["number"] == 0.1
    assert loaded["nested"][0][0]["a"].tolist() == [1.0]
    assert loaded["nested"][1] == {"b": 1}
    assert (loaded["text"], loaded["bytes"], loaded["big"]) == ("ü", b"\x00\xff", 2**70)


def test_the_policys_file_is_written_under_its_own_name(tmp_path):
    """A policy that overrides `save_checkpoint` may derive further names from the path."""
    names = []

    def write(path):
        names.append(pathlib.Path(path).name)
        pathlib.Path(path).write_text("mine")

    save_checkpoint(tmp_path, "epoch_3", content(), write_policy_file=write)
    assert names == ["epoch_3.pt"]
    assert (tmp_path / "epoch_3.pt").read_text() == "mine"


def test_a_policy_that_writes_no_file_is_told_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"save_checkpoint wrote no file to .*epoch_1\.pt"):
        save_checkpoint(tmp_path, "epoch_1", content(), write_policy_file=lambda path: None)


# ---- names that are written again --------------------------------------------------------------


def test_a_name_is_written_over_whole(tmp_path):
    for epoch in (1, 2, 3):
        path = save(tmp_path, "epoch_last", epoch)
    assert weight(path) == 3
    assert sorted(item.name for item in tmp_path.iterdir()) == ["epoch_last", "epoch_last.pt"]


def test_other_folders_beside_checkpoints_are_no_damaged_checkpoints(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("rlightning.checkpoint._log.warning", lambda *args: said.append(args))
    save(tmp_path, "epoch_1")
    (tmp_path / "tensorboard").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch_1"]
    assert said == []


def kill_between_the_renames(folder):
    """Leave what a kill leaves after the old directory moved aside and before the new one came."""
    save(folder, "epoch_last", 1)
    (folder / "epoch_last").rename(folder / ".old-epoch_last")


@pytest.mark.parametrize("ask", [".", "epoch_last", "epoch_last.pt"])
def test_a_kill_between_two_renames_loses_nothing(tmp_path, ask):
    kill_between_the_renames(tmp_path)
    assert weight(find_checkpoint(tmp_path / ask)) == 1


def test_a_save_after_such_a_kill_works_and_tidies(tmp_path):
    kill_between_the_renames(tmp_path)
    assert weight(save(tmp_path, "epoch_last", 2)) == 2
    kill_between_the_renames(tmp_path / "other")
    save(tmp_path / "other", "epoch_0", 5)
    assert {path.name for path in list_checkpoints(tmp_path / "other")} == {"epoch_0", "epoch_last"}
    assert not list(tmp_path.rglob(".*"))


def test_left_overs_of_dead_writers_are_removed_and_of_living_ones_kept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f".tmp-epoch_0-{pid}").mkdir()
    save(tmp_path, "epoch_1")
    assert [path.name for path in tmp_path.glob(".tmp*")] == [f".tmp-epoch_0-{os.getppid()}"]


# ---- finding -----------------------------------------------------------------------------------


def test_a_removed_checkpoint_leaves_nothing_and_a_half_removed_one_is_cleared_away(
    tmp_path, monkeypatch
):
    for epoch in (1, 2):
        save(tmp_path, f"epoch_{epoch}", epoch=epoch)
    with monkeypatch.context() as killed:
        killed.setattr("rlightning.checkpoint.shutil.rmtree", lambda path, **_: None)
        prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["epoch_2"]
    save(tmp_path, "epoch_3", epoch=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["epoch_2", "epoch_2.pt", "epoch_3", "epoch_3.pt"]


def test_checkpoints_are_listed_oldest_first(tmp_path):
    """By the time of saving: a run may have gone back to an earlier epoch."""
    save(tmp_path, "epoch_9", 10)
    save(tmp_path, "epoch_0", 1)
    save(tmp_path, "epoch_last", 3)
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["epoch_9", "epoch_0", "epoch_last"]
    assert list_checkpoints(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (".", "epoch_2"),
        ("checkpoints", "epoch_2"),
        ("checkpoints/epoch_1", "epoch_1"),
        ("checkpoints/epoch_1.pt", "epoch_1"),
    ],
)
def test_a_run_a_folder_a_checkpoint_and_its_file_are_understood(tmp_path, ask, found):
    for epoch in (1, 2):
        save(tmp_path / "checkpoints", f"epoch_{epoch}", epoch)
    assert find_checkpoint(tmp_path / ask).name == found


@pytest.mark.parametrize("ask", [".", "absent", "lonely.pt"])
def test_nothing_there_says_what_to_give(tmp_path, ask):
    (tmp_path / "lonely.pt").write_text("x")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in .*give a run directory"):
        find_checkpoint(tmp_path / ask)


DAMAGE = {
    "truncated": lambda path: (path / "training.pt").write_bytes(b"PK"),
    "flipped": lambda path: (path / "weights.pt").write_bytes(
        bytes([(data := (path / "weights.pt").read_bytes())[0] ^ 1]) + data[1:]
    ),
    "missing file": lambda path: (path / "config.yaml").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text('{"format": 1,'),
    "manifest of another kind": lambda path: (path / "manifest.json").write_text("[1]"),
    "other format": lambda path: (path / "manifest.json").write_text('{"format": 9, "files": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_gives_way_to_the_next_newest(tmp_path, damage):
    save(tmp_path, "epoch_1", 1)
    damage(save(tmp_path, "epoch_2", 2))
    assert find_checkpoint(tmp_path).name == "epoch_1"
    with pytest.raises(CheckpointError):
        find_checkpoint(tmp_path / "epoch_2")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "epoch_2")


# ---- no code -----------------------------------------------------------------------------------


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["training.pt", "weights.pt"])
def test_code_in_a_checkpoint_never_runs(tmp_path, name):
    path = save(tmp_path, "epoch_1")
    marker = tmp_path / "ran"
    torch.save({"x": Bomb(marker)}, path / name)
    manifest = json.loads((path / "manifest.json").read_text())
    from rlightning.checkpoint import _describe

    manifest["files"][name] = _describe(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"{name} cannot be loaded as plain data") as caught:
        load_checkpoint(path)
    assert "weights_only" not in str(caught.value), "advises to run the code"
    assert not marker.exists()


def test_what_is_not_plain_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"training\.policy is a object"):
        save(tmp_path, "epoch_1", training={"policy": object()})
    assert list_checkpoints(tmp_path) == []


# ---- kills -------------------------------------------------------------------------------------

WRITER = """
import sys, pathlib, torch
from rlightning.checkpoint import Checkpoint, save_checkpoint
folder = pathlib.Path(sys.argv[1])
print("ready", flush=True)
for epoch in range(int(sys.argv[2]), 100_000):
    one = {"actor": {"weight": torch.full((200_000,), float(epoch))}}
    checkpoint = Checkpoint(policy="m:P", epoch=epoch, env_steps=epoch, weights=one,
        training={"epoch": epoch}, config_yaml="")
    save_checkpoint(folder, "epoch_last", checkpoint,
        write_policy_file=lambda path: torch.save(one, path))
    print(epoch, flush=True)
"""


def kill_during_saves(folder, kills, seed):
    """Kill a process that saves without pause, at random moments; check after each kill."""
    chance = random.Random(seed)
    epoch = 0
    for _ in range(kills):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(epoch + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert writer.stdout.readline() == "ready\n"
            completed = int(writer.stdout.readline())
            time.sleep(chance.uniform(0, 0.1))  # the random moment itself, not a synchronisation
        finally:
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
            writer.wait()
            writer.stdout.close()
        completed = int(rest[-1]) if rest and rest[-1].isdigit() else completed
        loaded = load_checkpoint(find_checkpoint(folder))
        assert loaded.epoch >= completed
        assert loaded.epoch == loaded.training["epoch"]
        assert set(loaded.weights["actor"]["weight"].tolist()) == {float(loaded.epoch)}
        policy_file = load_plain(folder / "epoch_last.pt")["actor"]["weight"]
        assert policy_file.unique().numel() == 1
        assert loaded.epoch <= float(policy_file[0]) <= loaded.epoch + 1
        epoch = loaded.epoch


def test_three_kills_during_saves_lose_nothing(tmp_path):
    kill_during_saves(tmp_path, kills=3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_kills_during_saves_lose_nothing(tmp_path):
    kill_during_saves(tmp_path, kills=20, seed=1)


def test_a_reader_beside_a_writer_disturbs_nothing(tmp_path):
    """Looking for the newest checkpoint while it is replaced must not make the save fail."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        writer.stdout.readline()
        writer.stdout.readline()
        deadline = time.monotonic() + 2
        reads = 0
        while time.monotonic() < deadline and writer.poll() is None:
            (path,) = list_checkpoints(tmp_path)
            loaded = load_checkpoint(path)
            assert set(loaded.weights["actor"]["weight"].tolist()) == {float(loaded.epoch)}
            assert loaded.epoch == loaded.training["epoch"]
            reads += 1
        assert writer.poll() is None, writer.stderr.read()
        assert reads > 3
    finally:
        writer.kill()
        writer.communicate()


@pytest.mark.parametrize(
    "task", ["FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1", "CartPole-v1", "Pendulum-v1"]
)
def test_a_checkpoint_holds_the_state_of_the_environments_that_come_with_gymnasium(tmp_path, task):
    """Some of them have text and bytes in theirs."""
    env = GymEnv(EnvConfig(name="e", backend="gymnasium", task=task, num_envs=2))
    env._reset(seed=0)
    path = save(tmp_path, "epoch_1", training={"env": env.get_state()})
    env.set_state(load_checkpoint(path).training["env"])
    env.close()


def test_an_array_that_cannot_be_saved_is_named_with_its_dtype(tmp_path):
    with pytest.raises(CheckpointError, match=r"training\.env\.words is an array of <U5"):
        save(tmp_path, "epoch_1", training={"env": {"words": np.array(["hello"])}})
