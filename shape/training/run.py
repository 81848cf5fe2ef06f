"""`python -m shape.train`: from conversations to an exported predictor with its measured speed-up.

The command is `shape.cli.train`.
"""

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from shape import bundled
from shape.data.conversations import Conversation, Prompt, evenly, fingerprint, load_conversations, load_prompts
from shape.data.regeneration import AnswerOptions, LocalBackend, answers_file, own_answers
from shape.drafters import PREDICTORS, TreeShape
from shape.errors import ConfigError, DataError, FeatureStoreError, exit_on_error
from shape.evaluation.environment import Environment, matrix_product_peak, peak_memory
from shape.evaluation.speed import SpeedResults, measure
from shape.features.costs import Size, Text, counted, size_of
from shape.features.extraction import (
    FeatureOptions,
    StorageOptions,
    TrainerOptions,
    encode_row,
    extract,
    longest,
    place,
    rows_of,
)
from shape.features.storage import Place
from shape.features.store import MANIFEST, FeatureStore, refuse_others
from shape.generation.decoder import ShapeDecoder, ShapeOutput
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.export import export, export_model
from shape.target.loading import TargetOptions, of_target
from shape.target.model import Target, announce
from shape.target.sharding import ShardTarget
from shape.training import defaults
from shape.training.batches import ShapeDataModule, derive_seed
from shape.training.distillation import DistillModule, draft_model
from shape.training.examples import draft_vocabulary
from shape.training.forecast import Forecast
from shape.training.losses import Losses
from shape.training.module import (
    AtomicCheckpointIO,
    DecodingValidation,
    Learner,
    Operations,
    ShapeModule,
    StopWhereDiverged,
    TrainingOptions,
    as_trained_and_decoded,
    load_weights,
    sound_checkpoint,
)
from shape.training.sizes import parameters

DRY_RUN = ("--dry_run", "--dry-run")
QUICKSTART_TARGET = "quickstart-target"
_HELD_OUT_SHARE = 0.1
_COMPARED = 8  # validation prompts on which decoding is compared with training
_LEAST_OF_TRAINED = 0.9  # rounding moves single tokens, a mismatch most of them
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's mallopt


@dataclass
class PredictorOptions:
    """The network; see `shape.networks.config.ShapeConfig`, whose fields of the same names these become.

    Attributes:
        kind: shape, or a rival: medusa, eagle, block (DFlash, DSpark). A rival has a window of one state and fixes
            step_mode and token_conditioning. Or model, a small language model of the target's tokens, which reads no
            states and of these options num_layers, num_heads and intermediate_size alone: the width of its states.
        window: known states that the predictor reads.
        intermediate_size: its width; null follows from the target (`shape.training.defaults`), and is twice its hidden
            size for rivals.
        num_layers: residual blocks at that width; decoder layers of block.
        attention: SHAPE's steps also attend to all known positions.
        num_heads: attention heads; null makes them 64 wide.
        num_steps: steps that training unrolls.
        step_mode: all steps from one window, or one network applied again to its own prediction.
        token_conditioning: read no token, the last settled one, or each token of the drafted path.
        refinement: what is done to a raw prediction.
        refinement_dim: width of the reduced space.
        refinement_epsilon: entropic regularisation.
        refinement_alpha: share of the refined state.
        refinement_alpha_learned: learn the share, starting from it.
        refinement_readout: what is read of the transport plan.
        refinement_iterations: Sinkhorn iterations.
        refinement_last_update: which marginal is exact in the end.
        dropout: probability.
        feature_layers: layers of the target that are read; the last is -1.
        draft_vocab_size: draft from so many of the most frequent tokens only; null drafts from all, auto from as many
            as target and data suggest (`shape.training.defaults`).
        markov_rank: rank of a bias by the token before, for steps that do not read it; 0 is none.
        coupling: keep the steps' marginals under the bias, by a coupling over so many candidates; 0 does not.
        confidence: estimate where the target will agree, for dynamic trees.
        own_heads: output embeddings of medusa's and eagle's own, started from the target's.
    """

    kind: Literal["shape", "medusa", "eagle", "block", "model"] = "shape"
    window: int = 8
    intermediate_size: int | None = None
    num_layers: int = 1
    attention: bool = False
    num_heads: int | None = None
    num_steps: int = 8
    step_mode: Literal["parallel", "recursive"] = "parallel"
    token_conditioning: Literal["none", "root", "path"] = "root"
    refinement: Literal["none", "affine", "sinkhorn"] = "none"
    refinement_dim: int = 128
    refinement_epsilon: float = 0.1
    refinement_alpha: float = 0.5
    refinement_alpha_learned: bool = False
    refinement_readout: Literal["marginal", "barycentric"] = "marginal"
    refinement_iterations: int = 10
    refinement_last_update: Literal["column", "row"] = "row"
    dropout: float = 0.0
    feature_layers: list[int] = field(default_factory=lambda: [-1])
    draft_vocab_size: int | Literal["auto"] | None = "auto"
    markov_rank: int = 64
    coupling: int = 0
    confidence: bool = False
    own_heads: bool = False


