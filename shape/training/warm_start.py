"""Training that goes on from a trained predictor, ours or another package's: `shape train --init CHECKPOINT`."""

from dataclasses import fields, replace

from shape.errors import ConfigError, TargetMismatch
from shape.generation.loading import load_predictor
from shape.networks.base import Predictor
from shape.target.loading import SOURCE, of_target, only
from shape.target.model import Target
from shape.training.options import PredictorOptions, TrainOptions


def as_checkpoint(options: TrainOptions, defaults: PredictorOptions | None = None) -> TrainOptions:
    """The options with the checkpoint's network; as they are without one.

    Args:
        defaults: what options of the network are where nothing was given.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: an option of the network that was given and is another in the checkpoint.
    """
    if options.init is None:
        return options
    config, defaults = _checkpoint(options, options.target).config, defaults or PredictorOptions()
    own = {field.name: getattr(config, field.name) for field in fields(PredictorOptions)}
    own["hidden_size"] = config.hidden_size if config.target_hidden_size else None
    for name, value in own.items():
        given = getattr(options.predictor, name)
        if given not in (value, getattr(defaults, name)):
            raise ConfigError(
                f"predictor.{name} is {given}, and checkpoint {options.init} has {value}; leave it out: with --init "
                "the network is the checkpoint's"
            )
    return replace(options, predictor=PredictorOptions(**own))


def refuse_other_sizes(options: TrainOptions, target: Target) -> None:
    """Raises TargetMismatch where the checkpoint, if there is one, is for states or a vocabulary of another size."""
    if options.init is None:
        return
    config = _checkpoint(options, target).config
    widths = ("hidden_size", config.state_size, target.hidden_size)
    for name, given, wanted in (widths, ("vocab_size", config.vocab_size, target.vocab_size)):
        if given not in (None, wanted):
            raise TargetMismatch(
                f"checkpoint {options.init} is for targets with {name} {given}, and {target.name} has {wanted}; give "
                "one that was trained for this target, or for what it was fine-tuned from"
            )


def start_from(predictor: Predictor, options: TrainOptions, target: Target) -> None:
    """Give a network the weights and the draft vocabulary of the checkpoint, in its own dtype."""
    found = _checkpoint(options, target)
    predictor.draft_vocabulary = found.draft_vocabulary
    predictor.load_state_dict(found.state_dict())
    predictor.complete(target)


def _checkpoint(options: TrainOptions, target: str | Target) -> Predictor:
    assert options.init is not None
    return load_predictor(options.init, target, **only(SOURCE | {"trust_remote_code"}, of_target(options)))
