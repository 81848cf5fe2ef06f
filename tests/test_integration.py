"""Where people already are: an exported folder for ``model.generate``, a pipeline, streamers and iterators."""

import asyncio
import gc
import os
import pickle
import shutil
import subprocess
import sys
import weakref
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from helpers import Recorder
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TextGenerationPipeline,
    dynamic_module_utils,
)
from transformers import pipeline as plain_pipeline

from shape import bundled
from shape.drafters import AdversaryDrafter, TrainedDrafter
from shape.errors import CheckpointError, ConfigError, DataError, TargetMismatch, UnsupportedGeneration
from shape.generation.decoder import ShapeDecoder
from shape.generation.loading import draft_dtype
from shape.generation.prefill import Memory
from shape.networks.config import ShapeConfig
from shape.networks.export import export
from shape.networks.shape import ShapePredictor
from shape.target.model import Target

CHAT = [{"role": "user", "content": "Say something."}]
BOOKING = [{"role": "user", "content": "Book a table for two."}]
TEXTS = ["Hello", "A longer prompt, twice", "ok"]


def predictor(target: Target) -> ShapePredictor:
    config = ShapeConfig(hidden_size=target.hidden_size, intermediate_size=48, step_mode="recursive")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ShapePredictor(config).eval()


@pytest.fixture(scope="module")
def exported(tiny_target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "mine"
    export(predictor(tiny_target), folder, tiny_target.identity, {})
    return folder


@pytest.fixture(autouse=True)
def copies_of_remote_code(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def model(tiny_target_folder) -> PreTrainedModel:
    """The tiny target as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(tiny_target_folder)


@pytest.fixture
def decoder(tiny_target) -> ShapeDecoder:
    """Drafts at every step, so that steps do not depend on the machine's times."""
    return ShapeDecoder(tiny_target, TrainedDrafter(predictor(tiny_target)), fall_back=False)


@pytest.fixture(scope="module")
def shipped() -> ShapeDecoder:
    return ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32")


@pytest.fixture(scope="module")
def precise(tiny_model, tiny_tokenizer) -> ShapeDecoder:
    """In float64: padding changes no near-tie."""
    model = tiny_model("llama", seed=1, vocab_size=len(tiny_tokenizer))
    return ShapeDecoder(Target(model, tiny_tokenizer, name="precise"), AdversaryDrafter(seed=1))


class FailsLater(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 12:
            raise RuntimeError("the processor failed")
        return scores


# ------------------------------------------------------------------------------------- an exported folder


def run_of(folder: Path) -> dict:
    """What makes transformers' generate run a folder."""
    return {"custom_generate": str(folder), "predictor": str(folder), "trust_remote_code": True}


def hub_repository(exported: Path, cache: Path) -> str:
    """The folder as it lies in the hub's cache after a download."""
    root, commit = cache / "models--some-one--4.my_own-1", "0" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    shutil.copytree(exported, root / "snapshots" / commit)
    return "some-one/4.my_own-1"


@pytest.mark.parametrize("place", ["path", "relative path", "moved", "hub"])
def test_an_exported_folder_decodes_for_its_target(model, exported, tiny_tokenizer, tmp_path, monkeypatch, place):
    """A repository of the hub is known by the copy that transformers makes of its code, a folder has to be named."""
    where, options = str(exported), {"trust_remote_code": True, "max_new_tokens": 20}
    if place == "relative path":
        monkeypatch.chdir(exported.parent)
        where = exported.name
    if place == "moved":
        where = str(shutil.copytree(exported, tmp_path / "elsewhere" / "mine"))
    if place == "hub":
        where = hub_repository(exported, tmp_path / "hub")
        options |= {"cache_dir": str(tmp_path / "hub"), "local_files_only": True}
    else:
        options["predictor"] = where
    inputs = tiny_tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    expected = model.generate(**inputs, max_new_tokens=20)
    out = model.generate(**inputs, custom_generate=where, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, expected)
    assert out.stats.drafter == "shape" and out.stats.drafted > 0


def test_the_decoder_is_made_once_and_lives_as_long_as_its_model(
    model, exported, tiny_target_folder, tmp_path, monkeypatch
):
    made = []
    original = ShapeDecoder.from_pretrained.__func__

    def count(cls, *arguments, **options):
        made.append(original(cls, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(ShapeDecoder, "from_pretrained", classmethod(count))
    ids, attributes = torch.tensor([[40, 50, 60]]), set(vars(model))
    another = str(shutil.copytree(exported, tmp_path / "another"))
    for folder in (exported, exported, another, exported):
        model.generate(ids, max_new_tokens=4, **run_of(folder))
    assert len(made) == 2
    run = {**run_of(another), "max_new_tokens": 12}
    head, expected = model.get_output_embeddings(), []
    # Moved there and back, too: the weights are rounded, and may lie where they lay.
    for change in (model.double, model.float, model.float, lambda: model.bfloat16().float(), lambda: None):
        change()
        expected.append(model.generate(ids, max_new_tokens=12))
        assert torch.equal(model.generate(ids, **run), expected[-1])
        assert made[-1].drafter.predictor.dtype == draft_dtype(made[-1].target, model.device)
    assert len(made) == 5
    with torch.no_grad():
        head.weight.add_(torch.randn_like(head.weight))
    assert torch.equal(model.generate(ids, **run), model.generate(ids, max_new_tokens=12)) and len(made) == 6
    model.resize_token_embeddings(len(head.weight) + 3)
    with pytest.raises(TargetMismatch, match="vocabulary size"):
        model.generate(ids, **run)
    assert set(vars(model)) == attributes

    made.clear()
    gc.collect()
    gc.disable()
    try:
        own = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
        own.generate(ids, max_new_tokens=4, **run_of(exported))
        decoder, known = weakref.ref(made.pop()), weakref.ref(own)
        del own
        assert known() is None and decoder() is None
    finally:
        gc.enable()


def test_a_model_that_has_decoded_is_copied_pickled_and_saved(model, exported, tmp_path):
    ids, run = torch.tensor([[40, 50, 60]]), run_of(exported)
    expected = model.generate(ids, max_new_tokens=12, **run)
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    for copied in (deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        assert vars(copied).keys() == vars(model).keys()
        assert torch.equal(copied.generate(ids, max_new_tokens=12), expected)
        assert torch.equal(copied.generate(ids, max_new_tokens=12, **run), expected)


class Trains(LightningModule):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], 1e-2)


class Writes(Callback):
    """Shows what the model has learned, by several ways to decode."""

    def __init__(self, folder: str) -> None:
        self.run = {**run_of(folder), "max_new_tokens": 9, "eos_token_id": []}
        self.written, self.own = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        model, ids = module.model, batch[:1, :4]
        if not batch_idx:
            self.decoder = ShapeDecoder(model, "ngram")
        modes = [part.training for part in model.modules()]
        trained = [weight.requires_grad for weight in model.parameters()]
        out = model.generate(ids, return_dict_in_generate=True, **self.run)
        again = model.generate(
            ids, max_new_tokens=9, eos_token_id=[], custom_generate=self.decoder.as_custom_generate()
        )
        self.decoder.generate(ids, max_new_tokens=5, do_sample=True, seed=batch_idx)
        next(self.decoder.stream(ids, max_new_tokens=5))
        assert out.stats.drafter == "shape" and torch.equal(again, out.sequences)
        assert modes == [part.training for part in model.modules()] and modes[0]
        assert trained == [weight.requires_grad for weight in model.parameters()]
        self.written.append(out.sequences)
        self.own.append(deepcopy(model).eval().generate(ids, max_new_tokens=9, eos_token_id=[]))


def test_a_model_in_training_that_decodes_in_a_callback_trains_on(tiny_target_folder, exported):
    """With dropout: neither modes, gradients nor random states tell that anything was decoded."""

    def train(*callbacks):
        model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, attention_dropout=0.3).train()
        model.get_input_embeddings().requires_grad_(False)
        module = Trains(model)
        torch.manual_seed(0)
        trainer = Trainer(
            max_steps=5, callbacks=list(callbacks), accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        batches = torch.randint(3, 200, (5, 4, 12), generator=torch.Generator().manual_seed(1))
        trainer.fit(module, DataLoader(batches, batch_size=None))
        return module.losses, model.state_dict()

    writes = Writes(str(exported))
    (losses, weights), (expected, untouched) = train(writes), train()
    assert losses == expected and len(losses) == 5
    assert all(torch.equal(weights[name], weight) for name, weight in untouched.items())
    assert torch.equal(torch.cat(writes.written), torch.cat(writes.own))
    assert len({tuple(text.flatten().tolist()) for text in writes.written}) > 1


def test_an_exported_folder_takes_every_option(model, exported, tiny_tokenizer):
    run = run_of(exported)
    batch = tiny_tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 30, "repetition_penalty": 1.3}
    assert torch.equal(model.generate(**batch, **run, **options), model.generate(**batch, **options))
    ids = batch.input_ids[1:2]
    options = {"max_new_tokens": 30, "do_sample": True, "seed": 3, "top_k": 0}
    expected, recorder = ShapeDecoder(model).generate(ids, **options), Recorder()
    assert torch.equal(model.generate(ids, streamer=recorder, **run, **options), expected)
    assert recorder.tokens == expected[0].tolist() and recorder.ended == 1
    model.generation_config.top_k, model.generation_config.repetition_penalty = 2, 1.5
    options = {"max_new_tokens": 30, "repetition_penalty": None}
    assert torch.equal(model.generate(ids, **run, **options), model.generate(ids, **options))
    options |= {"do_sample": True, "seed": 3, "top_k": None}
    assert torch.equal(model.generate(ids, **run, **options), expected)
    model.generation_config.top_k, model.generation_config.repetition_penalty = None, None
    stop = tiny_tokenizer.decode(model.generate(ids, max_new_tokens=30)[0, -12:-10])
    options = {"max_new_tokens": 30, "stop_strings": [stop], "tokenizer": tiny_tokenizer}
    assert torch.equal(model.generate(ids, **run, **options), model.generate(ids, **options))


def test_what_an_exported_folder_refuses(model, exported, tiny_model, tmp_path):
    ids, run = torch.tensor([[40, 50, 60]]), run_of(exported)
    with pytest.raises(UnsupportedGeneration, match="no prompt is given"):
        model.generate(**run)
    with pytest.raises(UnsupportedGeneration, match="the prompt is given twice"):
        model.generate(ids, input_ids=ids, **run)
    with pytest.raises(UnsupportedGeneration, match="option num_beams=2 is not supported"):
        model.generate(ids, num_beams=2, **run)
    with pytest.raises(TargetMismatch, match="output embedding"):
        tiny_model("llama", torch.float32, seed=5, vocab_size=model.config.vocab_size).generate(ids, **run)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(ids, custom_generate=str(exported), trust_remote_code=False)
    empty = tmp_path / "empty"
    shutil.copytree(exported / "custom_generate", empty / "custom_generate")
    waiting = Recorder()
    with pytest.raises(CheckpointError, match="cannot be read"):
        model.generate(ids, streamer=waiting, **run_of(empty))
    assert waiting.ended == 1 and waiting.pieces == []
    with pytest.raises(CheckpointError, match="give the same one as predictor=FOLDER"):
        model.generate(ids, custom_generate=str(exported), trust_remote_code=True)
    custom_generate = "a local variable of that name is nobody's business"  # noqa: F841
    with pytest.raises(CheckpointError, match="give the same one as predictor=FOLDER"):
        model.load_custom_generate(str(exported), trust_remote_code=True)(model, ids)


def test_without_the_package_the_folder_says_what_to_install(exported, tmp_path):
    """transformers' own message would name the import, and the package has another name."""
    (tmp_path / "shape.py").write_text("")  # a stranger of that name
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    script = str(exported / "custom_generate" / "generate.py")
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert "needs the package shape-decoding; install it from its repository" in ran.stderr
    assert dynamic_module_utils.get_imports(script) == []


def test_the_shipped_predictor_has_it_too(exported, shipped):
    folder = bundled.path("checkpoints", "quickstart-shape")
    files = [place / "custom_generate" / "generate.py" for place in (folder, exported)]
    assert files[0].read_text() == files[1].read_text()
    model, ids = shipped.target.model, shipped.target.encode(BOOKING)
    out = model.generate(ids, max_new_tokens=40, return_dict_in_generate=True, **run_of(folder))
    assert torch.equal(out.sequences, model.generate(ids, max_new_tokens=40))
    assert out.stats.drafter == "shape" and out.stats.accepted > 0


# ---------------------------------------------------------------------------------------------- a pipeline


PIPELINE_CALLS = {
    "text": ("Hello", {}),
    "new text only": ("Hello", {"return_full_text": False}),
    "texts": (TEXTS, {}),
    "batch": (TEXTS, {"batch_size": 3}),
    "batch with penalty": (TEXTS, {"batch_size": 2, "repetition_penalty": 1.3}),
    "chat": (CHAT, {}),
    "chats": ([CHAT, [*CHAT, {"role": "assistant", "content": "Some"}]], {"batch_size": 2}),
    "token ids": ("Hello", {"return_tensors": True}),
    "length": ("Hello", {"max_length": 30, "max_new_tokens": None}),
    "dict": ("Hello", {"return_dict_in_generate": True}),
}


@pytest.mark.parametrize("name", PIPELINE_CALLS)
def test_a_pipeline_gives_what_transformers_own_gives(precise, name):
    given, options = PIPELINE_CALLS[name]
    options = {"do_sample": False, "max_new_tokens": 24, **options}
    plain = plain_pipeline("text-generation", model=precise.target.model, tokenizer=precise.tokenizer, device="cpu")
    drafting = precise.pipeline()
    assert isinstance(drafting, TextGenerationPipeline)
    assert drafting(given, **options) == plain(given, **options)
    assert drafting.model is precise.target.model and "generate" not in vars(drafting.model)


def test_the_shipped_pair_in_a_pipeline_and_as_a_stream(shipped):
    model, tokenizer = shipped.target.model, shipped.tokenizer
    options = {"do_sample": False, "max_new_tokens": 40, "batch_size": 2}
    chats = [BOOKING, [{"role": "user", "content": "I want to listen to some music, please."}]]
    plain = plain_pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    answers = shipped.pipeline(**options)(chats)
    assert answers == plain(chats, **options)
    pieces = list(shipped.stream(BOOKING, max_new_tokens=40))
    assert "".join(pieces) == answers[0][0]["generated_text"][-1]["content"] and len(pieces) > 2


def test_a_pipeline_stops_where_transformers_own_stops(precise):
    options = {"do_sample": False, "max_new_tokens": 24, "return_full_text": False}
    plain = plain_pipeline("text-generation", model=precise.target.model, tokenizer=precise.tokenizer, device="cpu")
    ((whole,), drafting) = plain("Hello", **options), precise.pipeline()
    options |= {"stop_sequence": next(letter for letter in whole["generated_text"] if letter.isascii())}
    (stopped,) = drafting("Hello", **options)
    assert [stopped] == plain("Hello", **options) and 0 < len(stopped["generated_text"]) < len(whole["generated_text"])


def test_a_pipeline_decodes_with_drafts(precise, monkeypatch):
    calls = []
    monkeypatch.setattr(ShapeDecoder, "generate", lambda self, ids, **options: calls.append(options) or ids)
    precise.pipeline(max_new_tokens=7, seed=2)("Hello", do_sample=True)
    (options,) = calls
    assert options["seed"] == 2 and options["do_sample"]


def test_pipeline_options_that_only_the_decoder_has(precise):
    drafting = precise.pipeline(do_sample=True, top_k=0, max_new_tokens=24)
    assert drafting("Hello", seed=1) == drafting("Hello", seed=1) != drafting("Hello", seed=2)
    several = drafting("Hello", num_return_sequences=3, seed=1)
    assert len({answer["generated_text"] for answer in several}) == 3
    recorder = Recorder()
    (answer,) = drafting("Hello", streamer=recorder, return_tensors=True)
    assert recorder.tokens == answer["generated_token_ids"] and recorder.ended == 1


def test_what_a_pipeline_refuses(precise, tiny_model):
    with pytest.raises(ConfigError, match="has no tokenizer"):
        ShapeDecoder(tiny_model("llama")).pipeline()
    with pytest.raises(UnsupportedGeneration, match="num_beams=3 is not supported"):
        precise.pipeline()("Hello", num_beams=3, do_sample=False)
    with pytest.raises(UnsupportedGeneration, match="no prompt is given"):
        precise.pipeline()("", do_sample=False)


# ----------------------------------------------------------------------------------- streams and streamers


def answered(decoder: ShapeDecoder, prompt, **options) -> list[int]:
    ids = decoder.target.encode(prompt)
    return decoder.generate(ids, torch.ones_like(ids), max_new_tokens=40, **options)[0, ids.shape[1] :].tolist()


async def gathered(stream) -> list:
    return [piece async for piece in stream]


@pytest.mark.parametrize("prompt", ["Hello", CHAT, "東京 naïve"], ids=["text", "chat", "unicode"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 0, "seed": 5}], ids=["greedy", "sampled"])
def test_streams_give_everything_once(decoder, prompt, sampling):
    """Random bytes are often no valid characters: pieces must still add up to the decoded whole."""
    options = {"max_new_tokens": 40, **sampling}
    expected = answered(decoder, prompt, **sampling)
    ids = decoder.target.encode(prompt)
    steps = list(decoder.stream(input_ids=ids, attention_mask=torch.ones_like(ids), **options))
    assert [token for step in steps for token in step] == expected and len(steps) > 1
    assert asyncio.run(gathered(decoder.astream(ids, **options))) == steps
    pieces = list(decoder.stream(prompt, **options))
    assert "".join(pieces) == decoder.tokenizer.decode(expected, skip_special_tokens=True) and all(pieces)
    assert asyncio.run(gathered(decoder.astream(prompt, **options))) == pieces


def test_characters_come_whole_and_words_keep_their_spaces(tiny_target):
    """An answer that is known: the target is made to say it."""
    text = "a naïve café, 東京 ok\n done 🙂 "
    spoken = [*tiny_target.tokenizer(text).input_ids, 2]
    start = tiny_target.encode("Hello").shape[1]

    class Say(LogitsProcessor):
        def __call__(self, input_ids, scores):
            wanted = torch.full_like(scores, float("-inf"))
            wanted[:, spoken[input_ids.shape[1] - start]] = 0.0
            return wanted

    stream = ShapeDecoder(tiny_target).stream("Hello", max_new_tokens=99, logits_processor=LogitsProcessorList([Say()]))
    pieces = list(stream)
    assert "".join(pieces) == text and len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)


def test_streams_of_one_decoder_may_be_open_side_by_side(decoder):
    options = {"max_new_tokens": 40}
    alone = [list(decoder.stream(text, **options)) for text in TEXTS]
    rounds = zip_longest(*(decoder.stream(text, **options) for text in TEXTS), fillvalue="")
    assert [[piece for piece in column if piece] for column in zip(*rounds, strict=True)] == alone

    async def serve() -> list[list[str]]:
        return await asyncio.gather(*(gathered(decoder.astream(text, **options)) for text in TEXTS))

    assert asyncio.run(serve()) == alone


def test_whoever_leaves_a_stream_ends_the_decoding(decoder):
    forwards = []
    hook = decoder.target.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        for _ in decoder.stream(torch.tensor([[40, 50, 60]]), max_new_tokens=100, eos_token_id=[]):
            assert torch.is_grad_enabled()
            break
        assert len(forwards) == 1  # the prefill

        async def leave() -> None:
            async for _ in decoder.astream(torch.tensor([[40, 50, 60]]), max_new_tokens=100, eos_token_id=[]):
                break

        asyncio.run(leave())
        assert len(forwards) == 2

        async def cancel() -> None:
            stream = gathered(decoder.astream(torch.tensor([[40, 50, 60]]), max_new_tokens=200, eos_token_id=[]))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream, 0.01)

        asyncio.run(cancel())  # it waits for the step under way
        seen = len(forwards)
        assert seen < 100
        gc.collect()
        assert len(forwards) == seen
    finally:
        hook.remove()


