"""Run as a program: decoding over several devices, none of which is there.

A tensor on a pretended device keeps its numbers on the CPU, says that it lies elsewhere, and refuses what hardware
refuses: an operation on tensors of two devices, other than a copy. So results can be compared with those of the CPU,
and whatever forgets to move something raises. The device type is one that torch keeps for others, and it stays
registered for the life of the process: hence a process of its own.
"""

import os
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel

from shape.drafters import AdversaryDrafter, Drafter, OracleDrafter, SuffixDrafter, TrainedDrafter, TreeShape
from shape.drafters.compressed import lower_rank
from shape.errors import ShapeError
from shape.generation.decoder import ShapeDecoder
from shape.generation.eager import EagerSteps
from shape.generation.fixed import FixedSteps
from shape.generation.stage import Stage
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.registry import PREDICTORS
from shape.target.model import Target
from shape.verification import noise
from shape.verification.noise import shift

KIND = "pretended"
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
# These bring an answer to the host, or something from it; so does indexing by booleans.
WAITING = (*COPIES, torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)  # these take indices from the CPU
# What Apple's GPUs have not, and what they compute of integers through float32: 2^63 - 1 becomes -2^63.
ABSENT = ("aten::_int_mm", "aten::_linalg_eigh", "aten::_linalg_svd")
THROUGH_FLOATS = ("aten::abs", "aten::abs_")
# Prompts of 9, 6 and 8 tokens.
IDS = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(9) >= torch.tensor([[0], [3], [1]])).long()


class Pretended(torch.Tensor):
    """A CPU tensor that says it lies on another device."""

    actual: Tensor

    @staticmethod
    def __new__(cls, actual: Tensor, device: torch.device) -> "Pretended":
        layout = {"strides": actual.stride(), "storage_offset": actual.storage_offset(), "dtype": actual.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, actual.shape, device=device, **layout)
        made.actual = actual
        return made

    def __init__(self, actual: Tensor, device: torch.device) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.actual!r} on {self.device}"

    def tolist(self) -> Any:
        assert not silent, "the host is asked"
        asked.append("tolist")
        return self.actual.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return carry_out(operation, args, kwargs or {})


silent = False  # whether the host must not be asked
narrow = False  # whether there is no float64
asked: list[str] = []  # what the host has waited for


