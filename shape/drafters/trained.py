"""The drafter of every trained predictor: trees grown step by step from each sequence's known states."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import takewhile
from math import log
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shape.drafters.base import MEASURED_LENGTH, Committed, Drafter
from shape.drafters.biases import PathBias
from shape.drafters.fused import FusedPredictor
from shape.drafters.fused_block import FusedBlock
from shape.drafters.fused_eagle import EagleDraft, FusedEagle, FusedParallelEagle
from shape.drafters.growing import Biases, Noise, grow_by_depth, grow_by_path, tree_of_depths
from shape.errors import TargetMismatch
from shape.networks.base import Head, Known, Predictor, Remembered
from shape.networks.shape import windows
from shape.networks.single import SingleRoot
from shape.target import kernels
from shape.target.identity import TargetIdentity
from shape.target.integers import supports
from shape.target.model import Target
from shape.target.support import LayerShape
from shape.verification.cache import KVCache
from shape.verification.noise import all_hashes, token_hashes
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, of_lists
from shape.verification.tree_shape import TreeShape

_ONE_BY_ONE = 4  # sequences at most, for which a call each is quicker than torch's operations for all
_SLOTS = 256  # of the memory, at first
_NO_BIAS = Biases(np.empty((0, 0), np.float32), True)
_FUSED = (FusedEagle, FusedParallelEagle, FusedBlock)


class TrainedDrafter(Drafter):
    """A predictor continues each sequence from its known states; the target's own head reads what it predicts.

    Nodes carry what their path has made of the network's state; where that does not depend on the path's tokens, all
    nodes of a depth share one prediction. A network with attention has a KV cache of known positions, into which only
    committed states go, so that rejected drafts leave nothing to roll back. Works on a predictor in training too: it
    takes no gradient and touches no global random state.

    It drafts on the predictor's device, which need not be the target's: new states go there and the tree comes back.
    There, and with a draft vocabulary, it has a copy of its rows of the head. On a CPU that copy, and the weights of
    parallel steps, are computed with in 8 bits, whatever the target has: no token depends on how drafts are rounded.

    Args:
        predictor: the trained network.
        tree: how to grow; None takes the predictor's own default.

    Attributes:
        window: (B, W, F), the last known states of each sequence.
        cache: keys and values of known positions (`Predictor.remember`), for networks that attend to them.
        on_host: whether trees may be grown by the host's compiled loops: where the predictor is on the CPU.
        single: its forward for one sequence in one call; None where it has none.
        fused: its passes in one call each; None where it has none.
    """

    predictor: Predictor
    tree: TreeShape
    draws_one_child = True
    window: Tensor
    cache: KVCache | None = None
    on_host: bool = False
    single: SingleRoot | None = None
    fused: FusedPredictor | None = None

    def __init__(self, predictor: Predictor, tree: TreeShape | None = None) -> None:
        self.predictor = predictor
        self.tree = self._reached(tree or TreeShape(**(predictor.config.draft or {})))
        self.name = predictor.kind
        self.layers = tuple(predictor.config.target_layers)

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.predictor,)

    def describe(self, beside: torch.device | None = None) -> str:
        weights = (weight.cpu() for weight in self.predictor.parameters())  # Apple's GPUs have no float64
        sums = [weight.double().sum().item() for weight in weights]
        where = "" if beside in (None, self.predictor.device) else f", on {self.predictor.device}"
        return f"{self.name}, {self.tree}, weights {sha256(repr(sums).encode()).hexdigest()[:8]}{where}"

    @property
    def drops_drawn_nodes(self) -> bool:
        return self.tree.nodes is not None

    def with_tree(self, tree: TreeShape) -> "TrainedDrafter":
        other = copy(self)
        other.tree = self._reached(tree)
        return other

    def _reached(self, tree: TreeShape) -> TreeShape:
        """What of the shape the predictor can draft."""
        config, selector = self.predictor.config, self.predictor.selector
        depth = config.num_steps if config.step_mode == "parallel" else None
        return tree.within(depth, None if selector is None else selector.candidates)

    def why_not_fixed(self, target: Target) -> str | None:
        return None if self.predictor.device == target.device else "drafts are made on another device"

    def limit_draft(self, num_draft_tokens: int) -> None:
        self.tree = self._reached(replace(self.tree, depth=num_draft_tokens))

    def bind(self, target: Target) -> None:
        if missing := [layer for layer in self.layers if layer > target.config.num_hidden_layers]:
            raise TargetMismatch(
                f"the predictor reads layers {missing}, and target {target.name} has "
                f"{target.config.num_hidden_layers}; give the target it was trained for"
            )
        known = self.predictor.config.target_identity
        if known is not None:
            TargetIdentity.from_dict(known).require(target.identity)
        else:
            self._require_sizes(target)
        self.predictor.complete(target)
        self._target, self._device = target, self.predictor.device
        self.on_host = self._device.type == "cpu"
        vocabulary, dtype = self.predictor.draft_vocabulary, self.predictor.dtype
        bits = 8 if self.on_host and kernels.has("avx2") and supports(dtype) else None
        tokens = torch.arange(target.vocab_size, device=self._device) if vocabulary is None else vocabulary
        self._vocabulary = vocabulary
        # Of all tokens verification's own, so that it finds the noise that drafting made.
        self._words = all_hashes(target.vocab_size, self._device) if vocabulary is None else token_hashes(tokens)
        if self.on_host:
            self._ids = tokens.numpy()
            self._numbers = np.full(target.vocab_size, -1)
            self._numbers[self._ids] = np.arange(len(tokens))
        apart = vocabulary is not None or self._device != target.device
        self._head: Head | None = target.head_of(tokens, dtype, bits) if apart else None
        if self.predictor.heads:
            self._head = self.predictor.own_head
        self.single = SingleRoot.of(self.predictor, bits, self._head)
        self._embeddings = None if vocabulary is None else self._embed_tokens(vocabulary).to(dtype)
        markov = self.predictor.token_bias
        self._bias = None if markov is None else PathBias(markov, tokens, self._embed_tokens)
        biased = markov is not None or self.predictor.config.confidence
        served = self.on_host and not (self.predictor.by_path and biased)
        made = (kind.of_predictor(self.predictor) for kind in _FUSED)
        self.fused = next(filter(None, made), None) if served else None

    def _require_sizes(self, target: Target) -> None:
        """Raises TargetMismatch for what can be seen of a predictor that does not say its target."""
        config = self.predictor.config
        sizes = [("hidden size", config.state_size, target.hidden_size)]
        if config.kind != "shape":  # which has no weights of tokens but those of its draft vocabulary
            sizes.append(("vocabulary size", config.vocab_size or target.vocab_size, target.vocab_size))
        for name, expected, found in sizes:
            if expected != found:
                raise TargetMismatch(
                    f"the predictor expects {name} {expected}, and target {target.name} has {found}; train a predictor "
                    "for this target"
                )

    def start(self, committed: Committed, hidden: Tensor) -> None:
        if self.single is not None:
            self.single.renew()
        hidden = self._read(hidden)
        rows, longest = hidden.shape[:2]
        # What lies before the known states is forgotten: positions are read relative to each other.
        texts = [text[-longest - 1 :] for text in committed.texts]
        known = [len(text) - 1 for text in texts]
        config, shapes = self.predictor.config, self.predictor.memory_shapes
        self.window = windows(hidden, of_lists(known, self._device)[:, None], config.window)[:, 0]
        if shapes:
            self.cache = KVCache(self.memory_layers, rows, longest + _SLOTS, self.predictor.dtype, self._device)
            tokens = of_lists([text + [0] * (longest + 1 - len(text)) for text in texts], self._device)
            self._remember(tokens, F.pad(hidden, (0, 0, 1, 0)))
            self.cache.set_lengths(known)

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        counts = counts.to(self._device)
        if self.cache is None:
            return self.append_states(None, hidden, counts)
        size, rows = hidden.shape[1] + 1, zip(self.cache.host_lengths, tokens, strict=True)
        padded = of_lists([[*own, *[0] * (size - len(own))] for own in tokens], self._device)
        self.append_states(padded, hidden, counts)
        self.cache.set_lengths([length + len(own) - 1 for length, own in rows])

    def append_states(self, tokens: Tensor | None, hidden: Tensor, counts: Tensor) -> None:
        """``update`` without a wait for the device: the caller moves the cache's lengths on.

        Args:
            tokens: (B, D + 1) int64, read by networks with attention only: the root that was verified and what was
                committed behind it.
        """
        known = torch.cat([self.window, self._read(hidden)], dim=1)
        size = self.predictor.config.window
        if self.cache is not None and tokens is not None:
            self._remember(tokens, known[:, size - 1 :])
        if self.on_host:  # in fewer calls
            rows = [known[row : row + 1, count : count + size] for row, count in enumerate(counts.tolist())]
            self.window = rows[0] if len(rows) == 1 else torch.cat(rows)
        else:
            each = torch.arange(len(known), device=self._device)[:, None]
            self.window = known[each, counts[:, None] + torch.arange(size, device=self._device)]

    def _read(self, hidden: Tensor) -> Tensor:
        """What the network reads of the target's layers (`ShapeConfig.target_layers`), on its device."""
        return hidden[..., : self.predictor.config.feature_size].to(self._device)

    def select(self, rows: Tensor) -> None:
        rows = rows.to(self._device)
        self.window = self.window[rows]
        if self.cache is not None:
            self.cache.select(rows)

    def join(self, other: Self) -> None:
        self.window = torch.cat([self.window, other.window])
        if self.cache is not None and other.cache is not None:
            self.cache.join(other.cache)

    @torch.no_grad()
    def _remember(self, tokens: Tensor, features: Tensor) -> None:
        """Cache keys and values of the next positions: tokens (B, D + 1), theirs and the one after; features
        (B, D + 1, F), of the position before and theirs.
        """
        assert self.cache is not None
        size = tokens.shape[1] - 1
        if (fused := self._fused(size)) is not None:
            return fused.remember(features[:, 1:], self._embed_tokens(tokens[:, 1:]), self.cache)
        positions = self.cache.lengths[:, None] + torch.arange(size, device=self._device)
        found = self.predictor.remember(features, self._embed_tokens(tokens), positions, self._memory())
        self.cache.reserve(size)
        for layer, (keys, values) in zip(self.cache.layers, found, strict=True):
            layer.update(keys, values)

    def _fused(self, count: int) -> FusedPredictor | None:
        """What takes so many tokens of each sequence by kernels, where that is served."""
        fused, cache = self.fused, self.cache
        if fused is None or cache is None or not self.on_host:
            return None
        return fused if fused.serves_behind(cache, count) else None

    @property
    def memory_layers(self) -> list[LayerShape]:
        return [LayerShape(shape, shape) for shape in self.predictor.memory_shapes]

    def _memory(self) -> Remembered:
        """Keys and values of the slots in use."""
        assert self.cache is not None
        used = slice(self.cache.longest)
        return [(layer.keys[:, :, used], layer.values[:, :, used]) for layer in self.cache.layers]

    def _known(self, steps: int) -> Known:
        """What the network knows at the roots, (B, 1), for so many steps."""
        cache = self.cache
        if cache is None:
            return Known(self.window[:, None], [], None, None)
        slots, visible = torch.arange(cache.longest, device=self._device), None
        if not cache.uniform:
            visible = slots < cache.lengths[:, None, None]
        network, most = self.predictor, max(steps, self.predictor.config.num_steps)
        ahead = network.rotary_ahead(cache.lengths[:, None], network.dtype, most)
        return Known(self.window[:, None], self._memory(), visible, ahead)

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        return self._draft(committed.to(self._device), sampler.to(self._device)).to(committed.root.device)

    @torch.no_grad()
    def _draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        network, by_path, self.passes = self.predictor, self.predictor.by_path, 0
        depth, width, branching = self.tree.depth, self.tree.width, self.tree.branching or self.tree.width

        root = committed.root[:, None]
        of_roots = self._numbers[[text[-1] for text in committed.texts]] if self.on_host else None
        embedding = self._embed_roots(root, of_roots)
        if by_path:
            if of_roots is not None and (fused := self._fused(width * depth)) is not None:
                return self._grown_by_kernels(fused, committed.root, of_roots, embedding, sampler)
            known = self._known(depth)
            carried = network.begin(known, embedding)
        else:
            all_states, found = self._all_steps(embedding, depth)
            all_logits = sampler.draft_logits(found, None, self._vocabulary)
            if of_roots is not None and (self._bias is None or self._bias.on_host):
                return self._grown_on_host(committed.root, of_roots, embedding, all_states, all_logits, sampler)
        rows = torch.arange(root.shape[0], device=root.device)[:, None]
        noise = sampler.draft_noise(depth, self._words, width)
        # The frontier: nodes expanded next, with numbers, joint log-probabilities, embeddings and what they carry.
        number, nodes = torch.zeros_like(root), 1
        joint = torch.zeros(root.shape, device=root.device)
        bias, token, bias_state = self._bias, root, None
        read = None if bias is None else bias.behind_roots(root, embedding)
        # Of every depth: what was expanded, its best children, and their joint log-probabilities.
        numbers, children, scores, best = [], [], [], []
        drawn: list[Tensor] = []
        for n in range(depth):
            if by_path:
                states, carried = network.advance(known, carried, embedding, n)
                logits = sampler.draft_logits(self._logits(states), n, self._vocabulary)
            else:  # one for all nodes of a depth, but for the bias
                states, logits = all_states[:, n : n + 1], all_logits[:, n : n + 1]
            if bias is not None and read is not None:
                added, bias_state = bias(read, states, bias_state)
                logits = logits + sampler.temper(added)
            logits = logits.expand(-1, number.shape[1], -1)
            self.passes = n + 1
            # None is above 0, so that no child is likelier than its parent.
            log_probs, candidates = sampler.candidates(logits, noise[n], branching)
            if sampler.draws:
                drawn.append(sampler.draft_log_probs(logits, self._target.vocab_size, self._vocabulary, candidates))
            if network.config.confidence and sampler.greedy:
                # What the target thinks of the best child is known better than by its probability; the others follow.
                estimate = F.logsigmoid(network.estimate(states, token, embedding))
                log_probs = log_probs + (estimate[..., None] - log_probs[..., :1])
            log_probs, candidates = (joint[..., None] + log_probs).flatten(1), candidates.flatten(1)
            numbers.append(number)
            children.append(candidates)
            scores.append(log_probs)
            if n + 1 == depth:
                break
            joint, chosen = log_probs.topk(min(width, log_probs.shape[1]), dim=1)
            if self.tree.threshold > 0:
                best.append(joint.max())
                if by_path and float(best[-1]) < log(self.tree.threshold):  # else the next depth costs next to nothing
                    break
            number = nodes + chosen
            nodes += candidates.shape[1]
            drafted = candidates.gather(1, chosen)
            if by_path or network.config.confidence:
                embedding = self._embed_drafted(drafted)
                token = self._token_ids(drafted)
            read = None if bias is None else bias.behind(drafted)
            if width > 1 and (by_path or bias_state is not None):  # a child inherits what its parent carries
                parents = chosen // branching
                if by_path:
                    carried = tuple(part[rows, parents] for part in carried)
                bias_state = None if bias_state is None else bias_state[rows, parents]
        if best and not by_path:
            # A wait for all depths, so that no more is verified than is likely.
            kept = 1 + sum(takewhile(bool, [one >= log(self.tree.threshold) for one in torch.stack(best).tolist()]))
            numbers, children, scores, drawn = (of_depth[:kept] for of_depth in (numbers, children, scores, drawn))
            self.passes = kept
        return tree_of_depths(
            root, numbers, children, scores, branching, drawn, sampler.one_drawn, self._vocabulary, self.tree.nodes
        )

    def _grown_on_host(
        self, root: Tensor, numbers: np.ndarray, embedding: Tensor, states: Tensor, logits: Tensor, sampler: Sampler
    ) -> TokenTree:
        """The same from the states (B, depth, H) and logits (B, depth, K) of all depths, of which each serves all nodes
        of its depth.

        Args:
            root, numbers: (B,) int64, tokens, and their numbers in the draft vocabulary. embedding: (B, 1, H), theirs.
        """
        bias, given = self._bias, (numbers, root, embedding, states)
        first, later = (_NO_BIAS, _NO_BIAS) if bias is None else bias.for_loops(*given)
        estimated = self.predictor.config.confidence and sampler.greedy
        estimate = partial(self._estimates, root, embedding, states) if estimated else None
        self.passes = logits.shape[1]
        behind_all = root, numbers, logits, self._ids, first, later, self.tree, estimate
        return grow_by_depth(*behind_all, sampler.temperature or 1.0, self._noise(sampler))

    def _estimates(
        self, root: Tensor, embedding: Tensor, states: Tensor, depth: int, numbers: np.ndarray
    ) -> np.ndarray:
        """Log-probabilities, (B M,), that the best children of nodes at a depth, with these numbers of their tokens,
        are accepted.
        """
        root = root[:, None]
        if depth > 0:
            drafted = torch.from_numpy(numbers)
            root, embedding = self._token_ids(drafted), self._embed_drafted(drafted)
        found = self.predictor.estimate(states[:, depth : depth + 1], root, embedding)
        return F.logsigmoid(found).float().flatten().numpy()

    def _grown_by_kernels(
        self, fused: FusedPredictor, root: Tensor, numbers: np.ndarray, embedding: Tensor, sampler: Sampler
    ) -> TokenTree:
        """The same where every node has a prediction of its own; arguments as above."""
        assert self.cache is not None
        draft = EagleDraft(fused, self.cache, self.tree)

        def step(depth: int, numbers: np.ndarray, behind: np.ndarray) -> Tensor:
            if depth == 0:
                states = draft.begin(self.window[:, -1:], embedding)
            else:
                states = draft.go_on(self._embed_drafted(torch.from_numpy(numbers)), torch.from_numpy(behind))
            return sampler.draft_logits(self._logits(states), depth, self._vocabulary)

        tree, self.passes = grow_by_path(root, numbers, step, self._ids, self.tree, self._noise(sampler))
        return tree

    def _noise(self, sampler: Sampler) -> Noise | None:
        if sampler.draws:
            keys = sampler.draft_keys
            return Noise(keys, torch.zeros_like(keys), self._words, self._target.vocab_size, sampler.one_drawn)
        return None if sampler.greedy else Noise(*sampler.counters, self._words)

    def _embed_roots(self, root: Tensor, numbers: np.ndarray | None) -> Tensor:
        """(B, 1) tokens, with their numbers in the draft vocabulary, on the host, -> (B, 1, H)."""
        if numbers is not None and self._embeddings is not None and len(numbers) == 1 and (at := int(numbers[0])) >= 0:
            return self._embeddings[None, at : at + 1]  # at hand, in a tenth of the time
        return self._embed_tokens(root)

    @torch.no_grad()
    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.predictor.embed(tokens, self._target)

    def _token_ids(self, candidates: Tensor) -> Tensor:
        """Tokens by their numbers in the draft vocabulary."""
        return candidates if self._vocabulary is None else self._vocabulary[candidates]

    def _embed_drafted(self, candidates: Tensor) -> Tensor:
        """Input embeddings of tokens by their numbers in the draft vocabulary."""
        return self._embed_tokens(candidates) if self._embeddings is None else F.embedding(candidates, self._embeddings)

    @torch.no_grad()
    def run_forwards(self, rows: int, passes: int) -> None:
        network, config, like = self.predictor, self.predictor.config, copy(self)
        zeros = next(network.parameters()).new_zeros
        like.window, embedding = zeros(rows, config.window, config.feature_size), zeros(rows, 1, config.hidden_size)
        if network.memory_shapes:
            like.cache = KVCache(self.memory_layers, rows, MEASURED_LENGTH, network.dtype, self._device)
            like.cache.set_lengths([MEASURED_LENGTH] * rows)
        fused = like._fused(self.tree.width * passes) if network.by_path else None
        if fused is not None and like.cache is not None:
            draft = EagleDraft(fused, like.cache, replace(self.tree, depth=max(passes, 1)))
            behind = torch.zeros(rows, self.tree.width, dtype=torch.long)
            self._logits(draft.begin(like.window[:, -1:], embedding))
            for _ in range(1, passes):
                self._logits(draft.go_on(embedding.expand(-1, self.tree.width, -1), behind))
            return
        roots = torch.full((rows, 1), MEASURED_LENGTH, device=self._device)
        bias = None if self._bias is None or (self.on_host and self._bias.in_loops) else self._bias
        state, bias_state = zeros(rows, 1, config.hidden_size), None
        if bias is not None:
            _, bias_state = bias(bias.behind_roots(torch.zeros_like(roots), embedding), state, None)
        if network.by_path:
            known = like._known(passes)
            carried = network.begin(known, embedding)
        else:
            like._all_steps(embedding, passes)
        frontier = torch.zeros(rows, self.tree.width, dtype=torch.long, device=self._device)
        for n in range(passes):
            if n > 0 and bias is not None:
                bias(bias.behind(frontier), state, bias_state)
            if not network.by_path:
                continue
            states, carried = network.advance(known, carried, embedding, n)
            self._logits(states)
            if n == 0 and self.tree.width > 1:
                wide = torch.zeros(self.tree.width, dtype=torch.long, device=self._device)
                carried = tuple(part[:, wide] for part in carried)
                embedding = embedding[:, wide]

    def _all_steps(self, root: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """States (B, depth, H) and logits (B, depth, K) behind roots with embeddings (B, 1, H), where one prediction
        per depth serves every path.
        """
        network, fused, read = self.predictor, self._fused(self.predictor.config.places), None
        if isinstance(fused, FusedBlock | FusedParallelEagle) and self.cache is not None:
            states = fused.begin(self.window[:, -1:], root, self.cache)
        elif self.single is not None and self.on_host and len(root) <= _ONE_BY_ONE:
            states, read = self.single(self.window, root[:, 0])
        else:
            known = self._known(depth)
            carried = network.begin(known, root)
            if network.config.step_mode == "parallel":
                states = carried[0][:, 0]
            else:
                found = []
                for n in range(depth):
                    state, carried = network.advance(known, carried, root, n)
                    found.append(state)
                states = torch.cat(found, dim=1)
        if states.shape[1] > depth:
            states, read = states[:, :depth], None if read is None else read[:, :depth]
        logits = self._logits(states) if read is None else self._target.logits(states, lambda _: read)
        return states, network.before_bias(logits, None if self._bias is None else self._bias.reduced)

    def _logits(self, states: Tensor) -> Tensor:
        """(..., H) -> (..., K), over the draft vocabulary."""
        if self._head is None:
            states = states.to(self._target.dtype)
        return self._target.logits(states, self._head)
