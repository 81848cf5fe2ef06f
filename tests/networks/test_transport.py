from typing import get_args

import numpy as np
import ot
import pytest
import torch
from helpers import matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from shape.networks.transport import (
    MAX_EXPONENT,
    LastUpdate,
    Plan,
    sinkhorn,
    sinkhorn_divergence,
    squared_distances,
)

ORDERS: tuple[LastUpdate, ...] = get_args(LastUpdate)
CONVERGED = 3000


def problem(seed: int, batch: tuple[int, ...] = (3,), d: int = 7, k: int = 4, sharpness: float = 1.0):
    """p, q (*batch, d) and a (d, d) cost, float64."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (sharpness * torch.randn(2, *batch, d, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, q, squared_distances(torch.randn(d, k, generator=generator, dtype=torch.float64))


def cost_of(plan: Plan, cost: Tensor) -> Tensor:
    """<T, C>, entropy not included."""
    return (matrix(plan) * cost).sum((-1, -2))


seeds = st.integers(0, 2**31)


class TestAgainstPot:
    @pytest.mark.parametrize("last_update", ORDERS)
    @pytest.mark.parametrize("epsilon", [0.1, 0.5, 5.0])
    def test_converged_plan(self, last_update: LastUpdate, epsilon: float) -> None:
        p, q, cost = problem(0)
        plan = matrix(sinkhorn(p, q, cost, epsilon, CONVERGED, last_update))
        for i in range(len(p)):
            oracle = ot.sinkhorn(p[i].numpy(), q[i].numpy(), cost.numpy(), epsilon, numItermax=100_000, stopThr=1e-13)
            np.testing.assert_allclose(plan[i], oracle, atol=1e-9)

    def test_cost_approaches_the_unregularised_optimum(self) -> None:
        p, q, cost = problem(1)
        exact = torch.tensor([ot.emd2(p[i].numpy(), q[i].numpy(), cost.numpy()) for i in range(len(p))])
        gaps = [
            (cost_of(sinkhorn(p, q, cost, epsilon, CONVERGED), cost) - exact).abs().max() for epsilon in (1.0, 0.3, 0.1)
        ]
        assert gaps[0] > gaps[1] > gaps[2]
        assert gaps[2] < 0.02

    def test_unconverged_row_order_is_that_of_pot(self) -> None:
        """Each iteration of `sinkhorn_knopp` updates v, then u: an oracle for each of them."""
        p, q, cost = problem(2, batch=())
        for iterations in (1, 2, 5):
            ours = matrix(sinkhorn(p, q, cost, 0.3, iterations, "row"))
            oracle = ot.bregman.sinkhorn_knopp(
                p.numpy(), q.numpy(), cost.numpy(), 0.3, numItermax=iterations, stopThr=0, warn=False
            )
            np.testing.assert_allclose(ours, oracle, atol=1e-12)


class TestMarginals:
    @given(
        seeds,
        st.integers(1, 12),
        st.floats(0.05, 3),
        st.floats(0, 6),
        st.sampled_from(["float32", "float64"]),
    )
    def test_last_update_is_exact_at_every_iteration_count(
        self, seed: int, iterations: int, epsilon: float, sharpness: float, dtype: str
    ) -> None:
        """The finding about the paper's read-out: after a column update T^T 1 is q, converged or not."""
        p, q, cost = (x.to(getattr(torch, dtype)) for x in problem(seed, sharpness=sharpness))
        tolerance = 1e-12 if dtype == "float64" else 2e-6
        by_column = sinkhorn(p, q, cost, epsilon, iterations, "column")
        by_row = sinkhorn(p, q, cost, epsilon, iterations, "row")
        torch.testing.assert_close(by_column.column_marginal(), q, atol=tolerance, rtol=0)
        torch.testing.assert_close(matrix(by_row).sum(-1), p, atol=tolerance, rtol=0)

    def test_the_other_marginal_is_off_until_converged(self) -> None:
        p, q, cost = problem(3)
        errors = [
            (sinkhorn(p, q, cost, 0.2, iterations, "row").column_marginal() - q).abs().max()
            for iterations in (1, 10, CONVERGED)
        ]
        assert errors[0] > 1e-2
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 1e-10

    def test_column_read_out_gives_the_plan_no_gradient(self) -> None:
        p, q, cost = problem(4)
        reads = torch.randn(7, dtype=torch.float64)

        def gradients(last_update: LastUpdate) -> tuple[Tensor, ...]:
            leaves = [x.clone().requires_grad_() for x in (p, q, cost)]
            (sinkhorn(*leaves, 0.3, 3, last_update).column_marginal() @ reads).sum().backward()
            return tuple(x.grad for x in leaves)

        to_p, to_q, to_cost = gradients("column")
        assert to_p.abs().max() < 1e-12
        assert to_cost.abs().max() < 1e-12
        torch.testing.assert_close(to_q, reads.expand_as(q))
        assert min(x.abs().max() for x in gradients("row")) > 1e-4

    @given(seeds)
    def test_equal_distributions_stay_put_as_epsilon_falls(self, seed: int) -> None:
        p, _, cost = problem(seed)
        moved = matrix(sinkhorn(p, p, cost, 0.02, 200))
        spread = matrix(sinkhorn(p, p, cost, 2.0, 200))
        stayed = [torch.diagonal(plan, dim1=-2, dim2=-1).sum(-1) for plan in (moved, spread)]
        assert (stayed[0] >= stayed[1]).all()


