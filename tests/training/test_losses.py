import math
from collections.abc import Callable
from dataclasses import fields
from functools import wraps

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shape.errors import ConfigError
from shape.training import losses as module
from shape.training.losses import (
    acceptance_loss,
    agreement_loss,
    mse,
    smooth_l1,
    squared_norm,
    step_sum,
    supervised,
    weighted_loss,
)
from shape.training.options import Losses


def of_logits(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss on log-probabilities as one on logits."""

    @wraps(loss)
    def applied(predicted: Tensor, target: Tensor, *arguments, **options) -> Tensor:
        logs = module.log_probabilities(predicted), module.log_probabilities(target)
        return loss(*logs, *arguments, **options)

    return applied


soft_cross_entropy, kl = of_logits(module.soft_cross_entropy), of_logits(module.kl)
total_variation = of_logits(module.total_variation)
negative_log_acceptance = of_logits(module.negative_log_acceptance)
sinkhorn = of_logits(module.sinkhorn)
ON_STATES = [mse, squared_norm, smooth_l1]
ON_LOGITS = [soft_cross_entropy, kl, total_variation, negative_log_acceptance]
LIMIT = {"scale": 1e-9, "epsilon": 0.002, "iterations": 400}  # of the loss sinkhorn: total variation
LOSSES = {loss.__name__: loss for loss in (*ON_STATES, *ON_LOGITS, sinkhorn)}
WEIGHTS = list(LOSSES)
seeds = st.integers(0, 2**31)
sizes = st.floats(0, 50)


def only(**weights: float) -> Losses:
    """Weights with everything off that is not named."""
    return Losses(**dict.fromkeys(WEIGHTS, 0.0) | weights)


def pair(seed: int, *shape: int, size: float = 3.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple((size * torch.randn(2, *shape, generator=generator, dtype=torch.float64)).to(dtype))


def masked_loss(
    losses: Losses,
    predicted: Tensor,
    target: Tensor,
    predicted_logits: Tensor | None,
    target_logits: Tensor | None,
    mask: Tensor,
    embeddings: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`weighted_loss` of what a mask keeps."""
    kept = supervised(mask)
    logits = (None if each is None else each[kept] for each in (predicted_logits, target_logits))
    return weighted_loss(losses, predicted[kept], target[kept], *logits, kept[-1], embeddings)


class TestValues:
    def test_against_naive_formulas(self) -> None:
        predicted, target = pair(0, 2, 3, 11)
        q, p = predicted.softmax(-1), target.softmax(-1)
        torch.testing.assert_close(soft_cross_entropy(predicted, target), -(p * q.log()).sum(-1))
        torch.testing.assert_close(kl(predicted, target), (p * (p / q).log()).sum(-1))
        torch.testing.assert_close(total_variation(predicted, target), (p - q).abs().sum(-1) / 2)
        torch.testing.assert_close(negative_log_acceptance(predicted, target), -torch.minimum(p, q).sum(-1).log())
        torch.testing.assert_close(mse(predicted, target), (predicted - target).square().sum(-1) / 11)
        torch.testing.assert_close(squared_norm(predicted, target), (predicted - target).square().sum(-1))
        error = (predicted - target).abs()
        huber = torch.where(error < 1, error.square() / 2, error - 0.5)
        torch.testing.assert_close(smooth_l1(predicted, target), huber.mean(-1))

    @given(seeds)
    def test_estimates_learn_what_a_draft_from_some_tokens_is_accepted_with(self, seed: int) -> None:
        """Of all tokens the first 7 can be drafted: what is accepted is the overlap with the whole distribution."""
        (estimate, _), (q, _), (_, p) = (pair(seed + n, 9, size) for n, size in enumerate((1, 7, 11)))
        estimate, log_share = estimate[:, 0], p[:, :7].logsumexp(-1) - p.logsumexp(-1)
        accepted = torch.minimum(q.softmax(-1), p.softmax(-1)[:, :7]).sum(-1)
        expected = module.F.binary_cross_entropy_with_logits(estimate, accepted)
        steps, losses = torch.zeros(9, dtype=torch.int64), Losses()
        found = acceptance_loss(losses, estimate, q, p[:, :7], steps, log_share=log_share)
        torch.testing.assert_close(found, expected)
        agree = (q.argmax(-1) == p.argmax(-1)).double()  # of all tokens
        expected = module.F.binary_cross_entropy_with_logits(estimate.float(), agree.float())
        found = agreement_loss(estimate, q, p[:, :7], 9, draftable=p.argmax(-1) < 7)
        torch.testing.assert_close(found, expected)

    @given(seeds, sizes)
    def test_bounds_and_relations(self, seed: int, size: float) -> None:
        predicted, target = pair(seed, 5, 17, size=size, dtype=torch.float32)
        tv = total_variation(predicted, target)
        divergence = kl(predicted, target)
        assert (tv >= 0).all() and (tv <= 1).all()
        assert (divergence >= -1e-5).all()
        assert (negative_log_acceptance(predicted, target) >= -1e-5).all()
        acceptance = negative_log_acceptance(predicted, target).neg().exp()
        torch.testing.assert_close(acceptance, 1 - tv, atol=1e-5, rtol=1e-5)
        assert (tv <= (divergence.clamp(min=0) / 2).sqrt() + 1e-3).all()  # Pinsker
        entropy = soft_cross_entropy(target, target)
        torch.testing.assert_close(soft_cross_entropy(predicted, target), divergence + entropy, atol=1e-3, rtol=1e-4)

    @pytest.mark.parametrize("loss", [*ON_STATES, kl, total_variation, negative_log_acceptance])
    def test_zero_where_equal(self, loss) -> None:
        same = pair(1, 4, 9)[0]
        torch.testing.assert_close(loss(same, same), torch.zeros(4, dtype=torch.float64))

    @pytest.mark.parametrize("loss", ON_LOGITS)
    def test_logits_count_up_to_a_constant(self, loss) -> None:
        predicted, target = pair(2, 4, 9)
        torch.testing.assert_close(loss(predicted + 7, target - 3), loss(predicted, target))

    @pytest.mark.parametrize("loss", [*ON_STATES, *ON_LOGITS])
    def test_bfloat16_is_computed_in_float32(self, loss) -> None:
        predicted, target = pair(3, 4, 9, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(predicted, target)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, loss(predicted.float(), target.float()))


class TestGradients:
    @pytest.mark.parametrize("loss", [*ON_STATES, *ON_LOGITS])
    def test_finite_differences(self, loss) -> None:
        predicted, target = pair(4, 3, 6)
        assert torch.autograd.gradcheck(lambda x: loss(x, target), predicted.requires_grad_())

    @pytest.mark.parametrize("loss", [*ON_STATES, *ON_LOGITS])
    def test_descent_reaches_the_target(self, loss) -> None:
        predicted, target = pair(5, 1, 5, size=1.5)
        predicted.requires_grad_()
        optimiser = torch.optim.Adam([predicted], lr=0.05)
        for _ in range(400):
            optimiser.zero_grad()
            loss(predicted, target).sum().backward()
            optimiser.step()
        if loss in ON_LOGITS:
            assert total_variation(predicted, target).item() < 0.05
        else:
            torch.testing.assert_close(predicted.detach(), target, atol=0.05, rtol=0)

    def test_acceptance_gradient_is_total_variations_over_the_acceptance(self) -> None:
        predicted, target = pair(6, 4, 9)
        predicted.requires_grad_()
        (of_tv,) = torch.autograd.grad(total_variation(predicted, target).sum(), predicted)
        (of_nla,) = torch.autograd.grad(negative_log_acceptance(predicted, target).sum(), predicted)
        acceptance = 1 - total_variation(predicted, target).detach()
        torch.testing.assert_close(of_nla, of_tv / acceptance.unsqueeze(-1))

    def test_acceptance_pulls_even_from_disjoint_supports(self) -> None:
        """Overlap e^-200 underflows float32: the loss is still finite, and its gradient points home."""
        predicted = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
        value = negative_log_acceptance(predicted, torch.tensor([[0.0, 200.0, 0.0]]))
        value.sum().backward()
        assert value.item() == pytest.approx(200, abs=1.1)
        assert predicted.grad[0, 0] > 0.4
        assert predicted.grad[0, 1] < 0

    def test_nothing_flows_to_the_target_side_unasked(self) -> None:
        predicted, target = pair(7, 2, 3, 8)
        predicted.requires_grad_()
        total, _ = weighted_loss(Losses(), predicted, target, predicted, target, torch.ones(2, 3, dtype=torch.bool))
        total.backward()
        assert predicted.grad.any()


class TestSinkhorn:
    """The family between total variation (s -> 0) and transport by meaning."""

    @given(seeds, st.floats(0.5, 8))
    @settings(max_examples=25)
    def test_its_limit_is_total_variation(self, seed: int, size: float) -> None:
        predicted, target = pair(seed, 4, 11, size=size)
        embeddings = pair(seed + 1, 11, 5)[0]
        value = sinkhorn(predicted, target, embeddings, support=11, **LIMIT)
        torch.testing.assert_close(value, total_variation(predicted, target), atol=0.02, rtol=0)

    def test_the_bucket_only_forgives_what_both_have_in_it(self) -> None:
        predicted, target = pair(0, 50, 40)
        embeddings, tv = pair(1, 40, 5)[0], total_variation(predicted, target)
        top = target.topk(8, -1).indices
        rests = [1 - x.softmax(-1).gather(-1, top).sum(-1) for x in (predicted, target)]
        value = sinkhorn(predicted, target, embeddings, support=8, **LIMIT)
        assert (value <= tv + 0.02).all()
        assert (value >= tv - torch.minimum(*rests) - 0.02).all()

    def test_zero_where_equal_and_up_to_a_constant(self) -> None:
        predicted, target = pair(2, 4, 30)
        embeddings = pair(3, 30, 5)[0]
        torch.testing.assert_close(sinkhorn(target, target, embeddings), torch.zeros(4).double(), atol=1e-3, rtol=0)
        moved = sinkhorn(predicted + 7, target - 3, embeddings)
        torch.testing.assert_close(moved, sinkhorn(predicted, target, embeddings))

    def test_a_similar_token_is_a_smaller_mistake(self) -> None:
        """Tokens 0 and 1 lie close together, 2 far from both; only with s above their distance does it matter."""
        embeddings = torch.tensor([[0.0, 0.0], [0.3, 0.0], [0.0, 3.0]])
        target, near, far = (torch.nn.functional.one_hot(torch.tensor([i]), 3) * 12.0 for i in (0, 1, 2))
        by_meaning = [float(sinkhorn(wrong, target, embeddings, scale=1.0)) for wrong in (near, far)]
        by_chance = [float(sinkhorn(wrong, target, embeddings, scale=1e-6)) for wrong in (near, far)]
        assert by_meaning[0] < 0.2 < 0.9 < by_meaning[1]
        assert by_chance == pytest.approx([1.0, 1.0], abs=0.02)

    def test_its_gradient_is_that_of_finite_differences(self) -> None:
        predicted, target = pair(4, 3, 6, size=1.5)
        embeddings = pair(5, 6, 4)[0]

        def converged(x: Tensor) -> Tensor:
            return sinkhorn(x, target, embeddings, epsilon=0.3, support=4, iterations=400)

        assert torch.autograd.gradcheck(converged, predicted.requires_grad_())

    @pytest.mark.parametrize("scale", [1e-9, 1.0, 4.0])
    def test_descent_reaches_the_target(self, scale: float) -> None:
        predicted, target = pair(6, 1, 6, size=1.5)
        embeddings = pair(7, 6, 4)[0]
        predicted.requires_grad_()
        optimiser = torch.optim.Adam([predicted], lr=0.05)
        for _ in range(400):
            optimiser.zero_grad()
            sinkhorn(predicted, target, embeddings, scale=scale, support=5).sum().backward()
            optimiser.step()
        assert total_variation(predicted, target).item() < 0.15

    @pytest.mark.parametrize("size", [1.0, 300.0])
    def test_float32_under_autocast_and_finite_gradients(self, size: float) -> None:
        predicted, target = pair(8, 4, 40, size=size, dtype=torch.bfloat16)
        embeddings = pair(9, 40, 8, dtype=torch.bfloat16)[0]
        predicted.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = sinkhorn(predicted, target, embeddings)
        assert value.dtype == torch.float32 and value.isfinite().all()
        torch.testing.assert_close(value, sinkhorn(predicted.float(), target.float(), embeddings.float()))
        value.sum().backward()
        assert predicted.grad.isfinite().all() and predicted.grad.any()

    def test_positions_are_worked_out_by_themselves(self) -> None:
        """More positions than are taken at once, any leading shape, and one alone."""
        predicted, target = pair(10, 300, 2, 9)
        embeddings = pair(11, 9, 4)[0]
        value = sinkhorn(predicted, target, embeddings, support=4)
        assert value.shape == (300, 2)
        torch.testing.assert_close(value[290, 1], sinkhorn(predicted[290, 1], target[290, 1], embeddings, support=4))


class TestSupervised:
    @given(seeds)
    def test_in_order_of_steps_and_nothing_else(self, seed: int) -> None:
        mask = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(seed)) < 0.5
        kept = supervised(mask)
        assert mask[kept].all() and len(kept[-1]) == mask.sum()
        assert kept[-1].tolist() == sorted(kept[-1].tolist())


