"""The page: what is found, that it is whole, safe and the same every time, and what a browser makes of it."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from browser import find as find_browser
from browser import opened
from helpers import ROOT, predictor, write_rows

from shape.cli.report import main
from shape.cli.terminal import about
from shape.data.conversations import Prompt
from shape.drafters import HybridDrafter, NgramDrafter, SuffixDrafter, TrainedDrafter, TreeShape
from shape.errors import DataError
from shape.evaluation.check import check
from shape.evaluation.efficiency import run as measure_efficiency
from shape.evaluation.methods import Configured
from shape.evaluation.options import CheckOptions, EfficiencyOptions
from shape.evaluation.report.page import bars, pages, plots_of
from shape.evaluation.report.sources import find
from shape.evaluation.speed import SpeedSetting, measure_in
from shape.generation.decoder import ShapeDecoder
from shape.generation.options import GenerateOptions
from shape.generation.rules import TypicalLossy
from shape.target.chat import Message

RESULTS = ROOT / "eval" / "results"
HOSTILE = "</span><script>alert('1')</script>\"&amp;"
KINDS = {"speed", "efficiency", "check", "ablation", "analysis"}


@pytest.fixture(scope="module")
def results(tiny_target, tiny_target_folder, tmp_path_factory) -> Path:
    """One of each kind: measured on the tiny target, but for trainings, of which there are committed ones."""
    folder = tmp_path_factory.mktemp("results")
    own = TrainedDrafter(predictor(torch.float32), TreeShape(depth=3, width=2, nodes=5))
    hybrid = HybridDrafter([SuffixDrafter(shortest=1), own])
    prompts = [
        Prompt(kind, kind, (text,), (Message("user", text),))
        for kind, text in (("talk", "Hi"), ("sums", "1+1 1+1 1+1"))
    ]
    methods = {
        "transformers": "transformers", "autoregressive": None, "shape": own, "suffix+shape": hybrid,
        "shape@typical-lossy": Configured(own, TypicalLossy()), HOSTILE: NgramDrafter(),
    }  # fmt: skip
    setting = SpeedSetting(max_new_tokens=10, temperature=1.0, warmup=0)
    measure_in(folder / "bench", tiny_target, methods, prompts, setting, progress=False, label=HOSTILE)
    asked = write_rows(folder / "questions.jsonl", *({"prompt": text} for text in ("Hello", "Good day")))
    measure_efficiency(
        EfficiencyOptions(
            output=str(folder / "efficiency"), predictor="none", target=str(tiny_target_folder), prompts=str(asked),
            limit=2, max_new_tokens=4, dtype=["float32"], temperature=[0.0], batch_size=[1, 2],
        )
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHAPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        found = check(
            CheckOptions(
                target=str(tiny_target_folder), prompts=str(asked), limit=2, max_new_tokens=4, drafter=["ngram"]
            )
        )
    (folder / "whatever.json").write_text(json.dumps(found))
    for name in ("ablations/losses", "analysis/shipped"):
        shutil.copytree(RESULTS / name, folder / name)
    chain = TrainedDrafter(predictor(torch.float32), TreeShape(depth=3, width=1))
    for name, drafter, rule in (("match", own, "match"), ("rejection", chain, "rejection"), ("both", hybrid, "match")):
        traced(tiny_target, drafter, rule, folder / "traces" / f"{name}.jsonl")
    return folder


def traced(target, drafter, rule: str, path: Path) -> None:
    """An answer's trace as shape.generate writes it."""
    options = GenerateOptions(temperature=1.0, seed=2, acceptance=rule)
    decoder, messages = ShapeDecoder(target, drafter, fall_back=False), [{"role": "user", "content": HOSTILE}]
    out = decoder.generate(
        target.encode(messages), max_new_tokens=30, do_sample=True, top_k=0, seed=2, acceptance=rule, eos_token_id=[],
        return_dict_in_generate=True, trace=True,
    )  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    out.trace.write(path, about(decoder, messages, options, out.stats), target.tokenizer)


@pytest.fixture(scope="module")
def documents(results) -> dict[str, str]:
    return pages(find(results))


@pytest.fixture(scope="module")
def document(documents) -> str:
    return documents["report.html"]


@pytest.fixture(scope="module")
def trace(documents) -> str:
    return documents["report-trace-traces-match-jsonl.html"]


