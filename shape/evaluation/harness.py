"""lm-evaluation-harness with a `ShapeDecoder` as its model, for MMLU and every other suite that it has.

The command is `shape.cli.harness`.
"""

from dataclasses import fields
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria

from shape.errors import ConfigError, how_to_install
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.target.loading import of_pair
from shape.target.model import announce
from shape.target.options import PairOptions

try:
    from lm_eval.__main__ import cli_evaluate  # noqa: F401  (the command, `shape.cli.harness`)
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ConfigError(f"lm-evaluation-harness is not installed ({error}); {how_to_install('eval')}") from error


class _StopsWithin(StopStringCriteria):
    """Stop strings in what was written. As transformers has them they may begin in the prompt, which the library's own
    models leave out.

    Args:
        context, mask: (B, L) ids of the prompts, padded on the left, and where these are no padding.
    """

    def __init__(self, tokenizer: Any, stop: list[str], context: Tensor, mask: Tensor) -> None:
        super().__init__(tokenizer, stop)
        whole = context.tolist()
        bare = [list(compress(row, here)) for row, here in zip(whole, mask.tolist(), strict=True)]
        self._prompts = sorted([*whole, *bare], key=len, reverse=True)

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Any:
        text = input_ids[0].tolist()
        prompt = next(prompt for prompt in self._prompts if text[: len(prompt)] == prompt)
        return super().__call__(input_ids[:, len(prompt) :], scores, **more)


@register_model("shape")
class ShapeLM(HFLM):
    """A decoder as lm-evaluation-harness sees it.

    Args:
        predictor, target, drafter, dtype, num_draft_tokens: see `ShapeDecoder.from_pretrained`.
        acceptance: a rule's name; the lossy ones change results, which is what they can be compared by.
        device: where the target is put, unless device_map says so.
        options: how target and predictor are read (see `shape.target.options.PairOptions`), and those of
            `lm_eval.models.huggingface.HFLM`: batch_size, max_length, add_bos_token, ...

    Raises:
        ShapeError: as `ShapeDecoder.from_pretrained` does.
    """

    def __init__(
        self,
        predictor: str | None = None,
        target: str | None = None,
        drafter: str | None = None,
        acceptance: str = "match",
        dtype: str | None = None,
        device: str | None = None,
        num_draft_tokens: str | int | None = None,
        **options: Any,
    ) -> None:
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # what the library asks for where nobody has
        place = options.pop("device_map", None) or device
        names = {entry.name for entry in fields(PairOptions)} & options.keys()
        loading = PairOptions(device_map=place, **{name: options.pop(name) for name in names})
        self.decoder = ShapeDecoder.from_pretrained(
            predictor=predictor,
            target=target,
            drafter=drafter,
            dtype=dtype,
            num_draft_tokens=num_draft_tokens,
            **of_pair(loading),
        )
        announce(self.decoder.target)
        if self.decoder.tokenizer is None:
            raise ConfigError(f"target {self.decoder.target.name} has no tokenizer; give a folder that has one")
        self.acceptance, self.emitted, self.forwards = acceptance, 0, 0
        super().__init__(pretrained=self.decoder.target.model, tokenizer=self.decoder.tokenizer, **options)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """(B, L) ids padded on the left -> (B, L') with what follows, cut short by the caller at the stop strings.

        Greedy unless a task says `do_sample`; samples depend on torch's global seed, which lm-evaluation-harness sets.
        """
        mask = generation_kwargs.get("attention_mask", torch.ones_like(context))
        sampled = bool(generation_kwargs.pop("do_sample", generation_kwargs.get("temperature", 0.0) > 0))
        if not sampled:
            for name in ("temperature", "top_k", "top_p", "min_p"):
                generation_kwargs.pop(name, None)
        out = self.decoder.generate(
            context,
            max_new_tokens=max_length - context.shape[1],
            do_sample=sampled,
            stop_strings=None,
            stopping_criteria=[_StopsWithin(self.tokenizer, stop, context, mask)] if stop else None,
            acceptance=self.acceptance,
            return_dict_in_generate=True,
            **generation_kwargs,
        )
        assert isinstance(out, ShapeOutput)
        self.emitted += out.stats.emitted
        self.forwards += out.stats.forwards
        return out.sequences

    def get_model_info(self) -> dict[str, Any]:
        """What the results say beside the task's figures: with the acceptance length of all that was written."""
        length = self.emitted / self.forwards if self.forwards else None
        drafter = self.decoder.drafter
        return {
            "model_num_parameters": self.decoder.target.model.num_parameters(),
            "model_dtype": self.decoder.target.precision,
            "model_revision": self.decoder.target.identity.revision,
            "model_sha": "",
            "drafter": "none" if drafter is None else str(drafter.name),
            "acceptance": self.acceptance,
            "acceptance_length": length,
        }
