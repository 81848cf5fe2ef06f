"""`ShapePredictor`: a light network that continues the target's hidden states without running the target.

Indexing (see `shape.target.model`): x_0..x_t are committed, h_0..h_{t-1} are known, step n = 0, 1, ... predicts
h_{t+n}, whose logits draft x_{t+n+1}. The paper's "H_{t+n} from H_t" is this with its H_t equal to our
h_{t-1}.

Shapes: B batch, T positions, P roots, W window, H hidden size, F feature size (H times the number of feature
layers), S steps, M predictor width, d reduced width. Leading dimensions are free wherever `...` is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from shape.networks.base import Carried, Known, Predictor, Remembered
from shape.networks.config import ShapeConfig
from shape.networks.layers import ContextAttention, normalise, scale
from shape.networks.refinement import refinement_of


def windows(hidden: Tensor, ends: Tensor, size: int) -> Tensor:
    """The `size` states before each end: (B, T, F), (B, P) -> (B, P, size, F), h_{end-size}..h_{end-1}.

    Positions before the text are zeros. Training and decoding both cut their windows here, so that they
    cannot differ by one. `ends` holds integers up to T; an end of t is what a root at position t needs.
    """
    positions = ends.unsqueeze(-1) + torch.arange(-size, 0, device=ends.device)
    rows = torch.arange(len(hidden), device=hidden.device)[:, None, None]
    return torch.where((positions >= 0).unsqueeze(-1), hidden[rows, positions.clamp(min=0)], 0)


def roll(window: Tensor, state: Tensor) -> Tensor:
    """Move the window on by one: (..., W, F), (..., H) -> (..., W, F), the oldest entry out, `state` in.

    Only the last feature layer is ever predicted: the columns of the others are zeros in the new entry, which
    is what unknown states are everywhere.
    """
    others = window.shape[-1] - state.shape[-1]
    entry = F.pad(state, (others, 0)) if others else state
    return torch.cat([window[..., 1:, :], entry.unsqueeze(-2)], dim=-2)


class ResidualBlock(nn.Module):
    """x + down(dropout(silu(up(norm(x))))) at width `size`, with a hidden layer of width `inner`."""

    def __init__(self, size: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.up(normalise(x)))
        return x + self.down(F.dropout(inner, self.dropout, self.training))


class Adapters(nn.Module):
    """A residual block for each of several steps, which all read the same x.

    As one matrix up and one batch of matrices down: a product for each step would take several times as long where x is
    a single row, as in decoding.
    """

    def __init__(self, steps: int, size: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(size, steps * inner)
        self.down = nn.Linear(inner, steps * size)  # its rows are those of the steps' matrices, one after the other
        self.inner, self.size, self.dropout = inner, size, dropout

    def forward(self, x: Tensor) -> Tensor:
        """(..., M) -> (..., S, M)."""
        inner = F.silu(self.up(normalise(x)))
        inner = F.dropout(inner, self.dropout, self.training).unflatten(-1, (-1, self.inner))
        down = self.down.weight.unflatten(0, (-1, self.size))
        added = torch.einsum("...si,soi->...so", inner, down) + self.down.bias.unflatten(0, (-1, self.size))
        return x.unsqueeze(-2) + added


class ShapePredictor(Predictor):
    """Gated residual prediction of future hidden states from a window of known ones (paper 3.1-3.2).

    One step is

        x     = silu(A [norm(h_{t-W}), ..., norm(h_{t-1})] + B norm(e) + b)     e: token embedding, if read
        x     = residual blocks at width M, then the adapter of step n (parallel mode)
        delta = D x
        gate  = sigmoid(G [norm(h), delta])                                     h: the current state
        h'    = h + |h| gate * delta                                            |h|: its root mean square

    followed by the refinement. `norm` is layer normalisation without parameters (the next matrix would absorb
    them): unknown states, which are zeros, stay zeros, and a target whose states are 100 times larger needs
    no other weights; `|h|` brings the prediction back to the target's size. D starts at zero: before
    training, a predictor without refinement repeats the current state (with one, at its share of 1 - alpha).

    Weights, biases not counted: M (W F + H) + 2 M^2 num_layers + 2 H^2, with token conditioning M H more, in
    parallel mode 2 S M (M // 4) more, with refinement 2 d H more, with attention 6 H^2 + M H more, with a Markov bias
    of rank r over K tokens r (H + K) more.

    Inputs may be of any floating dtype: they are cast to the parameters' own, in which results are returned.
    """

    kind = "shape"

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        size, width = config.hidden_size, config.intermediate_size
        assert width is not None  # the configuration fills it in
        self.window_projection = nn.Linear(config.window * config.feature_size, width)
        self.attention = ContextAttention(2 * size, width, config) if config.attention else None
        self.token_projection = None if config.token_conditioning == "none" else nn.Linear(size, width, bias=False)
        self.blocks = nn.ModuleList(ResidualBlock(width, width, config.dropout) for _ in range(config.num_layers))
        parallel = config.step_mode == "parallel"
        self.adapters = Adapters(config.num_steps, width, max(width // 4, 1), config.dropout) if parallel else None
        self.delta = nn.Linear(width, size)
        self.gate = nn.Linear(2 * size, size)
        self.refinement = refinement_of(config)
        self._add_read_out()

    # -- as every predictor

    @property
    def memory_shapes(self) -> list[tuple[int, int]]:
        return [] if self.attention is None else [(self.attention.heads, self.attention.head_size)]

    def remember(
        self, features: Tensor, embeddings: Tensor, positions: Tensor, past: Remembered | None = None
    ) -> Remembered:
        """Keys are of h_{i-1} and x_i, which is what a step knows of its own position; values of what followed, h_i and
        x_{i+1}. So one layer can find similar positions and how the text went on there.
        """
        if self.attention is None:
            return []
        states = normalise(features[..., -self.config.hidden_size :].to(self.delta.weight.dtype))
        places = torch.cat([states, normalise(embeddings.to(states.dtype))], dim=-1)
        following = torch.cat([states[:, 1:], places[:, 1:, self.config.hidden_size :]], dim=-1)
        rotary = self.rotary(positions, states.dtype)
        return [self.attention.remember(places[:, :-1], following, rotary)]

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        if self.adapters is None:
            return (known.window.to(self.delta.weight.dtype),)
        x, current, normalised = self._trunk(known.window, root, 0, known)
        return (self._read_out(self.adapters(x), current.unsqueeze(-2), normalised.unsqueeze(-2)),)

    def advance(self, known: Known, carried: Carried, embedding: Tensor | None, n: int) -> tuple[Tensor, Carried]:
        if self.adapters is not None:
            return super().advance(known, carried, embedding, n)
        state = self._read_out(*self._trunk(carried[0], embedding, n, known))
        return state, (roll(carried[0], state),)

    # -- its steps

    def forward(self, window: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Predict h_t..h_{t+S-1}: (..., W, F), (..., S, H) -> (..., S, H).

        `window` ends in h_{t-1}. `embeddings[..., n, :]` is the embedding of x_{t+n}: the true tokens in
        training (path conditioning), or only that of x_t at n = 0 (root). A recursive predictor reads its own
        predictions from the second step on, in training as in decoding.
        """
        return self.unroll(Known(window, [], None, None), embeddings)

    def _trunk(self, window: Tensor, embedding: Tensor | None, n: int, known: Known) -> tuple[Tensor, Tensor, Tensor]:
        """(..., M) features all steps share, the current state (..., H), and that state normalised.

        Args:
            window: (..., W, F), which ends in h_{t+n-1}, predicted or not.
            embedding: (..., H), of x_{t+n} (path), or of x_t, which counts at n = 0 alone (root).

        Raises:
            ValueError: the embedding is missing, where tokens are read, or known positions, where these are.
        """
        dtype, size = self.delta.weight.dtype, self.config.hidden_size
        window = window.to(dtype)
        states = normalise(window.unflatten(-1, (-1, size)))  # each layer by itself: (..., W, layers, H)
        x = self.window_projection(states.flatten(-3))
        current = states[..., -1, -1, :]
        token = torch.zeros_like(current)
        if self.token_projection is not None and self._reads_token(n):
            if embedding is None:
                raise ValueError(f"this predictor needs the embedding of token x_{{t+{n}}} for step {n}")
            token = normalise(embedding.to(dtype))
            x = x + self.token_projection(token)
        if self.attention is not None:
            if known.rotary is None:
                raise ValueError("this predictor attends to known positions: give them beside the window")
            place = torch.cat([current, token], dim=-1)
            x = x + self.attention(place, known.rotary[:, :, n + 1], known.memory[0], known.visible)
        x = F.dropout(F.silu(x), self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return x, window[..., -1, -size:], current

    def _read_out(self, x: Tensor, current: Tensor, normalised: Tensor) -> Tensor:
        """Gated residual on the current state, refined."""
        delta = self.delta(x)
        gate = torch.sigmoid(self.gate(torch.cat([normalised.expand_as(delta), delta], dim=-1)))
        raw = torch.addcmul(current, scale(current) * gate, delta)
        return raw if self.refinement is None else self.refinement(raw, current)

    def _reads_token(self, n: int) -> bool:
        """Whether a token enters at step n: in recursive mode the root is the latest token at n = 0 only."""
        conditioning, every_step = self.config.token_conditioning, self.config.step_mode == "parallel"
        return conditioning == "path" or (conditioning == "root" and (every_step or n == 0))

    def _std(self, module: nn.Linear) -> float:
        if module is self.delta or module is self.gate:
            return 0.0  # at first the prediction is the current state, and all gates are half open
        if self.refinement is not None and module is self.refinement.expand:
            return self.refinement.expand_std
        return super()._std(module)


AutoConfig.register(ShapeConfig.model_type, ShapeConfig, exist_ok=True)
AutoModel.register(ShapeConfig, ShapePredictor, exist_ok=True)
