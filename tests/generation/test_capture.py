"""What CUDA graphs cannot hold, found on a CPU; and the graphs themselves, where there is a GPU."""

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import predictor, prompts
from torch import Tensor
from transformers import PreTrainedModel

from shape.drafters import TrainedDrafter, TreeShape
from shape.errors import UnsupportedTarget
from shape.generation.capture import captured, refuse_waiting
from shape.generation.decoder import ShapeDecoder
from shape.generation.fixed import FixedSteps
from shape.generation.stage import Stage

SAMPLED = {"do_sample": True, "temperature": 0.9, "seed": 7}
NUMBERS = torch.arange(6.0).view(2, 3)


def set_where(given: Tensor, value: Tensor | float) -> None:
    given = given.clone()
    given[given > 2] = value


WAITING: dict[str, Callable[[Tensor], object]] = {
    "number": lambda given: given.sum().item(),
    "condition": lambda given: bool(given.max() > 2),
    "equality": lambda given: torch.equal(given, given + 1),
    "places": lambda given: given.nonzero(),
    "mask": lambda given: given[given > 2],
    "masked_select": lambda given: given.masked_select(given > 2),
    "unique": lambda given: given.unique(),
    "repeats": lambda given: given.repeat_interleave(torch.tensor([1, 2]), dim=0),
    "several under a mask": lambda given: set_where(given, torch.ones(3)),
}
SILENT: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda given: (given @ given.T).softmax(-1),
    "indices": lambda given: given[torch.tensor([1, 0]), torch.tensor([2, 2])],
    "where": lambda given: torch.where(given > 2, given, 0.0),
    "one number under a mask": lambda given: set_where(given, 0.0),
    "repeats of known number": lambda given: given.repeat_interleave(torch.tensor([1, 2]), dim=0, output_size=3),
    "best": lambda given: given.topk(2).indices,
}


@pytest.mark.parametrize("name", [*WAITING, *SILENT])
def test_what_waits_for_the_host_is_refused_with_its_line(tiny_target, name):
    run = {**WAITING, **SILENT}[name]
    if name in SILENT:
        return refuse_waiting(lambda: run(NUMBERS), tiny_target)
    with pytest.raises(
        UnsupportedTarget, match=r"target tiny waits for the host \(aten::\w+.* in test_capture\.py, line"
    ):
        refuse_waiting(lambda: run(NUMBERS), tiny_target)


def test_off_cuda_nothing_is_captured(tiny_target):
    def run() -> None: ...

    assert captured(run, tiny_target) is run


def tree_drafter(device: torch.device | str = "cuda") -> TrainedDrafter:
    network = predictor(attention=True, loud=True).to(device)
    return TrainedDrafter(network, TreeShape(depth=3, width=2))


def on(device: torch.device | str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.to(device) for name, one in batch.items()}


