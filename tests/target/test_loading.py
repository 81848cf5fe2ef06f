"""The options of transformers' ``from_pretrained`` on their way to the target, and where it is put without any."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    MambaConfig,
    T5Config,
)

from eval import ablate, latency, quality, tables
from shape.cli import bench, check, efficiency, extract, generate, recipes, terminal, train
from shape.cli import regenerate as regeneration
from shape.drafters import ModelDrafter, SuffixDrafter, TrainedDrafter
from shape.errors import CheckpointError, ConfigError, UnsupportedTarget
from shape.evaluation.environment import Environment
from shape.generation.decoder import ShapeDecoder
from shape.target.loading import default_device, of_predictor, of_target, read_config, read_tokenizer, recorded
from shape.target.model import Target
from shape.target.options import PairOptions, PlacedOptions, TargetOptions
from shape.target.size import size_of

TARGET, PREDICTOR = "somebody/target", "somebody/predictor"


def published(cache: Path, name: str, revisions: dict[str, Path]) -> dict[str, str]:
    """A repository as huggingface_hub caches it -> the commit of each revision."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    commits = {revision: f"{number:040x}" for number, revision in enumerate(revisions, 1)}
    for revision, folder in revisions.items():
        shutil.copytree(folder, repository / "snapshots" / commits[revision])
        (repository / "refs" / revision).write_text(commits[revision])
    return commits


@pytest.fixture
def hub(tiny_model, tiny_tokenizer, tiny_target_folder, tiny_predictor_folder, tmp_path):
    """Two revisions of a target and of a predictor for both, in a cache -> (how it is read, commits of the target).

    The second target has other weights, template and generation config; the second predictor drafts deeper.
    """
    second = tmp_path / "second"
    tiny_model("llama", torch.float32, seed=2, vocab_size=len(tiny_tokenizer)).save_pretrained(second)
    tiny_tokenizer.save_pretrained(second)
    (second / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    deeper = shutil.copytree(tiny_predictor_folder, tmp_path / "deeper")
    for folder, depth in ((deeper, 1), (shallow := shutil.copytree(tiny_predictor_folder, tmp_path / "shallow"), 2)):
        config = json.loads((folder / "config.json").read_text())
        config |= {"target_identity": None, "draft": {**(config.get("draft") or {}), "depth": depth}}
        (folder / "config.json").write_text(json.dumps(config))
    cache = tmp_path / "cache"
    published(cache, PREDICTOR, {"main": shallow, "one-pass": deeper})
    commits = published(cache, TARGET, {"main": tiny_target_folder, "v2": second})
    return {"cache_dir": str(cache), "local_files_only": True}, commits


def test_target_and_predictor_have_revisions_of_their_own(hub, tiny_target):
    place, commits = hub
    first = Target.load(TARGET, **place)
    assert first.identity.revision == commits["main"] and first.identity.head_hash == tiny_target.identity.head_hash
    for given in ("v2", commits["v2"]):
        found = Target.load(TARGET, revision=given, **place)
        assert found.identity.revision == commits["v2"] and found.identity.head_hash != first.identity.head_hash
        assert found.tokenizer.chat_template == "{{ messages[0]['content'] }}"  # the tokenizer of that revision too

    def made(*arguments, **options):
        decoder = ShapeDecoder.from_pretrained(*arguments, **options, **place)
        assert isinstance(decoder.drafter, TrainedDrafter)
        return decoder.target.identity.revision, decoder.drafter.tree.depth

    assert made(PREDICTOR, target=TARGET) == (commits["main"], 2)
    assert made(TARGET, predictor=PREDICTOR, revision="v2") == (commits["v2"], 2)
    assert made(TARGET, predictor=PREDICTOR, predictor_revision="one-pass") == (commits["main"], 1)
    assert made(PREDICTOR, TARGET, revision="v2", predictor_revision="one-pass") == (commits["v2"], 1)
    assert made(PREDICTOR, target=tiny_target, predictor_revision="one-pass") == ("", 1)
    assert ShapeDecoder.from_pretrained(TARGET, revision="v2", **place).target.identity.revision == commits["v2"]


def test_a_smaller_model_has_a_revision_of_its_own(hub):
    place, commits = hub
    decoder = ShapeDecoder.from_pretrained(
        target=TARGET, predictor=TARGET, predictor_revision="v2", attn_implementation="eager", **place
    )
    assert isinstance(decoder.drafter, ModelDrafter)
    assert decoder.target.identity.revision == commits["main"]
    assert decoder.drafter.model.identity.revision == commits["v2"]
    # What is the target's alone stays with it.
    assert decoder.target.config._attn_implementation == "eager" != decoder.drafter.model.config._attn_implementation


def test_what_no_repository_has(hub):
    place, _ = hub
    with pytest.raises(UnsupportedTarget, match="target somebody/target cannot be loaded"):
        Target.load(TARGET, revision="v3", **place)
    with pytest.raises(CheckpointError, match="predictor somebody/predictor cannot be read"):
        ShapeDecoder.from_pretrained(TARGET, predictor=PREDICTOR, predictor_revision="v2", **place)
    with pytest.raises(CheckpointError, match="somebody/absent cannot be read; give the folder or hub id of a target"):
        ShapeDecoder.from_pretrained("somebody/absent", **place)


def test_a_command_reads_both_revisions(hub, capsys, monkeypatch):
    place, commits = hub
    made: list[ShapeDecoder] = []
    load = terminal.load
    monkeypatch.setattr(terminal, "load", lambda options: made.append(load(options)) or made[-1])
    arguments = ["--target", TARGET, "--predictor", PREDICTOR, "--prompt", "Hello", "--max_new_tokens", "4"]
    revisions = ["--revision", "v2", "--predictor_revision", "one-pass", "--target_options", json.dumps(place)]
    generate.main([*arguments, *revisions])
    said = capsys.readouterr()
    assert made[0].target.identity.revision == commits["v2"] and made[0].drafter.tree.depth == 1
    (line,) = (line for line in said.err.splitlines() if line.startswith("target somebody/target: float32"))
    assert " on cpu" in line
    assert "(shape)" in said.err + said.out


MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_the_target(tiny_target, tiny_target_folder, tmp_path):
    folder = shutil.copytree(tiny_target_folder, tmp_path / "own")
    (folder / "modeling_own.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own-llama", "auto_map": auto}))
    with pytest.raises(UnsupportedTarget, match="cannot be loaded"):
        ShapeDecoder.from_pretrained(folder)
    decoder = ShapeDecoder.from_pretrained(folder, trust_remote_code=True)
    assert type(decoder.target.model).__name__ == "OwnModel"
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(
        decoder.generate(ids, max_new_tokens=6), ShapeDecoder(tiny_target).generate(ids, max_new_tokens=6)
    )