class TestWeightedLoss:
    @given(seeds, st.floats(0.1, 1))
    @settings(max_examples=25)
    def test_portions_add_up_by_one_number_of_the_whole(self, seed: int, decay: float) -> None:
        losses = Losses(mse=0.3, smooth_l1=0.0, kl=0.7, step_decay=decay)
        states, logits = pair(seed, 12, 4), pair(seed + 1, 12, 7)
        steps = torch.randint(3, (12,), generator=torch.Generator().manual_seed(seed))
        whole = step_sum(losses, steps.bincount(minlength=3))
        assert whole.shape == () and float(whole) == pytest.approx(sum(decay**n for n in steps.tolist()), rel=1e-5)
        portions = [
            weighted_loss(losses, *(each[some] for each in (*states, *logits, steps)), whole=whole)[0]
            for some in (slice(0, 5), slice(5, 5), slice(5, 12))
        ]
        at_once, _ = weighted_loss(losses, *states, *logits, steps)
        torch.testing.assert_close(torch.stack(portions).sum(), at_once, rtol=1e-5, atol=1e-6)

    @given(seeds, st.floats(0.1, 1))
    def test_against_a_loop(self, seed: int, decay: float) -> None:
        states, logits = pair(seed, 2, 5, 3, 4), pair(seed + 1, 2, 5, 3, 7)
        mask = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(seed)) < 0.6
        weights = {"mse": 0.3, "smooth_l1": 0.5, "soft_cross_entropy": 1.0, "kl": 0.2}
        weights |= {"total_variation": 0.7, "negative_log_acceptance": 2.0, "sinkhorn": 0.4}
        embeddings = pair(seed + 2, 7, 5)[0]
        losses = Losses(**weights, step_decay=decay, sinkhorn_scale=2.0, sinkhorn_support=3)
        total, parts = masked_loss(losses, *states, *logits, mask, embeddings)
        expected = 0.0
        for name, weight in weights.items():
            arguments = states if name in ("mse", "smooth_l1") else logits
            more = (embeddings, 2.0, 0.1, 3, 10) if name == "sinkhorn" else ()
            values = LOSSES[name](*arguments, *more)
            summed, mass = 0.0, 0.0
            for b in range(2):
                for i in range(5):
                    for n in range(3):
                        if mask[b, i, n]:
                            summed += decay**n * values[b, i, n].item()
                            mass += decay**n
            mean = summed / mass if mass else 0.0
            assert parts[name].item() == pytest.approx(mean, rel=1e-5, abs=1e-6)
            expected += weight * mean
        assert total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    def test_parts_are_detached_and_only_those_asked_for(self) -> None:
        predicted, target = pair(0, 2, 3, 4)
        predicted.requires_grad_()
        total, parts = masked_loss(only(mse=2.0), predicted, target, None, None, torch.ones(2, 3, dtype=torch.bool))
        assert list(parts) == ["mse"]
        assert total.requires_grad and not parts["mse"].requires_grad
        torch.testing.assert_close(total.detach(), 2 * parts["mse"])

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_masked_rows_have_no_influence(self, poison: float) -> None:
        states, logits = pair(1, 2, 3, 4), pair(2, 2, 3, 7)
        mask = torch.tensor([[True, False, True], [False, False, True]])
        every = Losses(**dict.fromkeys(WEIGHTS, 1.0), sinkhorn_support=3)
        embeddings = pair(3, 7, 5)[0]

        def run(value: float) -> tuple[Tensor, list[Tensor]]:
            tensors = [x.masked_fill(~mask.unsqueeze(-1), value).requires_grad_() for x in (*states, *logits)]
            total, _ = masked_loss(every, *tensors, mask, embeddings)
            total.backward()
            return total, [x.grad for x in tensors]

        (clean, clean_grads), (poisoned, poisoned_grads) = run(0.0), run(poison)
        assert torch.equal(clean, poisoned)
        for a, b in zip(clean_grads, poisoned_grads, strict=True):
            assert torch.equal(a, b)
            assert not b[~mask].any()

    def test_nothing_supervised_is_zero_with_a_gradient(self) -> None:
        predicted, target = pair(3, 2, 3, 4)
        predicted.requires_grad_()
        total, parts = masked_loss(Losses(), predicted, target, predicted, target, torch.zeros(2, 3, dtype=torch.bool))
        total.backward()
        assert total.item() == 0
        assert all(part == 0 for part in parts.values())
        assert not predicted.grad.any()

    def test_later_steps_count_less(self) -> None:
        predicted, target = torch.zeros(1, 3, 2), torch.zeros(1, 3, 2)
        predicted.requires_grad_()
        total, _ = masked_loss(
            only(mse=1.0, step_decay=0.5),
            predicted,
            target + 1,
            None,
            None,
            torch.ones(1, 3, dtype=torch.bool),
        )
        total.backward()
        pull = predicted.grad[0, :, 0]
        torch.testing.assert_close(pull / pull[0], torch.tensor([1.0, 0.5, 0.25]))

    def test_missing_logits(self) -> None:
        states = pair(4, 2, 3, 4)
        with pytest.raises(ValueError, match="soft_cross_entropy need logits"):
            masked_loss(Losses(), *states, None, None, torch.ones(2, 3, dtype=torch.bool))

    def test_missing_embeddings(self) -> None:
        states, logits = pair(4, 2, 3, 4), pair(5, 2, 3, 7)
        with pytest.raises(ValueError, match="sinkhorn needs the rows"):
            masked_loss(only(sinkhorn=1.0), *states, *logits, torch.ones(2, 3, dtype=torch.bool))

    def test_paper(self) -> None:
        """MSE + soft cross-entropy (3.2.2), all steps alike."""
        states, logits = pair(5, 4, 3, 6), pair(6, 4, 3, 9)
        paper = only(mse=1.0, soft_cross_entropy=1.0, step_decay=1.0)
        total, _ = masked_loss(paper, *states, *logits, torch.ones(4, 3, dtype=torch.bool))
        torch.testing.assert_close(
            total, mse(*states).mean() + soft_cross_entropy(*logits).mean(), rtol=1e-6, atol=1e-6
        )


