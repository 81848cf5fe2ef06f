"""Options of `shape.train`: dataclasses whose fields are the command line's and the configuration files' names."""

import math
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from shape import bundled
from shape.data.options import AnswerOptions
from shape.errors import ConfigError, require
from shape.features.options import FeatureOptions, StorageOptions, with_state
from shape.features.trainer import TrainerOptions
from shape.target.options import TargetOptions
from shape.verification.tree_shape import TreeShape

STATE_LOSSES = ("mse", "squared_norm", "smooth_l1")
LOGIT_LOSSES = ("soft_cross_entropy", "kl", "total_variation", "negative_log_acceptance", "sinkhorn")

Logger = Literal["csv", "tensorboard", "wandb", "mlflow", "none"]


@dataclass
class PredictorOptions:
    """The network; see `shape.networks.config.ShapeConfig`, whose fields of the same names these become.

    Attributes:
        kind: shape, or a baseline: medusa, eagle, peagle (P-EAGLE), mtp, block (DFlash, DFlash2, DSpark), which have a
            window of one state, no refinement, and fix step_mode and token_conditioning. Or model, a small language
            model of the target's tokens, which reads no states and of these options num_layers, num_heads and
            intermediate_size alone: the width of its states.
        window: known states that the predictor reads.
        hidden_size: of eagle, peagle and block, a width other than the target's, with own_heads and own_embeddings;
            null is the target's.
        intermediate_size: its width; null follows from the target: shape's is chosen, that of eagle, peagle,
            mtp and block is that of the target's own layers. medusa has none.
        num_layers: residual blocks at that width; residual layers of each of medusa's heads; decoder layers of the
            others.
        attention: SHAPE's steps also attend to all known positions.
        num_heads: attention heads; null makes shape's 64 wide, and takes the target's number for the others.
        num_steps: tokens ahead that are predicted. Parallel networks draft no further; recursive ones are unrolled so
            far in training.
        step_mode: all steps from one window, or one network applied again to its own prediction.
        token_conditioning: read no token, the last committed one, or each token of the drafted path.
        refinement: what is done to shape's raw prediction.
        refinement_dim: width of the reduced space.
        refinement_epsilon: entropic regularisation.
        refinement_alpha: share of the refined state.
        refinement_alpha_learned: learn the share, starting from it.
        refinement_readout: what is read of the transport plan.
        refinement_iterations: Sinkhorn iterations.
        refinement_last_update: which marginal is exact in the end.
        dropout: probability, of kind shape.
        feature_layers: layers of the target that are read, shape's with -1 in the end; auto is a low, a middle and a
            high one, as published for EAGLE-3.
        transformer_layer_config: of eagle's, peagle's, mtp's and block's decoder layers, what differs from the target's
            geometry.
        draft_vocab_size: draft from so many of the most frequent tokens only; null drafts from all, auto from as many
            as target and data suggest.
        markov_rank: rank of a bias by the token before, for steps that do not read it; 0 is none.
        markov_head_type: whether the bias is of the token alone or, of block, has a state of its own along the path,
            is gated by the network's state, or chooses by both among each step's likeliest tokens (DFlash2).
        selector_top_k: how many these are.
        conv_kernel_size: places of a block that its convolutions read (DFlash2); 0 is none.
        conv_group_size: channels that share what a place adds to these convolutions' kernels.
        coupling: keep the steps' marginals under the bias, by a coupling over so many candidates; 0 does not.
        confidence: estimate where the target will agree, for dynamic trees.
        shared_head: one output embedding of its own for all of medusa's steps.
        residual_bias: biases in medusa's residual layers.
        own_heads: output embeddings of its own, started from the target's.
        own_embeddings: input embeddings of its own, started from the target's.
        mask_token_id: token of the target that fills block's and peagle's places; null chooses one.
        sample_from_anchor: block's first place drafts too (DSpark), or only those behind it (DFlash).
        sliding_window_non_causal: block's layers with a sliding window see all places, and not those before alone.
        confidence_head_with_markov: block's confidence reads the Markov table too.
        norm_before_residual: eagle's layer adds to the normalised state.
        norm_before_fc: eagle normalises its features together before they are fused.
        fc_norm: eagle normalises each layer's features before they are fused (EAGLE-3.1).
        norm_output: eagle's next step reads the normalised output (EAGLE-3.1).
    """

    kind: Literal["shape", "medusa", "eagle", "peagle", "mtp", "block", "model"] = "shape"
    window: int = 8
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int = 1
    attention: bool = False
    num_heads: int | None = None
    num_steps: int = 8
    step_mode: Literal["parallel", "recursive"] = "parallel"
    token_conditioning: Literal["none", "root", "path"] = "root"
    refinement: Literal["none", "affine", "sinkhorn"] = "sinkhorn"
    refinement_dim: int = 64
    refinement_epsilon: float = 0.1
    refinement_alpha: float = 0.5
    refinement_alpha_learned: bool = False
    refinement_readout: Literal["marginal", "barycentric"] = "marginal"
    refinement_iterations: int = 10
    refinement_last_update: Literal["column", "row"] = "column"
    dropout: float = 0.0
    feature_layers: list[int] | Literal["auto"] = field(default_factory=lambda: [-1])
    transformer_layer_config: dict[str, Any] | None = None
    draft_vocab_size: int | Literal["auto"] | None = "auto"
    markov_rank: int = 64
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

    @property
    def known_states(self) -> int | None:
        """States before a root that are read: a window of so many, or None for all of the text."""
        if self.kind == "medusa":
            return 1
        return self.window if self.kind == "shape" and not self.attention else None


