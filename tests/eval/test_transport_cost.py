"""The program that measures what refinement costs, with few prompts and positions."""

import json

from eval import transport_cost


def test_drafting_and_training_are_measured(tmp_path, capsys, monkeypatch):
    losses, step = [], transport_cost.ShapeModule.training_step

    def watched(*given):
        losses.append(step(*given))
        return losses[-1]

    monkeypatch.setattr(transport_cost.ShapeModule, "training_step", watched)
    few = ["--limit=1", "--max_new_tokens=4", "--rounds=1", "--batch_size=8", "--widths=[4]"]
    transport_cost.main([*few, "--kinds=[column last,barycentric]", f"--output={tmp_path}"])
    lines = json.loads((tmp_path / "cost.json").read_text())["lines"]
    assert [(one["kind"], one["width"]) for one in lines] == [("none", None), ("column last", 4), ("barycentric", 4)]
    assert all(0 < one["draft"] < one["step"] and one["training"] > 0 for one in lines)
    assert (tmp_path / "cost.md").read_text().strip() in capsys.readouterr().out
    assert losses and all(0 < float(loss.detach()) < 1e3 for loss in losses)  # what is timed is no arithmetic of nan


def test_unknown_refinements_are_refused_before_anything_is_loaded(refused):
    assert "sideways" in refused(transport_cost.main, "--kinds=[sideways]", "--target=nowhere")
