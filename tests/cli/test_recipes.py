"""The command: compile, merge, inspect."""

from dataclasses import replace

import pytest
from helpers import write_rows

from shape.cli.generate import main as generate
from shape.cli.recipes import main
from shape.data.conversations import Prompt
from shape.drafters.recipes.drafter import RecipeDrafter
from shape.drafters.recipes.misses import read_misses
from shape.drafters.recipes.pack import Pack
from shape.drafters.recipes.verify import make_verify
from shape.errors import ConfigError
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target


def test_compile_merge_and_inspect(tiny_target_folder, tmp_path, capsys, monkeypatch, refused):
    ask = write_rows(tmp_path / "prompts.jsonl", *({"id": str(i), "turns": [f"say {i % 2}"]} for i in range(4)))
    one, two, both = (str(tmp_path / f"{name}.pack") for name in ("one", "two", "both"))
    given = ["--target", str(tiny_target_folder), "--prompts", str(ask), "--max_new_tokens", "12", "--prefix", "2"]
    main(["compile", *given, "--output", one, "--temperature", "0", "--samples", "1"])
    assert "recipes of" in capsys.readouterr().out and Pack.load(one).samples == 1
    main(["compile", *given, "--output", two, "--limit", "2", "--seed", "3"])
    main(["merge", one, two, "--output", both])
    assert len(Pack.load(both).recipes) >= len(Pack.load(one).recipes) > 0
    capsys.readouterr()
    main(["inspect", both, "--show", "3"])
    assert capsys.readouterr().out.count("->") == 3
    with monkeypatch.context() as patched:  # text needs a tokenizer, and no weights
        patched.setattr(Target, "load", lambda *_, **__: pytest.fail("loaded"))
        main(["inspect", both, "--show", "1", "--target", str(tiny_target_folder)])
    assert "'" in capsys.readouterr().out
    decoder = ShapeDecoder.from_pretrained(None, target=tiny_target_folder, pack=both)
    assert isinstance(decoder.drafter, RecipeDrafter)
    hybrid = ShapeDecoder.from_pretrained(None, target=tiny_target_folder, pack=both, drafter="suffix+recipes")
    assert hybrid.drafter.name == "suffix+recipes"
    log = tmp_path / "misses.jsonl"
    ask = ["--target", str(tiny_target_folder), "--pack", one, "--misses", str(log), "--prompt"]
    for prompt in ("other", "other"):
        generate([*ask, prompt, "--max_new_tokens", "30"])
    main(["merge", one, "--misses", f"[{log}]", "--output", both])
    assert len(read_misses(log)) > 1 and len(Pack.load(both).recipes) > len(Pack.load(one).recipes)
    empty = str(tmp_path / "empty.pack")
    replace(Pack.load(one), recipes=()).save(empty)
    merged = []
    for packs in ([one, empty], [empty, one]):
        main(["merge", *packs, "--misses", f"[{log}]", "--output", str(tmp_path / "any.pack")])
        merged.append(Pack.load(tmp_path / "any.pack").recipes)
    assert merged[0] == merged[1] == Pack.load(both).recipes
    with pytest.raises(ConfigError, match="drafter 'recipes' needs a pack"):
        ShapeDecoder.from_pretrained(None, target=tiny_target_folder, drafter="recipes")
    with pytest.raises(ConfigError, match=r"'operator:gt' raised TypeError \(.*\) for the answer to prompt 0; correct"):
        make_verify("operator:gt")(Prompt("0", "", ("text",), ()), "answer")
    (tmp_path / "one.pack").write_bytes(b"broken")
    compiles = ["compile", "--target", "/nowhere", "--prompts", given[3], "--output", two]
    assert "neither json nor a MODULE:FUNCTION" in refused(main, *compiles, "--verify", "nothing")
    assert "'math:sqrt' does not take a prompt and an answer" in refused(main, *compiles, "--verify", "math:sqrt")
    monkeypatch.setattr("shape.data.reading._hub_rows", lambda source: pytest.fail(f"asked for {source}"))
    with pytest.raises(pytest.fail.Exception, match="asked for someone/prompts"):
        main([*compiles, "--prompts", "someone/prompts"])
    assert "missing.jsonl" in refused(main, *compiles, "--misses", str(tmp_path / "missing.jsonl"))
    assert "limit is 0; give a positive number" in refused(main, *compiles, "--limit", "0")
    assert "most is 0; give a positive number" in refused(main, "merge", two, "--output", both, "--most", "0")
    for arguments in (
        ["inspect", one],
        ["inspect", both, "--target", "quickstart-target"],
        ["inspect", both, "--target", "/nowhere"],
        ["merge", one, two, "--output", both],
        ["compile", *given, "--output", one, "--prefix", "0"],
    ):
        refused(main, *arguments)