@dataclass(frozen=True)
class Losses:
    """Weights of the losses, and the factor by which each further step counts less.

    Attributes:
        mse: weight of the mean squared error of states.
        squared_norm: weight of the squared norm of that error, which is the width times the mean (the paper's).
        smooth_l1: weight of the Huber loss of states (EAGLE's).
        soft_cross_entropy: weight of the cross-entropy of the target's distribution (the paper's).
        kl: weight of the Kullback-Leibler divergence, which has the same gradient.
        total_variation: weight of the distance that one minus acceptance is.
        negative_log_acceptance: weight of the logarithm of acceptance.
        sinkhorn: weight of the transport loss; off by default.
        step_decay: factor by which each further step counts less; 1 counts all alike.
        sinkhorn_scale: squared distance at which a mistake costs all, in units of the mean one.
        sinkhorn_epsilon: entropic regularisation of the transport loss.
        sinkhorn_support: the target's likeliest tokens, between which mass is moved.
        sinkhorn_iterations: of the transport loss.

    Raises:
        ConfigError: a negative weight, no weight at all, or a parameter out of range.
    """

    mse: float = 0.0
    squared_norm: float = 0.0
    smooth_l1: float = 0.5
    soft_cross_entropy: float = 1.0
    kl: float = 0.0
    total_variation: float = 0.0
    negative_log_acceptance: float = 0.0
    sinkhorn: float = 0.0
    step_decay: float = 0.8
    sinkhorn_scale: float = 1.0
    sinkhorn_epsilon: float = 0.1
    sinkhorn_support: int = 16
    sinkhorn_iterations: int = 10

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in (*STATE_LOSSES, *LOGIT_LOSSES)}
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"the weight of the loss {name} is {weight}: it has to be 0 or more")
        if not any(weights.values()):
            raise ConfigError(f"all losses have weight 0: give one of {', '.join(weights)} a positive weight")
        require(self, "step_decay", above=0, most=1, group="losses.")
        require(self, "sinkhorn_scale sinkhorn_epsilon", above=0, group="losses.")
        require(self, "sinkhorn_support sinkhorn_iterations", least=1, group="losses.")

    @property
    def on_states(self) -> dict[str, float]:
        """The positive weights of losses that compare hidden states."""
        return {name: weight for name in STATE_LOSSES if (weight := getattr(self, name)) > 0}

    @property
    def on_logits(self) -> dict[str, float]:
        """The positive weights of losses that compare distributions: without any, no logits are needed."""
        return {name: weight for name in LOGIT_LOSSES if (weight := getattr(self, name)) > 0}