def test_a_stream_can_go_on_from_the_turn_before(decoder):
    memory, ids = Memory(), decoder.target.encode("Hello")
    first = [token for step in decoder.stream(ids, max_new_tokens=9, memory=memory) for token in step]
    ids = torch.cat([ids, torch.tensor([[*first, 40, 50]])], dim=1)
    assert memory.tokens == ids[0, : len(memory.tokens)].tolist() != []
    again = decoder.stream(ids, max_new_tokens=9, memory=memory)
    assert list(again) == list(decoder.stream(ids, max_new_tokens=9)) != []


def test_errors_reach_whoever_listens(decoder):
    options = {"max_new_tokens": 40, "eos_token_id": [], "logits_processor": LogitsProcessorList([FailsLater()])}
    stream = decoder.stream(torch.tensor([[40, 50, 60]]), **options)
    assert next(stream)
    with pytest.raises(RuntimeError, match="the processor failed"):
        list(stream)
    with pytest.raises(RuntimeError, match="the processor failed"):
        asyncio.run(gathered(decoder.astream("Hello", **options)))


def test_bad_streams_are_refused_at_once(decoder, tiny_model):
    """When the stream is asked for, not when it is first read."""
    ids = torch.tensor([[40, 50, 60], [40, 50, 60]])
    with pytest.raises(UnsupportedGeneration, match="streaming follows one sequence, and 2 were asked for"):
        decoder.stream(ids)
    with pytest.raises(UnsupportedGeneration, match="num_beams=2"):
        decoder.astream("Hello", num_beams=2)
    with pytest.raises(UnsupportedGeneration, match="option streamer is not one of generate's"):
        decoder.stream("Hello", streamer=Recorder())
    with pytest.raises(DataError, match="prompt is empty"):
        decoder.stream("")
    with pytest.raises(DataError, match="has no tokenizer"):
        ShapeDecoder(tiny_model("llama")).stream("Hello")


