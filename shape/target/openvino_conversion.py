"""A target as OpenVINO models: the decoder's layers with their KV cache as state, and the output embedding.

The layers are traced once by way of torch, with keys and values as inputs and outputs; these then become state, in the
form that OpenVINO's plugins fuse into one kernel of attention: read, reorder by rows, append, attend, keep. Nothing of
the state is copied in a forward, however long it is.
"""

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from shape.errors import ConfigError, UnsupportedTarget, how_to_install
from shape.files import typed
from shape.target.loading import first_line
from shape.target.support import Support, cache_name

IDS, POSITIONS, ROWS, STATES = "ids", "positions", "rows", "states"
"""Names of inputs and of outputs: of the latter ``states.-1`` is h, and ``states.k`` what layer k reads."""
_BATCH, _PAST, _NEW = 2, 5, 3  # of the example that is traced; no size of it is kept
_SUPPORT, _TABLES, _GENERATION = "support.json", "tables.safetensors", "generation_config.json"


def mask_names(support: Support) -> dict[str, int | None]:
    """The attention masks that a target takes, and the window of each."""
    if support.mask_by_layer_type:
        return {"full_attention": None, "sliding_attention": support.sliding_window}
    return {"attention": support.sliding_window}


class _Appending(DynamicLayer):
    """Keys and values of a layer, (B, heads, T, D), to which new ones are appended."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True


class _Layers(nn.Module):
    """The forward of the decoder's layers as a function of tensors alone."""

    def __init__(self, body: nn.Module, masks: Sequence[str]) -> None:
        super().__init__()
        self.body, self._masks = body, masks

    def forward(self, ids: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        masks, past = rest[: len(self._masks)], rest[len(self._masks) :]
        layers: list[Any] = [_Appending(*pair) for pair in zip(past[::2], past[1::2], strict=True)]
        found = self.body(
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks[0] if len(masks) == 1 else dict(zip(self._masks, masks, strict=True)),
            use_cache=True,
            output_hidden_states=True,
            **{cache_name(type(self.body).forward): Cache(layers=layers)},
        )
        present = [states for layer in layers for states in (layer.keys, layer.values)]
        return found.last_hidden_state, *found.hidden_states, *present


def convert(model: PreTrainedModel, body: nn.Module, support: Support, quantize: str | None, folder: Path) -> None:
    """Write the models, what drafters need of the weights, and what the probe found, into a folder that appears as a
    whole or not at all. The model keeps what drafters need alone.

    Args:
        model: in float32, on the CPU. body: its layers, without the output embedding.
        quantize: "int8" or "int4" weights; None keeps float32.

    Raises:
        UnsupportedTarget: the model cannot be traced.
    """
    import openvino as ov

    name = getattr(model.config, "_name_or_path", "")
    logging.getLogger("shape").info("converting target %s to OpenVINO, once; kept in %s", name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        try:
            parts = {"body": _traced_body(body, support), "head": _traced_head(model)}
        except Exception as error:  # tracers have errors of many kinds
            raise UnsupportedTarget(
                f"target {name} cannot be converted to OpenVINO; use backend torch ({first_line(error)})"
            ) from error
        for part, traced in parts.items():
            ov.save_model(compressed(traced, quantize), made / f"{part}.xml", compress_to_fp16=False)
        save_file({key: kept.contiguous() for key, kept in _tables(model)}, made / _TABLES)
        model.config.save_pretrained(made)
        model.generation_config.save_pretrained(made)  # type: ignore[union-attr]
        (made / _SUPPORT).write_text(json.dumps(asdict(support)), encoding="utf-8")
        if not folder.exists():  # another process may have been faster
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _release(model)


def read_support(folder: Path) -> Support | None:
    """What the probe found of a target that was converted into this folder; None where none was."""
    try:
        return typed(Support, json.loads((folder / _SUPPORT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def skeleton(folder: Path, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """The converted model without weights but for those that are kept, see ``_release``."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    for name, kept in load_file(folder / _TABLES).items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = kept
        else:
            module._parameters[leaf] = nn.Parameter(kept, requires_grad=False)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _release(model: PreTrainedModel) -> None:
    """Let go of the weights that only the layers read: all matrices but those of the token tables."""
    kept = {id(weight) for table in _token_tables(model) for weight in table.parameters()}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.dim() > 1 and id(weight) not in kept:
                module._parameters[name] = nn.Parameter(weight.to("meta"), requires_grad=False)


def compressed(model: Any, quantize: str | None) -> Any:
    """A converted model with weights of 8 or 4 bits.

    Raises:
        ConfigError: NNCF is not installed.
    """
    if quantize is None:
        return model
    try:
        import nncf
    except ImportError as error:
        raise ConfigError(
            f"quantize {quantize} needs NNCF with backend openvino; {how_to_install('openvino')}"
        ) from error
    modes = nncf.CompressWeightsMode
    if quantize == "int8":
        return nncf.compress_weights(model, mode=modes.INT8_ASYM)
    return nncf.compress_weights(model, mode=modes.INT4_ASYM, group_size=_group_size(model), ratio=1.0)


def _group_size(model: Any) -> int:
    """Weights that share a 4-bit scale: what divides the inputs of all matrices, 128 at most."""
    widths = [op.shape[-1] for op in model.get_ops() if op.get_type_name() == "Constant" and len(op.shape) == 2]
    return next((size for size in (128, 64, 32, 16) if all(width % size == 0 for width in widths)), -1)


def _token_tables(model: PreTrainedModel) -> list[nn.Module]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _tables(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """What of a model is kept in torch: its token tables, vectors and buffers."""
    kept = {id(weight) for table in _token_tables(model) for weight in table.parameters()}
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or id(weight) in kept:
            yield name, weight.detach()
    yield from model.named_buffers()


def _traced_body(body: nn.Module, support: Support) -> Any:
    """The layers as a model with inputs ids, positions, masks and rows, and states of every layer as outputs."""
    import openvino as ov
    from openvino._offline_transformations import apply_make_stateful_transformation

    masks, shapes = list(mask_names(support)), [one for layer in support.layers for one in (layer.keys, layer.values)]
    example = [
        torch.zeros(_BATCH, _NEW, dtype=torch.int64),
        torch.arange(_PAST, _PAST + _NEW).repeat(_BATCH, 1),
        *(torch.zeros(_BATCH, 1, _NEW, _PAST + _NEW) for _ in masks),
        *(torch.randn(_BATCH, heads, _PAST, size) for heads, size in shapes),
    ]
    with torch.no_grad():
        model = _traced(_Layers(body, masks), tuple(example))
    past, present = ([f"{name}.{number}" for number in range(len(shapes))] for name in ("past", "present"))
    depth = len(model.outputs) - len(present)
    states = [f"{STATES}.{layer}" for layer in (-1, *range(depth - 1))]
    free: Mapping[str, list[int]] = {
        IDS: [-1, -1],
        POSITIONS: [-1, -1],
        **{name: [-1, 1, -1, -1] for name in masks},
        **{name: [-1, heads, -1, size] for name, (heads, size) in zip(past, shapes, strict=True)},
    }
    for port, (name, sizes) in zip(model.inputs, free.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(ov.PartialShape(sizes))
    for port, name in zip(model.outputs, [*states, *present], strict=True):
        port.get_tensor().add_names({name})  # two states can be one tensor
    _reorder_rows(model, past)
    apply_make_stateful_transformation(model, dict(zip(past, present, strict=True)))
    _start_empty(model, dict(zip(past, shapes, strict=True)))
    model.validate_nodes_and_infer_types()
    return model


def _traced_head(model: PreTrainedModel) -> Any:
    """The output embedding, (T, H) -> (T, V)."""
    size = model.config.get_text_config().hidden_size
    with torch.no_grad():
        head = _traced(model.get_output_embeddings(), (torch.zeros(_NEW, size),))
    head.reshape([-1, size])
    return head


def _traced(module: nn.Module, example: tuple[Tensor, ...]) -> Any:
    """What ``openvino.convert_model`` does, without what that sends to its makers."""
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    reader = FrontEndManager().load_by_framework("pytorch")
    with warnings.catch_warnings(action="ignore"):  # of code whose branches are the same for every text
        graph = TorchScriptPythonDecoder(module, example_input=example)  # has to live until it is converted
        return reader.convert(reader.load(graph))


def _reorder_rows(model: Any, past: Sequence[str]) -> None:
    """Let an input say from which row of the state each row goes on."""
    import numpy as np
    from openvino import opset13 as ops

    rows = ops.parameter([-1], np.int32, name=ROWS)
    rows.output(0).get_tensor().set_names({ROWS})
    model.add_parameters([rows])
    for port in model.inputs:
        if port.get_any_name() in past:
            readers = port.get_target_inputs()
            chosen = ops.gather(port.get_node(), rows, ops.constant(0))
            for reader in readers:
                reader.replace_source_output(chosen.output(0))
    model.validate_nodes_and_infer_types()


def _start_empty(model: Any, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Let the state begin with no tokens, and with as many rows as there are ids."""
    import numpy as np
    from openvino import opset13 as ops

    ids = next(port for port in model.inputs if port.get_any_name() == IDS)
    batch = ops.gather(ops.shape_of(ids.get_node(), output_type="i64"), ops.constant([0]), ops.constant(0))
    for op in model.get_ops():
        if op.get_type_name() == "ReadValue":
            heads, size = shapes[next(name for name in shapes if op.get_variable_id().startswith(name + "present"))]
            sizes = [ops.constant(np.array([number], np.int64)) for number in (heads, 0, size)]
            op.set_arguments([ops.broadcast(ops.constant(0.0, dtype=np.float32), ops.concat([batch, *sizes], 0))])