@dataclass
class TrainingOptions:
    """How the predictor is optimised.

    Attributes:
        steps: optimiser steps; null follows from the data.
        batch_size: positions per optimiser step, over all processes and accumulated parts together.
        learning_rate: AdamW's peak, reached after `warmup_steps`.
        warmup_steps: steps over which the learning rate rises to its peak.
        decay: how the learning rate falls to zero over the remaining steps.
        weight_decay: on matrices only; biases, gates and norms are left alone.
        noise: standard deviation of uniform noise on the input states, in units of each state's root mean square.
            Off by default: `shape train --training.noise 0.2` was no better within its interval.
        noise_absolute: that deviation is in the states' own units (the paper's), whatever their size.
        ema: validate and export an exponential moving average of the weights, with this decay per step; null takes the
            weights themselves.
        max_minutes: stop after so long, of steps and validation (answers, features and the measurement at the end come
            on top), and shrink the learning rate's schedule to fit; such a run depends on the machine's speed and
            cannot be reproduced bit by bit.
        conversations: learn from so many of the conversations alone, evenly chosen; null is all. For learning curves,
            which say whether more data would help.
        gradient_checkpointing: compute unrolled steps (of block its layers) a second time in the backward pass, instead
            of keeping what they computed: more time for less memory, and the same result.
        compile: losses, and steps of networks that do not attend to whole texts, through torch.compile, which takes a
            minute or more before the first step; the same up to rounding, but for dropout's draws.
        checkpoint_every: steps between resumable checkpoints; null is five minutes. One more is written at the end, and
            at Ctrl-C or SIGTERM.
        workers: processes that read features ahead; 0 reads in the training process.
    """

    steps: int | None = None
    batch_size: int = 1024
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay: Literal["cosine", "linear", "none"] = "cosine"
    weight_decay: float = 0.01
    noise: float = 0.0
    noise_absolute: bool = False
    ema: float | None = None
    max_minutes: float | None = None
    conversations: int | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: int | None = None
    workers: int = 0

    def check(self) -> None:
        """Raises ConfigError for the first value out of range."""
        require(self, "steps batch_size checkpoint_every conversations max_minutes", above=0, group="training.")
        require(self, "warmup_steps weight_decay noise workers", least=0, group="training.")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"training.learning_rate is {self.learning_rate}; give a value between 0 and 1")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"training.ema is {self.ema}; give a decay between 0 and 1, or null")


@dataclass
class ValidationOptions:
    """Decoding during training, by which the best weights are chosen.

    Attributes:
        prompts: how many, from the validation data.
        max_new_tokens: per prompt.
        every: steps between measurements; null is a fifth of all.
        patience: end training after so many measurements in a row without a new best; null goes on to the last step.
            The learning rate should not depend on an end that nobody knows: --training.decay none, with --training.ema.
    """

    prompts: int = 32
    max_new_tokens: int = 64
    every: int | None = None
    patience: int | None = None