def test_models_that_also_see_images_load_from_their_folder(tmp_path):
    """Known to transformers by that alone, such as Mistral-Small-3 and Qwen3-VL."""
    text = {
        "model_type": "mistral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision, image_token_index=20)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    decoder = ShapeDecoder.from_pretrained(tmp_path, drafter="suffix", fall_back=False)
    assert type(decoder.target.model) is type(model)
    assert size_of(read_config(tmp_path)).parameters == size_of(model).parameters
    ids = torch.randint(21, 64, (2, 9), generator=torch.Generator().manual_seed(0)).repeat(1, 3)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(decoder.generate(ids, **options), expected)


def test_options_that_cannot_be_served(tiny_target, tiny_target_folder):
    with pytest.raises(ConfigError, match=r"with these options .*unexpected keyword argument 'fall_bak'") as caught:
        ShapeDecoder.from_pretrained(tiny_target_folder, fall_bak=False)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("did you mean fall_back?")
    with pytest.raises(ConfigError, match=r"did you mean device_map\?"):
        ShapeDecoder.from_pretrained(tiny_target_folder, device="cpu")
    with pytest.raises(ConfigError, match=r"tree is \{'depth': 2\}; give a TreeShape"):
        ShapeDecoder.from_pretrained(tiny_target, tree={"depth": 2})
    with pytest.raises(ConfigError, match="target is a OptimizedModule; give the PreTrainedModel in it"):
        ShapeDecoder(torch.compile(tiny_target.model))
    with pytest.raises(ConfigError, match="predictor is a dict"):
        ShapeDecoder.from_pretrained(tiny_target, predictor={})
    with pytest.raises(ConfigError, match="num_draft_tokens cost is for a smaller model as drafter; give a number"):
        ShapeDecoder.from_pretrained(tiny_target, num_draft_tokens="cost")
    with pytest.raises(ConfigError, match="drafter '' is unknown"):
        ShapeDecoder.from_pretrained(tiny_target, drafter="")
    with pytest.raises(UnsupportedTarget, match="is a predictor; give it as predictor"):
        ShapeDecoder.from_pretrained(target="quickstart-shape", drafter="suffix")
    with pytest.raises(ConfigError, match="drafter 'model' is asked for, and quickstart-shape is a predictor"):
        ShapeDecoder.from_pretrained(predictor="quickstart-shape", drafter="model")
    with pytest.raises(ConfigError, match=r"drafter 'shape' is asked for, and .* is a language model"):
        ShapeDecoder.from_pretrained(tiny_target, predictor=tiny_target_folder, drafter="shape")
    with pytest.raises(ConfigError, match="fall_back is 'no'"):
        ShapeDecoder(tiny_target, fall_back="no")
    with pytest.raises(ConfigError, match=r"drafter is <class .*SuffixDrafter'>; give a Drafter"):
        ShapeDecoder(tiny_target, SuffixDrafter)
    with pytest.raises(ConfigError, match=r"option attn_implementation .* while tiny is at hand"):
        ShapeDecoder.from_pretrained(tiny_target, attn_implementation="eager")
    with pytest.raises(ConfigError, match="give one target and one predictor"):
        ShapeDecoder.from_pretrained("a", "b", predictor="c")
    with pytest.raises(ConfigError, match="two models at hand"):
        ShapeDecoder.from_pretrained(tiny_target, tiny_target)
    with pytest.raises(ConfigError, match="device and device_map both say"):
        of_target(PlacedOptions(device="cpu", device_map="auto"))
    with pytest.raises(ConfigError, match="device_map is given in target_options"):
        of_target(TargetOptions(target_options={"device_map": "auto"}))
    with pytest.raises(ConfigError, match="token is given in target_options, which results record; give --token"):
        of_target(TargetOptions(target_options={"token": "secret"}))
    with pytest.raises(ConfigError, match="revision is given by itself and in target_options"):
        of_target(PairOptions(revision="v1", target_options={"revision": "v2"}))


def test_a_drafter_at_hand(tiny_target, tiny_target_folder):
    drafter, ids = SuffixDrafter(), torch.tensor([[5, 6, 7, 5, 6]])
    decoder = ShapeDecoder.from_pretrained(tiny_target_folder, drafter=drafter)
    assert decoder.drafter is drafter
    assert torch.equal(
        decoder.generate(ids, max_new_tokens=6), ShapeDecoder(tiny_target).generate(ids, max_new_tokens=6)
    )


def test_sizes_are_of_decoders():
    recurrent = size_of(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4))
    assert recurrent.attention == 0 and recurrent.active > 0
    with pytest.raises(UnsupportedTarget, match="is not that of a decoder-only language model"):
        size_of(T5Config())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 9 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    ],
)
def test_a_target_that_is_too_large_for_the_accelerator(error, tiny_target_folder, monkeypatch, refused):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    said = refused(generate.main, "--target", str(tiny_target_folder), "--prompt", "x")
    assert "does not fit into the memory of cuda; give device_map auto" in said
    assert "in training, which has no device_map, shard_target or a smaller dtype" in said


