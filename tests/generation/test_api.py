"""What people call first: chat, saving, the hub, and what a decoder says of itself."""

import json
import logging
import re
import warnings
from copy import copy
from pathlib import Path

import pytest
import torch
from helpers import predictor
from huggingface_hub import RepoUrl
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from eval.architectures import build
from shape.drafters import SuffixDrafter, TreeShape
from shape.drafters.recipes.pack import Pack, Recipe
from shape.errors import CheckpointError, ConfigError, DataError, ShapeError, UnsupportedGeneration, UnsupportedTarget
from shape.generation import decoder as module
from shape.generation.custom_generate import _decoder
from shape.generation.decoder import ShapeDecoder
from shape.generation.served import as_long_as_answers
from shape.target.model import Target, announce


def test_chat_gives_the_answer_as_text(tiny_target):
    decoder, tokenizer = ShapeDecoder(tiny_target, SuffixDrafter()), tiny_target.tokenizer
    messages = [{"role": "user", "content": "Say something."}]
    ids = tiny_target.encode(messages)
    for options in ({}, {"do_sample": True, "seed": 3, "top_k": 0}, {"return_dict_in_generate": True}):
        kept = {name: value for name, value in options.items() if name != "return_dict_in_generate"}
        out = decoder.generate(ids, max_new_tokens=20, **kept)
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert decoder.chat(messages, max_new_tokens=20, **options) == expected
    assert decoder.chat("Say something.", max_new_tokens=20) == decoder.chat(messages, max_new_tokens=20)
    with pytest.raises(DataError, match="no tokenizer"):
        ShapeDecoder(Target(tiny_target.model)).chat("Say something.")


def test_chat_ends_where_the_call_ends(tiny_model, tiny_tokenizer):
    model = tiny_model("llama", torch.float32, seed=1, vocab_size=len(tiny_tokenizer))
    decoder, length = ShapeDecoder(Target(model, tiny_tokenizer)), {"max_new_tokens": 20}
    ids = decoder.target.encode([{"role": "user", "content": "Say something."}])
    free = decoder.generate(ids, **length, eos_token_id=[])[0, ids.shape[1] :].tolist()
    first, second = sorted({free.index(token) for token in free})[3:5]

    def said(count: int) -> str:
        return tiny_tokenizer.decode(free[:count], skip_special_tokens=True)

    for end in (free[first], [free[first]], torch.tensor([free[first]])):
        assert decoder.chat("Say something.", **length, eos_token_id=end) == said(first)
    config = GenerationConfig(**length, eos_token_id=free[first])
    assert decoder.chat("Say something.", generation_config=config) == said(first)
    assert decoder.chat("Say something.", generation_config=config, eos_token_id=free[second]) == said(second)
    for end in (second, first):
        model.generation_config.eos_token_id = free[end]
        assert decoder.chat("Say something.", **length) == said(end)
        assert decoder.chat("Say something.", **length, eos_token_id=[]) == said(20)