class TestReadOuts:
    """Products with the scalings against the plan as a matrix."""

    @pytest.fixture
    def plan(self) -> Plan:
        p, q, cost = problem(5, batch=(2, 3))
        return sinkhorn(p, q, cost, 0.4, 4)

    def test_marginal(self, plan: Plan) -> None:
        torch.testing.assert_close(plan.column_marginal(), matrix(plan).sum(-2))

    def test_push(self, plan: Plan) -> None:
        mass = torch.rand(2, 3, 7, dtype=torch.float64)
        transition = matrix(plan) / matrix(plan).sum(-1, keepdim=True)
        torch.testing.assert_close(plan.push(mass), torch.einsum("...ij,...i->...j", transition, mass))
        torch.testing.assert_close(plan.push(mass).sum(-1), mass.sum(-1))
        torch.testing.assert_close(plan.push(matrix(plan).sum(-1)), plan.column_marginal())


def test_pairs_on_supports_of_their_own() -> None:
    """Kernels of their own give what each pair gives by itself."""
    problems = [problem(seed, batch=()) for seed in range(3)]
    p, q, cost = (torch.stack(tensors) for tensors in zip(*problems, strict=True))
    together = sinkhorn(p, q, cost, 0.3, 4)
    for i, one in enumerate(problems):
        alone = sinkhorn(*one, 0.3, 4)
        torch.testing.assert_close(matrix(together)[i], matrix(alone))
        torch.testing.assert_close(together.push(p)[i], alone.push(p[i]))


class TestGradients:
    @pytest.mark.parametrize("last_update", ORDERS)
    def test_finite_differences(self, last_update: LastUpdate) -> None:
        p, q, cost = problem(6, batch=(2,), d=4)

        def read(p_logits: Tensor, q_logits: Tensor, cost: Tensor) -> tuple[Tensor, ...]:
            plan = sinkhorn(p_logits.softmax(-1), q_logits.softmax(-1), cost, 0.3, 3, last_update)
            return plan.column_marginal(), matrix(plan).sum(-1), cost_of(plan, cost), plan.arrivals(p)

        leaves = [x.requires_grad_() for x in (p.log(), q.log(), cost + 0.1)]
        assert gradcheck(read, leaves)

    def test_a_p_that_several_q_share(self) -> None:
        p, q, cost = problem(3, batch=(4,), d=5)
        assert gradcheck(
            lambda p, q: sinkhorn(p.softmax(-1), q.softmax(-1), cost, 0.3, 2).column_marginal(),
            [p[:1].log().requires_grad_(), q.log().requires_grad_()],
        )

    def test_of_the_ground_cost(self) -> None:
        points = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        assert gradcheck(squared_distances, points)


