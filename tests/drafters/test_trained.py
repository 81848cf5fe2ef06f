"""Trees of trained predictors against these called path by path."""

import pytest
import torch
import torch.nn.functional as F
from helpers import BASELINES, MODES, WIDTHS, committed, predictor, require_equal_trees

from shape.drafters import Committed, TrainedDrafter, TreeShape, biases
from shape.errors import TargetMismatch
from shape.networks.base import Known, Predictor
from shape.networks.shape import windows
from shape.networks.teacher_forcing import Reader, Texts, known_in
from shape.target.model import Target
from shape.verification.noise import sequence_keys, token_hashes
from shape.verification.sampling import Sampler


def loud(step_mode: str, conditioning: str) -> Predictor:
    """Away from the identity it starts as, so that windows and tokens matter."""
    return predictor(step_mode=step_mode, token_conditioning=conditioning, loud=True)


@pytest.fixture(scope="module")
def target(tiny_model) -> Target:
    return Target(tiny_model("llama"))


def begin(network, target, tree, batch=2) -> tuple[TrainedDrafter, Committed, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = [6, 3][:batch]
    texts = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]
    begun = committed(*texts)
    hidden = torch.randn(batch, 5, 32, dtype=torch.float64, generator=generator)
    drafter = TrainedDrafter(network, tree)
    drafter.bind(target)
    drafter.start(begun, hidden)
    return drafter, begun, hidden


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_children_are_the_best_of_each_nodes_own_path(target, mode, temperature):
    network = loud(*mode)
    drafter, begun, hidden = begin(network, target, TreeShape(depth=3, width=2, branching=2))
    sampler = Sampler(begun.lengths - 1, temperature, keys=sequence_keys(0, 2) if temperature else None)
    sampler.commit(begun.lengths)
    tree = drafter.draft(begun, sampler)
    assert tree.size == 1 + 2 + 4 + 4
    for row in range(2):
        end = len(begun.texts[row]) - 1
        for node in range(tree.size):
            children = [n for n in range(tree.size) if tree.parent[row, n] == node]
            if not children:
                continue
            path = [n for n in range(node + 1) if tree.ancestors[row, node, n]]
            window = windows(hidden[row : row + 1], torch.tensor([[end]]), 4)[0, 0]
            tokens = tree.tokens[row, path]
            embeddings = target.embed(tokens if mode[1] == "path" else tokens[:1].expand(len(path)))
            state = network.unroll(Known(window, [], None, None), embeddings, len(path))[-1]
            logits = target.logits(state).expand(2, 1, -1)
            noise = sampler.draft_noise(len(path), token_hashes(torch.arange(64)))[-1]
            scores = sampler.draft_scores(logits, len(path) - 1, noise)[row, 0]
            assert tree.tokens[row, children].tolist() == scores.topk(2).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", [{"kind": "block", "markov_rank": 4}, BASELINES["shape with Markov bias"]])
def test_biases_from_a_table_are_those_that_are_computed(target, monkeypatch, kind, temperature):
    network = predictor(**kind, loud=True)
    sampler = Sampler(torch.tensor([5, 2]), temperature, keys=sequence_keys(0, 2) if temperature else None)
    trees = []
    for entries in (biases._TABLED, 0):
        monkeypatch.setattr(biases, "_TABLED", entries)
        drafter, begun, _ = begin(network, target, TreeShape(depth=3, width=2))
        assert (drafter._bias.table is None) == (entries == 0)
        sampler.commit(begun.lengths)
        trees.append(drafter.draft(begun, sampler))
    assert torch.equal(trees[0].tokens, trees[1].tokens) and torch.equal(trees[0].parent, trees[1].parent)
    for weight in network.token_bias.parameters():
        weight.data.zero_()  # and they matter
    drafter, begun, _ = begin(network, target, TreeShape(depth=3, width=2))
    assert not torch.equal(drafter.draft(begun, sampler).tokens, trees[0].tokens)


SHAPES = [
    TreeShape(depth=3, width=2),
    TreeShape(depth=4, width=3, branching=2, nodes=5),
    TreeShape(depth=5, width=2, nodes=3),
    TreeShape(depth=2, width=1, branching=4, nodes=3),
    TreeShape(depth=4, width=2, threshold=0.02),
    TreeShape.full(3, 3),
]


def test_parallel_steps_draft_no_deeper_than_they_were_trained():
    deep = TreeShape(depth=9, width=2, nodes=12)
    parallel = TrainedDrafter(predictor(num_steps=3, step_mode="parallel", token_conditioning="root"), deep)
    assert (parallel.tree.depth, parallel.with_tree(deep).tree.depth) == (3, 3)
    parallel.limit_draft(7)
    assert parallel.tree.depth == 3
    assert TrainedDrafter(predictor(num_steps=3, step_mode="recursive"), deep).tree.depth == 9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["greedy", "coupled", "drawn", "one drawn"])