def test_the_token_stays_a_secret(monkeypatch):
    options = PairOptions(token="hf_secret")
    assert of_target(options)["token"] == of_predictor(options)["token"] == "hf_secret"
    assert "hf_secret" not in repr(options) and "token" not in recorded(options)
    for given in (["--token", "hf_secret"], ["--token=hf_secret"]):
        monkeypatch.setattr(sys, "argv", ["generate", "--target", "T", *given, "--seed", "1"])
        command = Environment.capture(torch.device("cpu")).command
        assert "hf_secret" not in command and command.endswith("--seed 1")


Main = Callable[[list[str]], object]


def commands(folder: Path, data: Path, output: Path) -> dict[str, tuple[Main, list[str]]]:
    """Every command that loads a target, with what it asks for."""
    target, predictor = ["--target", str(folder)], ["--predictor", "quickstart-shape"]
    taught = [*target, "--data", str(data), "--output", str(output)]
    device = ["--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    asked = [*target, "--prompts", str(data), "--output", str(output / "pack")]
    return {
        "generate": (generate.main, [*target, "--prompt", "x"]),
        "bench": (bench.main, [*target, "--output", str(output)]),
        "check": (check.main, target),
        "regeneration": (regeneration.main, [*target, "--data", str(data), "--output", f"{output}.jsonl"]),
        "recipes": (recipes.main, ["compile", *asked]),
        "extract": (extract.main, [*taught, *device]),
        "train": (train.main, [*taught, *device]),
        "efficiency": (efficiency.main, [*target, *predictor]),
        "quality": (quality.main, target),
        "latency": (
            latency.main,
            ["--targets", json.dumps([str(folder)]), "--output", str(output)],
        ),
    }


NAMES = [*commands(Path(), Path(), Path())]


@pytest.fixture
def asked_of_transformers(monkeypatch) -> list[dict]:
    """What transformers is asked for, at which loading ends."""
    seen: list[dict] = []

    def refuse(where, **options):
        seen.append({"where": where, **options})
        raise OSError("that is enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_every_command_hands_the_options_on(name, tiny_target_folder, tmp_path, asked_of_transformers, monkeypatch):
    data = tmp_path / "data.jsonl"
    turns = [{"from": "human", "value": "a"}, *([{"from": "gpt", "value": "b"}] if name == "extract" else [])]
    row = {"prompt": "a"} if name == "recipes" else {"conversations": turns}
    data.write_text(json.dumps({"id": "1", **row}))

    def run(*more: str) -> dict:
        command, arguments = commands(tiny_target_folder, data, tmp_path / str(len(list(tmp_path.iterdir()))))[name]
        with pytest.raises((SystemExit, UnsupportedTarget)):
            command([*arguments, *more])
        return asked_of_transformers.pop()

    more = ["--attn_implementation", "eager", "--trust_remote_code", "true"]
    more += ["--quantization_config", "{quant_method: x}", "--target_options", "{variant: fp16}"]
    seen = run(*more)
    assert seen["where"] == str(tiny_target_folder) and seen["attn_implementation"] == "eager"
    assert seen["trust_remote_code"] is True and seen["quantization_config"] == {"quant_method": "x"}
    assert seen["variant"] == "fp16"
    # Without a word about it the target is put on a GPU where there is one; where Lightning computes, it is asked.
    by_lightning = name in ("train", "extract", "regeneration")
    assert str(seen["device_map"]) == ("cpu" if by_lightning else "None")
    if name in ("train", "extract"):
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")
    places = [(["--device", "cpu"], torch.device("cpu")), (["--device_map", "auto"], "auto")]
    for given, place in places if by_lightning else [([], "cuda"), *places]:
        assert run(*given)["device_map"] == place


def test_tables_and_ablations_hand_them_on(tiny_target_folder, tmp_path, asked_of_transformers, monkeypatch):
    monkeypatch.setattr(ablate, "ablate", lambda options: ablate.plan(replace(options, only=["none"])))  # that is quick
    options = tables.TablesOptions(target=str(tiny_target_folder), revision="v2", output=str(tmp_path))
    for command in ("speed", "quality", "batches", "latency", "refinement"):
        with pytest.raises(UnsupportedTarget):
            tables.RUNS[command][0](options, tmp_path / command)
        assert asked_of_transformers.pop()["revision"] == "v2", command
    given = ["refinement", "--only=[none]", f"--output={tmp_path}", '--override=["token=hf_secret"]']
    with pytest.raises(ConfigError, match="token would be written into the options"):
        ablate.plan(ablate.parse(given))
    assert "hf_secret" not in "".join(path.read_text() for path in tmp_path.rglob("*.yaml"))


def test_the_device_where_nobody_names_one(monkeypatch):
    assert default_device().type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert default_device().type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device().type == "cuda"
    with torch.device("meta"):  # whoever says where tensors are made says so of models too
        assert default_device().type == "meta"


def test_why_a_tokenizer_cannot_be_read_is_told_before_the_weights_are(tiny_target_folder, tmp_path, monkeypatch):
    """A package that is missing, say; a folder without any tokenizer has none."""

    def fails(*_, **__):
        raise ImportError("No module named 'mistral_common'")

    folder = Path(shutil.copytree(tiny_target_folder, tmp_path / "target"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fails)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    (folder / "tokenizer.json").rename(folder / "tekken.json")
    with pytest.raises(
        UnsupportedTarget, match=r"cannot be read .No module named 'mistral_common'.; install what it names"
    ):
        Target.load(folder)
    (folder / "tekken.json").unlink()
    assert read_tokenizer(folder, {}) is None


def test_a_chat_template_that_only_processors_look_for(tiny_target_folder, tmp_path):
    folder = Path(shutil.copytree(tiny_target_folder, tmp_path / "target"))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert read_tokenizer(folder, {}).chat_template == template
    (folder / "chat_template.jinja").write_text("the tokenizer's own")
    assert read_tokenizer(folder, {}).chat_template == "the tokenizer's own"