def test_streamers_reach_a_custom_generate(decoder):
    """transformers hands a streamer the prompt, and does not hand it to functions of others: it is given beside them,
    and nothing is looked up in the caller."""
    model = decoder.target.model
    ids, mask = torch.tensor([[40, 50, 60]]), torch.ones(1, 3)
    recorder, run = Recorder(), {"attention_mask": mask, "max_new_tokens": 20}
    out = model.generate(ids, custom_generate=decoder.as_custom_generate(streamer=recorder), **run)
    assert recorder.tokens == out[0].tolist() and recorder.ended == 1
    assert torch.equal(out, decoder.generate(ids, mask, max_new_tokens=20))
    recorder = Recorder()
    with pytest.raises(UnsupportedGeneration, match="streaming follows one sequence"):
        decode = decoder.as_custom_generate(streamer=recorder)
        model.generate(ids, num_return_sequences=2, do_sample=True, custom_generate=decode, **run)
    assert recorder.ended == 1
    recorder = Recorder()
    assert torch.equal(model.generate(ids, streamer=recorder, custom_generate=decoder.as_custom_generate(), **run), out)
    assert recorder.tokens == ids[0].tolist() and recorder.ended == 0  # the one that transformers keeps to itself


class Leaves(Recorder):
    """Is interrupted behind so many pieces."""

    def put(self, value) -> None:
        super().put(value)
        if len(self.pieces) == 3:
            raise KeyboardInterrupt


def test_a_streamer_is_ended_whatever_happens(decoder):
    """Once, or the thread that reads it would wait for ever, or the next text end at once."""
    ids = torch.tensor([[40, 50, 60]])
    options = {"max_new_tokens": 20, "eos_token_id": []}
    failing = LogitsProcessorList([FailsLater()])
    for error, recorder, more in (
        (RuntimeError, Recorder(), {"logits_processor": failing}),
        (UnsupportedGeneration, Recorder(), {"num_beams": 2}),
        (KeyboardInterrupt, Leaves(), {}),
    ):
        with pytest.raises(error):
            decoder.generate(ids, streamer=recorder, **options, **more)
        assert recorder.ended == 1
