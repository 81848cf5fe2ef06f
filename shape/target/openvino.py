"""OpenVINO as the backend of a target: its layers and its output embedding run there, everything else stays in torch.

Drafters, acceptance rules and the loop see a Target like any other, whose states are float32 on the host; drafters have
the token tables in torch, and may draft on another device than the target verifies on. Intel's GPUs and NPUs have not
been tried.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shape import bundled
from shape.errors import ConfigError, UnsupportedTarget, how_to_install
from shape.files import cache_folder
from shape.target.loading import commit_of, dtype_name, dtype_of, first_line, only, read_config, read_tokenizer
from shape.target.model import Target
from shape.target.openvino_conversion import IDS, POSITIONS, ROWS, STATES, convert, mask_names, read_support, skeleton
from shape.target.quantize import check_name
from shape.target.support import Masks, Support

DEVICES = ("CPU", "GPU", "NPU")
_VERSION = 1  # of what a conversion writes
_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_CODE = frozenset({"trust_remote_code", "code_revision"})
_HIDDEN = torch.finfo(torch.float32).min


class OpenVinoTarget(Target):
    """A frozen causal LM whose forwards OpenVINO computes.

    Until ``convert`` it computes in torch, so that it can be probed; a target that was converted earlier begins as one.

    Args:
        model: in float32 on the CPU, or one that was converted already and has its token tables only.
        folder: of the converted models, which is written by ``convert`` where it is not there.
        place: OpenVINO's name of a device.
        compute: what is multiplied in: float32, bfloat16 or float16. Inputs and outputs are float32.
        quantize: "int8" or "int4" weights, which are other weights than the checkpoint's: answers are then those of
            the quantised target.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        name: str,
        revision: str,
        *,
        folder: Path,
        place: str,
        compute: torch.dtype,
        quantize: str | None,
    ) -> None:
        super().__init__(model, tokenizer, name, revision)
        self._folder, self._place, self.computed_in, self.quantized = folder, place, compute, quantize
        self._bodies: dict[tuple[int, ...], CompiledLayers] = {}
        self._own = threading.local()  # requests of the head, which hold a call's inputs and outputs
        self.converted: Support | None = read_support(folder)

    @classmethod
    def load(  # type: ignore[override]
        cls,
        target: str | Path,
        *,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        device_map: Any = None,
        quantize: str | None = None,
        **options: Any,
    ) -> "OpenVinoTarget":
        """From a path, a hub id or a bundled name; a later load of the same finds it converted.

        Args:
            dtype: what is computed in; None takes the checkpoint's own.
            device: CPU (the default), or GPU or NPU, which have not been tried.
            device_map: the same.
            options: transformers', as in ``Target.load``.

        Raises:
            ConfigError: OpenVINO is not installed, or has no such device, or does not compute in this dtype.
            UnsupportedTarget: nothing can be loaded from there.
        """
        place = _place(device or device_map)
        if quantize is not None:
            check_name(quantize)
        config = read_config(target, **options)
        compute = dtype_of(dtype, config)
        if compute not in _HINTS:
            name = dtype_name(compute)
            raise ConfigError(f"dtype {name} is not for backend openvino; give float32, bfloat16 or float16")
        where = bundled.resolve(str(target))
        revision = commit_of(where, options)
        folder = _folder_of(where, revision, quantize, options)
        settings: dict[str, Any] = {"folder": folder, "place": place, "compute": compute, "quantize": quantize}
        if read_support(folder) is None:
            given = Target.load(
                target, tokenizer=tokenizer, dtype="float32", device_map="cpu", prepacked=False, **options
            )
            return cls(given.model, given.tokenizer, str(target), given.revision, **settings)
        model = skeleton(folder, config, **only(_CODE, {"trust_remote_code": False, **options}))
        model.to(compute)  # type: ignore[arg-type]
        return cls(model, tokenizer or read_tokenizer(target, options), str(target), revision, **settings)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def places(self) -> str:
        return f"OpenVINO's {self._place}"

    @property
    def prepacked(self) -> bool:
        """Of the output embedding's rows that drafters have copies of."""
        return True

    @property
    def precision(self) -> str:
        dtype = dtype_name(self.computed_in)
        return dtype if self.quantized is None else f"{dtype}, {self.quantized} weights"

    def convert(self, support: Support) -> None:
        """Make of what torch computed until now what OpenVINO computes.

        Args:
            support: what the probe found.

        Raises:
            UnsupportedTarget: it cannot be converted.
        """
        convert(self.model, self._body, support, self.quantized, self._folder)
        self.converted = support
        self.model.to(self.computed_in)

    def discard(self) -> None:
        """Remove the conversion."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def layers(self, states: Sequence[int]) -> "CompiledLayers":
        """The decoder's layers, compiled for these states as ``hidden`` gives them."""
        key = tuple(states)
        if key not in self._bodies:
            self._bodies[key] = CompiledLayers(self._read_model("body"), key, self._compiled)
        return self._bodies[key]

    @torch.no_grad()
    def hidden(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Masks = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        layers: Sequence[int] = (-1,),
        **more: Any,
    ) -> Tensor:
        """As in ``Target``, float32.

        Args:
            cache: an ``OpenVinoCache``.
            more: for torch's forward, before the model is converted.
        """
        if self.converted is None:
            given: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
            return super().hidden(input_ids, layers=layers, **given, **more)
        compiled, past, new = self.layers(layers), 0 if cache is None else cache.longest, input_ids.shape[1]
        names = mask_names(self.converted)
        if attention_mask is None:
            masks = [_causal(past, new, window).expand(len(input_ids), -1, -1, -1) for window in names.values()]
        else:
            masks = [attention_mask] if isinstance(attention_mask, Tensor) else [attention_mask[name] for name in names]
        if position_ids is None:
            position_ids = torch.arange(past, past + new).expand_as(input_ids)
        if cache is not None:
            return cache.append(compiled, input_ids, position_ids, dict(zip(names, masks, strict=True)))
        request, rows = compiled.request(), np.arange(len(input_ids), dtype=np.int32)
        states = compiled.run(request, input_ids, position_ids, dict(zip(names, masks, strict=True)), rows)
        compiled.idle.append(request)
        return states

    def _read(self, hidden: Tensor) -> Tensor:
        if self.converted is None:
            return super()._read(hidden)
        request = getattr(self._own, "head", None)
        if request is None:
            request = self._own.head = self._head_model.create_infer_request()
        logits = torch.empty(*hidden.shape[:-1], self._head_rows_count, dtype=torch.float32)
        states = hidden.detach().reshape(-1, self.hidden_size).float().contiguous()
        request.set_input_tensor(shared(states.numpy()))
        request.set_output_tensor(shared(logits.view(-1, self._head_rows_count).numpy()))
        request.infer()
        return logits

    @cached_property
    def _head_model(self) -> Any:
        return self._compiled(self._read_model("head"))

    @cached_property
    def _head_rows_count(self) -> int:
        return self._head_model.output(0).get_partial_shape()[1].get_length()

    def _read_model(self, part: str) -> Any:
        return _core().read_model(self._folder / f"{part}.xml")

    def _compiled(self, model: Any) -> Any:
        """A model for the device. Nothing has fewer bits than was asked for, but for activations that meet quantised
        weights in bfloat16: these have 8 bits, token by token, as in torch. A dozen tokens take half of the time so.
        """
        properties: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_PRECISION_HINT": _HINTS[self.computed_in],
        }
        if self._place == "CPU":
            rounded = self.quantized is not None and self.computed_in is torch.bfloat16
            properties |= {
                "KV_CACHE_PRECISION": _HINTS[self.computed_in],
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": "64" if rounded else "0",
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            }
        try:
            return _core().compile_model(model, self._place, properties)
        except RuntimeError as error:
            raise UnsupportedTarget(
                f"target {self.name} cannot be compiled for OpenVINO's {self._place} in {self.precision}; give another "
                f"device or dtype ({first_line(error)})"
            ) from error