@dataclass
class ValidationOptions:
    """Decoding during training, by which the best weights are chosen.

    Attributes:
        prompts: how many, from the validation data.
        max_new_tokens: per prompt.
        every: steps between measurements; null is a fifth of all.
    """

    prompts: int = 32
    max_new_tokens: int = 64
    every: int | None = None


@dataclass
class MeasurementOptions:
    """The comparison with plain decoding that ends the run.

    Attributes:
        prompts: JSON lines with prompts; null is the bundled bench split for bundled data, and otherwise every other
            validation conversation, which then chooses no weights.
        limit: at most so many; 0 measures nothing.
        max_new_tokens: per prompt.
        temperature: 0 decodes greedily.
    """

    prompts: str | None = None
    limit: int = 24
    max_new_tokens: int = 64
    temperature: float = 0.0


@dataclass
class TrainOptions(TargetOptions):
    """What to train, on what, to where.

    Attributes:
        target: folder or hub id of the target, or quickstart-target, which ships.
        data: file, folder or hub dataset with conversations; null is the data that ships.
        validation_data: conversations to validate on, and to measure on at the end; null is those that ship, or a part
            held out of `data`.
        output: folder of the exported predictor; checkpoints, logs and features go below it.
        regenerate: let the target answer the prompts of `data` itself, and learn from its answers (kept in the
            features folder); false learns from the answers as they are, which is right where shape.data.regeneration
            or a server wrote them.
        features: folder of stored features, or an address that fsspec knows (s3://...), made by shape.extract or by an
            earlier run, or to be filled; null is `features` in the output folder.
        online: compute features in each training step and store none.
        shard_target: each of several processes keeps its part of the target's weights (FSDP), and they gather a block
            when it is computed; for targets that one device cannot hold. Online, on answers that are there already.
        chat_template_kwargs: given to the target's chat template with every conversation and prompt, for example
            {"enable_thinking": false}; a row's own go before them.
        max_length: tokens kept of each conversation; null is 1,024, or as many as the target has positions.
        limit: at most so many conversations.
        skip_bad_rows: count malformed rows and go on.
        seed: of weights, order, noise and dropout.
        target_dtype: dtype to run the target in; null is its checkpoint's own.
        ckpt_path: resume from this checkpoint; "last" is the one in the output folder.
        predictor: the network.
        tree: default shape of the drafts.
        losses: weights of the losses.
        training: optimisation.
        validation: decoding during training.
        measurement: the comparison at the end.
        regeneration: how the target answers; an answer is at most half of `max_length`.
        extraction: how features are stored.
        trainer: devices, precision and so on, as Lightning's Trainer has them.
    """

    target: str = QUICKSTART_TARGET
    data: str | None = None
    validation_data: str | None = None
    regenerate: bool = True
    output: str = "checkpoints/shape"
    features: str | None = None
    online: bool = False
    shard_target: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    max_length: int | None = None
    limit: int | None = None
    skip_bad_rows: bool = False
    seed: int = 0
    target_dtype: str | None = None
    ckpt_path: str | None = None
    predictor: PredictorOptions = field(default_factory=PredictorOptions)
    tree: TreeShape = field(default_factory=lambda: TreeShape(depth=8, width=2, nodes=12))
    losses: Losses = field(default_factory=Losses)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    measurement: MeasurementOptions = field(default_factory=MeasurementOptions)
    regeneration: AnswerOptions = field(default_factory=AnswerOptions)
    extraction: StorageOptions = field(default_factory=StorageOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)

    def check(self) -> None:
        """Raises ConfigError for options that cannot be meant, before anything is loaded."""
        self.training.check()
        self.regeneration.check()
        if self.training.optimizer == "muon" and self.trainer.strategy.startswith("fsdp"):
            raise ConfigError("muon takes whole matrices, and fsdp cuts them; give --training.optimizer adamw, or ddp")
        if self.training.ema is not None and self.trainer.strategy.startswith("fsdp"):
            raise ConfigError("ema averages whole networks, and fsdp cuts them; leave it out, or give ddp")
        if self.online and self.features is not None:
            raise ConfigError("online and features are both given; choose one: online computes what features stores")
        if self.shard_target and (not self.online or self.regenerate):
            raise ConfigError(
                "shard_target shares out the target within training, which neither stores its features nor answers "
                "with it; give --online true, --regenerate false, and data with its answers (shape.data.regeneration)"
            )
        for name in ("prompts", "max_new_tokens", "every"):
            value = getattr(self.validation, name)
            if value is not None and value < 1:
                raise ConfigError(f"validation.{name} is {value}; give a positive number")
        if self.measurement.limit < 0 or self.measurement.max_new_tokens < 1 or self.measurement.temperature < 0:
            raise ConfigError("measurement needs limit >= 0, max_new_tokens >= 1 and temperature >= 0; correct them")

    def feature_options(self) -> FeatureOptions:
        return FeatureOptions(
            max_length=self.max_length,
            layers=self.predictor.feature_layers,
            skip_bad_rows=self.skip_bad_rows,
            **asdict(self.extraction),
        )

    def settled(self, size: Size, text: Text | None) -> "TrainOptions":
        """With what was left open filled in for a target and data (`shape.training.defaults`); what is given stays.

        Args:
            text: what is learned from, where it is known yet.
        """
        predictor, training, validation = self.predictor, self.training, self.validation
        if predictor.draft_vocab_size == "auto":
            drafted = None if predictor.kind == "model" else defaults.draft_vocab_size(size, text)
            predictor = replace(predictor, draft_vocab_size=drafted)
        if predictor.intermediate_size is None and predictor.kind == "shape":

            def learned(width: int) -> int:
                own = replace(self, predictor=replace(predictor, intermediate_size=width)).predictor_config(size)
                assert own is not None
                return parameters(own)

            predictor = replace(predictor, intermediate_size=defaults.width(size, learned))
        steps = training.steps or defaults.steps(text.positions if text else 0, training.batch_size)
        return replace(
            self,
            max_length=longest(self.max_length, size.positions),
            predictor=predictor,
            training=replace(training, steps=steps),
            validation=replace(validation, every=validation.every or defaults.validation_interval(steps)),
        )

    def predictor_config(self, target: Target | Size) -> ShapeConfig | None:
        """What the network is for this target; None for a language model.

        Raises:
            ConfigError: it cannot be for this target.
        """
        chosen = asdict(self.predictor)
        if self.predictor.kind == "model":
            return None
        if (chosen["draft_vocab_size"] or 0) > target.vocab_size:
            raise ConfigError(
                f"predictor.draft_vocab_size is {chosen['draft_vocab_size']}, and the target has {target.vocab_size} "
                "tokens; give fewer, or null"
            )
        return ShapeConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            target_identity=target.identity.to_dict() if isinstance(target, Target) else None,
            draft=asdict(self.tree),
            **chosen,
        )


