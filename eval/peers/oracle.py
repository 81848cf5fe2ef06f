"""Drafts for targets with random weights, for which nothing can be trained: simulated acceptance at a chosen length."""

import torch
from torch import Tensor

from shape.drafters import Drafter, OracleDrafter, TrainedDrafter, TreeShape
from shape.drafters.base import Committed, Wrapped
from shape.networks.registry import PREDICTORS
from shape.target.model import Target
from shape.target.prepack import prepack
from shape.target.size import size_of
from shape.training.defaults import network_config, resolve
from shape.training.options import PredictorOptions, TrainOptions
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree


class SteadyOracle(OracleDrafter):
    """Chains of which each step accepts the same number of tokens: the acceptance length is a whole number, exactly.

    Args:
        texts: prompts and plain answers.
        prompts: their lengths, which is where roots begin.
        length: the acceptance length; of every so many tokens one is drafted wrongly.
        depth: length of the chain, `length` at least.
    """

    name = "steady oracle"

    def __init__(self, texts: list[list[int]], prompts: list[int], length: int, depth: int) -> None:
        super().__init__(texts, depth=depth)
        self.prompts, self.length = prompts, length

    def _corrupted(self, row: int, text: list[int]) -> list[int]:
        first = self.prompts[row]
        return [
            (token + 1) % self._vocab_size if (at - first) % self.length == 0 else token
            for at, token in enumerate(text)
        ]


class Charged(Wrapped):
    """A predictor does all that it does for a draft, and what is proposed comes from an oracle.

    Args:
        predictor: of the target's size; what it drafts is dropped.
        oracle: whose drafts count.
        depth: of the chain that the predictor drafts.
    """

    def __init__(self, predictor: TrainedDrafter, oracle: Drafter, depth: int) -> None:
        super().__init__(predictor.with_tree(TreeShape(depth=depth, width=1)))
        self.oracle, self.name = oracle, "charged oracle"

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.oracle.bind(target)

    def start(self, committed: Committed, hidden: Tensor) -> None:
        super().start(committed, hidden)
        self.oracle.start(committed, hidden)

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        super().draft(committed, sampler)
        self.passes = self.inner.passes
        return self.oracle.draft(committed, sampler)


def untrained_predictor(target: Target, chosen: PredictorOptions | None = None) -> TrainedDrafter:
    """What `shape train` would train for a target of this size, with the weights that training begins with.

    Args:
        chosen: of the network; None is the default one.
    """
    options = resolve(TrainOptions(predictor=chosen or PredictorOptions()), size_of(target.config), None)
    return untrained(target, options)


def untrained(target: Target, options: TrainOptions, tree: TreeShape | None = None) -> TrainedDrafter:
    """The same of resolved options, as loading makes a drafter of a trained network."""
    config = network_config(options, size_of(target.config))
    assert config is not None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = PREDICTORS[config.kind](config)
    if config.draft_vocab_size is not None:
        network.draft_vocabulary = torch.arange(config.draft_vocab_size)
    network = network.to(target.dtype).eval()  # type: ignore[arg-type]
    prepack(network)  # as loading does with a trained one
    return TrainedDrafter(network, tree)