class CompiledLayers:
    """The decoder's layers on a device, for some states of theirs.

    Args:
        model: the converted layers, with the states of every layer as outputs.
        states: which of them to compute, as in ``Target.hidden``.
        compile_model: a function that compiles a model for the device.
    """

    def __init__(self, model: Any, states: tuple[int, ...], compile_model: Any) -> None:
        import openvino as ov
        from openvino import opset13 as ops

        found = {name: port for port in model.outputs for name in port.get_names() if name.startswith(STATES)}
        chosen = [found[f"{STATES}.{layer}"].get_node().input_value(0) for layer in states]
        side_by_side = chosen[0] if len(chosen) == 1 else ops.concat(chosen, -1).output(0)
        result = ops.result(side_by_side)
        self._compiled = compile_model(ov.Model([result], model.get_sinks(), model.get_parameters(), "layers"))
        self._width = self._compiled.output(0).get_partial_shape()[2].get_length()
        self.idle: list[Any] = []  # requests that nobody uses

    def request(self) -> Any:
        """A request with an empty state. Who is done with it puts it among ``idle``."""
        request = self.idle.pop() if self.idle else self._compiled.create_infer_request()
        request.reset_state()
        return request

    def run(self, request: Any, ids: Tensor, positions: Tensor, masks: dict[str, Tensor], rows: np.ndarray) -> Tensor:
        """States of tokens behind a request's state, (B, N, F) float32.

        Args:
            masks: (B, 1, N, T + N) float32 each, for T tokens in the state.
            rows: (B,) int32, from which row of the state each row goes on.
        """
        found = torch.empty(*ids.shape, self._width, dtype=torch.float32)
        # The request refers to this memory, which has to stay until it has run.
        given = {IDS: ids.contiguous().numpy(), POSITIONS: positions.contiguous().numpy(), ROWS: rows}
        given |= {name: mask.contiguous().numpy() for name, mask in masks.items()}
        for name, numbers in given.items():
            request.set_tensor(name, shared(numbers))
        request.set_output_tensor(shared(found.numpy()))
        request.infer()
        return found