@dataclass(frozen=True)
class Material:
    """What is learned from and validated on: the same for runs that differ in their network and its optimisation alone.

    Attributes:
        runs: the options of each, settled.
        conversations: each of one text, as `rows_of` makes them.
        held_out: numbers of those that are validated on, or measured on.
        for_validation: those, or others, that choose the weights.
        prompts: of the measurement at the end; they chose nothing.
        home: where features and answers lie.
        trainer: runs the target beforehand.
    """

    runs: list[TrainOptions]
    target: Target
    conversations: list[Conversation]
    held_out: set[int]
    for_validation: list[Conversation]
    prompts: list[Prompt]
    home: Place
    trainer: pl.Trainer


def train(options: TrainOptions) -> Path:
    """The whole way; returns the folder of the exported predictor. Only the first process exports and measures."""
    options.check()
    output = writable(Path(options.output))
    checkpoint = checkpoint_named(options.ckpt_path, output)
    home = Place(output if options.online else options.features or output / "features")
    material = prepare([options], home)
    (options,) = material.runs
    validation = decoding_validation(options, material)
    operations = Operations()
    trainer = make_trainer(options, material.target, output, [validation, operations])
    if checkpoint is None:
        set_aside(output / "checkpoints")
    source: FeatureStore | None = None
    if not options.online:
        source = _features(options, material)
    module, data = make_learner(options, material, source)
    size = sum(parameter.numel() for parameter in module.predictor.parameters())
    _say(
        f"training: {size / 1e6:.1f}M parameters on {data.size} for at most {options.training.steps} steps of "
        f"{options.training.batch_size} positions"
    )
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    if trainer.is_global_zero:
        record = throughput(options, module, module.seconds - validation.seconds, operations)
        finish(options, module, validation, material.prompts, {"examples": data.size, **record})
    return output