def test_what_slows_down_and_nobody_asked_for_is_told_once(tiny_model, tiny_tokenizer):
    """Many instruct models have a penalty in their generation config, which measurements switch off."""
    model = tiny_model("llama", seed=3, vocab_size=len(tiny_tokenizer))
    model.generation_config.update(repetition_penalty=1.3, top_h=0.4, suppress_tokens=[7], top_k=5)
    ids, short = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 3, "do_sample": False}
    own = {"repetition_penalty": 1.3, "suppress_tokens": [7]}
    off = {"repetition_penalty": 1.0, "suppress_tokens": None}
    config, copied = GenerationConfig(**own | {"repetition_penalty": 1.2}, **short), copy(model.generation_config)
    copied.update(**short)

    def told(ask, options) -> list[str]:
        decoder = ShapeDecoder(Target(model, tiny_tokenizer, name="tiny"), SuffixDrafter())
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                ask(decoder, options)
        return [text for one in found if "generation_config" in (text := str(one.message)) and "switches" in text]

    def generates(decoder, options):
        decoder.generate(ids, **options)

    def as_custom(decoder, options):
        model.generate(ids, custom_generate=decoder.as_custom_generate(), **options)

    asked = [generates, lambda decoder, options: list(decoder.stream(ids, **options)), as_custom]
    asked += [lambda decoder, options: decoder.chat("hi", **options), lambda one, options: one.warm_up(**options)]
    for ask in asked:
        (text,) = told(ask, short)
        assert "target tiny has repetition_penalty=1.3, suppress_tokens=[7], as in its own generate" in text
        assert "repetition_penalty=1.0, suppress_tokens=None switches that off" in text and "top_h" not in text
        assert told(ask, short | off) == []
        (text,) = told(ask, short | {"repetition_penalty": 1.2})
        assert "has suppress_tokens=[7], as" in text
    (text,) = told(generates, short | {"do_sample": True})
    assert "top_h=0.4" in text
    assert told(generates, short | own) == []  # the caller's, though the same
    assert len(told(generates, {"generation_config": copied})) == 1  # which only holds what the target's has
    (text,) = told(generates, {"generation_config": config})
    assert "repetition_penalty" not in text
    with pytest.raises(
        UnsupportedGeneration, match=r"the generation_config of target .* has repetition_penalty=1.3, .*one prompt at"
    ):
        as_custom(ShapeDecoder(model), short | {"num_return_sequences": 2, "do_sample": True})


def test_answers_have_a_length_where_nobody_says_one(tiny_target, tiny_model, tiny_tokenizer, monkeypatch):
    decoder, asked = ShapeDecoder(tiny_target, SuffixDrafter()), []
    start = decoder._start
    given = [{"role": "user", "content": "Say something."}], "Say something."  # of a chat, and as it is
    rooms = [tiny_target.max_positions - tiny_target.encode(one).shape[1] for one in given]
    monkeypatch.setattr(decoder, "_start", lambda *given, **options: asked.append(options) or start(*given, **options))
    configs = [{"generation_config": GenerationConfig(**one)} for one in ({"max_new_tokens": 3}, {"max_length": 90})]
    unsaid = {"eos_token_id": 0}, {"max_new_tokens": None}, {"max_length": None, "eos_token_id": 0}
    for options in (*unsaid, {"max_length": 90}, *(one | {"max_new_tokens": None} for one in configs)):
        decoder.chat("Say something.", **options)
        list(decoder.stream("Say something.", **options))
    assert [one.get("max_new_tokens") for one in asked] == [*rooms * 3, *[None] * 6]
    assert not any("max_new_tokens" in one for one in asked[-6:])  # a None would hide what the configurations say


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda decoder: decoder.chat(["Hello"]), "a message is 'Hello'; give objects with role and content"),
        (lambda decoder: decoder.chat({"role": "user", "content": "x"}), "a message is 'role'"),
        (lambda decoder: next(decoder.stream([1, 2, 3])), "a message is 1"),
        (lambda decoder: decoder.chat(5), "the messages are 5; give a text, or objects with role and content"),
        (
            lambda decoder: decoder.generate(torch.tensor([[5]]), generation_config={"max_new_tokens": 5}),
            "generation_config is a dict; give a GenerationConfig",
        ),
        (lambda decoder: ShapeDecoder(decoder.target, graphs="yes"), "graphs is 'yes'; give True, False or Fixed"),
        (
            lambda decoder: ShapeDecoder.from_pretrained(decoder.target, drafter=[SuffixDrafter(), "ngram"]),
            "give a Drafter alone, or names",
        ),
        (lambda decoder: ShapeDecoder.from_pretrained(decoder.target, drafter=5), "drafter is 5; give a Drafter"),
        (
            lambda decoder: ShapeDecoder.from_pretrained(decoder.target, drafter=SuffixDrafter(), num_draft_tokens=3),
            "set them on the SuffixDrafter at hand",
        ),
        # Before a target is looked for:
        (lambda decoder: ShapeDecoder.from_pretrained(target="nowhere", drafter="sufix"), "drafter 'sufix' is unknown"),
        (
            lambda decoder: ShapeDecoder.from_pretrained(target="nowhere", num_draft_tokens="cost"),
            "num_draft_tokens cost is for a smaller model as drafter",
        ),
        (
            lambda decoder: ShapeDecoder.from_pretrained(target="nowhere", drafter="suffix", num_draft_tokens=0),
            "num_draft_tokens is 0; give a positive number",
        ),
        (lambda decoder: Target.load("nowhere", dtype="fp16"), "dtype fp16 is not"),
    ],
)
def test_mistakes_are_told_in_a_sentence(tiny_target, call, message):
    with pytest.raises(ShapeError, match=re.escape(message)):
        call(ShapeDecoder(tiny_target))


