"""The modes that forwards run in where nothing is trained. A network that is handed over stays as its owner has it."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shape.target.families import foreign

Piece = TypeVar("Piece")
Result = TypeVar("Result")
_ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of PEFT's layers
_VERSION = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


def gradientless(networks: Iterable[nn.Module]) -> type[torch.inference_mode] | type[torch.no_grad]:
    """Makes contexts, or decorators, within which these are computed with and nothing is kept for gradients.

    ``torch.inference_mode`` where they allow it: PyTorch then spares every operation the bookkeeping of views and
    versions, which takes a tenth of a small target's forward on a CPU (``python -m eval.forwards``). What is made
    there cannot be trained on. Weights of classes of their own (torchao's and quanto's, bitsandbytes', DTensor) may not
    allow it (https://github.com/pytorch/pytorch/issues/170419), and rotary frequencies that a model makes anew for
    longer texts stay with it, for its owner to train with: beside these it is ``torch.no_grad``.
    """
    modules = [module for network in networks for module in network.modules()]
    weights = chain.from_iterable((*module._parameters.values(), *module._buffers.values()) for module in modules)
    plain = all(type(weight) in (Tensor, nn.Parameter) for weight in weights if weight is not None)
    steady = all(map(keeps_frequencies, modules))
    return torch.inference_mode if plain and steady else torch.no_grad


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within it streams, events, graphs and kernels are those of this device, where another was current before."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware does, as fast as its other products; Apple's is not known to."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()  # type: ignore[attr-defined]


def host_by_default() -> AbstractContextManager[Any]:
    """Within it tensors of no named device are the host's, whatever ``torch.set_default_device`` says."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def keeps_frequencies(module: nn.Module) -> bool:
    """Whether a module, if it is a rotary embedding, has the same frequencies for texts of every length."""
    kinds = str(vars(module).get("rope_type"))  # a name, or one for each kind of layer
    return "dynamic" not in kinds and "longrope" not in kinds


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square error relative to the expected values; NaN compares as failure."""
    found, expected = found.cpu().double(), expected.cpu().double()  # Apple's accelerators have no float64
    return float((found - expected).norm() / expected.norm())


def state_of(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies, and how often it was changed in place, where that is counted."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def states_of(weights: Sequence[Tensor]) -> list[Any]:
    """``state_of`` many, as quickly as that can be asked."""
    if any(map(Tensor.is_inference, weights)):
        return [*map(state_of, weights)]
    return [*map(Tensor.data_ptr, weights), *map(_VERSION, weights)]


def fingerprint(network: nn.Module) -> int:
    """Of what a network computes with, for comparison with later: modules, their hooks, forwards and adapters, and
    weights as in ``state_of``. Left out is what comes and goes by itself: hooks of transformers' own, weights that are
    offloaded between forwards, and rotary frequencies that change with a text's length.
    """
    found: list[Any] = []
    weights: list[Any] = []
    for module in network.modules():
        own = vars(module)
        # Hooks are numbered in the order in which they were put anywhere.
        found += [id(module), *foreign(own["_forward_hooks"]), *foreign(own["_forward_pre_hooks"])]
        found += [id(own.get("forward")), *(repr(own[name]) for name in _ADAPTER if name in own)]
        weights += own["_parameters"].values()
        weights += own["_buffers"].values() if keeps_frequencies(module) else ()
    weights = [weight for weight in weights if weight is not None and not weight.is_meta]
    plain = [weight for weight in weights if type(weight) in (Tensor, nn.Parameter)]
    return hash((*found, *map(id, weights), *states_of(plain)))


@dataclass
class _Held:
    """A network in evaluation mode: for whom, and the modules that the last of them puts back."""

    users: set[object] = field(default_factory=set)
    training: list[nn.Module] = field(default_factory=list)


_HELD: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()
_LOCK = Lock()


class evaluating(AbstractContextManager[None]):
    """Within it networks are in evaluation mode; afterwards each of their modules is in its own again.

    It can be entered many times, also by several threads at a time, for the same networks too. The modules are gathered
    once, so that entering costs a glance at each.
    """

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        self._parts: list[tuple[_Held, list[nn.Module]]] = []
        self._users: list[object] = []  # one for each time that it has been entered and not left
        for network in networks:
            modules = list(network.modules())
            with _LOCK:
                self._parts.append((_HELD.setdefault(modules[0], _Held()), modules))

    @property
    def modules(self) -> Iterator[nn.Module]:
        """The modules of all networks."""
        return chain.from_iterable(modules for _, modules in self._parts)

    def __enter__(self) -> None:
        user = object()
        try:
            with _LOCK:
                for held, modules in self._parts:
                    held.users.add(user)
                    for module in [module for module in modules if module.training]:
                        held.training.append(module)
                        vars(module)["training"] = False  # nn.Module's way costs a microsecond
            self._users.append(user)
        except BaseException:  # an interrupt, wherever it comes
            self._leave(user)
            raise

    def __exit__(self, *raised: Any) -> None:
        user = self._users.pop()
        try:
            self._leave(user)
        except BaseException:
            self._leave(user)
            raise

    def _leave(self, user: object) -> None:
        """May be called twice."""
        with _LOCK:
            for held, _ in self._parts:
                held.users.discard(user)
                if not held.users:
                    for module in held.training:
                        vars(module)["training"] = True
                    held.training.clear()


def each_step(
    context: AbstractContextManager[None], steps: Generator[Piece, None, Result]
) -> Generator[Piece, None, Result]:
    """A generator that computes within a context, and is out of it while its caller has what it gave."""
    try:
        while True:
            with context, _interrupted_as_such():
                try:
                    piece = next(steps)
                except StopIteration as done:
                    return done.value
            yield piece
    finally:
        steps.close()


def all_steps(
    context: AbstractContextManager[None], steps: Generator[Piece, None, Result]
) -> Generator[Piece, None, Result]:
    """The same within one context from the first step to the last, where the caller does nothing in between."""
    with context, _interrupted_as_such():
        return (yield from steps)


@contextmanager
def _interrupted_as_such() -> Iterator[None]:
    """numba makes a SystemError of an interrupt that comes while it reads a loop's arguments, and others of that."""
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