def prepare(runs: Sequence[TrainOptions], home: Place) -> Material:
    """Target and data of runs that share them, and every check of their options that needs these.

    Args:
        home: where features lie, or will; answers too.

    Raises:
        ConfigError, DataError, UnsupportedTarget, FeatureStoreError: what cannot be trained on.
    """
    options = runs[0]
    trainer = options.trainer.for_extraction()
    target = load_target(options, trainer)
    if target.tokenizer is None:
        raise DataError(f"target {target.name} has no tokenizer, and conversations are text; put one into its folder")
    size = size_of(target.model)
    for run in runs:
        run.feature_options().check(target)
        run.settled(size, None).predictor_config(target)
    prompts = _prompts_file(options)
    conversations = load_data(options)
    refuse_others(home, target)
    for_validation = validation_data(options)
    options = options.settled(size, None)  # what follows reads its length
    if options.regenerate and not ships_answers(options):
        conversations = _own_answers(options, target, conversations, home, trainer)
    rows = rows_of(target, conversations)
    held_out = set() if for_validation else numbers_held_out(options, conversations)
    text = what_is_learned(options, conversations, held_out, target.tokenizer)
    settled = [run.settled(size, text) for run in runs]
    for_validation = for_validation or [conversations[index] for index in sorted(held_out)]
    if not prompts:
        if options.measurement.limit and len(for_validation) < 2:
            raise DataError(
                "there is one conversation to validate on, and none is left to measure on; give more "
                "--validation_data, or --measurement.prompts, or --measurement.limit 0"
            )
        # The best of many measurements owes something to luck on its own prompts, and is measured on others.
        for_validation, prompts = for_validation[::2], _as_prompts(for_validation[1::2])
    prompts = _fitting(prompts, target, options)
    rank_zero_only(announce)(target)
    for run in settled:
        _say(Forecast.of(run, size, text, target.dtype).brief())
    owners = [number for number, own in enumerate(rows) for _ in own]
    return Material(
        settled,
        target,
        list(chain.from_iterable(rows)),
        {row for row, number in enumerate(owners) if number in held_out},
        list(chain.from_iterable(rows_of(target, for_validation))),
        prompts,
        home,
        trainer,
    )


def load_target(options: TrainOptions, trainer: pl.Trainer) -> Target:
    """As its options say, and where the trainer computes."""
    return Target.load(
        options.target,
        dtype=options.target_dtype,
        device_map="cpu" if options.shard_target else trainer.strategy.root_device,
        prepacked=False if options.shard_target else None,
        **of_target(options),
    )


def what_is_learned(
    options: TrainOptions, conversations: Sequence[Conversation], held_out: set[int], tokenizer: Any
) -> Text:
    """What the conversations that are learned from hold, in the target's tokens, by a sample of them."""
    numbers = range(len(conversations))
    left_out = held_out | _left_out(numbers, held_out, options.training.conversations)
    assert options.max_length is not None  # settled
    learned = [conversations[number] for number in numbers if number not in left_out]
    return counted(learned, tokenizer, options.max_length, options.skip_bad_rows)


def decoding_validation(
    options: TrainOptions, material: Material, name: str = "", learner: Learner | None = None
) -> DecodingValidation:
    """The validation of one run; see there."""
    return DecodingValidation(
        validation_prompts(material.for_validation, material.target, options),
        cast(int, options.validation.every),
        options.validation.max_new_tokens,
        Path(options.output) / "checkpoints/best.safetensors",
        name,
        learner,
    )


