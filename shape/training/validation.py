"""Validation by decoding: the acceptance length with the current weights, by which the best ones are kept."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, cast

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shape.data.backends import sampling
from shape.drafters import Drafter
from shape.errors import CheckpointError
from shape.evaluation.estimates import estimate, ratio
from shape.files import written_whole
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.prompts import side_by_side
from shape.target.inference import evaluating
from shape.target.model import Target
from shape.training.module import DrafterModule, TrainingModule
from shape.verification.tree_shape import TreeShape

_BATCH_SIZE = 8
_MEASURED = "measured"  # in the metadata of the best weights


def acceptance_length(emitted: Sequence[int], forwards: Sequence[int]) -> dict[str, float]:
    """Sum of tokens over sum of forwards, of each prompt: its value, and low and high of its interval."""
    counts = np.array([emitted, forwards], dtype=float)
    found = asdict(estimate(lambda weights: ratio(*(weights @ each for each in counts)), len(emitted)))
    # Where the prefill's tokens ended all answers there is nothing to divide.
    value = 1.0 if found["value"] is None else found["value"]
    return {name: value if figure is None else figure for name, figure in found.items()}


class DecodingValidation(pl.Callback):
    """Measures the acceptance length by decoding fixed prompts with the current weights, and keeps the best ones.

    Each process decodes its share of the prompts; processes that share the target's weights decode all of them at once.
    Decoding runs without autocast, in evaluation mode, without gradients.

    Args:
        prompts: token ids, (T,) int64 each.
        every: steps between measurements; one more comes at the end.
        max_new_tokens: per prompt.
        best_path: where the best weights go (safetensors), written by the first process, and from where, or from beside
            the checkpoint, a resumed run has those so far.
        name: of the run, in joint training, whose weights are measured.
        at_start: measure before the first step too, where training starts from trained weights.
        patience: measurements in a row without a new best after which training ends; None goes on.
        tree: the shape of the drafts, where a resumed run may have another one.
        asked: what the prompts were made from; default: their tokens, which chat templates with a date change by day.

    Attributes:
        history: acceptance length and its interval by step.
        seconds: that validation took, before a resumption too.
    """

    def __init__(
        self,
        prompts: Sequence[Tensor],
        every: int,
        max_new_tokens: int,
        best_path: Path,
        name: str = "",
        at_start: bool = False,
        patience: int | None = None,
        tree: TreeShape | None = None,
        asked: str | None = None,
    ) -> None:
        self.prompts, self.every, self.max_new_tokens, self.at_start = list(prompts), every, max_new_tokens, at_start
        self.best_path, self.name, self.patience, self.tree = best_path, name, patience, tree
        self._asked = asked or [prompt.tolist() for prompt in self.prompts]
        self.history: list[dict[str, float]] = []
        self.seconds = 0.0
        self._resumed_from = best_path
        self.lost = False  # whether the best weights of a checkpoint are gone, and none are kept since

    @property
    def state_key(self) -> str:
        return f"{super().state_key} {self.name}".strip()

    @property
    def best(self) -> dict[str, float] | None:
        return max(self.history, key=lambda entry: entry["value"], default=None)

    @property
    def _decoded(self) -> dict[str, str]:
        """What is decoded, as a hash, and the shape of the drafts: lengths compare with the same ones alone."""
        decoded = [self._asked, len(self.prompts), self.max_new_tokens]
        return {"asked": _digest(decoded), "tree": str(self.tree)}

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "seconds": self.seconds, **self._decoded}

    def on_load_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self._resumed_from = Path(cast(str, trainer.ckpt_path))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self.seconds = list(state_dict["history"]), state_dict["seconds"]
        for path in (self._resumed_from.with_name(self.best_path.name), self.best_path):
            if self.history and measured_in(path) in (self.best, {}):
                _copy(path, self.best_path)
                break
        else:
            self.lost = bool(self.history)  # and the best from now on are kept
            self.history.clear()
        own = self._decoded
        if "asked" not in state_dict:  # of before, which says it by the prompts' tokens, or not at all
            own["decoded"] = _digest([[prompt.tolist() for prompt in self.prompts], self.max_new_tokens])
        if self.history and any(state_dict.get(name, value) != value for name, value in own.items()):
            self.history.clear()
            rank_zero_only(print)(
                "validation decodes other prompts than before, or with other drafts: the best weights are chosen anew"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Of an end that is none any more: an undisturbed run would not have measured here. It stays where its weights
        # have taken the place of the best ones before.
        between = bool(self.history) and self.history[-1]["step"] % self.every
        if between and (self.history[-1] != self.best or len(self.history) == 1):
            self.history.pop()
        if self.at_start and not trainer.global_step:
            self._validate(trainer, pl_module)
        self._stop_without_progress(trainer)  # a run that had ended so

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step and trainer.global_step % self.every == 0:
            self._validate(trainer, pl_module)
            self._stop_without_progress(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validate(trainer, pl_module)

    def load_best(self, predictor: nn.Module) -> None:
        """Put the best weights into a predictor of the same configuration.

        Raises:
            CheckpointError: they are gone or damaged, or there are another run's in their place.
        """
        if self.lost:
            raise CheckpointError(f"the best weights of the checkpoint are not in {self.best_path}; {_MORE_STEPS}")
        load_weights(predictor, self.best_path)

    def _stop_without_progress(self, trainer: pl.Trainer) -> None:
        if self.patience is None or not self.history:
            return
        values = [entry["value"] for entry in self.history]
        if len(values) - 1 - values.index(max(values)) >= self.patience:
            trainer.should_stop = True

    def _validate(self, trainer: pl.Trainer, trained: pl.LightningModule) -> None:
        if self.history and self.history[-1]["step"] == trainer.global_step:
            return
        assert isinstance(trained, TrainingModule)
        module = trained.trained[self.name]
        started = monotonic()
        network = gathered(module.network)
        with evaluating([network]), torch.autocast(module.device.type, enabled=False):
            counts = self._counts(trainer, module, module.drafter(network))
        counts = trainer.strategy.reduce(counts, reduce_op="sum")
        measured = acceptance_length(*counts.tolist())
        best, entry = self.best, {"step": trainer.global_step, **measured}
        if trainer.is_global_zero and (best is None or entry["value"] > best["value"]):
            save_weights(network, self.best_path, entry)
            self.lost = False
        self.history.append(entry)
        named = {("acceptance_length" if name == "value" else name): figure for name, figure in measured.items()}
        values = {"/".join(filter(None, [self.name, "val", name])): figure for name, figure in named.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self.seconds += monotonic() - started

    def _counts(self, trainer: pl.Trainer, module: DrafterModule, drafter: Drafter) -> Tensor:
        """(2, prompts) int64: tokens and forwards of each prompt that this process decodes, 0 of the others."""
        counts = torch.zeros(2, len(self.prompts), dtype=torch.int64, device=module.device)
        shared, rank, world = module.target.sharded, trainer.global_rank, trainer.world_size
        mine = range(len(self.prompts)) if shared else range(rank, len(self.prompts), world)
        found = decode_counts(module.target, drafter, [self.prompts[i] for i in mine], self.max_new_tokens)
        if not shared or rank == 0:  # of those that decoded the same, one counts
            counts[:, list(mine)] = torch.tensor(found, dtype=counts.dtype, device=counts.device)
        return counts


def decode_counts(
    target: Target, drafter: Drafter, prompts: Sequence[Tensor], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Tokens emitted and target forwards, for each prompt, of greedy decoding with the drafter."""
    emitted: list[int] = []
    forwards: list[int] = []
    with ShapeDecoder(target, drafter, fall_back=False) as decoder:  # what it captures on a GPU is training's memory
        for start in range(0, len(prompts), _BATCH_SIZE):
            ids, mask = side_by_side(prompts[start : start + _BATCH_SIZE], target.device)
            options: dict[str, Any] = {**sampling(0.0), "max_new_tokens": max_new_tokens}
            output = decoder.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
            assert isinstance(output, ShapeOutput)
            emitted += output.stats.sequence_emitted
            forwards += output.stats.sequence_forwards
    return emitted, forwards


