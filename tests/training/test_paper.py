"""The paper's predictor by the commands: trained, exported, loaded and decoded with, its transport refinement on."""

import json
import subprocess
import sys

import pytest
import torch

from shape import bundled
from shape.generation.decoder import ShapeDecoder
from shape.networks.shape import ShapePredictor
from shape.training.order import derive_seed

PROMPT = "Book a table for two."


def command(name: str, *options: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"shape.{name}", *options], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@torch.no_grad()
def test_transport_from_training_to_decoding(tmp_path):
    output = tmp_path / "paper"
    few = ["--limit=600", "--training.steps=150", "--training.batch_size=512", "--validation.prompts=6"]
    measured = ["--measurement.limit=2", "--measurement.max_new_tokens=24", "--trainer.enable_progress_bar=false"]
    paper = f"--config={bundled.path('configs', 'paper.yaml')}"
    said = command("train", paper, f"--output={output}", *few, *measured)
    assert "WARNING" not in said and f"the predictor is in {output}" in " ".join(said.split())

    config = json.loads((output / "config.json").read_text())
    assert (config["refinement"], config["refinement_last_update"]) == ("sinkhorn", "row")
    predictor = ShapePredictor.from_pretrained(output).eval()
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(0, "weights"))
        untrained = ShapePredictor(predictor.config)
    for before, after in zip(untrained.refinement.parameters(), predictor.refinement.parameters(), strict=True):
        assert not torch.equal(before, after)

    decoder = ShapeDecoder.from_pretrained(output, dtype="float32", fall_back=False)
    states = torch.randn(1, predictor.config.window, predictor.config.hidden_size)
    refined = predictor(states)
    predictor.refinement = None
    assert not torch.allclose(refined, predictor(states), rtol=1e-2)

    ids = decoder.target.encode([{"role": "user", "content": PROMPT}])
    out = decoder.generate(ids, max_new_tokens=48, return_dict_in_generate=True)
    assert torch.equal(out.sequences, decoder.target.model.generate(ids, max_new_tokens=48, do_sample=False))
    assert out.stats.acceptance_length > 1.3
    answer = decoder.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    given = ["--prompt", PROMPT, "--max_new_tokens=48", "--dtype=float32"]
    assert answer.strip() in command("generate", f"--predictor={output}", *given)
