"""The command that answers: streaming, colours, seeds, and its errors."""

import io
import json

import pytest
import torch
from helpers import predictor, save_untrained

from shape.cli.generate import main
from shape.cli.terminal import answer, coloured, report
from shape.drafters.recipes.misses import read_misses
from shape.drafters.recipes.pack import Pack, Recipe
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import Engine
from shape.generation.options import GenerateOptions
from shape.generation.trace import STYLES, pieces

FAST = ["--max_new_tokens", "12"]


@pytest.fixture(scope="module")
def predictor_folder(tiny_target, tiny_target_folder, tmp_path_factory):
    """An untrained predictor of the tiny target, as train would export it."""
    return save_untrained(tiny_target, tiny_target_folder, tmp_path_factory.mktemp("predictor"))


def run(capsys, *arguments: str) -> list[str]:
    main([*arguments, *FAST])
    said = capsys.readouterr()
    notes = [line for line in said.err.splitlines() if not line.startswith("target ")]
    return [*said.out.rstrip("\n").splitlines(), *notes]


def test_streams_the_answer_alone_to_stdout_and_figures_to_stderr(capsys, predictor_folder, tiny_target):
    main(["--predictor", predictor_folder, "--prompt", "Hello", *FAST])
    said = capsys.readouterr()
    figures = said.err.splitlines()[-1]
    assert "acceptance length" in figures and "tokens/s" in figures and "%|" not in said.err
    messages = [{"role": "user", "content": "Hello"}]
    ids = tiny_target.tokenizer(tiny_target.render(messages, True), return_tensors="pt").input_ids
    expected = ShapeDecoder(tiny_target).generate(ids, max_new_tokens=12)[0, ids.shape[1] :]
    assert said.out.strip() == tiny_target.tokenizer.decode(expected, skip_special_tokens=True).strip()


@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_the_seed_fixes_the_answer_for_every_drafter(capsys, predictor_folder, drafter):
    sampled = ["--predictor", predictor_folder, "--prompt", "Hello", "--temperature", "1", "--seed", "3"]
    assert run(capsys, *sampled)[:-1] == run(capsys, *sampled, "--drafter", drafter)[:-1]


@pytest.mark.parametrize(
    ("more", "fixed"),
    [([], False), (["--show-draft"], True), (["--trace", "trace.jsonl"], True), (["--temperature", "1"], True)],
)
def test_greedy_answers_that_nobody_looks_into_may_look_at_the_clock(
    capsys, predictor_folder, monkeypatch, tmp_path, more, fixed
):
    asked, control = [], Engine._control
    monkeypatch.setattr(Engine, "_control", lambda self, *given: asked.append(given[-1]) or control(self, *given))
    monkeypatch.chdir(tmp_path)
    run(capsys, "--predictor", predictor_folder, "--prompt", "Hello", *more)
    assert asked[-1] is fixed  # the first is the warm-up


def test_a_target_alone(capsys, predictor_folder, tiny_target_folder):
    """Without a predictor suffix drafts, which is said; the answer is the same, and so is where it is computed."""
    main(["--target", str(tiny_target_folder), "--prompt", "Hello", *FAST])
    said = capsys.readouterr()
    assert "(suffix)" in said.err.splitlines()[-1]
    assert said.out.rstrip("\n").splitlines() == run(capsys, "--predictor", predictor_folder, "--prompt", "Hello")[:-1]
    (line,) = (line for line in said.err.splitlines() if line.startswith(f"target {tiny_target_folder}: float32"))
    assert line.endswith(" on cpu; no predictor is given, so suffix drafts")


def test_a_smaller_model_in_a_hybrid(capsys, tiny_target_folder):
    """Its name in the hybrid is enough for the model given as predictor to be loaded."""
    model = ["--target", str(tiny_target_folder), "--predictor", str(tiny_target_folder), "--prompt", "Hello"]
    assert "(suffix+model)" in run(capsys, *model, "--drafter", "suffix+model")[-1]


