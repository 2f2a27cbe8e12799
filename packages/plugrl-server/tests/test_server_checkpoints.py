"""Checkpoints of a run: whole or absent, code-free, pruned, and refused where they do not fit."""

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from plugrl_server.common.checkpoint_manager import (
    Checkpoint,
    CheckpointManager,
    get_latest_checkpoint_step,
    load_checkpoint_from_path,
)
from plugrl_server.errors import RunExistsError
from rlightning.errors import CheckpointError


def manager(folder, **changes):
    defaults = {"config": {"policy_uid": "p", "seed": 3}, "overwrite": False, "resume": False}
    return CheckpointManager(folder, **{**defaults, **changes})


def checkpoint(step, value=1.0):
    return Checkpoint(
        step=step,
        model={"w": torch.full((2,), value)},
        optimizer={"adam": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}},
        meta={"count": 7, "rows": np.arange(3), "text": ["a", "b"]},
    )


def test_a_checkpoint_holds_what_it_was_given(tmp_path):
    saved = manager(tmp_path / "run")
    saved.save_checkpoint(checkpoint(10))
    folder = tmp_path / "run" / "10"
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "weights.pt",
        "training.pt",
        "config.yaml",
        "model.safetensors",
    }
    assert "policy_uid: p" in (folder / "config.yaml").read_text()
    assert load_file(folder / "model.safetensors")["w"].tolist() == [1.0, 1.0]
    again = saved.load_checkpoint()
    assert again.step == 10
    assert torch.equal(again.model["w"], torch.ones(2))
    assert again.optimizer["adam"]["state"][0]["step"] == 3.0
    assert again.meta["count"] == 7
    assert again.meta["rows"].tolist() == [0, 1, 2]
    assert again.meta["text"] == ["a", "b"]
    assert "torch" in again.meta["rng"]
    assert load_checkpoint_from_path(tmp_path / "run").step == 10
    assert load_checkpoint_from_path(folder).step == 10


def test_a_policy_without_weights_is_saved_too(tmp_path):
    saved = manager(tmp_path / "run")
    saved.save_checkpoint(Checkpoint(step=1, meta={"n": 1}))
    assert saved.load_checkpoint().model is None


def test_the_newest_few_stay(tmp_path):
    saved = manager(tmp_path / "run", keep=2)
    for step in (5, 100, 20, 200):
        saved.save_checkpoint(checkpoint(step))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "100",
        "100.pt",
        "200",
        "200.pt",
    ]
    assert get_latest_checkpoint_step(tmp_path / "run") == 200


def test_a_save_of_the_same_step_replaces_the_first(tmp_path):
    saved = manager(tmp_path / "run")
    saved.save_checkpoint(checkpoint(5, value=1.0))
    saved.save_checkpoint(checkpoint(5, value=2.0))
    assert saved.load_checkpoint().model["w"].tolist() == [2.0, 2.0]


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path):
    saved = manager(tmp_path / "run")
    saved.save_checkpoint(checkpoint(5))
    half = tmp_path / "run" / ".tmp-6-999999"
    half.mkdir()
    (half / "weights.pt").write_bytes(b"half")
    torn = tmp_path / "run" / "7"
    torn.mkdir()
    assert saved.load_checkpoint().step == 5
    saved.save_checkpoint(checkpoint(8))
    assert not half.exists()
    assert saved.load_checkpoint().step == 8


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path):
    saved = manager(tmp_path / "run")
    saved.save_checkpoint(checkpoint(5))
    saved.save_checkpoint(checkpoint(6))
    (tmp_path / "run" / "6" / "training.pt").write_bytes(b"x")
    assert saved.load_checkpoint().step == 5
    with pytest.raises(CheckpointError, match=r"training\.pt"):
        saved.load_checkpoint(6)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code from a checkpoint ran",))


def test_no_code_of_a_checkpoint_runs(tmp_path):
    saved = manager(tmp_path / "run")
    folder = saved.save_checkpoint(checkpoint(5))
    bomb = pickle.dumps(Bomb(), protocol=2)
    (folder / "weights.pt").write_bytes(bomb)
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["weights.pt"] = {
        "size_bytes": len(bomb),
        "sha256": hashlib.sha256(bomb).hexdigest(),
    }
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="plain data"):
        saved.load_checkpoint()


def test_an_earlier_run_stays_unless_it_is_continued_or_replaced(tmp_path):
    manager(tmp_path / "run").save_checkpoint(checkpoint(5))
    with pytest.raises(RunExistsError, match="--resume") as refused:
        manager(tmp_path / "run")
    assert isinstance(refused.value, FileExistsError)
    assert manager(tmp_path / "run", resume=True).load_checkpoint().step == 5
    manager(tmp_path / "run", overwrite=True)
    assert get_latest_checkpoint_step(tmp_path / "run") is None


def test_nothing_to_resume_is_an_error_that_leaves_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="--exp-name"):
        manager(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
