"""Ablations: what is trained and what it is told, resuming, what is counted, the table, and mistakes said early."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from helpers import tiny_bert

from eval.ablate import main, parse
from eval.ablation import training
from eval.ablation.measuring import examine
from eval.ablation.plan import Run, plan
from eval.quality import _Measurement
from shape import bundled
from shape.drafters import OracleDrafter, TreeShape
from shape.errors import CheckpointError, ConfigError, exit_on_error
from shape.evaluation.speed import Bench
from shape.generation.decoder import ShapeDecoder
from shape.training import parsing

SHIPPED = [
    "curve",
    "data",
    "default",
    "features",
    "longer",
    "losses",
    "refinement",
    "refinement-steps",
    "refinement-sweep",
    "baselines",
    "sizes",
    "tokens",
    "training",
    "trees",
]


def test_trains_every_variant_with_every_seed_and_measures_them_together(file, tmp_path, launched, refused):
    arguments = [str(file), f"--output={tmp_path}", "--only=[path 1.0,root]"]
    main(arguments)
    folders = [Path(told[0].removeprefix("--config=")).parent.name for told in launched]
    assert folders == ["path-1.0-0", "root-0", "path-1.0-1", "root-1"]  # all variants of a seed, then the next seed
    found = json.loads((tmp_path / "ablation.json").read_text())
    assert found["schema_version"] == 1 and found["environment"]["versions"]["torch"] == torch.__version__
    assert [line["label"] for line in found["lines"]] == ["path 1.0", "root"]
    for line in found["lines"]:
        for temperature in ("0.0", "1.0"):
            figures = line["at"][temperature]
            assert figures["summary"]["answers"] == 4  # two prompts, two seeds
            assert set(figures["acceptance_lengths"]) == {"0", "1"} and figures["summary"]["equal_autoregressive"] == 4
            assert all(length >= 1 for length in figures["acceptance_lengths"].values())
            assert figures["step_ms"]["verify"] > 0
        for trained in found["trained"][line["variant"]].values():
            assert trained["steps"] == 3 and 0 <= trained["seconds"] <= trained["record"]["seconds"]
            assert trained["parameters"] > 1000 and 0 < trained["record"]["share_of_peak"] < 1
    assert list(found["others"]["1.0"]) == ["transformers", "autoregressive", "transformers-lookup"]
    text = (tmp_path / "ablation.md").read_text()
    assert text.startswith("### Tiny") and "acceptance length, T = 1, over seeds" in text and "| root |" in text
    assert "| transformers-lookup |" in text and "accepted at 1" in text
    assert not list(tmp_path.glob("*.jsonl")) and (tmp_path / "measured-t1.json").exists()
    # The same features for all, and a second call trains nothing.
    assert not list(tmp_path.glob("runs/*/features")) and (tmp_path / "features").is_dir()
    kept = tmp_path / "runs/root-0/options.yaml"
    values = yaml.safe_load(kept.read_text())
    values["training"]["checkpoint_every"] = 7
    kept.write_text(yaml.safe_dump({name: value for name, value in values.items() if name != "shard_target"}))
    main(arguments)  # nor does an option that was not there then, or how often checkpoints were written
    assert len(launched) == 4
    said = refused(main, *arguments, "--override=[training.steps=4]")  # what lies there was another training
    assert "other options (training.steps was 3 and is 4)" in said


@pytest.mark.slow  # trains and decodes by every rule
def test_what_variants_write_by_lossy_rules(file, tmp_path, launched, monkeypatch):
    bert = tiny_bert(tmp_path / "bert")
    arguments = [str(file), f"--output={tmp_path}", "--only=[path 1.0,affine]", f"--measure.encoder={bert}"]
    arguments += ["--measure.lossy=[trs-lossy]"]
    record, calls = _Measurement.record, []

    def interrupted(self, prompt, number):
        calls.append(prompt.id)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return record(self, prompt, number)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(_Measurement, "record", interrupted)
        main(arguments)
    monkeypatch.setattr(_Measurement, "record", lambda self, *given: calls.append(given[0].id) or record(self, *given))
    main(arguments)
    assert len(calls) == 6 + 2 * 2 * 2 - 5 and not (tmp_path / "texts").exists()  # what was written is kept
    found = json.loads((tmp_path / "ablation.json").read_text())["texts"]
    assert list(found) == ["path 1.0", "affine"]
    for text in found.values():
        own, lossy = (text["modes"][f"{mode}, T = 0"] for mode in ("autoregressive", "trs-lossy"))
        assert own["answers"] == own["equal"] == 4  # two prompts, two seeds
        assert lossy["perplexity"]["value"] != own["perplexity"]["value"] and lossy["bert_score"] < 1
        by_seed = text["perplexities"]["trs-lossy, T = 0"]
        assert min(by_seed.values()) <= lossy["perplexity"]["value"] <= max(by_seed.values()) and len(by_seed) == 2
        assert {one["positions"] for one in text["ahead"]} and text["ahead"][0]["accuracy"]["value"] is not None
    table = (tmp_path / "ablation.md").read_text()
    assert "| trs-lossy, T = 1 | affine |" in table and "1 ahead (95 %)" in table


def test_interrupted_work_goes_on(file, tmp_path, launched, monkeypatch):
    """Finished trainings and finished prompts are kept, a training that had begun is resumed."""
    arguments = [str(file), f"--output={tmp_path}", "--only=[path 1.0,affine]", "--seeds=[3]"]
    launch, record, done = training._launch, Bench.record, []

    def interrupted(module: str, told: list[str], log: Path, threads: int) -> int:
        if "affine" in told[0] and not done:
            done.append("stopped")
            checkpoint = log.parent / "checkpoints/last.ckpt"
            checkpoint.parent.mkdir()
            checkpoint.write_bytes((tmp_path / "runs/path-1.0-3/checkpoints/last.ckpt").read_bytes())
            raise KeyboardInterrupt
        if "affine" in told[0]:
            assert told[1:] == ["--ckpt_path=last"]
            (log.parent / "checkpoints/last.ckpt").unlink()
            told = told[:1]
        return launch(module, told, log, threads)

    def stumbling(self, prompts, *rest, **options):
        if len(done) == 4:
            done.append("stopped")
            raise KeyboardInterrupt
        done.append(prompts[0].id)
        return record(self, prompts, *rest, **options)

    monkeypatch.setattr(training, "_launch", interrupted)
    monkeypatch.setattr(Bench, "record", stumbling)
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 130
    main(arguments)
    assert len(launched) == 2 and done == ["stopped", "0", "2", "0", "stopped", "2"]
    assert (tmp_path / "ablation.md").exists() and "One seed (3)" in (tmp_path / "ablation.md").read_text()


def test_variants_trained_together_on_one_forward(file, tmp_path, launched, refused):
    arguments = [str(file), f"--output={tmp_path}", "--together=true", "--measure.temperatures=[0]"]
    assert "together: path-1.0-0 reads stored features" in refused(main, *arguments)
    main([*arguments, "--override=[online=true]"])
    assert [len([each for each in told if each.endswith("options.yaml")]) for told in launched] == [3, 3]  # by seed
    assert "all variants of a seed at once" in (tmp_path / "ablation.md").read_text()
    found = json.loads((tmp_path / "ablation.json").read_text())
    assert {one["steps"] for by_seed in found["trained"].values() for one in by_seed.values()} == {3}
    main([*arguments, "--override=[online=true]"])
    assert len(launched) == 2


def test_trainings_at_once_share_the_threads(file, tmp_path, monkeypatch):
    runs = plan(parse([str(file), f"--output={tmp_path}"]))[:4]
    together, threads = threading.Barrier(2, timeout=60), []

    def train(run: Run, given: int) -> str:
        together.wait()  # never passed by one training alone
        threads.append(given)
        return run.name

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    found = training.train_all(runs, jobs=2)
    assert threads == [2] * 4
    assert [found[run.variant][run.seed] for run in runs] == [run.name for run in runs]


def test_after_a_failed_training_none_begins(file, tmp_path, monkeypatch):
    runs, begun = plan(parse([str(file), f"--output={tmp_path}"])), []

    def train(run: Run, threads: int) -> None:
        begun.append(run.name)
        raise CheckpointError("it failed")

    monkeypatch.setattr(training, "train", train)
    with pytest.raises(CheckpointError, match="it failed"):
        training.train_all(runs, jobs=1)
    assert begun == [runs[0].name]


@pytest.mark.parametrize("together", [False, True])
def test_an_interrupt_of_this_process_alone_ends_its_trainings(file, tmp_path, monkeypatch, together):
    """As a scheduler sends it; what is under way gets it too, and no other training begins."""
    waiting = "import pathlib, time; pathlib.Path(f'begun-{time.time_ns()}').touch(); time.sleep(600)"
    (tmp_path / "waiting.py").write_text(waiting)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    launch = training._launch
    monkeypatch.setattr(training, "_launch", lambda _, told, log, threads: launch("waiting", told, log, threads))
    runs = plan(parse([str(file), f"--output={tmp_path}"]))

    def interrupt() -> None:
        while len(list(tmp_path.glob("begun-*"))) < (1 if together else 2):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    other = threading.Thread(target=interrupt, daemon=True)  # which waits for ever where none begins
    other.start()
    with pytest.raises(SystemExit, match="130"), exit_on_error():
        training.train_together(runs, tmp_path) if together else training.train_all(runs, 2, needed=False)
    other.join()
    assert not training._RUNNING and len(list(tmp_path.glob("begun-*"))) == (1 if together else 2)


def test_one_training_is_measured_with_many_trees(file, tmp_path, launched):
    trees = "{chain: {depth: 2, width: 1}, 'k = 2, N = 2': {depth: 2, width: 2, branching: 2}}"
    arguments = ["--only=[path 1.0]", "--seeds=[0]", f"--trees={trees}", "--measure.temperatures=[0]"]
    main([str(file), f"--output={tmp_path}", *arguments])
    assert len(launched) == 1
    found = json.loads((tmp_path / "ablation.json").read_text())
    assert [line["label"] for line in found["lines"]] == ["chain", "k = 2, N = 2"]
    described = found["settings"]["0.0"]["methods"]
    assert "width=1" in described["chain"] and "branching=2" in described["k = 2, N = 2"]


def test_a_training_that_fails_says_where_to_look(file, tmp_path):
    """In a real process, which cannot resume from such a checkpoint."""
    run = plan(parse([str(file), f"--output={tmp_path}", "--only=[affine]"]))[0]
    (run.folder / "checkpoints").mkdir(parents=True)
    (run.folder / "checkpoints/last.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"affine, seed 0 ended with status 2 .*train\.log"):
        training.train(run, threads=1)
    assert not (run.folder / "run.json").exists() and "no checkpoint" in (run.folder / "train.log").read_text()


def test_runs_have_all_their_options_and_only_their_own_changes(file, tmp_path):
    runs = plan(parse([str(file), f"--output={tmp_path}", "--override=[training.batch_size=32]", "--data=D"]))
    assert [(run.variant, run.seed) for run in runs[:4]] == [
        ("path 1.0", 0),
        ("affine", 0),
        ("root", 0),
        ("path 1.0", 1),
    ]
    assert [run.options.predictor.refinement for run in runs] == ["sinkhorn", "affine", "sinkhorn"] * 2
    for run in runs:
        assert run.options.training.batch_size == 32 and run.options.data == "D" and run.options.seed == run.seed
        assert run.options.measurement.limit == 0 and run.options.features == str(tmp_path / "features")
        written = tmp_path / "options.yaml"
        written.write_text(yaml.safe_dump(run.values))
        assert parsing.parse([f"--config={written}"]) == run.options


@pytest.mark.parametrize("only", [None, ["root"]])
def test_features_hold_what_any_variant_reads(file, tmp_path, only):
    """So that others can be trained later, from the same ones."""
    values = yaml.safe_load(file.read_text())
    values["variants"]["deep"] = {
        "predictor": {"kind": "eagle", "feature_layers": "auto", "intermediate_size": None, "markov_rank": 0}
    }
    path = tmp_path / "layers.yaml"
    path.write_text(yaml.safe_dump(values))
    runs = plan(parse([str(path), f"--output={tmp_path}", *([f"--only={only}"] if only else [])]))
    assert {tuple(run.options.extraction.more_layers) for run in runs} == {(1,)}
    assert {run.options.features for run in runs} == {str(tmp_path / "features")}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_ablations_are_sound(name, tmp_path):
    options = parse([name, f"--output={tmp_path}", "--seeds=[0]"])
    runs = plan(options)
    assert len({json.dumps({**run.values, "output": ""}) for run in runs}) == len(runs) == len(options.variants)
    equal_steps = ("curve", "data", "features", "longer", "refinement-steps", "refinement-sweep", "sizes")
    for run in runs:  # the budget ends a training, or all have the same steps; and the clock does not count validation
        training, timed = run.options.training, run.options.training.max_minutes is not None
        assert (timed or name in equal_steps) and (not timed or run.options.validation.every > training.steps)
    # Nulls of the file go before the defaults of the target that ships.
    run = next((run for run in runs if run.options.predictor.draft_vocab_size is None), runs[0])
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(run.values))
    assert parsing.parse([f"--config={tmp_path / 'options.yaml'}"]) == run.options
    steps = runs[0].options.predictor.num_steps
    for shape in options.trees.values():
        assert shape == TreeShape.full(shape.branching, shape.depth) and shape.depth <= steps
    assert {path.stem for path in bundled.path("configs", "ablations").glob("*.yaml")} == set(SHIPPED)


# ------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_by_depth_counts_drafts_that_came_so_far(tiny_target, temperature):
    context = torch.tensor([[5, 6, 7, 8]])
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    text = ShapeDecoder(tiny_target).generate(context, seed=0, max_new_tokens=40, **options)[0].tolist()
    oracle = OracleDrafter([text], error_rate=0.25, depth=3)
    found = examine(tiny_target, oracle, [context], temperature, 40)
    assert len(found.asked) == 3
    assert all(later <= before for later, before in zip(found.asked[1:], found.accepted, strict=False))
    assert all(0 < yes <= of for yes, of in zip(found.accepted, found.asked, strict=True))
    exact = examine(tiny_target, OracleDrafter([text], depth=3), [context], temperature, 40)
    assert exact.accepted == exact.asked


# ------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only=[nothing]"], "variant nothing is not in the file, which has path 1.0, affine, root"),
        (["--seeds=[]"], "seeds are []"),
        (["--seeds=[1,1]"], "each once"),
        (["--base=[absent.yaml]"], "there is no configuration absent.yaml"),
        (["--override=[training.step=3]"], "base and common: Group 'training' does not accept option 'step'"),
        (["--override=[limit]"], "override limit has no value"),
        (["--override=[training.steps=0]"], "variant path 1.0: training.steps is 0"),
        (["--variants={a: {predictr: {window: 2}}}"], "variant a: Option 'predictr.window' is not accepted"),
        (["--variants={a: {predictor: {window: x}}}"], 'variant a: Parser key "predictor.window"'),
        (["--variants={a: {predictor: 3}}"], "variant a: predictor is 3, which names several options"),
        (["--variants={a: {losses: {mse: -1}}}"], "variant a: the weight of the loss mse is -1"),
        (
            ["--variants={a: {predictor: {token_conditioning: path, markov_rank: 0}}}"],
            'variant a: token_conditioning "path" needs',
        ),
        (["--variants={a: {predictor: {draft_vocab_size: 1000}}}"], "variant a: predictor.draft_vocab_size is 1000"),
        (["--variants={a: {seed: 3}}"], "variant a sets seed"),
        (["--variants={a: {data: D}}"], "variant a sets data, which all variants have to share"),
        (["--variants={}"], "has no variant"),
        (["--variants={a b: {}, a-b: {}}"], "differ in punctuation"),
        (["--variants={autoregressive: {}}"], "the name autoregressive is a method's and a variant's"),
        (["--target=/nowhere"], "/nowhere"),
        (["--measure.methods=[transformers-lookup]"], "no baseline"),
        (["--measure.methods=[autoregressive,magic]"], "drafter 'magic' is unknown"),
        (["--measure.prompts=absent.jsonl"], "absent.jsonl"),
        (["--measure.prompts=null"], "measure.prompts is not given"),
        (["--measure.temperatures=[0,0]"], "once"),
        (["--measure.temperatures=[-1]"], "measure.temperatures is -1.0; give 0 or more"),
        (["--measure.temperatures=[]"], "measure.temperatures holds no value; give at least one"),
        (["--measure.limit=0"], "measure.limit is 0"),
        (["--measure.lossy=[match]"], "measure.lossy holds match"),
        (["--trees={a: {depht: 2}}"], "tiny.yaml: "),
        (["--unknown=1"], "tiny.yaml: "),
    ],
)
def test_mistakes_get_one_sentence_before_any_work(file, tmp_path, monkeypatch, refused, more, message):
    monkeypatch.setattr(training, "_launch", lambda *_: pytest.fail("work has begun"))
    assert message in refused(main, str(file), f"--output={tmp_path}", *more)
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match=r"no configuration nothing.*refinement\.yaml"):
        parse(["nothing"])
