"""What training takes where the user says nothing: it follows from the target and from the data.

What each rule was measured by is in `eval/results/sizes`; docs/guides/train.md explains it. Width and draft vocabulary
are in `shape.networks.sizing`.

- **Length** of a conversation: 1,024 tokens, or as many as the target has positions.
- **Depth**: one block, as none, one and two are accepted alike (`PredictorOptions.num_layers`).
- **Steps**: four epochs of the positions of the data, but at least 600 steps of 1,024 positions as long as these are
  no more than forty epochs, never fewer than 200 steps (fewer where 600 x 1,024 positions are less), and never more
  than 40,000.
"""

from dataclasses import asdict, replace

from shape.data.statistics import DataStatistics
from shape.errors import ConfigError
from shape.features.options import longest, with_state
from shape.networks import sizing
from shape.networks.config import DECODER_LAYERS, MASKED, STATE_ALONE, ShapeConfig
from shape.networks.decoder import layers_like
from shape.target.model import Target
from shape.target.size import Size
from shape.training.options import TrainOptions

_PASSES, _MOST_PASSES = 4, 40
_ENOUGH_POSITIONS = 600 * 1024  # after which acceptance rises slowly, however few are distinct
_FEWEST_STEPS, _MOST_STEPS = 200, 40_000
_VALIDATIONS = 5


def steps(positions: float, batch_size: int) -> int:
    """Optimiser steps for so many positions to learn from."""
    least = min(_ENOUGH_POSITIONS / batch_size, max(_MOST_PASSES * positions / batch_size, _FEWEST_STEPS))
    return round(max(min(_PASSES * positions / batch_size, _MOST_STEPS), least))


def resolve(options: TrainOptions, size: Size, text: DataStatistics | None) -> TrainOptions:
    """The options with what was left open filled in for a target and data; what is given stays.

    Args:
        text: what is learned from, where it is known yet.
    """
    predictor, training = options.predictor, options.training
    if predictor.draft_vocab_size == "auto":
        drafted = None if predictor.kind == "model" else sizing.draft_vocab_size(size.vocab_size, text)
        predictor = replace(predictor, draft_vocab_size=drafted)
    if predictor.kind in STATE_ALONE:
        if predictor.feature_layers not in ("auto", [-1]):
            raise ConfigError(
                f"predictor.feature_layers is {predictor.feature_layers}: kind {predictor.kind} reads the target's "
                "last state alone; leave it out"
            )
        predictor = replace(predictor, feature_layers=[-1])
    if predictor.feature_layers == "auto":
        count = 0 if size.config is None else size.config.num_hidden_layers
        layers = sizing.feature_layers(count)
        predictor = replace(predictor, feature_layers=with_state(layers) if predictor.kind == "shape" else layers)
    if predictor.intermediate_size is None and predictor.kind == "shape":

        def parameters(width: int) -> int:
            sized = replace(options, predictor=replace(predictor, intermediate_size=width))
            config = network_config(sized, size)
            assert config is not None
            return sizing.parameters(config)

        predictor = replace(predictor, intermediate_size=sizing.width(size, parameters))
    count = training.steps or steps(text.positions if text else 0, training.batch_size)
    return replace(
        options,
        max_length=longest(options.max_length, size.positions),
        predictor=predictor,
        training=replace(training, steps=count),
        validation=replace(options.validation, every=options.validation.every or max(1, count // _VALIDATIONS)),
    )


def mask_token(target: Target) -> int:
    """The token that fills a block: the tokenizer's mask token, else a row of the embedding behind its last token,
    else the padding, end or unknown token; the choice of speculators.
    """
    tokenizer = target.tokenizer
    if (mask := tokenizer.mask_token_id) is not None:
        return mask
    if len(tokenizer) < target.vocab_size:
        return len(tokenizer)
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    found = next((token for token in known if token is not None), None)
    if found is None:
        raise ConfigError(
            f"target {target.name} has no mask, padding, end or unknown token: give predictor.mask_token_id"
        )
    return found


def network_config(options: TrainOptions, target: Target | Size) -> ShapeConfig | None:
    """The network's configuration for this target; None for a language model.

    Raises:
        ConfigError: it cannot be for this target.
    """
    chosen, given = options.predictor, asdict(options.predictor)
    if chosen.kind == "model":
        sizing.draft_model_width_and_heads(
            target.hidden_size, chosen.intermediate_size, chosen.num_layers, chosen.num_heads
        )
        return None
    if (given["draft_vocab_size"] or 0) > target.vocab_size:
        raise ConfigError(
            f"predictor.draft_vocab_size is {given['draft_vocab_size']}, and the target has {target.vocab_size} "
            "tokens; give fewer, or null"
        )
    given["hidden_size"] = given["hidden_size"] or target.hidden_size
    if given["hidden_size"] != target.hidden_size:
        given["target_hidden_size"] = target.hidden_size
        if options.losses.on_states:
            raise ConfigError(
                f"predictor.hidden_size is {given['hidden_size']}, the target's {target.hidden_size}, and losses are "
                f"on states ({', '.join(options.losses.on_states)}); give losses on distributions, such as losses.kl"
            )
    if options.predictor.kind in DECODER_LAYERS and target.config is not None:
        given["transformer_layer_config"] = {
            **layers_like(target.config, given["hidden_size"]),
            "num_hidden_layers": options.predictor.num_layers,
            **(given["transformer_layer_config"] or {}),
        }
    if options.predictor.kind in MASKED and given["mask_token_id"] is None and isinstance(target, Target):
        given["mask_token_id"] = mask_token(target)
    if not 0 <= (given["mask_token_id"] or 0) < target.vocab_size:
        raise ConfigError(
            f"predictor.mask_token_id is {given['mask_token_id']}, and the target's tokens are 0 to "
            f"{target.vocab_size - 1}; give one of them, or null, which chooses one"
        )
    return ShapeConfig(
        vocab_size=target.vocab_size,
        target_identity=target.identity.to_dict() if isinstance(target, Target) else None,
        draft=asdict(options.tree),
        **given,
    )