def gathered(network: PreTrainedModel) -> PreTrainedModel:
    """The network, or, where processes share its weights, a copy in each of them that has all."""
    state = network.state_dict()
    if not any(isinstance(each, DTensor) for each in state.values()):
        return network
    with torch.random.fork_rng(devices=[]):
        found = type(network)(network.config)
    found.load_state_dict(
        {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
    )
    return found.to(network.device)  # type: ignore[arg-type]


def save_weights(predictor: nn.Module, path: Path, measured: Mapping[str, float]) -> None:
    """With the measurement that they gave, an entry of `DecodingValidation.history`."""
    with written_whole(path) as temporary:
        # It knows of weights that are one.
        save_model(predictor, str(temporary), {_MEASURED: json.dumps(measured)})


def measured_in(path: Path) -> dict[str, float] | None:
    """The measurement stored beside a file's weights; None for no such file, empty where it does not say."""
    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {}).get(_MEASURED, "{}"))
    except (OSError, SafetensorError):
        return None


@rank_zero_only
def _copy(path: Path, to: Path) -> None:
    if path.resolve() != to.resolve():
        with written_whole(to) as temporary:
            shutil.copyfile(path, temporary)


_MORE_STEPS = (
    "give the same command with --ckpt_path last and more --training.steps, whose validation writes them again"
)


def load_weights(predictor: nn.Module, path: Path) -> None:
    """Put weights kept by `DecodingValidation` into a predictor of the same configuration.

    Raises:
        CheckpointError: they are gone or damaged.
    """
    try:
        load_model(predictor, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the best weights in {path} cannot be read ({error}); {_MORE_STEPS}") from error


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