class Outline(HTMLParser):
    """What a page consists of; fails where tags do not match."""

    VOID = ("meta", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert len(dict(attributes)) == len(attributes)
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> in line {self.getpos()[0]}"

    def handle_data(self, data):
        self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_page_begins_with_one_chart_and_one_table(results, document):
    outline = Outline(document)
    headings = [attributes.get("id") for attributes in outline.of("h2")]
    assert headings[:2] == ["rate", "all"] and {*headings} == {"rate", "all", "trace", *KINDS}
    measured = next(one for one in find(results) if one.kind == "speed").data
    drawn = bars(measured)
    assert [bar.method for bar in drawn if bar.is_baseline] == [
        measured.marked(name)
        for name in sorted(("transformers", "autoregressive"), key=lambda one: -measured.summary[one].tokens_per_second)
    ]
    assert drawn[0].share == 1 and [bar.share for bar in drawn] == sorted((bar.share for bar in drawn), reverse=True)
    before, _, after = document.partition('class="sortable"')
    table = Outline(f"<table {after.partition('</table>')[0]}</table>")
    assert "<svg" not in before and "<details" not in before and len(table.of("tr")) == 1 + len(measured.methods)
    rates = [one["data-value"] for one in table.of("td") if "data-value" in one][::4]
    assert float(rates[0]) == pytest.approx(measured.summary["transformers"].tokens_per_second, rel=1e-4)
    assert len(outline.of("details")) > 20 and not any("open" in one for one in outline.of("details"))


def test_pages_are_whole(documents):
    assert len(documents) == 4
    for name, document in documents.items():
        outline = Outline(document)
        ids = [attributes["id"] for _, attributes in outline.elements if attributes.get("id")]
        assert len(set(ids)) == len(ids)
        for _, attributes in outline.elements:
            for attribute in ("href", "xlink:href", "aria-labelledby"):
                if (value := attributes.get(attribute)) and value != "data:,":
                    assert value in documents or value.removeprefix("#") in ids, (name, value)
            assert not {"src", "srcset", "action", "onclick", "onerror"} & attributes.keys()
        drawings = outline.of("svg")
        assert len(drawings) > 5 and all(one["role"] == "img" and len(one["aria-label"]) > 20 for one in drawings)
        assert len(outline.of("figure")) >= len(drawings)
        addresses = set(re.findall(r"https?://[^\s\"'<)]+", document))
        assert addresses <= {"http://www.w3.org/1999/xlink"}  # a name, not a place
        assert "@import" not in document and len(document) < 1e6


def test_every_figure_says_what_it_is_of(results, documents):
    everything = "".join(documents.values())
    for source in find(results):
        assert source.about and source.environment is not None
        assert source.environment.versions["torch"] in everything and source.name in everything
    outline = " ".join(Outline(documents["report.html"]).text)
    assert "oracle (simulated)" in outline and "projected" not in outline
    assert "Lossy, not the target's own distribution: shape@typical-lossy" in outline


def test_hostile_texts_stay_texts(document, trace):
    for page in (document, trace):
        outline = Outline(page)
        assert len(outline.of("script")) == 1 and "alert(" not in page.split("<script>")[1]
    assert HOSTILE in "".join(Outline(document).text)
    assert sum(one.get("class", "").startswith("t ") for one in Outline(trace).of("span")) > 10


def test_what_a_token_says(results, tmp_path):
    """Its event, its odds, and its own characters, whatever they are."""
    lines = (results / "traces" / "match.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["type"] == "token":
            record["text"] = HOSTILE + "\n"
    write_rows(tmp_path / "edited.jsonl", *records)
    outline = Outline(pages(find(tmp_path))["report-trace-edited-jsonl.html"])
    emitted = [record for record in records if record["type"] == "token" and record["emitted"]]
    spans = [one for one in outline.of("span") if one.get("role") == "option"]
    assert [one["class"].split()[1] for one in spans] == [record["event"] for record in emitted]
    assert [one["tabindex"] for one in spans] == ["0"] + ["-1"] * (len(spans) - 1)
    last = next(record for record in reversed(emitted) if record["event"] == "accepted")
    told = spans[emitted.index(last)]["aria-label"]
    assert told.startswith(f"‘{repr(HOSTILE + chr(10))[1:-1]}’ accepted, step {last['step']}, depth {last['depth']}")
    assert f"p {last['p']:.3f}" in told and f"noise {last['noise']:.2f}" in told


def test_the_same_results_give_the_same_page(tmp_path):
    """Whatever was drawn before; and traces of before they said whose they are and spelt their tokens are read."""
    trace = tmp_path / "old.jsonl"
    step = {
        "type": "step",
        "step": 1,
        "rows": [0],
        "lengths": [3],
        "nodes": 1,
        "draft": 0.0,
        "verify": 0.1,
        "commit": 0.0,
    }
    token = dict.fromkeys(
        ("node", "parent", "depth", "source", "slot", "kept_slot", "p", "q", "noise", "margin", "draw")
    )
    token |= {
        "type": "token",
        "step": 1,
        "row": 0,
        "event": "autoregressive",
        "token": 7,
        "position": 4,
        "emitted": True,
        "p": 0.5,
    }
    write_rows(trace, step, token)
    first = pages(find(tmp_path))
    text = first["report-trace-old-jsonl.html"]
    assert pages(find(tmp_path)) == first and "⟨7⟩" in text and "Environment not recorded" in text


def test_what_is_missing_is_named_with_its_command():
    text = pages(find(RESULTS / "efficiency"))["report.html"]
    assert re.findall(r"<li>[^:]*: <code>(\S+ \S+)", text) == [
        "shape bench", "shape check", "python -m", "python -m", "shape generate"
    ]  # fmt: skip
    assert '<h2 id="rate"' not in text and '<h2 id="efficiency"' in text


def test_committed_results_of_before_are_shown():
    sources = find(RESULTS / "shipped")
    assert sources
    for source in sources:
        titles = [plot.title for plot in plots_of(source)]
        assert titles[0] == "Speed-up by method" and "Where the time goes" in titles


@pytest.mark.slow  # draws 180 figures
def test_everything_committed_fits_into_one_small_page():
    assert len(pages(find(RESULTS))["report.html"].encode()) < 3e6


def test_the_command_writes_pages_and_images(results, tmp_path, capsys):
    few = tmp_path / "few"
    shutil.copytree(results / "analysis", few / "analysis")
    shutil.copy(results / "traces" / "match.jsonl", few)
    output, images = tmp_path / "out" / "mine.html", tmp_path / "images"
    main([str(few), f"--output={output}", f"--images={images}"])
    assert "2 files of results" in capsys.readouterr().out
    assert {path.name for path in output.parent.iterdir()} == {"mine.html", "mine-trace-match-jsonl.html"}
    assert 'href="mine-trace-match-jsonl.html"' in output.read_text()
    names = sorted(path.name for path in images.iterdir())
    drawn = sum(plot.draw is not None for source in find(few) for plot in plots_of(source))
    assert len(names) == 2 * drawn and "analysis-analysis-shipped-analysis-acceptance-and-its-limits.svg" in names


def test_traces_of_like_names_have_a_page_each(results, tmp_path):
    """What their writers said of the call may be little."""
    whole = (results / "traces" / "match.jsonl").read_text().splitlines(keepends=True)
    called = json.loads(whole[0])["type"] == "call"
    for name in ("свод", "отчёт", "a_1", "a-1"):
        (tmp_path / f"{name}.jsonl").write_text('{"type": "call", "prompt": "Hi"}\n' + "".join(whole[called:]))
    made = pages(find(tmp_path))
    assert len(made) == 5 and all(name in made["report.html"] for name in list(made)[1:])
    assert all("Not all of target, drafter and sampling was recorded." in page for page in list(made.values())[1:])


@pytest.mark.parametrize("place", ["output", "images"])
def test_a_place_that_cannot_be_written_to_is_found_before_anything_is_drawn(
    results, tmp_path, refused, monkeypatch, place
):
    monkeypatch.setattr("shape.evaluation.report.page.pages", lambda *_, **__: pytest.fail("pages are drawn"))
    (tmp_path / "file").touch()
    given = {"output": str(tmp_path / "report.html")} | {place: str(tmp_path / "file" / "below")}
    refused(main, str(results), *(f"--{name}={value}" for name, value in given.items()), alone=True)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("results.json", '{"schema_version": 7}', "schema version 7"),
        ("efficiency.json", "{", "is damaged or of another version"),
        ("ablation.json", "{}", "is damaged or of another version"),
        ("trace.jsonl", '{"type": "call"}\n{', "line 2 of trace"),
        ("other.json", '{"id": 1}', "holds no results that the report knows"),
        ("other.jsonl", '{"id": 1}\n', "holds no results that the report knows"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(name, text, sentence, tmp_path, refused):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=sentence):
        find(tmp_path)
    assert sentence in refused(main, str(tmp_path), "--output", str(tmp_path / "report.html"), alone=True)
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(DataError, match="is no folder"):
        find(tmp_path / "absent")


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH to open the page in")
def test_in_a_browser(documents, tmp_path):
    """No request, no complaint, no sideways scrolling on a phone, both themes; tables that sort, tokens that tell."""
    for name, text in documents.items():
        (tmp_path / name).write_text(text)
    page, trace = tmp_path / "report.html", tmp_path / "report-trace-traces-match-jsonl.html"
    with opened(find_browser(), tmp_path / "profile") as tab:
        papers = set()
        for file, width, dark in ((page, 390, False), (page, 1280, True), (trace, 390, True), (trace, 1280, False)):
            tab.open(file, width, dark=dark)
            tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert tab.requests == [file.resolve().as_uri()] and tab.complaints == []
            assert tab.value("document.documentElement.scrollWidth") <= width
            papers.add(tab.value("getComputedStyle(document.querySelector('.card')).backgroundColor"))
            letters = "[...document.querySelectorAll('svg text')].map(one => one.getBoundingClientRect().height)"
            assert tab.value(f"Math.min(...{letters})") > 9
        assert len(papers) == 2
        tab.value("document.querySelector('.answer .t').focus()")
        told = "getComputedStyle(document.activeElement, '::after').content"
        assert "prefill" in tab.value(told)
        tab.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        assert "step 1" in tab.value(told) and tab.value("document.activeElement.tabIndex") == 0
        tab.open(page, 1280)
        column = "[...document.querySelectorAll('.sortable tbody tr')].map(one => Number(one.cells[1].dataset.value))"
        tab.value("document.querySelectorAll('.sortable button')[1].click()")
        assert tab.value(column) == sorted(tab.value(column), reverse=True)
        tab.value("document.querySelectorAll('.sortable button')[1].click()")
        assert tab.value(column) == sorted(tab.value(column))
        assert tab.value("document.querySelectorAll('[aria-sort=ascending]').length") == 1