@dataclass
class MeasurementOptions:
    """The comparison with autoregressive decoding that ends the run.

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
            held out of `data`. Conversations of `data` that ask the same are left out.
        init: start from this predictor, ours or of another package: its network, weights and draft vocabulary, with a
            fresh optimiser; for a target that was fine-tuned, or for data of another kind.
        output: folder of the exported predictor; checkpoints, logs and features go below it.
        regenerate: let the target answer the prompts of `data` itself, and learn from its answers (kept in the
            features folder); false learns from the answers as they are, which is right where shape regenerate or a
            server wrote them.
        features: folder of stored features, or an address that fsspec knows (s3://...), made by shape extract or by an
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
        dtype: dtype to run the target in; null is its checkpoint's own.
        ckpt_path: resume from this checkpoint; "last" is the one in the output folder.
        logger: where metrics go: csv, tensorboard, wandb, mlflow, several of these in a list, or none.
        predictor: the network.
        tree: default shape of the drafts.
        losses: weights of the losses.
        training: optimisation.
        validation: decoding during training.
        measurement: the comparison at the end.
        regeneration: how the target answers; an answer is at most half of `max_length`, and a prompt that reaches it
            ends its conversation.
        extraction: how features are stored.
        trainer: devices, precision and so on, as Lightning's Trainer has them.
    """

    target: str = bundled.TARGET
    data: str | None = None
    validation_data: str | None = None
    regenerate: bool = True
    init: str | None = None
    output: str = "checkpoints/shape"
    features: str | None = None
    online: bool = False
    shard_target: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    max_length: int | None = None
    limit: int | None = None
    skip_bad_rows: bool = False
    seed: int = 0
    dtype: str | None = None
    ckpt_path: str | None = None
    logger: Logger | list[Logger] = field(default_factory=lambda: ["csv", "tensorboard"])
    predictor: PredictorOptions = field(default_factory=PredictorOptions)
    tree: TreeShape = field(default_factory=lambda: TreeShape(depth=8, width=2, nodes=12))
    losses: Losses = field(default_factory=Losses)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    measurement: MeasurementOptions = field(default_factory=MeasurementOptions)
    regeneration: AnswerOptions = field(default_factory=AnswerOptions)
    extraction: StorageOptions = field(default_factory=StorageOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)

    @property
    def loggers(self) -> list[str]:
        """Names of the loggers, none of them "none"."""
        given = [self.logger] if isinstance(self.logger, str) else self.logger
        return [name for name in given if name != "none"]

    @property
    def uses_bundled_answers(self) -> bool:
        """The conversations that ship come with the answers of the target that ships."""
        return self.data is None and self.target == bundled.TARGET

    @property
    def writes_answers(self) -> bool:
        """Whether the target has answers to write first."""
        return self.regenerate and not self.uses_bundled_answers

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer that the target writes, at most, where `max_length` is known."""
        return max(1, min(self.regeneration.max_new_tokens, cast(int, self.max_length) // 2))

    def check(self) -> None:
        """Raises ConfigError for options that contradict each other or are out of range, before anything is loaded."""
        self.training.check()
        self.regeneration.check("regeneration.")
        self.extraction.check_storage("extraction.")
        self.trainer.check()
        if Path(self.output).resolve() == Path(self.target).resolve():
            raise ConfigError(f"output {self.output} is the target's folder, which would be replaced; give another")
        if self.training.ema is not None and self.trainer.strategy == "fsdp":
            raise ConfigError("ema averages whole networks, and fsdp cuts them; leave it out, or give ddp")
        if self.training.compile and self.trainer.strategy == "fsdp":
            raise ConfigError("training.compile traces whole weights, and fsdp cuts them; leave one of the two out")
        if self.online and self.features is not None:
            raise ConfigError("online and features are both given; choose one: online computes what features stores")
        if self.shard_target and (self.regenerate or not (self.online or self.features)):
            raise ConfigError(
                "shard_target shares out the target within training, which neither stores its features nor answers "
                "with it; give --online true, or --features that are stored, and --regenerate false with data that "
                "holds its answers (shape regenerate)"
            )
        if self.predictor.kind == "model" and self.losses.on_states:
            raise ConfigError(
                "a draft model has states of its own, and the losses are on states "
                f"({', '.join(self.losses.on_states)}); set these to 0 and give losses on distributions alone, such as "
                "--losses.kl 1"
            )
        if not self.online:
            self._check_features()
        require(self, "limit", least=1)
        require(self.validation, "prompts every patience", least=1, group="validation.")
        require(self.validation, "max_new_tokens", least=2, group="validation.")
        require(self.measurement, "limit temperature", least=0, group="measurement.")
        require(self.measurement, "max_new_tokens", least=1, group="measurement.")
        for name in {"wandb", "mlflow"} & set(self.loggers):
            if find_spec(name) is None:
                raise ConfigError(f"the logger {name} is not installed; pip install {name}, or give another --logger")

    def _check_features(self) -> None:
        """Raises ConfigError for a predictor that reads states which are not stored, or all of a store at a time that
        lies elsewhere.
        """
        before, window = self.extraction.before, self.predictor.known_states
        if before is not None and (window is None or window > before):
            reads = "attends to whole texts" if window is None else f"reads a window of {window}"
            raise ConfigError(
                f"extraction.before is {before}, and this predictor {reads}; give --extraction.before "
                f"{'null' if window is None else window}"
            )
        if window is None and self.features is not None and "://" in self.features:
            raise ConfigError(
                f"this predictor attends to whole texts, whose order needs all of {self.features} at hand; copy it "
                "into a folder, or compute features online"
            )

    def feature_options(self) -> FeatureOptions:
        """Of resolved options, whose layers are known."""
        layers = self.predictor.feature_layers
        return FeatureOptions(
            max_length=self.max_length,
            layers=[-1] if layers == "auto" else with_state(layers),
            skip_bad_rows=self.skip_bad_rows,
            **asdict(self.extraction),
        )
