"""What SGLang's n-gram worker drafts with, as that calls it; SGLang's own loader and corpus where it is installed."""

import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import committed

from shape.drafters import SuffixDrafter
from shape.errors import ConfigError
from shape.serving.batch import likeliest_chains
from shape.serving.sglang import DRAFTERS, Corpus, plug_in
from shape.verification.sampling import Sampler

TEXTS = [[5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 9, 8], [1, 2, 3]]


@pytest.fixture
def corpus(monkeypatch) -> Corpus:
    monkeypatch.setenv(DRAFTERS, "suffix")
    return Corpus(draft_token_num=4, max_trie_depth=18, match_type="BFS")


def drafts(corpus: Corpus, texts: list[list[int]], reach: int = 64, names: str = "abc") -> list[list[int]]:
    """By request the chain that the masks say, as SGLang walks it: what is left hangs on the root."""
    found = corpus.batch_get(list(names[: len(texts)]), [text[-reach:] for text in texts], list(map(len, texts)))
    tokens, mask = found[0].reshape(len(texts), 4), found[1].reshape(len(texts), 4, 4)
    assert tokens.dtype == mask.dtype == np.int64
    assert tokens[:, 0].tolist() == [text[-1] for text in texts]
    depths = mask.sum(-1) - 1
    assert (mask[:, range(4), range(4)] == 1).all() and not np.triu(mask, 1).any() and (mask[:, :, 0] == 1).all()
    chains = []
    for row, depth in zip(tokens.tolist(), depths.tolist(), strict=True):
        chain = next((at for at in range(1, 4) if depth[at] != at), 4)
        assert depth[chain:] == [1] * (4 - chain) and row[chain:] == [0] * (4 - chain)
        chains.append(row[1:chain])
    return chains


def alone(text: list[int]) -> list[int]:
    drafter = SuffixDrafter().reproducible()
    drafter.limit_draft(3)
    own = committed(text)
    drafter.start(own, torch.empty(1, len(text) - 1, 0))
    # An unused node, token 0 on the root, looks like a draft of that token.
    return likeliest_chains(drafter.draft(own, Sampler(own.lengths)))[0] or [0]


def test_wrong_options_are_named(monkeypatch):
    for names, nodes, said in (
        ("suffix+", 4, "names '', which"),
        ("suffix", 1, "--speculative-num-draft-tokens counts"),
    ):
        monkeypatch.setenv(DRAFTERS, names)
        with pytest.raises(ConfigError, match=said):
            Corpus(draft_token_num=nodes)


def test_each_request_drafts_from_its_own_text(corpus):
    assert drafts(corpus, TEXTS) == [alone(text) for text in TEXTS]
    assert alone(TEXTS[0]) == [7, 5, 6] and alone(TEXTS[2]) == [0]


def test_requests_come_and_go(corpus):
    drafts(corpus, TEXTS)
    longer = [[*TEXTS[0], 7, 5], [*TEXTS[1], 3, 9]]
    assert drafts(corpus, longer) == [alone(text) for text in longer]
    corpus.erase_match_state(["a", "unknown"])
    assert drafts(corpus, [[*longer[1], 8]], names="b") == [alone([*longer[1], 8])]
    corpus.reset()
    assert drafts(corpus, longer) == [alone(text) for text in longer]


def test_the_last_tokens_continue_a_text_that_is_known(corpus):
    text = [*range(10, 20), 4, 5]
    drafts(corpus, [text])
    text = [*text, 10, 11]
    assert drafts(corpus, [text], reach=3) == [[12, 13, 14]]  # from where the tail does not reach
    corpus.batch_put([text])
    corpus.synchronize()
    text = [*text, 1, 1, 1, 1, 10, 11]
    assert drafts(corpus, [text], reach=3) == drafts(corpus, [text[-3:]], names="x")  # too much has been missed


def test_drafters_that_need_the_target_are_refused(monkeypatch):
    monkeypatch.setenv(DRAFTERS, "suffix+shape")
    with pytest.raises(ConfigError, match="names 'shape'"):
        Corpus(draft_token_num=4)


def test_corpora_of_others_are_refused(corpus):
    assert corpus.list_external_corpora() == {}
    with pytest.raises(ConfigError, match="cannot be loaded"):
        corpus.load_external_corpus_named("docs", [])


def test_the_plugin_waits_to_be_asked(monkeypatch):
    hooks: list[tuple] = []
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = SimpleNamespace(register=lambda *hook: hooks.append(hook))
    module.HookType = SimpleNamespace(REPLACE="replace")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv(DRAFTERS, raising=False)
    (found,) = entry_points(group="sglang.srt.plugins", name="shape")
    assert found.load() is plug_in
    plug_in()
    assert hooks == []
    monkeypatch.setenv(DRAFTERS, "ngram")
    plug_in()
    assert [(target.rpartition(".")[2], hook) for target, hook, _ in hooks] == [("NgramCorpus", Corpus)]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_in_sglang(monkeypatch):
    """Its loader puts our corpus in the place of its own, whose empty drafts look like ours."""
    monkeypatch.setenv(DRAFTERS, "suffix")
    from sglang.srt.speculative.cpp_ngram import ngram_corpus

    theirs = ngram_corpus.NgramCorpus(max_trie_depth=12, draft_token_num=4)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ours = ngram_corpus.NgramCorpus(max_trie_depth=12, draft_token_num=4)
    assert isinstance(ours, Corpus)
    for mine, other in zip(*(each.batch_get(["a"], [[1, 2, 3]], [3]) for each in (ours, theirs)), strict=True):
        assert mine.dtype == other.dtype and mine.tolist() == other.tolist()
