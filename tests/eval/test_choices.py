"""The program that measures what the choice of a token costs, on small vocabularies."""

import json

from eval import choices


def test_every_setting_is_measured_at_every_size(tmp_path, capsys):
    choices.main(["--vocabularies", "[70, 200]", "--rounds", "2", "--output", str(tmp_path)])
    lines = json.loads((tmp_path / "choices.json").read_text())["lines"]
    assert [(one["vocabulary"], one["setting"]) for one in lines] == [
        (size, setting) for size in (70, 200) for setting in choices.SETTINGS
    ]
    assert all(one["ours"] > 0 and one["transformers"] > 0 for one in lines)
    assert (tmp_path / "choices.md").read_text().strip() in capsys.readouterr().out
