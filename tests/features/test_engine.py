"""States that a vLLM server wrote (recorded by `eval.reference.engine`) are the target's own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from training_runs import extraction_trainer

from shape.data.conversations import Conversation
from shape.data.encoding import Encoded, texts_of_turns
from shape.data.endpoint import Endpoint, EndpointError, Reply
from shape.errors import FeatureStoreError, UnsupportedTarget
from shape.features.engine import EngineStates
from shape.features.extraction import extract
from shape.features.options import FeatureOptions
from shape.features.store import FeatureStore
from shape.target.model import Target

RECORDED = ROOT / "tests" / "fixtures" / "engine"
REPLIES = json.loads((RECORDED / "replies.json").read_text())


def text(name: str) -> Encoded:
    ids = torch.tensor(REPLIES[name]["body"]["prompt"])
    return Encoded(name, ids, torch.ones(len(ids), dtype=torch.bool))


TEXTS = [text("short"), text("longer")]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("quickstart-target", dtype="float32", prepacked=False)


@pytest.fixture
def states(target, tmp_path, monkeypatch) -> EngineStates:
    """As the server was asked and answered; its files lie in `tmp_path`."""

    def post(self, path, body):
        (name,) = (name for name in ("short", "longer") if REPLIES[name]["body"] == body)
        written = tmp_path / f"{name}.safetensors"
        shutil.copyfile(RECORDED / written.name, written)
        Path(f"{written}.lock").touch()
        paths = {"kv_transfer_params": {"hidden_states_path": str(written)}}
        return Reply(f"http://{name}/v1", json.dumps({**REPLIES[name]["reply"], **paths}).encode())

    monkeypatch.setattr(Endpoint, "post", post)
    return EngineStates(Endpoint(("http://engine/v1",), "target"), target)


@pytest.mark.parametrize("layers", [[3, -1], [-1, 3]])
def test_states_of_an_engine_are_the_targets(states, target, tmp_path, layers):
    found = states(TEXTS, layers)
    for each, own in zip(found, TEXTS, strict=True):
        torch.testing.assert_close(each, target.features(own.input_ids[None], layers)[0], atol=1e-4, rtol=1e-4)
    assert not list(tmp_path.iterdir()), "files of the engine are left"


def test_features_of_an_engine_are_stored_as_the_targets(states, target, tmp_path):
    ids = [text.input_ids.tolist() for text in TEXTS]
    asked = [
        Conversation(str(n), (), "tokens", texts=texts_of_turns([(each[:3], each[3:])])) for n, each in enumerate(ids)
    ]
    options = FeatureOptions(layers=[3, -1], feature_dtype="bfloat16")
    trainer = extraction_trainer()
    store = extract(target, asked, tmp_path / "features", options, trainer, states)
    store.verify(target)
    assert isinstance(store, FeatureStore) and store.tokens == sum(map(len, ids))


def test_an_engine_with_other_layers_or_without_states_says_how_to_serve(states, monkeypatch):
    with pytest.raises(EndpointError, match=r"gives states \(21, 2, 384\), and \(21, 3, 384\).*ids\": \[1, 3, 6"):
        states(TEXTS[1:], [1, 3, -1])
    for reply in ('{"choices": []}', "<html>busy</html>", "[]", '{"kv_transfer_params": {"hidden_states_path": 1}}'):
        monkeypatch.setattr(Endpoint, "post", lambda *_, reply=reply: Reply("U", reply.encode()))
        with pytest.raises(EndpointError, match=r"gives no hidden states; serve with --speculative-config .*\[6\]"):
            states(TEXTS, [-1])


def test_wrong_layers_of_the_right_number_are_found_out(states):
    with pytest.raises(FeatureStoreError, match=r"not those of target .* \(conversation longer differs by"):
        states(TEXTS, [2, -1])


def test_one_conversation_of_each_engine_is_compared(states, monkeypatch):
    """As `post` here, each text is another's."""
    checked = []
    monkeypatch.setattr(states, "_check", lambda url, text, *_: checked.append((url, text.id)))
    for _ in range(2):
        states(TEXTS, [3, -1])
    assert checked == [("http://longer/v1", "longer"), ("http://short/v1", "short")]


def test_files_of_an_engine_elsewhere(target, monkeypatch):
    reply = {"kv_transfer_params": {"hidden_states_path": "/there/x.safetensors"}}
    monkeypatch.setattr(Endpoint, "post", lambda *_: Reply("U", json.dumps(reply).encode()))
    with pytest.raises(EndpointError, match=r"/there/x.safetensors, which cannot be read here .* shared_storage_path"):
        EngineStates(Endpoint(("http://engine/v1",), "target"), target)(TEXTS, [3, -1])


def test_a_target_whose_final_norm_has_another_name(target, monkeypatch):
    monkeypatch.delattr(target._body, "norm")
    with pytest.raises(UnsupportedTarget, match=r"the final norm of target .* is not known"):
        target.normed(torch.zeros(1, 384))
