"""What training leaves: the folder that `ShapeDecoder.from_pretrained` reads, with its model card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from shape.files import written_together
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.target.identity import TargetIdentity
from shape.target.model import Target

# The import stands in a try, or else transformers asks for a package named "shape".
_CUSTOM_GENERATE = '''"""transformers' generate with this predictor, in a few lines: shape does the work."""

try:
    from shape.custom_generate import generate_of
except ImportError as error:
    raise ImportError("this predictor needs the package shape-decoding; install it from its repository") from error

generate = generate_of(__name__)
'''


def export(predictor: Predictor, directory: str | Path, identity: TargetIdentity, training: Mapping[str, Any]) -> None:
    """Write what `ShapeDecoder.from_pretrained` reads: config, weights (safetensors), a model card, and what
    transformers' `custom_generate` runs.

    Args:
        training: plain values: command, data, steps, seconds, and, once measured, acceptance_length (with
            `low` and `high`) and speed_up.
    """
    predictor.config.target_identity = identity.to_dict()
    predictor.config.training = dict(training)
    with written_together(Path(directory)) as folder:
        predictor.save_pretrained(folder)
        (folder / "README.md").write_text(model_card(predictor, identity, training), encoding="utf-8")
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(_CUSTOM_GENERATE, encoding="utf-8")


def export_model(model: PreTrainedModel, directory: str | Path, target: Target, training: Mapping[str, Any]) -> None:
    """A draft model as transformers loads it, with the target's tokenizer and a card."""
    model.config.training = dict(training)
    with written_together(Path(directory)) as folder:
        model.save_pretrained(folder)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(_draft_model_card(model, target, training), encoding="utf-8")


def _draft_model_card(model: PreTrainedModel, target: Target, training: Mapping[str, Any]) -> str:
    millions = model.num_parameters() / 1e6
    return f"""---
library_name: transformers
base_model: {target.name}
tags: [speculative-decoding]
---
# Draft model for {target.name}

Drafts tokens for lossless speculative decoding of `{target.name}`, whose tokenizer it has: a causal LM of
{millions:.1f}M parameters that learned the target's distributions. It is of little use by itself.

```python
from shape import ShapeDecoder

decoder = ShapeDecoder.from_pretrained("path/or/id/of/this", target="{target.name}")
```

| | |
|---|---|
{_table(training)}
"""


def _table(training: Mapping[str, Any]) -> str:
    return "\n".join(f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in training.items())


def model_card(predictor: Predictor, identity: TargetIdentity, training: Mapping[str, Any]) -> str:
    """Markdown: what the predictor is for, how it came about, what was measured."""
    config = predictor.config
    millions = predictor.num_parameters() / 1e6
    revision = f" (revision {identity.revision})" if identity.revision else ""
    title = {"shape": "SHAPE", "eagle": "EAGLE", "peagle": "P-EAGLE", "mtp": "MTP", "block": "Block-parallel"}.get(
        config.kind, config.kind.capitalize()
    )
    return f"""---
library_name: shape
base_model: {identity.name}
tags: [speculative-decoding, custom_generate]
---
# {title} predictor for {identity.name}

Drafts tokens for lossless speculative decoding of `{identity.name}`{revision}: it reads the target's hidden
states, continues them to draft tokens, and the target verifies these. It
is of no use with another target: loading refuses one whose tokenizer or output embedding differ, and warns of another
chat template.

```python
from shape import ShapeDecoder  # the package shape-decoding, installed from its repository: no index has it

decoder = ShapeDecoder.from_pretrained("path/or/id/of/this")
```

or from the target as transformers loads it:

```python
path = "path/or/id/of/this"  # named twice: transformers does not pass it on
model.generate(**inputs, custom_generate=path, predictor=path, trust_remote_code=True)
```

{millions:.1f}M parameters: {describe(config)}.

| | |
|---|---|
{_table(training)}
"""


def describe(config: ShapeConfig) -> str:
    """One phrase that says what the network is."""
    vocabulary = f", drafts from {config.draft_vocab_size} tokens" if config.draft_vocab_size else ""
    extras = "".join(
        phrase
        for phrase, given in (
            (", attention to known positions", config.attention),
            (f", Markov bias of rank {config.markov_rank}", config.markov_rank),
            (", confidence estimate", config.confidence),
            (", own output embedding", config.own_heads),
        )
        if given
    )
    layers = f", reads layers {config.feature_layers}" if len(config.feature_layers) > 1 else ""
    if config.kind != "shape":
        return f"{config.num_steps} steps{layers}{extras}{vocabulary}"
    return (
        f"window {config.window}, {config.num_steps} {config.step_mode} steps, token conditioning "
        f"{config.token_conditioning}, refinement {config.refinement}{layers}{extras}{vocabulary}"
    )


def _cell(value: Any) -> str:
    if isinstance(value, Mapping) and {"value", "low", "high"} <= value.keys():
        if value["value"] is None or value["low"] is None:  # no interval from a single prompt
            return _cell(value["value"])
        return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")
