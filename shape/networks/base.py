"""`Predictor`: what every trained drafter network is to training and to decoding.

A network continues the target from some *roots* t without running it. It is given what is known there (`Known`) and
then, step by step, the tokens of a path x_t, x_{t+1}, ...; step n gives a state whose logits draft x_{t+n+1}. Training
unrolls the true path of many roots of a text, decoding grows trees from one root per sequence, and both call the same
three methods: `remember`, `begin`, `advance`.

Shapes: B batch, T positions, P roots, M nodes (in training one per root), W window, F feature size, H hidden size,
S steps, K draft vocabulary, G heads, D head size.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init

from shape.errors import ConfigError
from shape.networks.config import ShapeConfig
from shape.networks.layers import (
    MarkovBias,
    MarkovTable,
    Memory,
    SelectorMarkov,
    StateMarkov,
    eigh,
    normalise,
    rotary_table,
)
from shape.target.model import Target

Remembered = list[Memory]
Head = Callable[[Tensor], Tensor]
Carried = tuple[Tensor, ...]

_EMBEDDED = 4096  # tokens whose embeddings are copied at once


class Known(NamedTuple):
    """What is known at roots t: all that a prediction depends on beside the tokens from x_t on.

    Attributes:
        window: (B, P, W, F) features of h_{t-W}..h_{t-1}, zeros before the text.
        memory: what known positions left, per attention layer: keys and values, (B, G, T, D).
        visible: (B, P, T) bool, the positions before each root; None where all are.
        rotary: (B, P, S + 1, 2, D / 2), `Predictor.rotary` of positions t - 1, t, ..., made once for all steps;
            None without attention.
    """

    window: Tensor
    memory: Remembered
    visible: Tensor | None
    rotary: Tensor | None


class Predictor(PreTrainedModel):
    """Base of the trained drafter networks; a kind is its class (`kind`) and a configuration.

    Attributes:
        draft_vocabulary: (K,) int64, target token ids that may be drafted, or None; -1 until training has counted them,
            so that forgetting it is loud.
        confidence_learns: what `estimate` is trained for: whether the best draft is the target's best token, or the
            probability 1 - TV that rejection sampling accepts a draft (DSpark).
        lm_head, lm_heads: output embeddings of its own, (H) -> (K), one for all steps or one for each; where both are
            None, states are read with the target's frozen head.
        embed_tokens: input embeddings of its own, of all of the target's tokens; None uses the target's.
        gradient_checkpointing: whether training computes steps, or layers of a block, a second time in the backward
            pass and keeps their inputs alone until then.
    """

    kind: ClassVar[str]
    confidence_learns: ClassVar[Literal["agreement", "acceptance"]] = "agreement"
    # Whether training leaves out what the target is likeliest to say where that cannot be drafted.
    learns_draftable_alone: ClassVar[bool] = False
    config_class = ShapeConfig
    base_model_prefix = "shape"
    main_input_name = "window"
    # What FSDP may shard by itself: called as modules, and their weights read nowhere else.
    _no_split_modules = ["LlamaMLP", "Qwen3MLP", "ResidualBlock", "Adapters", "ResidualLayers"]  # noqa: RUF012

    config: ShapeConfig
    draft_vocabulary: Tensor | None
    lm_head: nn.Linear | None
    lm_heads: nn.ModuleList | None
    embed_tokens: nn.Embedding | None
    gradient_checkpointing = False
    markov: MarkovBias | None
    confidence: nn.Linear | None

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        config.check()  # it may have been changed since it was made
        if config.kind != self.kind:
            raise ConfigError(
                f"the configuration is of kind {config.kind!r}, and {type(self).__name__} is {self.kind!r}"
            )

    def _add_read_out(self, heads: int = 0) -> None:
        """The parts behind the states, and embeddings; called at the end of each kind's constructor.

        Args:
            heads: of its own: one for each of so many steps, or 1 for all.
        """
        config, size = self.config, self.config.hidden_size
        count = config.draft_vocab_size
        self.register_buffer("draft_vocabulary", None if count is None else torch.full((count,), -1))
        self._add_token_heads()
        own = [nn.Linear(size, config.draft_size, bias=False) for _ in range(heads)]
        self.lm_head = own[0] if heads == 1 else None
        self.lm_heads = nn.ModuleList(own) if heads > 1 else None
        self.embed_tokens = nn.Embedding(cast(int, config.vocab_size), size) if config.own_embeddings else None
        self.post_init()

    def _add_token_heads(self) -> None:
        """What reads the token before: a bias and a confidence estimate, where the configuration asks for them."""
        config, size = self.config, self.config.hidden_size
        self.markov = MarkovBias(size, config.markov_rank, config.draft_size) if config.markov_rank else None
        self.confidence = nn.Linear(2 * size, 1) if config.confidence else None

    # -- what a kind is

    @property
    def by_path(self) -> bool:
        """Whether states depend on the path's tokens beyond the root: if not, nodes of one depth share a state."""
        return self.config.token_conditioning == "path"

    @property
    def memory_shapes(self) -> list[tuple[int, int]]:
        """(G, D) of each attention layer; empty where nothing but the window is read."""
        return []

    def remember(
        self, features: Tensor, embeddings: Tensor, positions: Tensor, past: Remembered | None = None
    ) -> Remembered:
        """What known positions leave for later roots.

        Args:
            features: (B, T + 1, F), of the position before (zeros before the text) and then of each h_i.
            embeddings: (B, T + 1, H) of each x_i and, last, of the token behind them.
            positions: (B, T) int64, i, one behind the other.
            past: what the positions before these have left, of which a row's first i are its own; read where what a
                position leaves depends on those before it. None before the text.
        """
        return []

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        """What a path carries from step to step, each (B, M, ...) for M = P; `root` is (B, P, H), x_t's embedding.

        In step mode "parallel" it is the states of all steps and nothing else, (B, M, S, H).
        """
        raise NotImplementedError

    def advance(self, known: Known, carried: Carried, embedding: Tensor | None, n: int) -> tuple[Tensor, Carried]:
        """Step n: the state h_{t+n}, (B, M, H), and what is carried on.

        Args:
            embedding: (B, M, H) of x_{t+n}, the node's own token; None where no token is read.
        """
        return carried[0][..., n, :], carried

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines and sines of the rotary embedding, (...) int64 -> (..., 2, D / 2)."""
        assert self.config.num_heads is not None  # the configuration fills it in
        return rotary_table(positions, self.config.hidden_size // self.config.num_heads, dtype)

    # -- what is made of it

    def rotary_ahead(self, roots: Tensor, dtype: torch.dtype, steps: int | None = None) -> Tensor:
        """`rotary` of t - 1, t, ..., t + S - 1 for roots t, (B, P) -> (B, P, S + 1, 2, D / 2)."""
        ahead = torch.arange(-1, steps or self.config.num_steps, device=roots.device)
        return self.rotary(roots.unsqueeze(-1) + ahead, dtype)

    def unroll(self, known: Known, embeddings: Tensor | None, steps: int | None = None) -> Tensor:
        """States h_t..h_{t+S-1} along given tokens x_t..x_{t+S-1}: (B, P, S, H) -> (B, P, S, H)."""
        steps = steps or self.config.num_steps
        given = [] if embeddings is None else list(embeddings.unbind(-2))
        at = [*given, *[None] * (steps - len(given))][:steps]  # the root's alone, where no other is read
        carried, states = self.begin(known, at[0]), []
        for n, embedding in enumerate(at):
            state, carried = self.run(self.advance, known, carried, embedding, n)
            states.append(state)
        return torch.stack(states, dim=-2)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function of which, with `gradient_checkpointing`, inputs alone are kept for the backward pass."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False)

    @property
    def reads_tokens(self) -> bool:
        config = self.config
        return config.token_conditioning != "none" or config.markov_rank > 0 or config.confidence

    @property
    def token_bias(self) -> MarkovBias | MarkovTable | None:
        """What biases logits by the token before."""
        return self.markov

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """What makes logits of states, and has no part in the states themselves."""
        bias = [] if self.token_bias is None else [*self.token_bias.parameters()]
        return [*[cast(nn.Parameter, head.weight) for head in self.heads], *bias]

    @property
    def matrices_over_tokens(self) -> list[Tensor]:
        """Those with a row for each token that can be drafted: of own heads, and of a Markov bias."""
        bias = [] if self.token_bias is None else [self.token_bias.expansion.weight]
        return [*[head.weight for head in self.heads], *bias]

    @property
    def heads(self) -> list[nn.Linear]:
        """Output embeddings of its own: none, one for all steps, or one for each."""
        several = self.lm_heads or ([] if self.lm_head is None else [self.lm_head])
        return [cast(nn.Linear, head) for head in several]

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """What the network reads of tokens, (...) int64 -> (..., H)."""
        return target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    def own_head(self, states: Tensor) -> Tensor:
        """Where there are heads: (..., S', H) -> (..., S', K); with several of them S' counts steps from the first."""
        states = states.to(self.heads[0].weight.dtype)  # autocast may have made them smaller
        if self.lm_head is not None:
            return self.lm_head(states)
        return torch.stack([head(state) for head, state in zip(self.heads, states.unbind(-2), strict=False)], dim=-2)

    def own_head_at(self, states: Tensor, steps: Tensor) -> Tensor:
        """The same for single states, (N, H) -> (N, K), and their steps in rising order, (N,) int64."""
        if self.lm_head is not None:
            return self.own_head(states)
        counts = steps.bincount(minlength=len(self.heads)).tolist()
        parts = zip(states.to(self.heads[0].weight.dtype).split(counts), self.heads, strict=True)
        return torch.cat([head(part) for part, head in parts])

    def reduced(self, tokens: Tensor, embeddings: Tensor | None, states: Tensor | None = None) -> Tensor | None:
        """What a Markov bias reads of tokens (...) with embeddings (..., H): (..., rank); None without one.

        Args:
            states: of all steps from the first, which some biases read: (..., S, H) for tokens (..., S).
        """
        if self.token_bias is None:
            return None
        found = self.token_bias.reduced(tokens, embeddings)
        if states is not None and isinstance(self.token_bias, StateMarkov):
            return self.token_bias.along(found, states)
        return found

    @property
    def selector(self) -> SelectorMarkov | None:
        """The bias, where it chooses among each step's likeliest tokens and has a loss of its own for that."""
        return self.token_bias if isinstance(self.token_bias, SelectorMarkov) else None

    def before_bias(self, logits: Tensor, reduced: Tensor | None) -> Tensor:
        """Logits (..., S, K), to which the bias is then added: of a selector its candidates' alone; with a coupling
        corrected so that the biased marginals stay.

        Args:
            reduced: (K, rank), of the tokens that can be drafted; for a coupling.
        """
        if self.selector is not None:
            return self.selector.likeliest(logits)
        if not isinstance(self.token_bias, MarkovBias) or reduced is None or not self.config.coupling:
            return logits
        return logits if logits.shape[-2] == 1 else self.token_bias.couple(logits, reduced, self.config.coupling)

    def bias(self, logits: Tensor, reduced: Tensor | None) -> Tensor:
        """Logits (..., K) given the token before, (..., rank): as they are without a Markov bias."""
        return logits if self.token_bias is None or reduced is None else logits + self.token_bias(reduced)

    def estimate(self, states: Tensor, tokens: Tensor, embeddings: Tensor) -> Tensor:
        """Logit of the probability of what `confidence_learns` names, at nodes whose own tokens are given.

        (..., H), (...) int64, (..., H) -> (...).
        """
        assert self.confidence is not None
        shape = torch.broadcast_shapes(states.shape, embeddings.shape)
        seen = torch.cat([normalise(states).expand(shape), normalise(embeddings).expand(shape)], dim=-1)
        return self.confidence(seen.to(self.confidence.weight.dtype)).squeeze(-1)

    @torch.no_grad()
    def adopt(self, target: Target) -> None:
        """Start own heads and embeddings as copies of the target's, as Medusa does, or projections of these."""
        if self.heads:
            rows = target.output_rows(self.draft_vocabulary)
            fitted = self._fitted(lambda: rows.split(_EMBEDDED))
            for head in self.heads:
                head.weight.copy_(torch.cat([fitted(some) for some in rows.split(_EMBEDDED)]))
        if self.embed_tokens is not None:
            tokens = torch.arange(target.vocab_size).split(_EMBEDDED)
            fitted = self._fitted(lambda: (target.embed(some.to(target.device)) for some in tokens))
            for own, some in zip(self.embed_tokens.weight.split(_EMBEDDED), tokens, strict=True):
                own.copy_(fitted(target.embed(some.to(target.device))))
        self.complete(target)

    def _fitted(self, parts: Callable[[], Iterable[Tensor]]) -> Callable[[Tensor], Tensor]:
        """What makes rows of the target's width, which come in parts, of the network's: in another one, coordinates in
        the directions that keep most of them.
        """
        size, given = self.config.hidden_size, self.config.target_hidden_size
        if given is None:
            return lambda some: some
        moments = sum((some.float().T @ some.float() for some in parts()), torch.zeros(()))
        kept = eigh(moments)[1].flip(-1)[:, :size]
        return lambda some: F.pad(some.float() @ kept, (0, max(size - given, 0)))

    def complete(self, target: Target) -> None:
        """Fill in what a checkpoint leaves to the target."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            if module.bias is not None:
                init.zeros_(module.bias)
            init.normal_(module.weight, std=self._std(module))

    def _std(self, module: nn.Linear) -> float:
        """Inputs are normalised: with this outputs get about unit variance."""
        if module is self.confidence or (self.markov is not None and module is self.markov.expand):
            return 0.0  # at first no bias and no opinion
        return module.in_features**-0.5


def known_at(predictor: Predictor, features: Tensor, embeddings: Tensor | None, roots: Tensor, window: Tensor) -> Known:
    """What a network knows at roots of whole texts; decoding gathers the same step by step.

    Args:
        features: (B, T, F). embeddings: (B, T + 1, H), needed where the network remembers.
        roots: (B, P) int64. window: (B, P, W, F), see `shape.networks.shape.windows`.
    """
    if not predictor.memory_shapes:
        return Known(window, [], None, None)
    assert embeddings is not None
    positions = torch.arange(features.shape[1], device=roots.device)
    before = F.pad(features, (0, 0, 1, 0))
    memory = predictor.remember(before, embeddings, positions.expand(len(features), -1))
    return Known(window, memory, positions < roots[..., None], predictor.rotary_ahead(roots, window.dtype))