def make_learner(
    options: TrainOptions, material: Material, store: FeatureStore | None
) -> tuple[Learner, ShapeDataModule]:
    """A network to train, and its batches: of a feature store, or of the conversations in online mode."""
    target, config = material.target, options.predictor_config(material.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(options.seed, "weights"))
        predictor = _network(options.predictor, config, target)
    reads_window = isinstance(predictor, Predictor) and not predictor.memory_shapes
    numbers, held_out = range(len(material.conversations)), material.held_out
    data = ShapeDataModule(
        material.conversations if store is None else store,
        target,
        steps=cast(int, options.training.steps),
        batch_size=options.training.batch_size,
        workers=options.training.workers,
        window=predictor.config.window if reads_window else None,
        ahead=1 if config is None else config.num_steps,
        exclude=held_out | _left_out(numbers, held_out, options.training.conversations),
        max_length=cast(int, options.max_length),
        skip_bad_rows=options.skip_bad_rows,
        seed=options.seed,
    )
    if isinstance(predictor, Predictor):
        if (size := predictor.config.draft_vocab_size) is not None:
            predictor.draft_vocabulary = draft_vocabulary(data.texts(), size, target.vocab_size)
        if predictor.heads is not None:
            predictor.adopt_head(target.output_rows(predictor.draft_vocabulary))
    kind: type[Learner] = DistillModule if config is None else ShapeModule
    module = kind(
        predictor,
        target,
        options.losses,
        options.training,
        seed=options.seed,
        log_every=options.trainer.log_every_n_steps,
        recipe=_recipe(options, material),
    )
    return module, data


def _network(options: PredictorOptions, config: ShapeConfig | None, target: Target) -> PreTrainedModel:
    """Untrained."""
    if config is None:
        return draft_model(target, options.intermediate_size, options.num_layers, options.num_heads)
    return PREDICTORS[config.kind](config)


# ------------------------------------------------------------------------------------------------- before


def writable(output: Path) -> Path:
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".writable-{derive_seed(str(output))}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"output {output} cannot be written ({error.strerror}); give another folder") from error
    return output


def checkpoint_named(name: str | None, output: Path) -> str | None:
    """The checkpoint to resume from; "last" is the one in the output folder."""
    if name is None:
        return None
    path = output / "checkpoints/last.ckpt" if name == "last" else Path(name)
    if (found := sound_checkpoint(path)) != path:
        _say(f"checkpoint {path} is damaged or lost; going on from the one before, {found}")
    return str(found)


@rank_zero_only
def set_aside(folder: Path) -> None:
    """Rename an earlier run's checkpoints, so that `--ckpt_path last` can never mean another run's."""
    if not any(folder.glob("last*.ckpt")):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    print(
        f"an earlier run's checkpoints are now in {aside} (--ckpt_path last would have continued it)",
        flush=True,
    )


def load_data(options: TrainOptions) -> list[Conversation]:
    """The conversations to train on; those that ship come with the shipped target's own answers."""
    if options.data is not None:
        source: str | Path = options.data
    else:
        source = bundled.path("data", "answers.jsonl.gz" if ships_answers(options) else "train.jsonl.gz")
    return load_conversations(
        source,
        skip_bad_rows=options.skip_bad_rows,
        limit=options.limit,
        require_answers=not options.regenerate,
        chat_template_kwargs=options.chat_template_kwargs,
    )


def ships_answers(options: TrainOptions) -> bool:
    return options.data is None and options.target == QUICKSTART_TARGET


def _own_answers(
    options: TrainOptions, target: Target, conversations: list[Conversation], home: Place, trainer: pl.Trainer
) -> list[Conversation]:
    """The conversations answered by the target, where the Trainer would run it. Written once, beside the features that
    are made of them, or, where these lie elsewhere, to the output folder.
    """
    folder = home.folder or Path(options.output)
    place(target, trainer.strategy.root_device)
    chosen = options.regeneration
    chosen = replace(chosen, max_new_tokens=longest_answer(options))
    backend = LocalBackend(ShapeDecoder(target), chosen.max_new_tokens, chosen.temperature)
    answers = answers_file(conversations, backend, folder, chosen)
    asked = any(conversation.asks for conversation in conversations)
    if asked and home.exists(MANIFEST) and not answers.exists():
        raise FeatureStoreError(
            f"features in {home} are not of the target's answers to these conversations: the data or the options of "
            "answering have changed since; give another folder with --features or --output, or, where the data holds "
            "the target's own answers, --regenerate false"
        )
    return own_answers(
        conversations,
        backend,
        folder,
        chosen,
        replace(options.trainer, enable_progress_bar=False).for_extraction(),
        progress=options.trainer.enable_progress_bar,
    )


