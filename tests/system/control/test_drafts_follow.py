"""A draft that shares weights with its target follows every kind of update, and never stops the service."""

import concurrent.futures

import numpy as np
import pytest
from safetensors.torch import load_file, save

from tests.support.checkpoints.mtp import write_mtp
from tests.support.draft.helpers import feature_engine
from tests.support.gateway.services import free_port, until
from tests.support.system.controlled import System, pickled
from tests.support.system.trainer import GROUP, Trainer
from tests.support.tiny import write_tokenizer

EMBEDDING, JOIN = "model.embed_tokens.weight", "model.layers.3.eh_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints whose MTP layer drafts for them."""
    base = tmp_path_factory.mktemp("weights")
    found = [write_tokenizer(write_mtp(base / str(i), "glm-4.5")) for i in (1, 2)]
    tensors = load_file(found[1] / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor + 0.01
    (found[1] / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    return found


@pytest.fixture(scope="module")
def running(folders, tmp_path_factory):
    flags = {"draft_feature_dtype": "auto"}
    system = System(
        folders[0], tmp_path_factory.mktemp("system"),
        drafter=lambda: feature_engine("NEXTN", folders[0], folders[0], **flags).drafter,
    )  # fmt: skip
    yield system
    system.stop()


def weights_of(running):
    return running.gateway.client.get("/workers", headers=running.admin).json()["workers"]


def state_of(running):
    return next(one["weights"] for one in weights_of(running) if one["service"] == "draft")


def follows(running, version):
    until(lambda: (state_of(running) or {}).get("version") == version and state_of(running)["state"] != "loading")
    return state_of(running)["state"]


def params_of(running):
    params = running.draft.engine.drafter.runner.params
    return np.asarray(params["embed"]), np.asarray(params["fuse"].data)


def test_every_update_reaches_the_draft(running, folders):
    texts = running.texts(max_tokens=8)
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    first = params_of(running)

    def is_at(tensors, version):
        assert follows(running, version) == "current"
        embed, join = params_of(running)
        np.testing.assert_array_equal(embed, tensors[EMBEDDING].float().numpy())
        return np.array_equal(join, first[1])

    running.post("/update_weights_from_disk", json={"model_path": str(folders[1]), "weight_version": "disk"})
    assert not is_at(two, "disk")
    bucket = {"serialized_named_tensors": [pickled(one)], "weight_version": "tensors", "flush_cache": False}
    running.post("/update_weights_from_tensor", json=bucket)
    assert is_at(one, "tensors")
    assert running.post("/flush_cache?timeout=20")["success"]
    assert running.texts(max_tokens=8) == texts
    port, names = free_port(), [EMBEDDING, JOIN, "model.norm.weight"]
    trainer = Trainer(port, folders[1])
    join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": GROUP}
    assert running.post("/init_weights_update_group", json=join | {"backend": "gloo"})["success"]
    body = {
        "names": names, "dtypes": [str(two[name].dtype) for name in names], "group_name": GROUP,
        "shapes": [list(two[name].shape) for name in names], "weight_version": "group",
    }  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.post, "/update_weights_from_distributed", json=body)
        trainer.broadcast(names)
        assert answer.result(60)["success"]
    trainer.kill()
    assert running.post("/destroy_weights_update_group", json=join)["success"]
    assert not is_at(two, "group")
    running.draft.stop()  # it restarts with the weights of its flags
    running.draft.start()
    assert until(lambda: np.array_equal(params_of(running)[0], two[EMBEDDING].float().numpy()))
    running.draft.engine.drafter.shared_weights.take = None  # any error of the draft
    new = {name: two[name] * 2 for name in (EMBEDDING, "lm_head.weight")}
    running.post("/update_weights_from_tensor", json=bucket | {"serialized_named_tensors": [pickled(new)]})
    assert until(lambda: state_of(running)["state"] == "stale")
    assert state_of(running)["reason"]
    assert len(running.texts(max_tokens=8)) == len(texts)