class TestWeights:
    @pytest.mark.parametrize(
        ("weights", "words"),
        [
            ({"mse": -1.0}, "loss mse is -1.0"),
            ({"kl": math.nan}, "loss kl is nan"),
            ({"step_decay": 0.0}, "step_decay is 0.0"),
            ({"step_decay": 1.1}, "step_decay is 1.1"),
            ({"sinkhorn_scale": 0.0}, "sinkhorn_scale is 0.0"),
            ({"sinkhorn_support": 0}, "sinkhorn_support is 0"),
            ({"smooth_l1": 0.0, "soft_cross_entropy": 0.0}, "all losses have weight 0"),
        ],
    )
    def test_wrong_ones_get_one_sentence(self, weights: dict, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            Losses(**weights)

    def test_say_which_tensors_are_needed(self) -> None:
        assert Losses().on_states == {"smooth_l1": 0.5}
        assert Losses().on_logits == {"soft_cross_entropy": 1.0}
        assert not only(mse=1.0).on_logits
        assert not only(negative_log_acceptance=1.0).on_states
        assert only(sinkhorn=0.5).on_logits == {"sinkhorn": 0.5}

    def test_every_weight_is_a_field(self) -> None:
        parameters = {"step_decay"} | {f"sinkhorn_{name}" for name in ("scale", "epsilon", "support", "iterations")}
        assert {f.name for f in fields(Losses)} - parameters == set(WEIGHTS)
