"""The drop-in for ``transformers.pipeline("text-generation")``."""

from copy import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import TextGenerationPipeline

from shape.errors import ConfigError

if TYPE_CHECKING:
    from shape.generation.decoder import ShapeDecoder


class DraftingPipeline(TextGenerationPipeline):
    """transformers' own pipeline around another ``generate``.

    Args:
        decoder: decodes in place of the model.
        options: of ``TextGenerationPipeline`` but for the device: the model stays where it is.

    Raises:
        ConfigError: the decoder's target has no tokenizer.
    """

    def __init__(self, decoder: "ShapeDecoder", **options: Any) -> None:
        model, tokenizer = decoder.target.model, decoder.tokenizer
        if tokenizer is None:
            raise ConfigError(
                f"target {decoder.target.name} has no tokenizer, and a pipeline takes text; give one to ShapeDecoder"
            )
        # Unless told otherwise, transformers moves the model to the first accelerator, away from its drafter.
        place = {} if hasattr(model, "hf_device_map") else {"device": decoder.target.device}
        super().__init__(model=model, tokenizer=tokenizer, task="text-generation", **place, **options)
        self._drafting = _Drafting(decoder)

    def _forward(self, model_inputs: dict[str, Any], **options: Any) -> Any:  # type: ignore[override]
        # A call of this pipeline with another model: neither the target nor the pipeline is changed, not for a moment.
        call = copy(self)
        call.model = self._drafting  # type: ignore[assignment]
        return super(DraftingPipeline, call)._forward(model_inputs, **options)


class _Drafting:
    """A target's model but for ``generate``."""

    def __init__(self, decoder: "ShapeDecoder") -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder.target.model, name)

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        return self._decoder.generate(input_ids, **{**options, "return_dict_in_generate": False})
