"""`ShapeConfig`: everything that defines a predictor, in one place that travels with its weights.

The paper's predictor and ours are settings of the same class: `configs/paper.yaml` and the default differ
only in values. The baselines are other kinds with the same options as far as they have them. Every
combination is checked when the object is made, before any work starts.
"""

import math
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, Literal, get_args, get_origin

from transformers import AutoConfig, PreTrainedConfig

from shape.errors import ConfigError
from shape.features.options import with_state
from shape.networks.transport import LastUpdate

ANY_WIDTH = ("eagle", "peagle", "block")  # kinds that can be narrower or wider than their target
DECODER_LAYERS = (*ANY_WIDTH, "mtp")  # kinds built of them
MASKED = ("peagle", "block")  # kinds that draft in places of mask tokens
_OWN: dict[tuple[str, ...], tuple[str, ...]] = {  # options of some kinds alone
    ("shape",): ("dropout",),
    ("medusa",): ("shared_head", "residual_bias"),
    ("block",): (
        "sample_from_anchor",
        "sliding_window_non_causal",
        "conv_kernel_size",
        "conv_group_size",
        "selector_top_k",
    ),
    ("eagle", "peagle"): ("norm_before_residual", "norm_before_fc", "fc_norm"),
    ("eagle",): ("norm_output",),
    MASKED: ("mask_token_id",),
}
_MAY_BE_ZERO = {"num_layers", "markov_rank", "coupling", "conv_kernel_size", "mask_token_id"}

# Whose decoder layers networks can be built of (`shape.networks.decoder`).
LAYER_TYPES = ("llama", "qwen3")
# Of targets whose files have an MTP layer beside the model, which kind "mtp" can have too.
MTP_TARGETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MTP_LAYER_TYPES = (*LAYER_TYPES, *MTP_TARGETS)

# What a kind leaves no choice of: whatever else is given for these is replaced.
_BASELINE = {"window": 1, "attention": False, "refinement": "none"}
_FIXED: dict[str, dict[str, Any]] = {
    "shape": {},
    "medusa": {**_BASELINE, "step_mode": "parallel", "token_conditioning": "none", "feature_layers": [-1]},
    "eagle": {**_BASELINE, "step_mode": "recursive", "token_conditioning": "path"},
    "peagle": {**_BASELINE, "step_mode": "parallel", "token_conditioning": "root"},
    "mtp": {**_BASELINE, "step_mode": "recursive", "token_conditioning": "path", "feature_layers": [-1]},
    "block": {**_BASELINE, "step_mode": "parallel", "token_conditioning": "root"},
}
STATE_ALONE = [kind for kind, fixed in _FIXED.items() if "feature_layers" in fixed]  # that read no layer but the last

# What transformers itself writes into a config.json or passes to the constructor beside its declared fields.
_TRANSFORMERS_KEYS = frozenset({f.name for f in fields(PreTrainedConfig)}) | {
    "attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path", "num_labels",
    "output_attentions", "quantization_config", "tie_last_hidden_states", "torch_dtype",
}  # fmt: skip


