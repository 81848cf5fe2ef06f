"""What is read back from a trace's file agrees with what the decoder counted."""

import json

import pytest
from helpers import predictor, prompts, write_rows

from shape.drafters import HybridDrafter, NgramDrafter, SuffixDrafter, TrainedDrafter, TreeShape
from shape.errors import DataError
from shape.evaluation.report.sources import find
from shape.evaluation.report.traced import Traced, read
from shape.generation.decoder import ShapeDecoder

TREE = TreeShape(depth=4, width=2, nodes=7)


def written(tiny_model, path, drafter, **options):
    """A decoded batch of two with its trace in a file: its statistics, and the trace of the first row."""
    decoder = ShapeDecoder(tiny_model("llama"), drafter, fall_back=False)
    out = decoder.generate(
        **prompts([5, 9]), max_new_tokens=24, eos_token_id=[], return_dict_in_generate=True, trace=True, **options
    )
    out.trace.write(path, {"drafter": "it"})
    trace = read(path)
    assert isinstance(trace, Traced)
    return out, trace


@pytest.mark.parametrize(
    "drafter",
    [
        lambda: TrainedDrafter(predictor(), TREE),
        lambda: HybridDrafter([SuffixDrafter(shortest=1), NgramDrafter(), TrainedDrafter(predictor(), TREE)]),
        lambda: None,
    ],
    ids=["tree", "hybrid", "plain"],
)
def test_figures_agree_with_the_decoder(tiny_model, tmp_path, drafter):
    out, trace = written(tiny_model, tmp_path / "trace.jsonl", drafter())
    stats = out.stats
    assert trace.call["drafter"] == "it"
    assert [token["token"] for token in trace.emitted] == out.sequences[0, 9:].tolist()
    assert len(trace.steps) == stats.sequence_forwards[0]
    assert trace.acceptance_length == pytest.approx(stats.sequence_emitted[0] / stats.sequence_forwards[0])
    assert trace.events.total() == 24 and trace.events["prefill"] == 1
    assert sum(accepted for _, accepted in trace.lengths) == sum(t["event"] == "accepted" for t in trace.tokens)
    # What was accepted at a depth was asked at the next one, where the draft went as far.
    for (asked, accepted), (next_asked, _) in zip(trace.by_depth, trace.by_depth[1:], strict=False):
        assert 0 <= next_asked <= accepted <= asked
    assert trace.milliseconds["verify"] == [1e3 * step["verify"] for step in trace.steps]
    for step in trace.steps:
        kept, rolled = trace.slots(step)
        slots = {slot for slot, _ in kept} | set(rolled)
        assert len(slots) == len(kept) + len(rolled) and min(slots) == step["lengths"][0]
        # What is kept lies one behind the other.
        assert sorted(to for _, to in kept) == list(range(step["lengths"][0], step["lengths"][0] + len(kept)))
    if drafter() is None:
        assert not trace.by_depth and not trace.sources and set(trace.events) == {"prefill", "autoregressive"}


def test_sources_and_questions(tiny_model, tmp_path):
    hybrid = HybridDrafter([SuffixDrafter(shortest=1), TrainedDrafter(predictor(), TREE)])
    out, trace = written(tiny_model, tmp_path / "trace.jsonl", hybrid)
    other_row = [t for t in out.trace.records if t["type"] == "token" and t["row"] == 1 and t["source"]]
    for name, (proposed, accepted) in out.stats.sources.items():
        theirs = [token for token in other_row if name in token["source"].split("+")]
        mine = trace.sources.get(name, (0, 0))
        assert proposed == mine[0] + len(theirs) and accepted <= mine[1] + len(theirs)
    assert len(trace.questions) == sum(asked for asked, _ in trace.by_depth)
    assert all(token["entropy"] >= 0 for token, _ in trace.questions)
    assert {choice["step"] for choice in trace.choices} <= {step["step"] for step in trace.steps}


def test_traces_of_the_version_before_are_read(tiny_model, tmp_path):
    _, trace = written(tiny_model, tmp_path / "new.jsonl", None)
    old = (tmp_path / "new.jsonl").read_text().replace('"autoregressive"', '"plain"')
    (tmp_path / "old.jsonl").write_text(old)
    assert '"plain"' in old and read(tmp_path / "old.jsonl") == trace


def test_a_trace_of_a_later_version_is_named(tiny_model, tmp_path):
    """Links to nothing, and folders with a file's name, are passed over."""
    written(tiny_model, tmp_path / "new.jsonl", None)
    (tmp_path / "results.json").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    assert [source.name for source in find(tmp_path)] == ["new.jsonl"]
    call, *rest = map(json.loads, (tmp_path / "new.jsonl").read_text().splitlines())
    told = {"target": "t", "dtype": "float32", "drafter": "d", "acceptance": "match", "seed": 0, "temperature": 0}
    write_rows(tmp_path / "new.jsonl", call | told | {"environment": {"of": "a later version"}}, *rest)
    with pytest.raises(DataError, match=r"new\.jsonl: it cannot be read; it is damaged or of another version"):
        find(tmp_path)


def test_other_files(tmp_path):
    path = tmp_path / "some.jsonl"
    for text in ("", "no json\n", '["a list"]\n', '{"id": "a", "turns": ["b"]}\n'):
        path.write_text(text)
        assert read(path) is None
    path.write_text('{"type": "call"}\n{"type": "tok')
    with pytest.raises(DataError, match=r"line 2 of trace .*some\.jsonl cannot be read; it is cut or damaged"):
        read(path)
    write_rows(path, {"type": "call"})
    with pytest.raises(DataError, match="holds no token"):
        read(path)
