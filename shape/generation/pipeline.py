"""The drop-in for ``transformers.pipeline("text-generation")``."""

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor
from transformers import TextGenerationPipeline

from shape.errors import ConfigError
from shape.target.model import Target


class DraftingPipeline(TextGenerationPipeline):
    """transformers' own pipeline around another ``generate``.

    Args:
        target: whose model and tokenizer it has. generate: decodes in place of the model's.
        options: of ``TextGenerationPipeline`` but for the device: the model stays where it is.

    Raises:
        ConfigError: the target has no tokenizer.
    """

    def __init__(self, target: Target, generate: Callable[..., Any], **options: Any) -> None:
        model, tokenizer = target.model, target.tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"target {target.name} has no tokenizer, and a pipeline takes text; give one to ShapeDecoder"
            )
        # Unless told otherwise, transformers moves the model to the first accelerator, away from its drafter.
        where = {} if hasattr(model, "hf_device_map") else {"device": target.device}
        super().__init__(model=model, tokenizer=tokenizer, task="text-generation", **where, **options)
        self._drafting = _Drafting(model, generate)

    def _forward(self, model_inputs: dict[str, Any], **options: Any) -> Any:  # type: ignore[override]
        # A call of this pipeline with another model: neither the target nor the pipeline is changed, not for a moment.
        call = copy(self)
        call.model = self._drafting  # type: ignore[assignment]
        return super(DraftingPipeline, call)._forward(model_inputs, **options)


class _Drafting:
    """A target's model but for ``generate``."""

    def __init__(self, model: Any, generate: Callable[..., Any]) -> None:
        self._model, self._generate = model, generate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        return self._generate(input_ids, **{**options, "return_dict_in_generate": False})