class ShapeConfig(PreTrainedConfig):
    """Configuration of a predictor of any kind; what "shape" alone reads is named as such or fixed for the others.

    Args:
        kind: the network: "shape" (`shape.networks.shape`), or a baseline: "medusa", "eagle", "peagle" (P-EAGLE), "mtp"
            (a target's own MTP layer), "block" (DFlash, DFlash2, DSpark), which sets step_mode, token_conditioning,
            window, attention and refinement itself.
        hidden_size: width H of the target's hidden states and embeddings, and of the predictor's.
        target_hidden_size: "eagle", "peagle" and "block" that are narrower or wider than their target: its width; then
            hidden_size is the predictor's alone, and heads and embeddings have to be its own. None is the same.
        window: number W of known states the predictor reads (the current one and W - 1 before it).
        feature_layers: layers of the target whose states make up one feature vector, concatenated in this
            order, each of the target's width: indices into transformers' `hidden_states`, except -1, which is the
            vector that enters the output embedding. With "shape" it has to come last: predictions are residuals on it.
        transformer_layer_config: "eagle", "peagle", "mtp" and "block": transformers' configuration of the decoder
            layers, with its `model_type` (llama, qwen3; "mtp" has more); the name is that of `speculators`. None makes
            Llama's (Qwen3's with "block") of the options below.
        intermediate_size: width M of the predictor; None is the decoder layers', or 2 H.
        num_layers: residual MLP blocks at width M shared by all steps; residual layers of each of Medusa's heads;
            decoder layers of the others (published EAGLE-3 has one).
        attention: SHAPE's steps also attend to all known positions, not to the window alone.
        num_heads: attention heads, of width H / num_heads; None is the decoder layers', or makes them 64 wide.
        num_steps: number S of future states that are predicted. Parallel predictors draft no further; recursive ones
            are unrolled so far in training, and can.
        step_mode: "parallel" predicts all S states from one window, with a small residual adapter for each
            step (paper 3.1: one predictor with shared parameters serves several steps); "recursive" applies
            one network again to a window that ends in its own prediction.
        token_conditioning: whether a step reads token embeddings: "none" (the paper), "root" (of x_t, the
            last committed token, which the target has not seen yet) or "path" (of each drafted token too; needs
            recursive steps).
        refinement: what is done to the raw prediction (paper 3.2): "none", "affine" (through a linear
            bottleneck) or "sinkhorn" (an entropic transport plan between softmaxes in the reduced space).
        refinement_dim: width d of that reduced space (paper: 128).
        refinement_epsilon: entropic regularisation, in units of the mean ground cost (paper: 0.1).
        refinement_alpha: share of the refined state in the mixture with the raw one, in [0, 1] (paper: 0.5).
        refinement_alpha_learned: start from that share and learn it.
        refinement_readout: what is read of the plan: what arrives at each point ("marginal", the paper), or the mean of
            the current state's coordinates that arrive there ("barycentric").
        refinement_iterations: Sinkhorn iterations, each a row and a column update.
        refinement_last_update: which marginal the last update makes exact. With "column" the paper's read-out
            equals q whatever the plan is, so that transport drops out (see `shape.networks.transport`); with "row" the
            plan keeps an influence for as long as the iterations have not converged.
        dropout: probability, applied after each activation of kind shape.
        draft_vocab_size: draft from so many of the target's tokens only, the most frequent in the training data
            (EAGLE-3, FR-Spec arXiv 2502.14856): reading the whole output embedding is most of a small drafter's
            cost. None drafts from all. The output stays the target's: what cannot be drafted is still chosen.
        vocab_size: of the target; needed only where logits have weights of their own and draft_vocab_size is None.
        markov_rank: rank of a bias on the logits by the token before (DSpark's Markov head), for steps that do not read
            it themselves; 0 is none.
        markov_head_type: whether the bias is of the token before alone ("vanilla") or, of "block", of a state of its
            own that goes along the path ("rnn"), gated by the network's state ("gated"), or by both, for the likeliest
            tokens of each step, of which no other is drafted ("selector", DFlash2's).
        selector_top_k: "block" with a selector: how many these are.
        conv_kernel_size: "block": places of a block that convolutions around attention and feed-forward part read
            (DFlash2); 0 is none.
        conv_group_size: channels that share what a place adds to these convolutions' kernels.
        coupling: correct the bias so that the marginals of the steps stay: an entropic coupling of neighbouring steps
            over so many of their likeliest candidates, whose cost is the bias; 0 leaves the bias as it is.
        confidence: estimate for each node whether the target will agree with its best draft; dynamic trees grow by it.
        own_heads: trained output embeddings that start as copies of the target's, one for each of Medusa's steps.
            Without, and in kind "shape", the target's frozen one is used.
        shared_head: "medusa": one output embedding of its own for all steps.
        residual_bias: "medusa": its residual layers have biases, as FasterDecoding's.
        own_embeddings: an input embedding of its own, (vocab_size, H), that starts as a copy of the target's, where
            tokens are read; without, the target's frozen one is used.
        mask_token_id: "block" and "peagle": token of the target that fills the places behind x_t; training chooses one.
        sample_from_anchor: "block": place n of a block drafts the token behind its position (DSpark), so that a block
            has num_steps places; else the token at its position (DFlash), and it has one more.
        sliding_window_non_causal: "block": layers with a sliding window see all places of the block, and not only those
            before.
        confidence_head_with_markov: "block": the confidence reads the Markov table too, where there is one.
        norm_before_residual: "eagle" and "peagle": the layer's residual is the normalised state.
        norm_before_fc: "eagle" and "peagle": one norm over all feature layers before they are fused.
        fc_norm: "eagle" and "peagle": a norm for each feature layer before they are fused (EAGLE-3.1).
        norm_output: "eagle": what is fed to the next step is the normalised output (EAGLE-3.1).
        target_identity: `TargetIdentity.to_dict()` of the target the predictor was trained for.
        draft: default shape of the draft tree, `{"width": ..., "depth": ..., "nodes": ...}`.
        training: free record of how the predictor came about: command, data, measured acceptance length, ...

    Raises:
        ConfigError: an option that is unknown, out of range, or contradicts another one.
    """

    model_type = "shape"

    kind: Literal["shape", "medusa", "eagle", "peagle", "mtp", "block"] = "shape"
    hidden_size: int = 4096
    target_hidden_size: int | None = None
    window: int = 4
    feature_layers: list[int] = field(default_factory=lambda: [-1])
    transformer_layer_config: dict[str, Any] | None = None
    intermediate_size: int | None = None
    num_layers: int = 1
    attention: bool = False
    num_heads: int | None = None
    num_steps: int = 4
    step_mode: Literal["parallel", "recursive"] = "parallel"
    token_conditioning: Literal["none", "root", "path"] = "none"
    refinement: Literal["none", "affine", "sinkhorn"] = "none"
    refinement_dim: int = 128
    refinement_epsilon: float = 0.1
    refinement_alpha: float = 0.5
    refinement_alpha_learned: bool = False
    refinement_readout: Literal["marginal", "barycentric"] = "marginal"
    refinement_iterations: int = 10
    refinement_last_update: LastUpdate = "row"
    dropout: float = 0.0
    draft_vocab_size: int | None = None
    vocab_size: int | None = None
    markov_rank: int = 0
    markov_head_type: Literal["vanilla", "gated", "rnn", "selector"] = "vanilla"
    selector_top_k: int = 16
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    coupling: int = 0
    confidence: bool = False
    own_heads: bool = False
    shared_head: bool = False
    residual_bias: bool = False
    own_embeddings: bool = False
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    confidence_head_with_markov: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_identity: dict[str, Any] | None = None
    draft: dict[str, Any] | None = None
    training: dict[str, Any] | None = None

    # Drafting reads a dozen of these in a step, and transformers' own way, which asks for other names and for layers
    # that differ, takes a microsecond for each.
    __getattribute__ = object.__getattribute__

    def __post_init__(self, **kwargs: Any) -> None:
        _require_known(kwargs)
        super().__post_init__(**kwargs)
        self.feature_layers = list(self.feature_layers)
        if self.has_decoder_layers:
            self.transformer_layer_config = self._layers_filled_in()
        if self.intermediate_size is None:
            self.intermediate_size = 2 * self.hidden_size
        if self.num_heads is None:
            self.num_heads = _heads_for(self.hidden_size)
        for name, value in _FIXED.get(self.kind, {}).items():
            setattr(self, name, value)
        if not self.markov_rank:
            self.confidence_head_with_markov, self.markov_head_type = False, "vanilla"
        if self.target_hidden_size == self.hidden_size:
            self.target_hidden_size = None
        self.check()

    @property
    def block_size(self) -> int:
        """Places of a block, of kind "block"."""
        return self.num_steps if self.sample_from_anchor else self.num_steps + 1

    @property
    def places(self) -> int:
        """What goes through the layers at once, for each root: 1 where steps follow each other."""
        return {"peagle": self.num_steps, "block": self.block_size}.get(self.kind, 1)

    @property
    def has_decoder_layers(self) -> bool:
        return self.kind in DECODER_LAYERS

    def _layers_filled_in(self) -> dict[str, Any]:
        """`transformer_layer_config` with what it leaves open; intermediate_size and num_heads, given, replace its."""
        layer = {"model_type": "qwen3" if self.kind == "block" else "llama", **(self.transformer_layer_config or {})}
        known = MTP_LAYER_TYPES if self.kind == "mtp" else LAYER_TYPES
        if layer["model_type"] not in known:
            raise ConfigError(
                f"transformer_layer_config is of model_type {layer['model_type']!r}: decoder layers can be those of "
                f"{' or '.join(known)}"
            )
        if self.num_heads not in (None, layer.get("num_attention_heads")):
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
                layer.pop(name, None)
        layer.setdefault("hidden_size", self.hidden_size)
        layer.setdefault("num_hidden_layers", self.num_layers)
        layer.setdefault("num_attention_heads", self.num_heads or _heads_for(self.hidden_size))
        layer.setdefault("num_key_value_heads", layer["num_attention_heads"])
        layer.setdefault("head_dim", self.hidden_size // layer["num_attention_heads"])
        layer["intermediate_size"] = self.intermediate_size or layer.get("intermediate_size") or 2 * self.hidden_size
        self.intermediate_size, self.num_heads = layer["intermediate_size"], layer["num_attention_heads"]
        return layer

    @property
    def windows(self) -> list[int | None]:
        """Of each decoder layer, how many known positions it sees; None is all."""
        layer = self.transformer_layer_config or {}
        kinds = layer.get("layer_types") or ["full_attention"] * self.num_layers
        return [layer["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]

    def layer_config(self) -> PreTrainedConfig:
        """Of the decoder layers, as transformers has it."""
        assert self.transformer_layer_config is not None  # the configuration fills it in
        return AutoConfig.for_model(**{**self.transformer_layer_config, "intermediate_size": self.intermediate_size})

    @property
    def target_layers(self) -> list[int]:
        """Layers of the target that are computed: those that are read and, last, -1, the state h itself."""
        return with_state(self.feature_layers)

    @property
    def state_size(self) -> int:
        """Width of the target's states."""
        return self.target_hidden_size or self.hidden_size

    @property
    def feature_size(self) -> int:
        """Width F of one window entry: all feature layers beside each other."""
        return len(self.feature_layers) * self.state_size

    @property
    def draft_size(self) -> int:
        """Number K of tokens that can be drafted."""
        size = self.draft_vocab_size or self.vocab_size
        if size is None:
            raise ConfigError(
                "markov_rank and own_heads make weights for each token: give draft_vocab_size, or vocab_size"
            )
        return size

    def check(self) -> None:
        """Raise `ConfigError` for the first value that is out of range or contradicts another one."""
        for name, hint in ShapeConfig.__annotations__.items():
            value = getattr(self, name)
            if hint is int or (hint == int | None and value is not None):
                _require_int(name, value, 0 if name in _MAY_BE_ZERO else 1)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ConfigError(f"{name} is {value!r}: choose one of {', '.join(get_args(hint))}")
        _require_number("refinement_epsilon", self.refinement_epsilon, lambda x: x > 0, "greater than 0")
        _require_number("refinement_alpha", self.refinement_alpha, lambda x: 0 <= x <= 1, "from 0 to 1")
        _require_number("dropout", self.dropout, lambda x: 0 <= x < 1, "at least 0 and less than 1")
        for kinds, names in _OWN.items():
            given = [name for name in names if getattr(self, name) != getattr(ShapeConfig, name)]
            if given and self.kind not in kinds:
                raise ConfigError(
                    f"{', '.join(given)} is for kind {' or '.join(kinds)}: leave it out with kind {self.kind!r}"
                )
        self._check_feature_layers()
        self._check_width()
        self._check_attention()
        if self.kind == "shape" and (self.own_heads or self.own_embeddings):
            raise ConfigError(
                'own_heads and own_embeddings are for the other kinds: "shape" uses the target\'s output and input '
                "embeddings"
            )
        if self.own_embeddings and self.vocab_size is None:
            raise ConfigError("own_embeddings makes weights for each token of the target: give vocab_size")
        if self.shared_head and not self.own_heads:
            raise ConfigError("shared_head is for own_heads: give both, or neither to use the target's head")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm are both given: features are normalised together or each")
        if self.kind == "mtp" and self.num_layers != 1:
            raise ConfigError(f"num_layers is {self.num_layers}: kind mtp has one decoder layer")
        if self.has_decoder_layers and self.num_layers < 1:
            raise ConfigError(f"num_layers is {self.num_layers}: kind {self.kind!r} has at least 1 decoder layer")
        self._check_block()
        if self.coupling and not self.markov_rank:
            raise ConfigError(f"coupling is {self.coupling}: it corrects a Markov bias, so give a markov_rank")
        if self.markov_head_type != "vanilla" and self.kind != "block":
            raise ConfigError(
                f"markov_head_type {self.markov_head_type} is for kind block: give kind {self.kind!r} vanilla"
            )
        if self.markov_rank and self.token_conditioning == "path":
            raise ConfigError(
                f"markov_rank is {self.markov_rank}: a bias by the token before is for steps that do not read it; with "
                'token_conditioning "path" use 0'
            )
        if self.token_conditioning == "path" and self.step_mode != "recursive":
            raise ConfigError(
                'token_conditioning "path" needs step_mode "recursive": parallel steps are predicted before '
                "any token of the path is drafted"
            )

    def _check_feature_layers(self) -> None:
        layers = self.feature_layers
        numbers = bool(layers) and all(_is_int(layer) for layer in layers)
        if not numbers or (self.kind == "shape" and layers[-1] != -1):
            raise ConfigError(
                f"feature_layers is {layers}: it has to be a list of layer indices, which with kind shape ends in -1, "
                "the state that predictions are added to"
            )

    def _check_width(self) -> None:
        if self.target_hidden_size is None:
            return
        if self.kind not in ANY_WIDTH:
            raise ConfigError(
                f"hidden_size is {self.hidden_size} and the target's {self.target_hidden_size}: kind {self.kind!r} has "
                f"the target's width; {', '.join(ANY_WIDTH)} can have another"
            )
        if not (self.own_heads and self.own_embeddings):
            raise ConfigError(
                f"hidden_size is {self.hidden_size} and the target's {self.target_hidden_size}: a drafter of another "
                "width cannot read the target's embeddings; give own_heads and own_embeddings"
            )

    def _check_attention(self) -> None:
        assert self.num_heads is not None
        if self.has_decoder_layers:
            layer = self.transformer_layer_config or {}
            if layer["hidden_size"] != self.hidden_size or layer["num_hidden_layers"] != self.num_layers:
                raise ConfigError(
                    f"transformer_layer_config has hidden_size {layer['hidden_size']} and num_hidden_layers "
                    f"{layer['num_hidden_layers']}, and the predictor {self.hidden_size} and num_layers "
                    f"{self.num_layers}: give the same"
                )
            if self.num_heads % layer["num_key_value_heads"]:
                raise ConfigError(
                    f"num_key_value_heads is {layer['num_key_value_heads']}: it has to divide the {self.num_heads} "
                    "attention heads"
                )
            self._check_layer_types()
        attends, even = self.attention or self.has_decoder_layers, self.hidden_size // self.num_heads
        size = (self.transformer_layer_config or {}).get("head_dim", even)
        if attends and ((size == even and self.hidden_size % self.num_heads) or size % 2):
            raise ConfigError(
                f"num_heads is {self.num_heads}: heads divide the hidden size, {self.hidden_size}, into even parts"
            )

    def _check_layer_types(self) -> None:
        layer = self.transformer_layer_config or {}
        given = layer.get("layer_types") or []
        kinds = set(given or ["full_attention"])
        known = {"full_attention", *([] if self.kind == "mtp" else ["sliding_attention"])}
        if kinds - known:
            raise ConfigError(
                f"transformer_layer_config has layer_types {sorted(kinds)}: layers of kind {self.kind!r} can be "
                f"{' or '.join(sorted(known))}"
            )
        if "sliding_attention" in kinds and not (_is_int(layer.get("sliding_window")) and layer["sliding_window"] > 0):
            raise ConfigError("transformer_layer_config has layers of sliding_attention: give their sliding_window")
        if given and len(given) != self.num_layers:
            raise ConfigError(
                f"transformer_layer_config has {len(given)} layer_types, and the predictor {self.num_layers} layers: "
                "give as many"
            )

    def _check_block(self) -> None:
        if self.kind != "block":
            return
        if self.coupling:
            raise ConfigError(f"coupling is {self.coupling}: kind block learns its Markov table without; use 0")
        if self.markov_rank and self.vocab_size is None:
            raise ConfigError("markov_rank makes a table of each token of the target: give vocab_size")
        if self.markov_head_type == "selector" and self.confidence:
            raise ConfigError(
                "confidence is for Markov heads over all tokens, and a selector chooses among the likeliest: give one"
            )
        if self.conv_kernel_size > self.block_size:
            raise ConfigError(
                f"conv_kernel_size is {self.conv_kernel_size}: a block has {self.block_size} places; give at most that"
            )
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise ConfigError(
                f"conv_group_size is {self.conv_group_size}: it has to divide the hidden size, {self.hidden_size}"
            )
        if self.markov_head_type == "rnn" and not self.sample_from_anchor:
            raise ConfigError(
                "markov_head_type is rnn, whose state would begin at the place that drafts nothing: give "
                "sample_from_anchor with it"
            )


def _require_known(options: dict[str, Any]) -> None:
    unknown = sorted(name for name in options if not name.startswith("_") and name not in _TRANSFORMERS_KEYS)
    if unknown:
        raise ConfigError(f"ShapeConfig has no option {', '.join(unknown)}: check the spelling")


def _require_int(name: str, value: Any, least: int) -> None:
    if not _is_int(value) or value < least:
        raise ConfigError(f"{name} is {value!r}: it has to be an integer of at least {least}")


def _require_number(name: str, value: Any, holds: Callable[[float], bool], bounds: str) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or not holds(value):
        raise ConfigError(f"{name} is {value!r}: it has to be a number {bounds}")


def _heads_for(size: int) -> int:
    """Attention heads that are 64 wide, where such divide the width; else one."""
    heads = max(size // 64, 1)
    return heads if size % heads == 0 else 1


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