def test_a_predictor_by_its_networks_name_in_a_hybrid(capsys, tiny_target, tiny_target_folder, tmp_path):
    network = predictor(torch.float32, kind="eagle", vocab_size=tiny_target.vocab_size)
    network.save_pretrained(tmp_path)
    pair = ["--target", str(tiny_target_folder), "--predictor", str(tmp_path), "--prompt", "Hello"]
    assert "(suffix+eagle)" in run(capsys, *pair, "--drafter", "suffix+eagle3")[-1]


def test_no_miss_is_written_of_what_nobody_asked(tiny_target, tiny_target_folder, tmp_path):
    pack, log = tmp_path / "task.pack", tmp_path / "misses.jsonl"
    Pack(tiny_target.identity, (Recipe((5, 6), (7,), 2),), samples=1, prompts=1).save(pack)
    main(["--target", str(tiny_target_folder), "--pack", str(pack), "--misses", str(log), "--prompt", "Hello", *FAST])
    text = tiny_target.encode([{"role": "user", "content": "Hello"}])[0].tolist()
    text += ShapeDecoder(tiny_target).generate(torch.tensor([text]), max_new_tokens=12)[0, len(text) :].tolist()
    missed = [[*miss.prefix, *miss.tokens] for miss in read_misses(log)]
    assert missed and all(one in [text[at : at + len(one)] for at in range(len(text))] for one in missed)


def test_acceptance_rules_and_their_parameters(capsys, predictor_folder):
    """At this epsilon and delta everything drafted is typical; another rule is asked for by name."""
    sampled = ["--predictor", predictor_folder, "--prompt", "Hello", "--temperature", "1", "--tree.depth", "2"]
    loose = ["--acceptance", "typical-lossy", "--typical_lossy.epsilon", "1e-9", "--typical_lossy.delta", "0.5"]
    assert "acceptance length 2.75" in run(capsys, *sampled, *loose)[-1]  # 11 tokens in steps of 3, 3, 3 and 2
    assert "acceptance length" in run(capsys, *sampled, "--acceptance", "trs-lossy", "--trs_lossy.k", "2")[-1]
    assert "acceptance length" in run(capsys, *sampled, "--acceptance", "traversal")[-1]
    alone = run(capsys, *sampled, "--acceptance", "unverified-lossy")[-1]
    assert "acceptance length 1.83 (shape, unverified-lossy)" in alone  # 11 tokens in steps of 2, 2, 2, 2, 2 and 1


def test_show_draft_prints_the_same_text(capsys, predictor_folder):
    plain = run(capsys, "--predictor", predictor_folder, "--prompt", "Hello")
    shown = run(capsys, "--predictor", predictor_folder, "--prompt", "Hello", "--show-draft")
    assert "".join(shown[:-2]).split() == "".join(plain[:-1]).split()
    assert shown[-2].split(" / ") == list(STYLES)


def test_the_trace_is_shown_and_written(capsys, predictor_folder, tmp_path):
    file = tmp_path / "made" / "trace.jsonl"
    shown = run(capsys, "--predictor", predictor_folder, "--prompt", "Hello", "--show-trace", "--trace", str(file))
    assert shown[0].split()[0] == "step"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(record["type"] == "step" for record in records) == sum(line[:1].isdigit() for line in shown[1:-1])


def test_reads_the_prompt_from_standard_input(capsys, monkeypatch, predictor_folder):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    piped = run(capsys, "--predictor", predictor_folder)
    assert piped[:-1] == run(capsys, "--predictor", predictor_folder, "--prompt", "Hello")[:-1]


def test_bytes_that_are_no_text_are_told_before_anything_is_loaded(monkeypatch, refused):
    said = refused(main, "--target", "/nowhere", "--prompt", "Hi \udcff")
    assert said == r"error: the prompt has half a surrogate pair, '\udcff', which is no valid text"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff hello"), encoding="utf-8"))
    assert refused(main, "--target", "/nowhere") == "error: standard input is not UTF-8 text (invalid start byte)"