class TestGroundCost:
    @given(seeds, st.floats(1e-3, 1e3))
    def test_shape_of_it(self, seed: int, size: float) -> None:
        points = size * torch.randn(9, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        cost = squared_distances(points)
        naive = torch.cdist(points, points).square()
        torch.testing.assert_close(cost, naive / (naive.sum() / 72))
        assert torch.equal(cost.diagonal(), torch.zeros(9, dtype=torch.float64))
        assert (cost >= 0).all()
        torch.testing.assert_close(cost, cost.T)

    def test_degenerate_points_cost_nothing(self) -> None:
        assert torch.equal(squared_distances(torch.ones(4, 3)), torch.zeros(4, 4))
        assert torch.equal(squared_distances(torch.ones(1, 3)), torch.zeros(1, 1))

    def test_bfloat16_points_give_a_float32_cost(self) -> None:
        assert squared_distances(torch.randn(4, 3, dtype=torch.bfloat16)).dtype == torch.float32


class TestNumericalSafety:
    @pytest.mark.parametrize("last_update", ORDERS)
    @pytest.mark.parametrize("epsilon", [1e-4, 1e-2, 1e3])
    def test_extreme_inputs_stay_finite_in_float32(self, last_update: LastUpdate, epsilon: float) -> None:
        p, q, cost = (x.float() for x in problem(7, d=128, k=64, sharpness=60.0))
        assert (p == 0).any()  # softmaxes this sharp underflow
        p, q, cost = (x.requires_grad_() for x in (p, q, cost))
        plan = sinkhorn(p, q, cost, epsilon, 50, last_update)
        (plan.column_marginal().square().sum() + cost_of(plan, cost).sum()).backward()
        for tensor in (plan.u, plan.v, p.grad, q.grad, cost.grad):
            assert tensor.isfinite().all()

    def test_disjoint_points_at_the_cap(self) -> None:
        """All mass has to cross the dearest pair: the worst case of the scalings' range."""
        p, q = torch.eye(2)
        cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        plan = sinkhorn(p, q, cost, 1e-6, 20)
        torch.testing.assert_close(matrix(plan), torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
        torch.testing.assert_close(plan.kernel[0, 1].log(), torch.tensor(-MAX_EXPONENT))

    def test_lower_precision_and_autocast_do_not_reach_the_iterations(self) -> None:
        p, q, cost = (x.float() for x in problem(8))
        expected = sinkhorn(p, q, cost, 0.1, 10)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = sinkhorn(p, q, cost, 0.1, 10)
            assert squared_distances(torch.randn(4, 3)).dtype == torch.float32
        torch.testing.assert_close(inside.u, expected.u)
        assert sinkhorn(p.bfloat16(), q.bfloat16(), cost.bfloat16(), 0.1, 10).u.dtype == torch.float32

    def test_memory_does_not_grow_with_d_squared(self) -> None:
        """No tensor made on the way is larger than a batch of vectors or the shared kernel."""
        largest = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
                return out

        p, q, cost = problem(9, batch=(50,), d=32)
        with Watch():
            plan = sinkhorn(p, q, cost, 0.1, 3)
            plan.column_marginal(), plan.push(p), plan.arrivals(p)
        assert largest == max(p.numel(), cost.numel())


class TestDivergence:
    def test_against_pot(self) -> None:
        p, q, cost = problem(0, d=6)
        value = sinkhorn_divergence(p.log(), q.log(), cost, 0.3, 300)
        for i in range(len(p)):
            # POT's entropy is that of the plan alone: with it relative to p q^T the marginals' own are added.
            def regularised(a: Tensor, b: Tensor) -> float:
                plan = ot.sinkhorn(a.numpy(), b.numpy(), cost.numpy(), 0.3, numItermax=100_000, stopThr=1e-13)
                relative = (plan * np.log(plan / np.outer(a, b))).sum()
                return float((plan * cost.numpy()).sum() + 0.3 * relative)

            expected = regularised(p[i], q[i]) - (regularised(p[i], p[i]) + regularised(q[i], q[i])) / 2
            assert value[i].item() == pytest.approx(expected, abs=1e-8)

    def test_it_approaches_the_unregularised_optimum(self) -> None:
        p, q, cost = problem(1)
        cost = cost / cost.max()
        exact = torch.tensor([ot.emd2(p[i].numpy(), q[i].numpy(), cost.numpy()) for i in range(len(p))])
        gaps = [(sinkhorn_divergence(p.log(), q.log(), cost, e, 2000) - exact).abs().max() for e in (0.3, 0.1, 0.01)]
        assert gaps[0] > gaps[1] > gaps[2]
        assert gaps[2] < 0.02

    @given(seeds, st.floats(0, 6), st.integers(1, 30))
    @settings(max_examples=20)
    def test_zero_between_equals_and_symmetric(self, seed: int, sharpness: float, iterations: int) -> None:
        p, q, cost = problem(seed, sharpness=sharpness)
        same = sinkhorn_divergence(p.log(), p.log(), cost, 0.2, 200)
        torch.testing.assert_close(same, torch.zeros(3, dtype=torch.float64), atol=1e-3, rtol=0)
        there, back = (sinkhorn_divergence(a.log(), b.log(), cost, 0.2, 500) for a, b in ((p, q), (q, p)))
        torch.testing.assert_close(there, back, atol=1e-3, rtol=0)
        assert sinkhorn_divergence(p.log(), q.log(), cost, 0.2, iterations).isfinite().all()

    def test_its_gradient_is_bounded_by_the_cost(self) -> None:
        p, q, cost = problem(2, sharpness=4.0)
        log_q = q.log().requires_grad_()
        (gradient,) = torch.autograd.grad(sinkhorn_divergence(p.log(), log_q, cost, 0.01, 20).sum(), log_q)
        potential = gradient / q
        assert (potential.amax(-1) - potential.amin(-1) <= 2 * cost.max() + 1e-6).all()

    def test_tokens_without_mass(self) -> None:
        p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.0, 0.5, 0.5]])
        value = sinkhorn_divergence(p.log(), q.log(), 1 - torch.eye(3), 0.01, 100)
        assert value.item() == pytest.approx(0.5, abs=0.02)