def test_a_pack_beside_a_drafter_that_does_not_read_it(tiny_target, tmp_path):
    path = tmp_path / "task.pack"
    Pack(tiny_target.identity, (Recipe((5, 6), (7, 8, 9), 2),), samples=1, prompts=1).save(path)
    with pytest.raises(ConfigError, match=r"drafter 'suffix' looks nothing up in it; give recipes\+suffix, or leave"):
        ShapeDecoder.from_pretrained(tiny_target, drafter="suffix", pack=path)
    assert (
        ShapeDecoder.from_pretrained(tiny_target, drafter="recipes+suffix", pack=path).drafter.name == "recipes+suffix"
    )


def test_an_export_drafts_for_a_model_of_two_rotary_tables(tmp_path):
    """Of which transformers gives the code a weak reference."""
    model = build("phi3, LongRoPE")
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    predictor(torch.float32, **sizes).save_pretrained(tmp_path)
    options = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]]), "max_new_tokens": 8, "do_sample": False}
    found = _decoder(model, str(tmp_path), {}).generate(**options)
    assert torch.equal(found, model.generate(**options))


def test_what_nobody_knows_of_a_configuration_is_ignored(tiny_model):
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 5, 6]])
    model.generation_config.update(chat_format="chatml", max_window_size=6144, return_dict_in_generate=True)
    out = ShapeDecoder(model, SuffixDrafter()).generate(ids, max_new_tokens=8)
    assert torch.equal(out.sequences, model.generate(ids, max_new_tokens=8).sequences)
    with pytest.raises(UnsupportedGeneration, match="option chat_format is not one of generate's"):
        ShapeDecoder(model, "suffix").generate(ids, chat_format="chatml")


def test_autocast_behind_texts_of_unequal_length(tiny_model):
    model, ids = tiny_model("llama", torch.float32), torch.tensor([[5, 6, 7, 5, 6], [0, 0, 8, 9, 8]])
    mask = (ids > 0).long()
    options = {"max_new_tokens": 20, "pad_token_id": 0}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ShapeDecoder(model, SuffixDrafter()).generate(ids, mask, **options)
        expected = ShapeDecoder(model).generate(ids, mask, **options)
    assert torch.equal(out, expected) and out.shape[1] > 5


def test_messages_for_a_target_without_a_template(tiny_model, tiny_tokenizer):
    tokenizer = copy(tiny_tokenizer)
    tokenizer.chat_template = None
    target = Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    with pytest.raises(DataError, match="has no chat template, and continues texts, not None"):
        target.encode([{"role": "user"}])
    with pytest.raises(DataError, match="a message has the keys from, value; give role and content"):
        Target(target.model, tiny_tokenizer).encode([{"from": "human", "value": "hi"}])


def test_chat_leaves_reasoning_out(thinking_target):
    decoder, messages = ShapeDecoder(thinking_target), [{"role": "user", "content": "hi"}]
    ids = thinking_target.encode(messages)
    whole = decoder.generate(ids, max_new_tokens=60)[0, ids.shape[1] :].tolist()
    message = thinking_target.message(whole)
    assert message["reasoning_content"]
    assert decoder.chat(messages, max_new_tokens=60) == decoder.chat(messages) == message["content"]
    with pytest.warns(UserWarning, match="ends within its reasoning, after 6 tokens; give a larger max_new_tokens"):
        assert decoder.chat(messages, max_new_tokens=6) == ""