def longest_answer(options: TrainOptions) -> int:
    """Tokens of an answer that the target writes, at most."""
    return max(1, min(options.regeneration.max_new_tokens, cast(int, options.max_length) // 2))


def validation_data(options: TrainOptions) -> list[Conversation]:
    """Conversations that are only validated on; empty where a part of the data has to be held out."""
    given = options.validation_data
    if given is None and options.data is None:
        given = str(bundled.path("data", "validation.jsonl.gz"))
    if given is None:
        return []
    return load_conversations(
        given, skip_bad_rows=options.skip_bad_rows, chat_template_kwargs=options.chat_template_kwargs
    )


def numbers_held_out(options: TrainOptions, conversations: list[Conversation]) -> set[int]:
    """Numbers of the conversations to validate on, to measure on at the end, and not to train on: whatever is measured,
    the same, so that the same is learned.
    """
    if len(conversations) < 3:
        raise DataError(
            f"{options.data} has {len(conversations)} conversation(s), too few to train on, to validate on and to "
            "measure on; give more, or --validation_data"
        )
    count = max(2, min(2 * options.validation.prompts, int(len(conversations) * _HELD_OUT_SHARE)))
    return set(range(0, len(conversations), len(conversations) // count)[:count])


def _left_out(numbers: Sequence[int], held_out: set[int], count: int | None) -> set[int]:
    """The conversations that are not learned from where only so many are."""
    rest = [number for number in numbers if number not in held_out]
    return set(rest) - set(evenly(rest, len(rest) if count is None else count))


def validation_prompts(conversations: Sequence[Conversation], target: Target, options: TrainOptions) -> list[Tensor]:
    """Token ids up to an assistant turn, (T,) each: a turn of every conversation in rotation, evenly chosen.

    Raises:
        DataError: no prompt fits the target's positions.
    """
    room = length = cast(int, options.max_length)
    if target.max_positions is not None:
        room = min(room, target.max_positions - options.validation.max_new_tokens)
    found: list[Tensor] = []
    for index, conversation in enumerate(conversations):
        encoded = encode_row(conversation, target.tokenizer, length, options.skip_bad_rows)
        previous = torch.cat([encoded.loss_mask.new_zeros(1), encoded.loss_mask[:-1]])
        starts = (encoded.loss_mask & ~previous).nonzero()[:, 0].tolist()
        if conversation.kind == "text":
            starts = [min(32, len(encoded.input_ids) // 2)]
        starts = [start for start in starts if 1 <= start <= room]
        if starts:
            found.append(encoded.input_ids[: starts[index % len(starts)]])
    if not found:
        raise DataError(
            f"no validation conversation has an assistant turn within {room} tokens; raise max_length, or give other "
            "--validation_data"
        )
    return evenly(found, options.validation.prompts)


def _prompts_file(options: TrainOptions) -> list[Prompt]:
    """Prompts of the final measurement, read early so that a bad file stops the run before the work."""
    path = options.measurement.prompts
    if path is None and options.data is None:
        path = str(bundled.path("data", "bench.jsonl"))
    return [] if path is None else load_prompts(path, options.chat_template_kwargs)


def _as_prompts(conversations: Sequence[Conversation]) -> list[Prompt]:
    """Chats up to their first answer."""
    found = []
    for each in conversations:
        roles = [message.role for message in each.messages]
        if each.kind == "chat" and "assistant" in roles and "user" in roles[: roles.index("assistant")]:
            opening = each.messages[: roles.index("assistant")]
            found.append(Prompt(each.id, "", (opening[-1].content,), opening, each.template))
    return found


def _fitting(prompts: Sequence[Prompt], target: Target, options: TrainOptions) -> list[Prompt]:
    """Those that leave room for an answer within the target's positions."""
    if target.max_positions is None:
        return list(prompts)
    room = target.max_positions - options.measurement.max_new_tokens
    return [prompt for prompt in prompts if target.encode(prompt.opening, prompt.template).shape[1] <= room]


def _features(options: TrainOptions, material: Material) -> FeatureStore:
    """The feature store: extracted, completed, or an existing one after checking that it is the target's."""
    wanted = options.feature_options()
    store = extract(material.target, material.conversations, material.home, wanted, material.trainer)
    store.verify(material.target, seed=options.seed)
    return store


def _recipe(options: TrainOptions, material: Material) -> dict[str, Any]:
    """What defines a run beside its losses and optimisation: a checkpoint of another recipe is refused."""
    return {
        "predictor": asdict(options.predictor),
        "target": material.target.identity.head_hash,
        "online": options.online,
        "shuffled": "by shards" if material.home.folder is None else "as a whole",
        "max_length": options.max_length,
        "conversations": fingerprint(material.conversations)[:16],
        "precision": options.trainer.chosen_precision(),
        "gradient_clip_val": options.trainer.gradient_clip_val,
    }


def make_trainer(options: TrainOptions, target: Target, output: Path, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
    """The Trainer of a run, with its loggers, checkpoints and more callbacks."""
    csv = CSVLogger(output, name="logs")
    return pl.Trainer(
        **{**asdict(options.trainer), "precision": options.trainer.chosen_precision()},
        max_steps=cast(int, options.training.steps),
        max_epochs=1,  # one run over the loader, which counts in steps
        logger=[csv, TensorBoardLogger(output, name="logs", version=csv.version)],
        callbacks=[
            *([ShardTarget(target)] if options.shard_target else []),
            StopWhereDiverged(options.trainer.log_every_n_steps),
            *callbacks,
            ModelCheckpoint(
                output / "checkpoints",
                save_last=True,
                save_top_k=0,
                every_n_train_steps=options.training.checkpoint_every,
                enable_version_counter=False,
            ),
        ],
        plugins=[AtomicCheckpointIO()],
        use_distributed_sampler=False,
        enable_model_summary=False,
    )


# ------------------------------------------------------------------------------------------------- after


def finish(
    options: TrainOptions,
    module: Learner,
    validation: DecodingValidation,
    prompts: Sequence[Prompt],
    more: Mapping[str, Any],
) -> None:
    """Export the best weights, measure what was exported, and say what came out.

    Args:
        more: of the training, for its record.
    """
    output = Path(options.output)
    target = module.target
    predictor = type(module.predictor)(module.predictor.config)  # of its own: processes may have shared the other's
    load_weights(predictor, validation.best_path)
    predictor.eval().to(target.device)  # type: ignore[arg-type]
    record: dict[str, Any] = {
        "command": Environment.capture(target.device).command,
        "target": options.target,
        "data": options.data or "the conversations that ship with shape",
        "answers": "the target's own" if options.regenerate else "as given",
        "steps": module.trainer.global_step,
        "seconds": round(module.seconds, 1),
        "validation_seconds": round(validation.seconds, 1),
        "validation": {"prompts": len(validation.prompts), **(validation.best or {})},
        "peak_memory_gb": round(peak_memory(module.trainer.strategy.root_device), 2),
        **more,
    }
    _export(predictor, output, target, record)
    console = Console()
    if target.sharded:  # of which this process alone could not run a layer
        command = f"python -m shape.bench --target {options.target} --predictor {output} --device_map auto"
        console.print(f"the predictor is in {output}; measure it:\n  {command}", highlight=False, soft_wrap=True)
        return
    decoder = ShapeDecoder.from_pretrained(output, target=target)
    if isinstance(predictor, Predictor):
        _compare_with_training(target, predictor, validation, console)
    if "positions_per_second" in record:
        console.print(
            f"training: {record['positions_per_second']:,.0f} positions/s, {record['gflop_per_second']:,.0f} GFLOP/s, "
            f"{record['share_of_peak']:.0%} of what a large matrix product reaches here"
        )
    best = validation.best
    if best:
        console.print(
            f"validation: acceptance length {best['value']:.2f} [{best['low']:.2f}, {best['high']:.2f}] at step "
            f"{best['step']} of {module.trainer.global_step}, {len(validation.prompts)} prompts, which chose that step"
        )
    if prompts and options.measurement.limit:
        results = _measure(options, decoder, prompts)
        console.print(results.table())
        line = results.summary["shape"]  # whatever drafts
        record["acceptance_length"] = asdict(line.acceptance_length)
        record["measured_prompts"] = f"{min(len(prompts), options.measurement.limit)}, which chose nothing"
        record["speed_up"] = asdict(line.speed_up)
        place = results.environment
        record["measured_on"] = f"{place.device}, {place.cpu}, {place.threads} threads, {place.date}"
        _export(predictor, output, target, record)
        (output / "measurement.json").write_text(results.to_json())
    _show_sample(decoder, prompts, options, console)
    console.print(f"the predictor is in {output}; try it:", highlight=False)
    text = prompts[0].turns[0] if prompts else "Hello"
    whom = "" if isinstance(predictor, Predictor) else f"--target {options.target} "
    command = f"  python -m shape.generate {whom}--predictor {output} --prompt {text!r}"
    console.print(command, highlight=False, soft_wrap=True)


def _export(predictor: PreTrainedModel, output: Path, target: Target, record: dict[str, Any]) -> None:
    if isinstance(predictor, Predictor):
        export(predictor, output, target.identity, record)
    else:
        export_model(predictor, output, target, record)


def throughput(options: TrainOptions, module: Learner, seconds: float, operations: Operations) -> dict[str, float]:
    """How fast it trained: model-FLOPs use is against a large product in the precision of the training's own.

    Args:
        seconds: of optimisation alone.
    """
    steps = module.trainer.global_step
    if seconds <= 0 or not operations.flops:
        return {}
    mixed = "bf16" in options.trainer.chosen_precision()
    device = module.trainer.strategy.root_device
    peak = module.trainer.world_size * matrix_product_peak(device, torch.bfloat16 if mixed else torch.float32)
    rate = operations.flops * steps / seconds
    return {
        "positions_per_second": round(options.training.batch_size * steps / seconds, 1),
        "gflop_per_second": float(f"{rate / 1e9:.3g}"),
        "share_of_peak": float(f"{rate / peak:.2g}"),  # of a tiny predictor far below a thousandth
    }


def _compare_with_training(
    target: Target, predictor: Predictor, validation: DecodingValidation, console: Console
) -> None:
    """Say loudly where decoding gets less out of the network than training knows it to be worth."""
    forced, decoded = as_trained_and_decoded(
        target, predictor, evenly(validation.prompts, _COMPARED), validation.max_new_tokens
    )
    if decoded < _LEAST_OF_TRAINED * forced:
        console.print(
            f"[bold red]WARNING: chains decode with acceptance length {decoded:.2f} where the same texts, read as in "
            f"training, give {forced:.2f}[/]: what the network reads in decoding is not what it was trained on. Do not "
            "trust this predictor; please report it, with the command and the target's architecture.",
            highlight=False,
        )


def _measure(options: TrainOptions, decoder: ShapeDecoder, prompts: Sequence[Prompt]) -> SpeedResults:
    chosen = options.measurement
    return measure(
        decoder.target,
        {"transformers": "transformers", "autoregressive": None, "shape": decoder.drafter},
        evenly(prompts, chosen.limit),
        max_new_tokens=chosen.max_new_tokens,
        temperature=chosen.temperature,
        seed=options.seed,
        progress=options.trainer.enable_progress_bar,
        label=f"{options.output}, measured after training",
    )


def _show_sample(decoder: ShapeDecoder, prompts: Sequence[Prompt], options: TrainOptions, console: Console) -> None:
    if not prompts:
        return
    ids = decoder.target.encode(prompts[0].opening, prompts[0].template)
    out = decoder.generate(
        ids,
        do_sample=False,
        max_new_tokens=options.measurement.max_new_tokens,
        return_dict_in_generate=True,
    )
    assert isinstance(out, ShapeOutput)
    answer = decoder.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    console.print(f"\n> {prompts[0].turns[0]}\n{answer}\n", markup=False, highlight=False)


@rank_zero_only
def _say(line: str) -> None:
    print(line, flush=True)


# ------------------------------------------------------------------------------------------------- command


def parser(defaults: Path | None) -> ArgumentParser:
    """The command's options; those of the file `defaults` go before the dataclasses' own."""
    parser = ArgumentParser(
        prog="python -m shape.train",
        description="From conversations to an exported predictor with its measured speed-up.",
        default_config_files=[str(defaults)] if defaults else None,
    )
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_argument(*DRY_RUN, action="store_true", help="say what the training would take, and do nothing")
    parser.add_class_arguments(TrainOptions, as_group=False)
    return parser


def parse(arguments: Sequence[str]) -> TrainOptions:
    """Options from the command line. The quickstart's sizes are for its own target and no other."""
    with exit_on_error():
        defaults = bundled.path("configs", "quickstart.yaml")
    first = [argument for argument in arguments if not argument.startswith("--print_config")]
    ships = parser(defaults).parse_args(first).target == QUICKSTART_TARGET
    reader = parser(defaults if ships else None)
    return as_options(reader.instantiate(reader.parse_args(arguments)).as_dict())


def as_options(values: Mapping[str, Any]) -> TrainOptions:
    """Out of all that the parser knows."""
    return TrainOptions(**{name: value for name, value in values.items() if name not in ("config", "dry_run")})


def keep_freed_memory() -> None:
    """Keep what is freed for the next step: every step asks for the same hundreds of megabytes, and fetching them anew
    from Linux costs a CPU a third to a half of its time. For the process from now on; without glibc nothing happens.
    """
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