@pytest.mark.parametrize(
    "name",
    [
        *("parallel", "medusa", "block", "shape with Markov bias", "no table"),
        "block with recurrent Markov bias",
    ],
)
def test_trees_grown_on_the_host_are_those_grown_on_a_device(target, monkeypatch, name, how, shape):
    if name == "no table":
        monkeypatch.setattr(biases, "_TABLED", 0)
    kinds = {"parallel": {"kind": "shape", "step_mode": "parallel", "token_conditioning": "root"}}
    kinds |= {"no table": BASELINES["shape with Markov bias"], "block": {"kind": "block", "markov_rank": 4}}
    network = predictor(**(BASELINES | kinds)[name], loud=True)
    drafter, begun, _ = begin(network, target, shape)
    noise = {} if how == "greedy" else {"temperature": 0.7, "keys": sequence_keys(0, 2)}
    sampler = Sampler(begun.lengths - 1, **noise, coupled="drawn" not in how, one_drawn=how == "one drawn")
    sampler.commit(begun.lengths)
    assert drafter.on_host and not network.by_path
    drafter.single = None  # whose products are of 8 bits
    here = drafter.draft(begun, sampler)
    drafter.on_host = False
    there = drafter.draft(begun, sampler)
    require_equal_trees(here, there, check_dtype=False)
    assert bool(here.were_drawn.any()) == (how == "drawn") or how == "one drawn"  # of which none may be kept


def test_pruned_trees_keep_the_likeliest_nodes(target):
    network = loud("recursive", "path")
    whole, committed, _ = begin(network, target, TreeShape(depth=3, width=3))
    pruned, _, _ = begin(network, target, TreeShape(depth=3, width=3, nodes=5))
    sampler = Sampler(committed.lengths - 1)
    sampler.commit(committed.lengths)
    every, some = whole.draft(committed, sampler), pruned.draft(committed, sampler)
    assert every.size == 1 + 3 + 9 + 9 and some.size == 6

    def paths(tree, row):
        return {
            tuple(tree.tokens[row, [n for n in range(node + 1) if tree.ancestors[row, node, n]]].tolist())
            for node in range(tree.size)
        }

    for row in range(2):
        assert paths(some, row) <= paths(every, row)