def test_a_drafter_of_an_unknown_kind_is_no_language_model(tiny_target, tmp_path):
    said = {"model_type": "gemma4_text", "architectures": ["Gemma4DSparkModel"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"a drafter of a kind that is not known here \(Gemma4DSparkModel\)"):
        ShapeDecoder.from_pretrained(tiny_target, predictor=tmp_path)


def test_a_drafter_that_says_it_is_a_language_model_is_none(tiny_target, tmp_path):
    """Files of EAGLE-1, EAGLE-2 and HASS: weights that are not there would be made up, and drafts be noise."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    layer = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64))
    layer.save_pretrained(tmp_path)
    weights = {
        name.removeprefix("model."): weight.clone()
        for name, weight in layer.state_dict().items()
        if "layers.0" in name and "input_layernorm" not in name
    }
    save_file({**weights, "fc.weight": torch.zeros(8, 16)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedTarget, match=r"files lack \d+ of its .* if this is a drafter of EAGLE-1 or 2"):
        ShapeDecoder.from_pretrained(tiny_target, predictor=tmp_path)


def test_text_is_of_one_answer(tiny_target):
    decoder, named = ShapeDecoder(tiny_target), {"do_sample": True, "num_return_sequences": 2}
    for options in (named, {"generation_config": GenerationConfig(**named)}):
        for answer in (decoder.chat, lambda *given, **more: list(decoder.stream(*given, **more))):
            with pytest.raises(UnsupportedGeneration, match="text is of one answer; leave num_return_sequences out"):
                answer("hi", **options)


def test_the_targets_own_length_is_cut_to_the_room_that_is_left(tiny_model):
    """Nobody gave it to this call."""
    target = Target(tiny_model())
    target.model.generation_config.max_new_tokens = target.max_positions - 1
    ids = torch.tensor([[5, 6, 7]])
    assert as_long_as_answers(target, ids, {})["max_new_tokens"] == target.max_positions - 3
    assert as_long_as_answers(target, ids, {"max_new_tokens": 9}) == {"max_new_tokens": 9}


HALF = "\ud83d"  # of an emoji that a client cut in two


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda d, ids: d.chat(f"hi {HALF}"), DataError, "has half a surrogate pair"),
        (lambda d, ids: d.chat("hi", attention_mask=ids), UnsupportedGeneration, "attention_mask goes with token ids"),
        (lambda d, ids: list(d.stream("hi", ids)), UnsupportedGeneration, "attention_mask goes with token ids"),
        (lambda d, ids: list(d.stream([1, 2])), DataError, "a message is 1; give objects .*or token ids as a tensor"),
        (lambda d, ids: d.generate(ids, bad_words_ids=[[999999]]), UnsupportedGeneration, "bad_words_ids holds token"),
        (lambda d, ids: d.generate(ids, max_time="x"), UnsupportedGeneration, "max_time is 'x'; give seconds"),
        (lambda d, ids: d.generate(ids, logits_processor=[5]), UnsupportedGeneration, "logits_processor holds 5"),
        (lambda d, ids: d.generate(ids, acceptance=["match"]), UnsupportedGeneration, r"rule \['match'\] is unknown"),
        (lambda d, ids: d.generate(ids, streamer=5), UnsupportedGeneration, "streamer is 5; give one of transformers'"),
        (lambda d, ids: d.warm_up(batch_size=0), ConfigError, "numbers of at least 1, and one is 0"),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(tiny_target, ask, error, said):
    with pytest.raises(error, match=said):
        ask(ShapeDecoder(tiny_target), torch.tensor([[5, 6, 7]]))


def test_saved_and_loaded_again(tiny_target, tiny_target_folder, tiny_predictor_folder, tmp_path):
    decoder = ShapeDecoder.from_pretrained(tiny_target, predictor=tiny_predictor_folder, tree=TreeShape(2, width=2))
    decoder.save_pretrained(tmp_path / "saved")
    again = ShapeDecoder.from_pretrained(tmp_path / "saved", target=tiny_target)
    assert again.drafter.tree == TreeShape(2, width=2)
    for name, weight in decoder.drafter.predictor.state_dict().items():
        assert torch.equal(weight, again.drafter.predictor.state_dict()[name]), name
    assert again.drafter.predictor.config.training == decoder.drafter.predictor.config.training
    assert "base_model: tiny" in (tmp_path / "saved" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    where, batch = str(tmp_path / "saved"), {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}
    options = {**batch, "max_new_tokens": 8, "do_sample": False}
    found = model.generate(**options, custom_generate=where, predictor=where, trust_remote_code=True)
    assert torch.equal(found, model.generate(**options))
    with pytest.raises(ConfigError, match="drafter 'suffix' has no predictor to save"):
        ShapeDecoder(tiny_target, "suffix").save_pretrained(tmp_path / "none")


def test_pushed_to_the_hub(tiny_target, tiny_predictor_folder, monkeypatch):
    calls: list[tuple] = []

    class Hub:
        def __init__(self, token=None) -> None:
            calls.append(("token", token))

        def create_repo(self, repo_id, private=None, exist_ok=False) -> RepoUrl:
            calls.append(("create", repo_id, private, exist_ok))
            return RepoUrl(f"https://hub/{repo_id if '/' in repo_id else f'me/{repo_id}'}", endpoint="https://hub")

        def upload_folder(self, repo_id, folder_path, **options) -> str:
            calls.append(("upload", repo_id, {one.name for one in Path(folder_path).iterdir()}, options))
            return "https://hub/commit"

    monkeypatch.setattr(module, "HfApi", Hub)
    decoder = ShapeDecoder.from_pretrained(tiny_target, predictor=tiny_predictor_folder)
    assert decoder.push_to_hub("me/mine", private=True, token="t", commit_message="first") == "https://hub/commit"
    files = {"README.md", "config.json", "model.safetensors", "custom_generate"}
    assert calls == [
        ("token", "t"), ("create", "me/mine", True, True), ("upload", "me/mine", files, {"commit_message": "first"}),
    ]  # fmt: skip
    decoder.push_to_hub("mine")  # of the user
    assert [call[:2] for call in calls[3:]] == [("token", None), ("create", "mine"), ("upload", "me/mine")]


def test_a_decoder_says_what_it_is(tiny_target):
    said = repr(ShapeDecoder(tiny_target, "ngram"))
    assert said == (
        "ShapeDecoder(target='tiny', drafter='ngram, 8 tokens behind 4 to 2 equal ones', dtype='float32', "
        "device='cpu', fall_back=True)"
    )
    assert "drafter='none'" in repr(ShapeDecoder(tiny_target))


@pytest.mark.parametrize("name", ["num_draft_tokens", "num_assistant_tokens", "num_speculative_tokens"])
def test_the_length_of_a_draft_has_three_names(tiny_target, tiny_predictor_folder, name):
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    options = {"max_new_tokens": 24, "eos_token_id": [], "seed": 0, "return_dict_in_generate": True}

    def decoder(**more) -> ShapeDecoder:
        return ShapeDecoder.from_pretrained(tiny_target, predictor=tiny_predictor_folder, fall_back=False, **more)

    one, other = decoder(**{name: 1}), decoder()
    assert one.drafter.tree.depth == 1 < other.drafter.tree.depth
    found, expected = other.generate(ids, **options, **{name: 1}), one.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    sizes = [[step.nodes for step in out.stats.steps] for out in (found, expected, other.generate(ids, **options))]
    assert sizes[0] == sizes[1] != sizes[2]
    with pytest.raises(UnsupportedGeneration, match="a call takes a number"):
        one.generate(ids, **{name: "adaptive"})
    with pytest.raises(ConfigError, match="the length of a draft is given 2 times"):
        decoder(num_draft_tokens=3, num_speculative_tokens=3)
    none = other.generate(ids, **options, **{name: 0})
    assert none.stats.drafted == 0 and torch.equal(none.sequences, expected.sequences)


def test_messages_are_logged(tiny_target, caplog, capsys):
    with caplog.at_level(logging.INFO, logger="shape"):
        announce(tiny_target, "; so")
    assert caplog.messages == ["target tiny: float32 on cpu; so"]
    assert capsys.readouterr().out == ""


def test_what_was_published_before_still_imports():
    from shape.generation.custom_generate import generate_of

    assert callable(generate_of("anything"))