def _causal(past: int, new: int, window: int | None) -> Tensor:
    """(1, 1, new, past + new), a model's own mask of tokens that follow others."""
    keys = torch.arange(past + new)
    distance = keys[past:, None] - keys
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(1, 1, new, past + new, dtype=torch.float32).masked_fill_(hidden, _HIDDEN)


def shared(numbers: np.ndarray) -> Any:
    """Without a copy."""
    import openvino as ov

    return ov.Tensor(numbers, shared_memory=True)


@cache
def _core() -> Any:
    import openvino as ov

    return ov.Core()


def _place(device: str | None) -> str:
    """OpenVINO's name of a device that is there.

    Raises:
        ConfigError: OpenVINO is not installed, or has no such device.
    """
    place = str(device or "CPU").upper()
    try:
        there = _core().available_devices
    except ImportError as error:
        raise ConfigError(f"backend openvino is not installed; {how_to_install('openvino')}") from error
    kind = place.partition(".")[0]
    if kind not in DEVICES or all(one.partition(".")[0] != kind for one in there):
        raise ConfigError(
            f"device {device} is not there for backend openvino, which finds {', '.join(there)}; give one"
        )
    return place


def _folder_of(where: str, revision: str, quantize: str | None, options: dict[str, Any]) -> Path:
    """Where a target's conversion is kept: another one when its files, a version or an option is another."""
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(Path(where).iterdir() if Path(where).is_dir() else ())
        if file.is_file()
    ]
    source = [where, revision] if revision else [os.path.realpath(where), files]
    packages = [version(name) for name in ("openvino", "nncf", "transformers") if quantize or name != "nncf"]
    given = {name: str(value) for name, value in options.items() if name != "token"}
    key = hashlib.sha256(json.dumps([_VERSION, source, packages, quantize, given], sort_keys=True).encode()).hexdigest()
    return cache_folder() / "openvino" / f"{Path(where).name}-{quantize or 'float'}-{key[:16]}"