class Devices(TorchDispatchMode):
    """Within it tensors can be made on the pretended devices."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch then initialises no device

    def __enter__(self) -> "Devices":
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers, device=...) goes over the CPU
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return carry_out(operation, args, kwargs or {})


def carry_out(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU, its result on the device of its inputs, or on the one that is asked for."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.dim() > 0} or {tensor.device for tensor in tensors}
    others = {device for device in devices if device.type == KIND} if operation in INDEXING else devices
    kinds = {tensor.device.type for tensor in tensors} | {torch.device(kwargs.get("device") or KIND).type}
    asks = operation in WAITING[2:] and KIND in {tensor.device.type for tensor in tensors}
    asks |= operation in INDEXING and any(one.dtype == torch.bool for one in tree_leaves(args[1]) if one is not None)
    if silent and (asks or (operation in WAITING and len(kinds) > 1)):
        raise RuntimeError(f"{operation} waits for the host")
    # Uploads do not ask: see ``of_lists``.
    if asks or (operation in COPIES and KIND in kinds and torch.device(kwargs.get("device") or KIND).type == "cpu"):
        asked.append(str(operation))
    if operation not in COPIES and len(others) > 1:
        raise RuntimeError(f"{operation} is given tensors on {sorted(map(str, devices))}")
    home = tensors[0].device if operation in COPIES else next(iter(others or devices), torch.device("cpu"))
    home = torch.device(kwargs.get("device") or home)

    if KIND in {tensor.device.type for tensor in tensors}:
        name = operation._schema.name
        integers = any(tensor.dtype == torch.int64 for tensor in tensors)
        if name in ABSENT or (name in THROUGH_FLOATS and integers):
            raise NotImplementedError(f"{name} is not to be relied on here")

    def actual(part: Any) -> Any:
        if isinstance(part, torch.device):
            return torch.device("cpu")
        return part.actual if isinstance(part, Pretended) else part

    found = operation(*tree_map(actual, args), **tree_map(actual, kwargs))
    if operation._schema.is_mutable:  # in place
        return args[0]
    if home.type != KIND:
        return found
    if narrow and any(isinstance(part, Tensor) and part.dtype == torch.float64 for part in tree_leaves(found)):
        raise TypeError(f"{operation}: there is no float64 on this device")
    return tree_map(lambda part: Pretended(part, home) if isinstance(part, Tensor) else part, found)


def put(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(Pretended(parameter.data, device), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Pretended(buffer, device)


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()


def predictor_of(target: Target, **options: Any) -> Predictor:
    torch.manual_seed(0)
    options = {"intermediate_size": 48, "num_layers": 1, "vocab_size": 64, **options}
    config = ShapeConfig(hidden_size=target.hidden_size, **options)
    predictor = PREDICTORS[config.kind](config).double().eval()
    if config.draft_vocab_size is not None:
        predictor.draft_vocabulary = torch.arange(8, 8 + config.draft_vocab_size)
    return predictor


def spread(model: PreTrainedModel, places: dict[str, torch.device]) -> None:
    """What ``from_pretrained(device_map=...)`` does once weights are loaded."""
    for name, device in places.items():
        put(model.get_submodule(name), device)
    dispatch_model(model, dict(places), force_hooks=True)


def answers(target: Target | PreTrainedModel, drafter: Drafter) -> list[Tensor]:
    """Greedy, sampled, and sampled by rejection, on the CPU."""
    decoder = ShapeDecoder(target, drafter)
    ids, mask = IDS.to(decoder.target.device), MASK.to(decoder.target.device)
    options = {"max_new_tokens": 9, "pad_token_id": 0}
    out = [
        decoder.generate(ids, mask, **options),
        decoder.generate(ids, mask, do_sample=True, seed=3, **options),
        decoder.generate(ids, mask, do_sample=True, seed=3, acceptance="rejection", **options),
    ]
    assert all(one.device == ids.device for one in out)
    return [one.cpu() for one in out]


def check_sharded_target(config: PretrainedConfig) -> None:
    zero, one, two = (torch.device(KIND, index) for index in range(3))
    model = model_of(config)
    expected = answers(model, AdversaryDrafter(nodes=7))
    target = Target(model)
    rows, states = torch.tensor([5, 60]), torch.randn(2, 32, dtype=torch.float64)
    features, some = target.features(IDS, (0, 2, -1)), target.head_of(rows, torch.float64)(states)
    with Devices():
        places = {"model.embed_tokens": zero, "model.rotary_emb": zero, "model.norm": one, "lm_head": two}
        places |= {f"model.layers.{layer}": device for layer, device in enumerate((zero, one, two))}
        spread(model, places)
        assert model.model(IDS.to(zero)).last_hidden_state.device == one  # transformers leaves it there
        target = Target(model)
        assert target.hidden(IDS.to(zero)).device == target.device == zero
        found = answers(target, AdversaryDrafter(nodes=7))
        assert target.support.mode == "tree"
        assert [layer.device for layer in target.support.layers] == [None, one, two]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert torch.equal(target.features(IDS.to(zero), (0, 2, -1)).cpu(), features)
        for device in (zero, one, torch.device("cpu")):
            here = target.head_of(rows.to(device), torch.float64)(states.to(device))
            assert here.device == device and torch.allclose(here.cpu(), some, atol=1e-12)


def check_drafter_elsewhere(config: PretrainedConfig, places: list[tuple[str, str]], **options: Any) -> None:
    tree = TreeShape(depth=3, width=3)
    model = model_of(config)
    expected = answers(model, TrainedDrafter(predictor_of(Target(model), **options), tree))
    for home, elsewhere in places:
        model = model_of(config)
        predictor = predictor_of(Target(model), **options)
        with Devices():
            for module, device in ((model, home), (predictor, elsewhere)):
                if device != "cpu":
                    put(module, torch.device(device))
            found = answers(model, TrainedDrafter(predictor, tree))
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), (home, elsewhere)


def check_that_asking_raises() -> None:
    global silent
    with Devices():
        here = torch.ones(2, device=torch.device(KIND, 0))
        questions = (
            lambda: here.sum().item(),
            lambda: here.tolist(),
            lambda: here.cpu(),
            lambda: here.nonzero(),
            lambda: here[here > 0],
            lambda: here + torch.tensor([1.0, 2.0], device=here.device),
        )
        silent = True
        try:
            for number, ask in enumerate(questions):
                try:
                    ask()
                except (RuntimeError, AssertionError) as error:
                    assert "the host" in str(error)
                else:
                    raise AssertionError(f"question {number} was not noticed")
        finally:
            silent = False


def check_that_fixed_steps_are_silent(config: PretrainedConfig) -> None:
    """What a CUDA graph cannot hold raises here: an answer to the host, or a number from it."""
    options = {"max_new_tokens": 14, "pad_token_id": 0, "min_new_tokens": 3}
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    step, steps = Stage.step, 0

    def silently(stage: Stage, drafts: bool) -> None:
        global silent
        nonlocal steps
        silent, steps = True, steps + 1
        try:
            step(stage, drafts)
        finally:
            silent = False

    def decoders(model: PreTrainedModel, **options: Any) -> Iterator[ShapeDecoder]:
        texts = [row.tolist() for row in torch.cat([IDS, IDS, IDS], dim=1)]
        drafters = [None, OracleDrafter(texts, 0.3)]
        tree, line = TreeShape(depth=4, width=3, nodes=7), TreeShape(depth=3, width=1)
        for given, shapes in (
            ({"step_mode": "recursive", "token_conditioning": "path"}, (tree, line)),
            ({"kind": "eagle", "feature_layers": [1, 2, -1], "own_heads": True}, (tree, line)),
            ({"kind": "peagle", "feature_layers": [1, 2], "num_steps": 4, "mask_token_id": 5}, (tree,)),
            ({"kind": "block", "feature_layers": [0, 1], "markov_rank": 4, "mask_token_id": 5}, (tree,)),
        ):
            network = predictor_of(Target(model), **given)
            if KIND in str(model.device):
                put(network, model.device)
            drafters += [TrainedDrafter(network, shape) for shape in shapes]
        for drafter in drafters:
            yield ShapeDecoder(model, drafter, fall_back=False, **options)

    model = model_of(config)
    expected = [decoder.generate(IDS, MASK, **options, **more) for decoder in decoders(model) for more in ({}, sampled)]
    with Devices(), patch.object(Stage, "step", silently):
        device = torch.device(KIND, 0)
        put(model, device)
        for decoder in decoders(model, graphs=FixedSteps(slots=32)):
            for more in ({}, sampled):
                here = {"input_ids": IDS.to(device), "attention_mask": MASK.to(device)}
                found = decoder.generate(**here, **options, **more, return_dict_in_generate=True)
                assert found.stats.graphs and torch.equal(found.sequences.cpu(), expected.pop(0))
    assert steps > 50 and not expected


def check_that_other_steps_ask_once(config: PretrainedConfig) -> None:
    """Whatever is accepted, and however deep trees are; but for steps behind a stop, where the batch shrinks."""
    options = {"max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": [], "min_new_tokens": 3}
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}
    step, questions = EagerSteps.step, list[list[str]]()

    def listened(steps: EagerSteps, live: list[Any]) -> Any:
        before, same = len(asked), len(live) == len(steps._live)
        outcome = step(steps, live)
        if same:
            questions.append(asked[before:])
        return outcome

    def drafters(target: Target) -> Iterator[Drafter | None]:
        yield from (None, SuffixDrafter(shortest=1, threshold=0.0))
        shapes = (TreeShape(depth=4, width=3, nodes=7), TreeShape(depth=3, width=1), TreeShape(depth=3, width=2))
        for more in (
            {"step_mode": "recursive", "token_conditioning": "path"},
            {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 4, "draft_vocab_size": 24},
            {"step_mode": "parallel", "token_conditioning": "none", "attention": True},
        ):
            network = predictor_of(target, **more)
            if KIND in str(target.device):
                put(network, target.device)
            yield from (TrainedDrafter(network, shape) for shape in shapes)

    model = model_of(config)
    expected = [ShapeDecoder(model).generate(IDS, **options, **more) for more in ({}, sampled)]
    with Devices(), patch.object(EagerSteps, "step", listened):
        device = torch.device(KIND, 0)
        put(model, device)
        for drafter in drafters(Target(model)):
            decoder = ShapeDecoder(model, drafter, fall_back=False)
            for more, wanted in zip(({}, sampled), expected, strict=True):
                assert torch.equal(decoder.generate(IDS.to(device), **options, **more).cpu(), wanted)
    assert len(questions) > 50 and all(len(one) == 1 for one in questions), max(questions, key=len)


def check_the_default_device(config: PretrainedConfig) -> None:
    """What is loaded goes to the accelerator that is there, by default, and decodes there; a drafter goes beside it.
    The accelerator has no float64, as Apple's do not.
    """
    global narrow
    ids = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3}

    def found(decoder: ShapeDecoder) -> list[Tensor]:
        return [decoder.generate(ids, max_new_tokens=12, **more) for more in ({}, sampled)]

    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # in threads of its own transformers would not see the devices
    with TemporaryDirectory() as whole, TemporaryDirectory() as drafts:
        model = model_of(config).float()
        model.save_pretrained(whole)
        predictor_of(Target(model), step_mode="recursive", token_conditioning="path").float().save_pretrained(drafts)
        expected = found(ShapeDecoder.from_pretrained(whole, predictor=drafts))
        device = torch.device(KIND, 0)
        with Devices(), patch("shape.target.loading.default_device", lambda: device):
            narrow = True
            try:
                decoder = ShapeDecoder.from_pretrained(whole, predictor=drafts)
                assert decoder.target.device == device == next(decoder.drafter.predictor.parameters()).device
                assert decoder.target.places == f"{KIND}:0" and not decoder.target.prepacked
                assert all(torch.equal(*pair) for pair in zip(found(decoder), expected, strict=True))
            finally:
                narrow = False
            for options in ({"device_map": "cpu"}, {"target": model_of(config)}):
                decoder = ShapeDecoder.from_pretrained(*(() if "target" in options else (whole,)), **options)
                assert decoder.target.device.type == "cpu"  # as asked for, or where its owner has it


def check_what_apple_lacks(config: PretrainedConfig) -> None:
    """It is done on the host, or refused in a sentence."""
    device, model = torch.device(KIND, 0), model_of(config)
    layer = nn.Linear(12, 8, bias=False)
    expected, energy = lower_rank(layer, 3, None)
    with Devices():
        put(model, device)
        put(layer, device)
        found, same = lower_rank(layer, 3, None)
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            assert one.device == device and torch.equal(one.cpu(), other)
        assert same == energy
        refused(lambda: ShapeDecoder(model, "compressed"), "8 bits are for CPUs and CUDA")
        sampled = {"do_sample": True, "max_new_tokens": 2, "pad_token_id": 0}
        decoder, ids = ShapeDecoder(model), IDS[:1].to(device)

        def signed(x: Tensor, bits: int) -> Tensor:
            return x >> bits if x.device == device else shift(x, bits)

        with patch("shape.verification.noise.shift", signed):
            noise._check_integers.cache_clear()
            refused(lambda: decoder.generate(ids, **sampled), "computes other numbers in 64 bits than the CPU")
        decoder.generate(ids, **sampled)


def refused(work: Callable[[], Any], said: str) -> None:
    try:
        work()
    except ShapeError as error:
        assert said in str(error), error
    else:
        raise AssertionError("nothing was refused")


def check_that_mixing_raises() -> None:
    with Devices():
        here, there = (torch.ones(2, device=torch.device(KIND, index)) for index in range(2))
        assert (here + here).tolist() == [2.0, 2.0] and (here + there.to(here.device)).device == here.device
        for other in (there, torch.ones(2)):
            try:
                here + other
            except RuntimeError as error:
                assert "is given tensors on" in str(error)
            else:
                raise AssertionError("tensors on two devices were added")


def main() -> None:
    _setup_privateuseone_for_python_backend(KIND)
    tiny: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    check_that_mixing_raises()
    check_that_asking_raises()
    check_sharded_target(LlamaConfig(**tiny))
    check_sharded_target(MistralConfig(**tiny, sliding_window=6))
    check_that_fixed_steps_are_silent(LlamaConfig(**tiny))
    check_that_fixed_steps_are_silent(MistralConfig(**tiny, sliding_window=6))
    check_that_other_steps_ask_once(LlamaConfig(**tiny))
    check_the_default_device(LlamaConfig(**tiny))
    check_what_apple_lacks(LlamaConfig(**tiny))
    first, second = f"{KIND}:0", f"{KIND}:1"
    check_drafter_elsewhere(LlamaConfig(**tiny), [(first, second)])
    check_drafter_elsewhere(LlamaConfig(**tiny), [(first, "cpu"), ("cpu", second)], draft_vocab_size=24)
    check_drafter_elsewhere(LlamaConfig(**tiny), [(first, second)], token_conditioning="root", step_mode="parallel")


if __name__ == "__main__":
    main()