@pytest.fixture
def cuda_model(tiny_model) -> Iterator[PreTrainedModel]:
    """In float64, so that kernels for other shapes round alike."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield tiny_model("llama").cuda()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, SAMPLED])
def test_replayed_steps_do_not_wait(cuda_model, monkeypatch, how):
    """The tokens of the loop, by steps in which torch lets nothing synchronise."""
    launch, count = Stage.launch, 0

    def strictly(stage: Stage, *given):
        nonlocal count
        count += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(stage, *given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Stage, "launch", strictly)
    batch = on("cuda", prompts([3, 9]))
    expected = ShapeDecoder(cuda_model, graphs=False).generate(**batch, max_new_tokens=40, **how)
    decoder = ShapeDecoder(cuda_model, tree_drafter(), graphs=FixedSteps(slots=32))
    out = decoder.generate(**batch, max_new_tokens=40, return_dict_in_generate=True, **how)
    assert out.stats.graphs and count > 5 and torch.equal(out.sequences, expected)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_everything_usable(cuda_model):
    """What a trial run does not see: a wait that is no operation on tensors."""
    batch = on("cuda", prompts([3, 9]))
    expected = ShapeDecoder(cuda_model, graphs=False).generate(**batch, max_new_tokens=20)
    hook = cuda_model.model.norm.register_forward_hook(lambda *_: torch.cuda.synchronize())
    decoder, stream = ShapeDecoder(cuda_model, graphs=True), torch.cuda.current_stream()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [decoder.generate(**batch, max_new_tokens=20, return_dict_in_generate=True) for _ in range(2)]
    hook.remove()
    assert all(not one.stats.graphs and torch.equal(one.sequences, expected) for one in found)
    assert sum("cannot be captured as a CUDA graph" in str(one.message) for one in said) == 1
    assert torch.cuda.current_stream() == stream and not decoder.graphs._kept
    torch.cuda.empty_cache()
    again = ShapeDecoder(cuda_model, graphs=True).generate(**batch, max_new_tokens=20, return_dict_in_generate=True)
    assert again.stats.graphs and torch.equal(again.sequences, expected)


@pytest.mark.gpu
def test_memory_that_is_not_there(cuda_model):
    """A bound above what the device has: decoding goes on, and what was taken in vain is given back."""
    batch = on("cuda", prompts([3, 9]))
    expected = ShapeDecoder(cuda_model, graphs=False).generate(**batch, max_new_tokens=20)
    decoder = ShapeDecoder(cuda_model, graphs=FixedSteps(slots=2**34, memory=1e30))
    with pytest.warns(UserWarning, match="there is no memory for them"):
        out = decoder.generate(**batch, max_new_tokens=20, return_dict_in_generate=True)
    assert not out.stats.graphs and torch.equal(out.sequences, expected) and not decoder.graphs._kept


@pytest.mark.gpu
def test_memory_is_freed_at_the_end(cuda_model):
    batch, drafter = on("cuda", prompts([3, 9])), tree_drafter()
    decoder = ShapeDecoder(cuda_model, drafter, graphs=True)
    ShapeDecoder(cuda_model, drafter, graphs=False).generate(**batch, max_new_tokens=20)  # what libraries keep for good
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    decoder.generate(**batch, max_new_tokens=20)
    (stage,) = decoder.graphs._kept
    assert stage._graph_bytes > 0 and torch.cuda.memory_allocated() - before >= stage.bytes - stage._graph_bytes
    del stage
    decoder.close()
    # But for the workspace of matrix products that goes with a stream.
    assert torch.cuda.memory_allocated() - before < 2**27


@pytest.mark.gpu
def test_nothing_is_captured_in_the_middle_of_an_answer(cuda_model, monkeypatch):
    decoder = ShapeDecoder(cuda_model, tree_drafter(), graphs=FixedSteps(slots=16))
    options = {"max_new_tokens": 60, "eos_token_id": []}
    decoder.warm_up(batch_size=2, prompt_length=9, max_new_tokens=60)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    for lengths in ([3], [3, 9]):
        batch = on("cuda", prompts(lengths))
        out = decoder.generate(**batch, return_dict_in_generate=True, **options)
        assert out.stats.graphs
        assert torch.equal(out.sequences, ShapeDecoder(cuda_model, graphs=False).generate(**batch, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_capture_and_replay_side_by_side(cuda_model, own_streams):
    batches = [on("cuda", prompts([length])) for length in (9, 4, 12, 7)]
    options = {"max_new_tokens": 40, "eos_token_id": [], **SAMPLED}
    expected = [ShapeDecoder(cuda_model, graphs=False).generate(**batch, **options) for batch in batches]
    decoder, together = ShapeDecoder(cuda_model, tree_drafter(), graphs=FixedSteps(slots=16)), threading.Barrier(4)
    torch.cuda.synchronize()

    def answer(batch: dict[str, Tensor]) -> Tensor:
        together.wait(60)
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            found = decoder.generate(**batch, **options)
            stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            found = list(threads.map(answer, batches))
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert decoder.graphs._kept


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_target_that_is_not_on_the_current_device(tiny_model, compiled):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for index in (1, 0):  # one after the other: nothing that the first leaves may be the second's
        device = torch.device("cuda", index)
        model, batch = tiny_model("llama").to(device), on(device, prompts([3, 9]))
        expected = ShapeDecoder(model, graphs=False).generate(**batch, max_new_tokens=30)
        with torch.cuda.device(1 - index):
            decoder = ShapeDecoder(model, tree_drafter(device), graphs=FixedSteps(compiled, slots=32))
            out = decoder.generate(**batch, max_new_tokens=30, return_dict_in_generate=True)
            assert torch.cuda.current_device() == 1 - index
        assert out.stats.graphs and torch.equal(out.sequences, expected)
        assert all(step.verify > 0 for step in out.stats.steps)
