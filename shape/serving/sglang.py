"""Token drafters inside SGLang, by its plugins: what its n-gram worker drafts with is replaced.

SHAPE_SGLANG=suffix python -m sglang.launch_server --model-path MODEL --speculative-algorithm NGRAM \\
    --speculative-num-draft-tokens 8 --speculative-ngram-max-trie-depth 4096

Written against the source of SGLang 0.5.23, whose plugin loader and hooks run in a test; no server was run. A predictor
would need a worker of its own there: train one in a format that SGLang loads (`shape convert`).
"""

import os
from typing import Any

import numpy as np
import torch

from shape.drafters import make_drafter
from shape.errors import ConfigError
from shape.serving.batch import BatchDrafter, Computed

DRAFTERS = "SHAPE_SGLANG"
"""Environment variable with the drafters, joined by "+"; without it the plugin does nothing."""

_REPLACED = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus"
_SERVED = ("suffix", "ngram")


def plug_in() -> None:
    """What SGLang calls in each of its processes, by the entry point of the group "sglang.srt.plugins"."""
    if os.environ.get(DRAFTERS):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_REPLACED, Corpus, HookType.REPLACE)


class Corpus:
    """In place of SGLang's NgramCorpus, which it asks for drafts before each step; its texts are not kept.

    Args:
        draft_token_num: nodes of each request's tree, the last token of its text included.
        others: how SGLang's own would search.

    Raises:
        ConfigError: drafters that need more than tokens.
    """

    def __init__(self, draft_token_num: int = 8, **others: Any) -> None:
        names = os.environ[DRAFTERS]
        if draft_token_num < 2:
            raise ConfigError("--speculative-num-draft-tokens counts the last token of the text too; give at least 2")
        if unknown := set(names.split("+")) - set(_SERVED):
            raise ConfigError(
                f"{DRAFTERS} names {', '.join(map(repr, sorted(unknown)))}, which SGLang cannot be served with; give "
                f"{', '.join(_SERVED)}, or both joined by +"
            )
        drafter = make_drafter(names, num_draft_tokens=draft_token_num - 1)
        assert drafter is not None
        self._nodes, self._drafter = draft_token_num, drafter.reproducible()
        self.reset()

    def reset(self) -> None:
        self._batch = BatchDrafter(self._drafter, self._nodes - 1)
        self._texts: dict[str, tuple[np.ndarray, int]] = {}  # what is known of each text, and its length

    def batch_get(
        self, req_ids: list[str], batch_tokens: list[list[int]], total_lens: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Drafts for each request.

        Args:
            req_ids: of B requests.
            batch_tokens: the last tokens of their texts, at most ``--speculative-ngram-max-trie-depth`` of them.
            total_lens: lengths of the whole texts.

        Returns:
            (B * N,) int64 tokens of their trees, node 0 the last of the text, and (B * N * N,) int64 masks: 1 at
            [b, i, j] where j is i or an ancestor of it. Unused nodes are token 0, children of node 0.
        """
        step = [self._computed(*request) for request in zip(req_ids, batch_tokens, total_lens, strict=True)]
        tokens = np.zeros((len(step), self._nodes), np.int64)
        mask = np.zeros((len(step), self._nodes, self._nodes), np.int64)
        mask[:, :, 0] = 1
        mask[:, range(self._nodes), range(self._nodes)] = 1
        for row, (computed, draft) in enumerate(zip(step, self._batch.propose(step), strict=True)):
            chain = 1 + len(draft)
            tokens[row, :chain] = [computed.tokens[-1], *draft]
            mask[row, :chain, :chain] = np.tri(chain)
        return tokens.ravel(), mask.ravel()

    def _computed(self, request: str, tail: list[int], length: int) -> Computed:
        known, before = self._texts.get(request, (None, 0))
        new = length - before
        if known is not None and 0 < new <= len(tail):
            text, sampled = np.append(known, tail[-new:]), new
        else:  # it is new, or was away for longer than its tail reaches
            text, sampled = np.array(tail), 1
        self._texts[request] = text, length
        return Computed(text, sampled, len(text) - sampled - 1, torch.empty(sampled, 0))

    def erase_match_state(self, req_ids: list[str]) -> None:
        for request in req_ids:
            self._texts.pop(request, None)

    def batch_put(self, batch_tokens: list[list[int]]) -> None:
        """A text is drafted from by itself: drafts do not depend on what others were answered."""

    def synchronize(self) -> None:
        """There is nothing that goes on in the background."""

    def list_external_corpora(self) -> dict[str, int]:
        return {}

    def load_external_corpus_named(self, corpus_id: str, chunks: Any) -> int:
        """Raises ConfigError."""
        raise ConfigError(f"corpus {corpus_id!r} cannot be loaded: drafters of {DRAFTERS} read each text by itself")