@pytest.mark.parametrize("counts", [[1, 3], [2, 1]])
def test_update_moves_the_window_by_what_was_accepted(target, counts):
    network = loud("recursive", "path")
    drafter, begun, hidden = begin(network, target, TreeShape())
    new = torch.randn(2, 3, 32, dtype=torch.float64)
    drafter.update([[0] * (1 + count) for count in counts], new, torch.tensor(counts))
    for row, count in enumerate(counts):
        known = torch.cat([hidden[row, : len(begun.texts[row]) - 1], new[row, :count]])
        expected = windows(known[None], torch.tensor([[len(known)]]), 4)[0, 0]
        assert torch.equal(drafter.window[row], expected)
    drafter.select(torch.tensor([1]))
    assert drafter.window.shape == (1, 4, 32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_vocabulary_is_all_that_is_drafted(target, mode, temperature):
    """A vocabulary of every token, in another order, changes nothing; a smaller one holds every draft."""
    whole = loud(*mode)
    everything, some = torch.arange(63, -1, -1), torch.tensor([9, 4, 33, 60])
    drafts = []
    for vocabulary in (None, everything, some):
        network = loud(*mode)
        network.load_state_dict(whole.state_dict())
        network.register_buffer("draft_vocabulary", vocabulary)
        drafter, begun, _ = begin(network, target, TreeShape(depth=3, width=2))
        sampler = Sampler(begun.lengths - 1, temperature, keys=sequence_keys(0, 2) if temperature else None)
        sampler.commit(begun.lengths)
        drafts.append(drafter.draft(begun, sampler))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert set(drafts[2].tokens[:, 1:].flatten().tolist()) <= set(some.tolist())


def test_full_trees_hold_every_path():
    shape = TreeShape.full(branching=3, depth=3)
    assert (shape.width, shape.branching, shape.depth, shape.nodes) == (9, 3, 3, None)


def test_parallel_predictors_draft_no_deeper_than_their_steps(target):
    drafter, begun, _ = begin(loud("parallel", "none"), target, TreeShape(depth=9, width=1))
    assert drafter.draft(begun, Sampler(begun.lengths)).size == 1 + 4


def test_another_target_is_refused(target, tiny_model):
    network = loud("recursive", "path")
    network.config.target_identity = target.identity.to_dict()
    with pytest.raises(TargetMismatch, match=r"differs in output embedding .*; give the target"):
        TrainedDrafter(network).bind(Target(tiny_model("llama", seed=5)))
    network.config.target_identity = None
    with pytest.raises(TargetMismatch, match="expects hidden size 32"):
        other = Target(tiny_model("llama"))
        other.hidden_size = 48
        TrainedDrafter(network).bind(other)


@pytest.mark.parametrize("mode", MODES)
def test_every_node_draws_children_of_its_own(target, mode):
    """Where the rule asks for draws: siblings do not draw alike, even from one distribution, which the tree tells."""
    drafter, begun, _ = begin(loud(*mode), target, TreeShape(depth=3, width=3))
    sampler = Sampler(begun.lengths - 1, 99.0, keys=sequence_keys(0, 2), coupled=False)  # near the flat distribution
    sampler.commit(begun.lengths)
    tree = drafter.draft(begun, sampler)
    assert tree.log_q is not None
    for row in range(2):
        parents, tokens = tree.parent[row].tolist(), tree.tokens[row].tolist()
        children = {
            above: [t for t, p in zip(tokens, parents, strict=True) if p == above] for above in set(parents) - {-1}
        }
        assert len(children) == 1 + 3 + 3
        assert len({tuple(own) for own in children.values()}) == 7
        assert all(len(set(own)) == 3 for own in children.values())
        expanded = torch.tensor(sorted(children))
        assert torch.allclose(tree.log_q[row, expanded].exp().sum(-1), torch.ones(7))


@pytest.mark.parametrize("kind", [*BASELINES, *WIDTHS])
@pytest.mark.parametrize("grown", ["at once", "step by step"])
def test_every_kind_drafts_what_training_unrolls(target, kind, grown):
    """Along every path of a tree the drafts are the best of `unroll` on whole texts, however the states came in."""
    network = predictor(**(BASELINES | WIDTHS)[kind], loud=True)
    layers, size = network.config.feature_layers, 32
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in (9, 6)]
    hidden = torch.randn(2, 8, len(layers) * size, dtype=torch.float64, generator=generator)
    drafter = TrainedDrafter(network, TreeShape(depth=3, width=2, branching=2))
    drafter.bind(target)
    short = [2, 4] if grown == "step by step" else [9, 6]  # committed at the prefill, root included
    begun = committed(*(text[:n] for text, n in zip(texts, short, strict=True)))
    drafter.start(begun, hidden[:, : max(short) - 1])
    while (behind := [len(text) - n for text, n in zip(texts, short, strict=True)]) != [0, 0]:
        counts = [min(more, many) for more, many in zip(behind, (3, 1), strict=True)]
        new = [hidden[b, n - 1 : n + c - 1] for b, (n, c) in enumerate(zip(short, counts, strict=True))]
        rows = [F.pad(states, (0, 0, 0, 3 - len(states))) for states in new]
        ids = [text[n - 1 : n + count] for text, n, count in zip(texts, short, counts, strict=True)]
        short = [n + count for n, count in zip(short, counts, strict=True)]
        drafter.update(ids, torch.stack(rows), torch.tensor(counts))
    now = committed(*texts)
    sampler = Sampler(now.lengths - 1)
    sampler.commit(now.lengths)
    tree = drafter.draft(now, sampler)
    assert tree.size == 1 + 2 + 4 + 4
    reader = Reader(network, target)
    for row, text in enumerate(texts):
        root = torch.tensor([[len(text) - 1]])
        for node in range(tree.size):
            children = [n for n in range(tree.size) if tree.parent[row, n] == node]
            if not children:
                continue
            path = [n for n in range(node + 1) if tree.ancestors[row, node, n]]
            tokens = tree.tokens[row, path][None, None]
            whole = Texts(hidden[row : row + 1, : len(text) - 1], torch.tensor([text]), torch.ones(1, 1), root)
            known = known_in(network, target, whole, windows(whole.hidden, root, network.config.window))
            embeddings = network.embed(tokens, target)
            logits = reader(network.unroll(known, embeddings, len(path)), tokens, embeddings)[0, 0, -1]
            assert tree.tokens[row, children].tolist() == logits.topk(2).indices.tolist()


def test_a_node_has_no_more_children_than_a_selector_has_candidates():
    network = predictor(**{**BASELINES["block with convolutions and a selector"], "selector_top_k": 2})
    drafter = TrainedDrafter(network, TreeShape(depth=3, width=4))
    assert drafter.tree.branching == 2 and drafter.tree.width == 4
    assert drafter.with_tree(TreeShape.full(3, 2)).tree.branching == 2
    assert TrainedDrafter(predictor(), TreeShape(depth=3, width=4)).tree.branching is None
