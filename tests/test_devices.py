"""Targets spread over devices and offloaded to disk, and drafters on another device than the target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, predictor
from transformers import AutoModelForCausalLM

from shape.cli.generate import main as generate
from shape.drafters import AdversaryDrafter, Drafter, SuffixDrafter, TrainedDrafter, TreeShape
from shape.errors import ConfigError
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target


def offloaded(folder: Path, tmp_path: Path, on_disk: tuple[str, ...]) -> Target:
    """The tiny target with some of its modules on disk between forwards."""
    parts = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    places = {part: "disk" if part in on_disk else "cpu" for part in parts}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path)
    return Target(model, name=str(folder))


@pytest.mark.parametrize(
    "on_disk", [("model.layers.1",), ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")]
)
def test_an_offloaded_target(tiny_target, tiny_target_folder, tmp_path, on_disk):
    target = offloaded(tiny_target_folder, tmp_path, on_disk)
    layers = {f"model.layers.{i}": layer for i, layer in enumerate(target.model.model.layers)}
    assert layers["model.layers.1"].mlp.up_proj.weight.device.type == "meta"  # it is not in memory
    assert target.device.type == "cpu" and target.dtype == torch.float32
    assert target.identity.head_hash == tiny_target.identity.head_hash != ""

    ids = torch.randint(3, 200, (2, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(target.features(ids, (0, 1, -1)), tiny_target.features(ids, (0, 1, -1)))
    rows, states = torch.tensor([5, 200]), torch.randn(2, 32)
    expected = tiny_target.head_of(rows, torch.float32)(states)
    assert torch.equal(target.head_of(rows, torch.float32)(states), expected)

    with pytest.raises(ConfigError, match="copies a target whose weights are in memory, and some of"):
        ShapeDecoder(target, "compressed")
    decoder = ShapeDecoder(target, AdversaryDrafter(nodes=5))
    assert decoder.support.mode == "tree"
    for options in ({}, {"do_sample": True, "seed": 3}):
        expected = ShapeDecoder(tiny_target).generate(ids, max_new_tokens=16, **options)
        assert torch.equal(decoder.generate(ids, max_new_tokens=16, **options), expected)


@pytest.mark.parametrize("name", ["none", "suffix", "shape", "eagle"])
def test_sessions_of_an_offloaded_target(tiny_target, tiny_target_folder, tmp_path, name):
    """Its cache is kept from turn to turn: hooks that move weights are no other state of the target."""
    eagle = {"kind": "eagle", "feature_layers": [1, -1], "loud": True}
    drafter: Drafter | None = SuffixDrafter(shortest=1, threshold=0.0) if name == "suffix" else None
    if name in ("shape", "eagle"):
        network = predictor(torch.float32, vocab_size=259, **(eagle if name == "eagle" else {}))
        drafter = TrainedDrafter(network, TreeShape(depth=3, width=2))
    target = offloaded(tiny_target_folder, tmp_path, ("model.layers.1",))
    say = ShapeDecoder(target, drafter, fall_back=False).session()
    ids, reused = torch.randint(3, 200, (1, 9), generator=torch.Generator().manual_seed(0)), []
    options = {"max_new_tokens": 10, "eos_token_id": []}
    for turn in range(3):
        out = say(ids, torch.ones_like(ids), return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, ShapeDecoder(tiny_target).generate(ids, **options)), turn
        reused.append(out.stats.reused_tokens)
        ids = torch.cat([out.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    assert reused[0] == 0 and all(reused[1:]), reused


def test_places_from_a_file(tiny_target_folder, tmp_path, capsys):
    options = tmp_path / "options.yaml"
    options.write_text(
        f"target: {tiny_target_folder}\ndrafter: ngram\nprompt: ab ab ab\nmax_new_tokens: 4\n"
        "device_map: {model: cpu, lm_head: cpu}\n"
    )
    generate(["--config", str(options)])
    assert "acceptance length" in capsys.readouterr().err


def test_a_drafter_on_a_device_that_is_named():
    target = Target.load("quickstart-target", dtype="float32")
    ids = torch.randint(3, 8000, (1, 12), generator=torch.Generator().manual_seed(0))
    beside, named = (
        ShapeDecoder.from_pretrained("quickstart-shape", target=target, draft_device=device) for device in (None, "cpu")
    )
    one, other = (decoder.generate(ids, max_new_tokens=12, return_dict_in_generate=True) for decoder in (beside, named))
    assert torch.equal(one.sequences, other.sequences) and one.stats.accepted == other.stats.accepted


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_drafter_on_a_device_that_is_not_there(device):
    with pytest.raises(ConfigError, match=f"device {device} is not here"):
        ShapeDecoder.from_pretrained("quickstart-shape", draft_device=device)


@pytest.mark.slow  # every device and drafter in turn
def test_several_devices():
    """See the program: sharded targets, and drafters elsewhere, on devices that refuse to be mixed."""
    backends = pytest.importorskip("torch.utils.backend_registration")
    if not hasattr(backends, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices to pretend")
    program = [sys.executable, str(ROOT / "tests/pretended_devices.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
