"""How a predictor or a feature store recognises its target."""

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from shape.errors import TargetMismatch
from shape.files import typed
from shape.target.quantize import quantized

# Encoded by every tokenizer into its identity: vocabularies can be equal where the merges differ.
_TOKENIZER_PROBE = "The 3 quick  brown foxes, 1,024 émigrés & 東京\n\tdef f(x): return x**2 <|im_start|> </s>"
_HEAD_SAMPLE_ROWS = 64
_WEIGHT_SAMPLE = 8  # rows and columns


@dataclass(frozen=True)
class TargetIdentity:
    """What a predictor or a feature store remembers of its target. Hashes are sha256, shortened to 16 digits."""

    name: str
    revision: str
    hidden_size: int
    vocab_size: int
    tokenizer_hash: str
    head_hash: str
    template_hash: str

    @classmethod
    def of(cls, target: Any) -> "TargetIdentity":
        return cls(
            target.name,
            target.revision,
            target.hidden_size,
            target.vocab_size,
            tokenizer_hash=tokenizer_hash(target.tokenizer),
            head_hash=_head_hash(target.head),
            template_hash=_template_hash(target.tokenizer),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TargetIdentity":
        return typed(cls, {field.name: values[field.name] for field in fields(cls)})

    def differences(self, other: "TargetIdentity") -> list[str]:
        """Phrases naming what differs; name and revision do not count, so a moved folder stays the same target."""
        labels = {
            "hidden_size": "hidden size",
            "vocab_size": "vocabulary size",
            "tokenizer_hash": "tokenizer",
            "head_hash": "output embedding",
            "template_hash": "chat template",
        }
        found = []
        for field, label in labels.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            # An empty hash means "unknown" (no tokenizer at hand), which contradicts nothing.
            if mine != theirs and mine != "" and theirs != "":
                found.append(f"{label} ({mine} against {theirs})")
        return found

    def require(self, other: "TargetIdentity") -> None:
        """That a predictor of this target drafts for the other. Another chat template, as repositories get after their
        release, does no harm but to acceptance, and only warns.

        Raises:
            TargetMismatch: it is another target.
        """
        revision = f" (revision {self.revision})" if self.revision else ""
        if differences := self.differences(replace(other, template_hash="")):
            raise TargetMismatch(
                f"the predictor was trained for target {self.name}{revision}, and {other.name} differs in "
                f"{', '.join(differences)}; give the target it was trained for, or train one for this target"
            )
        if self.differences(other):
            warnings.warn(
                f"the predictor was trained for target {self.name}{revision} with another chat template than "
                f"{other.name} has; drafts are verified all the same, but fewer may be accepted",
                stacklevel=2,
            )


def _digest(content: str | bytes) -> str:
    if not content:
        return ""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of the vocabulary and of a probe sentence's ids: content, not file format or library version."""
    if tokenizer is None:
        return ""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return _digest(json.dumps([vocabulary, tokenizer(_TOKENIZER_PROBE)["input_ids"]]))


def _template_hash(tokenizer: Any) -> str:
    """Hash of the chat template, or of all where a tokenizer has several by name."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return _digest(template if isinstance(template, str) else json.dumps(template, sort_keys=True))


def _ordinary(weight: Any) -> bool:
    """Whether it is an ordinary tensor of floats; quantisers give their own kinds, or a method."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and weight.itemsize > 1


def _comparable(weight: Any) -> bool:
    """Whether its numbers in bfloat16 tell which weight it is: not where it is offloaded, nor in float16, which rounds
    other digits.
    """
    return _ordinary(weight) and weight.device.type != "meta" and weight.dtype != torch.float16


def _bytes(sample: Tensor) -> bytes:
    return sample.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def float_weight(module: Any) -> Tensor | None:
    """The module's weight where it is an ordinary matrix of floats; None where it is quantised."""
    weight = getattr(module, "weight", None)
    return weight if _ordinary(weight) else None


def answering_as(target: Any) -> dict[str, str | int]:
    """What the answers of a target depend on, whatever its name, as JSON."""
    identity = {name: value for name, value in target.identity.to_dict().items() if name not in ("name", "revision")}
    weights = weights_hash(target.model)
    return {"dtype": str(target.dtype), **identity, **({"weights": weights} if weights else {})}


def weights_hash(model: nn.Module) -> str:
    """Hash of a few numbers of every weight in bfloat16, which tells fine-tuned targets apart that share their head.

    Empty, which is "unknown", where a weight is quantised, in float16, offloaded, or shared out among processes.
    """
    config = getattr(model, "config", None)
    if quantized(model) or getattr(config, "quantization_config", None):  # into buffers, some of them
        return ""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not _comparable(parameter):
            return ""
        weight = parameter.detach()
        for dimension, size in enumerate(weight.shape):
            rows = torch.linspace(0, size - 1, min(size, _WEIGHT_SAMPLE), dtype=torch.float64).long()
            weight = weight.index_select(dimension, rows.to(weight.device))
        digest.update(name.encode() + _bytes(weight))
    return digest.hexdigest()[:16]


def _head_hash(head: nn.Module) -> str:
    """Hash of evenly spaced rows in bfloat16, so that loading in another dtype keeps the identity.

    Empty, which is "unknown", for a quantised head, and in float16, which rounds other digits: its rows are no longer
    those that a predictor was trained for, and still close enough to draft with.
    """
    with align_module_device(head):
        weight: Any = getattr(head, "weight", None)
        if not _comparable(weight):
            return ""
        rows, last = min(_HEAD_SAMPLE_ROWS, weight.shape[0]), weight.shape[0] - 1
        chosen = torch.linspace(0, last, rows, dtype=torch.float32).long()
        return _digest(_bytes(weight.detach()[chosen.to(weight.device)]))