def test_chats_in_a_terminal(capsys, monkeypatch, predictor_folder, tmp_path):
    """The second question is answered after the first and its answer."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen = []
    original = ShapeDecoder.generate

    def spy(self, input_ids, **options):
        seen.append(self.tokenizer.decode(input_ids[0]))
        return original(self, input_ids, **options)

    monkeypatch.setattr(ShapeDecoder, "generate", spy)
    monkeypatch.setattr(ShapeDecoder, "warm_up", lambda self, **options: None)
    monkeypatch.setattr("sys.stdin", Terminal("first\nsecond\n\n"))
    trace = tmp_path / "trace.jsonl"
    lines = run(capsys, "--predictor", predictor_folder, "--system", "Be brief.", "--trace", str(trace))
    asked = [json.loads(file.read_text().splitlines()[0]) for file in (trace, tmp_path / "trace-2.jsonl")]
    assert [one["type"] for one in asked] == ["call"] * 2 and asked[0] != asked[1]
    assert sum("acceptance length" in line for line in lines) == 2
    assert seen[0].count("<|im_end|>") == 2 and seen[1].startswith(seen[0]) and "second" in seen[1]


def test_pieces_hold_back_unfinished_characters(tiny_tokenizer):
    text = "naïve 東京 ok"
    parts = list(pieces(tiny_tokenizer, tiny_tokenizer(text).input_ids))
    assert "".join(parts) == text
    assert "東" in parts and "\ufffd" not in "".join(parts)


def test_colours_follow_the_trace(tiny_tokenizer):
    ids = tiny_tokenizer("abc").input_ids
    text = coloured(tiny_tokenizer, list(zip(ids, ["prefill", "accepted", "bonus"], strict=True)))
    assert text.plain == "abc"
    assert [str(span.style) for span in text.spans] == ["dim", "green", "cyan"]


def test_report_counts_every_token(tiny_target):
    options = GenerateOptions(max_new_tokens=5)
    output = answer(ShapeDecoder(tiny_target), [{"role": "user", "content": "Hi"}], options)
    assert report(output.stats).startswith(f"{output.stats.emitted + 1} tokens, acceptance length 1.00 (none)")


def test_a_target_without_a_tokenizer_is_told_before_the_warm_up(tiny_target, tmp_path, monkeypatch, refused):
    monkeypatch.setattr(ShapeDecoder, "warm_up", lambda self, **options: pytest.fail("the loops are compiled"))
    tiny_target.model.save_pretrained(tmp_path)
    said = refused(main, "--target", str(tmp_path), "--prompt", "x")
    assert said == f"error: target {tmp_path} has no tokenizer; give a folder that has one"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--predictor", "/nowhere", "--trace", "."], ". is a folder; give a file"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0; give 0 or more"),
        (["--prompt", "x", "--temperature", ".nan"], "temperature is nan; give 0 or more"),
        (["--prompt", "x", "--top_p", "2"], "top_p is 2.0; give a number above 0 and at most 1"),
        (["--prompt", "x", "--top_k", "-1"], "top_k is -1; give 0 or more"),
        (["--prompt", "x", "--predictor", "/nowhere"], "predictor /nowhere cannot be read"),
        (
            ["--prompt", "x", "--target", "/nowhere", "--drafter", "ngram"],
            "target /nowhere cannot",
        ),
        (["--prompt", "x", "--drafter", "magic"], "drafter 'magic' is unknown; use one of none, "),
        (["--prompt", "x", "--drafter", "sufix"], "'sufix' is unknown; did you mean suffix? Known are none, "),
        (["--prompt", "x", "--acceptance", "typical"], "acceptance rule 'typical' is unknown"),
        (["--prompt", "x", "--typical_lossy.epsilon", "2"], "typical_lossy.epsilon is 2.0; give a number above 0"),
        (["--prompt", "x", "--misses", "log"], "misses are of a pack, and none is given"),
        (["--prompt", "x", "--acceptance", "trs-lossy", "--misses", "log"], "which trs-lossy does not"),
        (["--prompt", "x", "--acceptance", "trs-lossy", "--drafter", "ngram", *FAST], "'trs-lossy' needs the k^N"),
    ],
)
def test_errors_are_one_sentence_and_status_2(refused, predictor_folder, arguments, sentence):
    assert sentence in refused(main, "--predictor", predictor_folder, *arguments)
