"""`ShapePredictor`: a light network that continues the target's hidden states without running the target.

Indexing (see `shape.target`): x_0..x_t are settled, h_0..h_{t-1} are known, step n = 0, 1, ... predicts
h_{t+n}, whose logits draft x_{t+n+1}. The paper's "H_{t+n} from H_t" is this with its H_t equal to our
h_{t-1}.

Shapes: B batch, T positions, P roots, W window, H hidden size, F feature size (H times the number of feature
layers), S steps, M predictor width, d reduced width. Leading dimensions are free wherever `...` stands.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers import initialization as init

from shape.config import ShapeConfig
from shape.transport import LastUpdate, sinkhorn, squared_distances


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
        inner = F.silu(self.up(_normalise(x)))
        return x + self.down(F.dropout(inner, self.dropout, self.training))


class AffineRefinement(nn.Module):
    """The paper's rival to transport: (1 - alpha) h_raw + alpha P2(P1 h_raw), a bottleneck of width d.

    Without biases, so that it has no opinion on the size of the target's states.
    """

    expand_std = 0.0  # start without noise

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__()
        self.alpha = config.refinement_alpha
        self.reduce = nn.Linear(config.hidden_size, config.refinement_dim, bias=False)
        self.expand = nn.Linear(config.refinement_dim, config.hidden_size, bias=False)

    def forward(self, raw: Tensor, current: Tensor) -> Tensor:
        return _mix(raw, self.expand(self.reduce(raw)), self.alpha)


class SinkhornRefinement(nn.Module):
    """The paper's refinement (section 3.2): (1 - alpha) h_raw + alpha P2(T^T 1).

    T is the entropic plan between p = softmax(P1 h_t) and q = softmax(P1 h_raw). The paper leaves "a cost in
    the reduced space" open. Here the points of that space are the columns of P2: P2 q is the mean of the
    columns under q, so a unit of mass at i *is* the state P2_i, as a unit of mass at token i is its embedding
    E_i in the paper's mu_t = sum_i p_t(i) delta_{E_i} with C_ij = |E_i - E_j|^2. The cost is the squared
    distance between columns, over its mean. States are normalised before P1 (large ones would saturate the
    softmax) and P2 speaks in units of the current state's size.
    """

    expand_std = 1.0  # columns of P2 stand for states, in units of their size

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__()
        self.alpha = config.refinement_alpha
        self.epsilon = config.refinement_epsilon
        self.iterations = config.refinement_iterations
        self.last_update: LastUpdate = config.refinement_last_update
        self.reduce = nn.Linear(config.hidden_size, config.refinement_dim)
        self.expand = nn.Linear(config.refinement_dim, config.hidden_size)

    def forward(self, raw: Tensor, current: Tensor) -> Tensor:
        arriving = self._distribution(raw)
        if self.last_update == "row":  # after a column update T^T 1 is q itself: nothing to iterate for
            leaving = self._distribution(current).expand_as(arriving)
            cost = squared_distances(self.expand.weight.T)
            plan = sinkhorn(leaving, arriving, cost, self.epsilon, self.iterations, self.last_update)
            arriving = plan.column_marginal()
        return _mix(raw, _scale(current) * self.expand(arriving.to(raw.dtype)), self.alpha)

    def _distribution(self, state: Tensor) -> Tensor:
        logits = self.reduce(_normalise(state))
        return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


class ShapePredictor(PreTrainedModel):
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
    parallel mode 2 S M (M // 4) more, with refinement 2 d H more.

    Inputs may be of any floating dtype: they are cast to the parameters' own, in which results are returned.
    """

    config_class = ShapeConfig
    base_model_prefix = "shape"
    main_input_name = "window"

    config: ShapeConfig

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        config.check()  # it may have been changed since it was made
        size, width = config.hidden_size, config.intermediate_size
        assert width is not None  # the configuration fills it in
        self.window_projection = nn.Linear(config.window * config.feature_size, width)
        self.token_projection = None if config.token_conditioning == "none" else nn.Linear(size, width, bias=False)
        self.blocks = _blocks(config.num_layers, width, width, config.dropout)
        steps = config.num_steps if config.step_mode == "parallel" else 0
        self.adapters = _blocks(steps, width, max(width // 4, 1), config.dropout)
        self.delta = nn.Linear(width, size)
        self.gate = nn.Linear(2 * size, size)
        self.refinement = _refinement(config)
        # Target token ids that may be drafted; -1 until training has counted them, so that forgetting it is loud.
        self.draft_vocabulary: Tensor | None
        count = config.draft_vocab_size
        self.register_buffer("draft_vocabulary", None if count is None else torch.full((count,), -1))
        self.post_init()

    def step(self, window: Tensor, embedding: Tensor | None, n: int) -> Tensor:
        """Predict h_{t+n}: (..., W, F), (..., H) -> (..., H).

        Parallel: `window` ends in h_{t-1} for every n < num_steps, `embedding` is x_t's (root conditioning).
        Recursive: `window` ends in h_{t+n-1}, predicted or not; `embedding` is x_{t+n}'s (path), or x_t's,
        which counts at n = 0 only (root). Without token conditioning `embedding` is not read and may be None.

        Raises:
            ValueError: n is beyond a parallel predictor's steps, or the embedding is missing.
        """
        x, current, normalised = self._trunk(window, embedding, n)
        if self.config.step_mode == "parallel":
            self._require_steps(n + 1)
            x = self.adapters[n](x)
        return self._read_out(x, current, normalised)

    def forward(self, window: Tensor, embeddings: Tensor | None = None, steps: int | None = None) -> Tensor:
        """Predict h_t..h_{t+S-1}: (..., W, F), (..., S, H) -> (..., S, H).

        `window` ends in h_{t-1}. `embeddings[..., n, :]` is the embedding of x_{t+n}: the true tokens in
        training (path conditioning), or only that of x_t at n = 0 (root). A recursive predictor reads its own
        predictions from the second step on, in training as in decoding. `steps` defaults to the
        configuration's `num_steps`.
        """
        steps = self.config.num_steps if steps is None else steps
        if self.config.step_mode == "parallel":
            self._require_steps(steps)
            root = None if embeddings is None else embeddings[..., 0, :]
            x, current, normalised = self._trunk(window, root, 0)
            x = torch.stack([adapter(x) for adapter in list(self.adapters)[:steps]], dim=-2)
            return self._read_out(x, current.unsqueeze(-2), normalised.unsqueeze(-2))
        window = window.to(self.delta.weight.dtype)
        predicted = []
        for n in range(steps):
            token = embeddings[..., n, :] if embeddings is not None and self._reads_token(n) else None
            predicted.append(self.step(window, token, n))
            window = roll(window, predicted[-1])
        return torch.stack(predicted, dim=-2)

    def _trunk(self, window: Tensor, embedding: Tensor | None, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """(..., M) features all steps share, the current state (..., H), and that state normalised."""
        dtype, size = self.delta.weight.dtype, self.config.hidden_size
        window = window.to(dtype)
        states = _normalise(window.unflatten(-1, (-1, size)))  # each layer by itself: (..., W, layers, H)
        x = self.window_projection(states.flatten(-3))
        if self.token_projection is not None and self._reads_token(n):
            if embedding is None:
                raise ValueError(f"this predictor needs the embedding of token x_{{t+{n}}} for step {n}")
            x = x + self.token_projection(_normalise(embedding.to(dtype)))
        x = F.dropout(F.silu(x), self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return x, window[..., -1, -size:], states[..., -1, -1, :]

    def _read_out(self, x: Tensor, current: Tensor, normalised: Tensor) -> Tensor:
        """Gated residual on the current state, refined."""
        delta = self.delta(x)
        gate = torch.sigmoid(self.gate(torch.cat([normalised.expand_as(delta), delta], dim=-1)))
        raw = torch.addcmul(current, _scale(current) * gate, delta)
        return raw if self.refinement is None else self.refinement(raw, current)

    def _reads_token(self, n: int) -> bool:
        """Whether a token enters at step n: in recursive mode the root is the latest token at n = 0 only."""
        conditioning, every_step = self.config.token_conditioning, self.config.step_mode == "parallel"
        return conditioning == "path" or (conditioning == "root" and (every_step or n == 0))

    def _require_steps(self, steps: int) -> None:
        if steps > len(self.adapters):
            raise ValueError(
                f"a parallel predictor with {len(self.adapters)} steps cannot predict {steps}: draft no "
                "deeper, or train one with more num_steps"
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Linear):
            return
        if module.bias is not None:
            init.zeros_(module.bias)
        std = module.in_features**-0.5  # inputs are normalised: outputs get about unit variance
        if module is self.delta or module is self.gate:
            std = 0.0  # at first the prediction is the current state, and all gates are half open
        elif self.refinement is not None and module is self.refinement.expand:
            std = self.refinement.expand_std
        init.normal_(module.weight, std=std)


def _blocks(count: int, size: int, inner: int, dropout: float) -> nn.ModuleList:
    return nn.ModuleList(ResidualBlock(size, inner, dropout) for _ in range(count))


def _refinement(config: ShapeConfig) -> AffineRefinement | SinkhornRefinement | None:
    if config.refinement == "none":
        return None
    return AffineRefinement(config) if config.refinement == "affine" else SinkhornRefinement(config)


def _mix(raw: Tensor, refined: Tensor, alpha: float) -> Tensor:
    return (1 - alpha) * raw + alpha * refined  # torch.lerp takes no mixed dtypes, which autocast makes


def _normalise(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _scale(state: Tensor) -> Tensor:
    """Root mean square over the last dimension, kept; its gradient at an all-zero state is zero, not NaN."""
    return torch.linalg.vector_norm(state, dim=-1, keepdim=True) * state.shape[-1] ** -0.5


AutoConfig.register(ShapeConfig.model_type, ShapeConfig, exist_ok=True)
AutoModel.register(ShapeConfig, ShapePredictor, exist_ok=True)
