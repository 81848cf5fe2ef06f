import itertools

import pytest
import torch
from helpers import MODES, matrix
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModel

from shape.errors import ConfigError
from shape.networks.base import Known
from shape.networks.config import ShapeConfig
from shape.networks.refinement import SinkhornRefinement
from shape.networks.shape import Adapters, ResidualBlock, ShapePredictor, roll, windows
from shape.networks.transport import sinkhorn, squared_distances

H, W, S = 16, 4, 3
REFINEMENTS = [("none", "row"), ("affine", "row"), ("sinkhorn", "row"), ("sinkhorn", "column")]
every_mode = pytest.mark.parametrize(("step_mode", "token_conditioning"), MODES)
COMBINATIONS = [
    {"step_mode": step_mode, "token_conditioning": conditioning, "refinement": kind, "refinement_last_update": last}
    for (step_mode, conditioning), (kind, last) in itertools.product(MODES, REFINEMENTS)
]
every_combination = pytest.mark.parametrize("options", COMBINATIONS, ids=["-".join(c.values()) for c in COMBINATIONS])


def small_config(**options) -> ShapeConfig:
    defaults = {"hidden_size": H, "window": W, "intermediate_size": 24, "num_steps": S, "refinement_dim": 6}
    return ShapeConfig(**{**defaults, **options})


def predictor(seed: int = 0, **options) -> ShapePredictor:
    """One with every weight away from its special initial value, as after some training."""
    torch.manual_seed(seed)
    model = ShapePredictor(small_config(**options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def inputs(*batch: int, layers: int = 1, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = 5 * torch.randn(*batch, W, layers * H, generator=generator)
    return window.to(dtype), torch.randn(*batch, S, H, generator=generator).to(dtype)


def test_adapters_are_a_residual_block_for_each_step() -> None:
    torch.manual_seed(0)
    adapters, x = Adapters(steps=3, size=8, inner=2, dropout=0.0), torch.randn(5, 4, 8)
    found = adapters(x)
    assert found.shape == (5, 4, 3, 8)
    for n in range(3):
        block = ResidualBlock(8, 2, 0.0)
        parts = {"up": slice(2 * n, 2 * n + 2), "down": slice(8 * n, 8 * n + 8)}
        named = adapters.state_dict()
        block.load_state_dict({name: value[parts[name.split(".")[0]]] for name, value in named.items()})
        torch.testing.assert_close(found[..., n, :], block(x))


class TestWindows:
    @given(st.data())
    def test_against_a_loop(self, data: st.DataObject) -> None:
        batch, length, size = (data.draw(st.integers(1, n)) for n in (3, 9, 5))
        count = data.draw(st.integers(0, 6))
        hidden = torch.randn(batch, length, 2)
        ends = torch.tensor(
            [[data.draw(st.integers(-1, length)) for _ in range(count)] for _ in range(batch)],
            dtype=torch.long,
        )
        expected = torch.zeros(batch, count, size, 2)
        for b, p, w in itertools.product(range(batch), range(count), range(size)):
            position = int(ends[b, p]) - size + w
            if position >= 0:
                expected[b, p, w] = hidden[b, position]
        assert torch.equal(windows(hidden, ends.view(batch, count), size), expected)

    def test_last_entry_is_the_state_before_the_end(self) -> None:
        hidden = torch.arange(10.0).view(1, 10, 1)
        assert windows(hidden, torch.tensor([[7]]), 4).flatten().tolist() == [3, 4, 5, 6]
        assert windows(hidden, torch.tensor([[1]]), 4).flatten().tolist() == [0, 0, 0, 0]
        assert windows(hidden + 1, torch.tensor([[2]]), 4).flatten().tolist() == [0, 0, 1, 2]

    def test_nothing_leaks_into_unknown_positions(self) -> None:
        hidden = torch.full((1, 3, 2), torch.nan, dtype=torch.bfloat16)
        cut = windows(hidden, torch.tensor([[0]]), 2)
        assert cut.dtype == torch.bfloat16
        assert torch.equal(cut, torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16))

    @pytest.mark.parametrize("end", range(1, 8))
    def test_rolling_continues_them(self, end: int) -> None:
        hidden = torch.randn(2, 8, H)
        now, after = (windows(hidden, torch.full((2, 1), e), W)[:, 0] for e in (end, end + 1))
        assert torch.equal(roll(now, hidden[:, end]), after)

    def test_rolling_leaves_other_layers_unknown(self) -> None:
        window, state = torch.randn(3, W, 2 * H), torch.randn(3, H)
        rolled = roll(window, state)
        assert torch.equal(rolled[:, :-1], window[:, 1:])
        assert torch.equal(rolled[:, -1], torch.cat([torch.zeros(3, H), state], -1))


def require_gradients(options: dict, layers: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """Of every weight."""
    model = predictor(**options, feature_layers=[2, 5, -1][-layers:], dropout=0.1).to(dtype)
    model.train()
    predicted = model(*inputs(2, 5, layers=layers, dtype=dtype))
    assert predicted.shape == (2, 5, S, H)
    assert predicted.dtype == dtype
    predicted.float().square().mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name


def test_trains_from_several_layers() -> None:
    """Which are put together before a mode or a refinement sees them."""
    require_gradients(COMBINATIONS[2], 3)


@pytest.mark.parametrize("options", [*COMBINATIONS[:4], *COMBINATIONS[4::4]])
def test_trains_in_bfloat16(options) -> None:
    """Each mode and each refinement."""
    require_gradients(options, 3, torch.bfloat16)


@every_combination
class TestEveryCombination:
    def test_trains(self, options) -> None:
        require_gradients(options)

    def test_forward_is_repeated_steps(self, options) -> None:
        """Training unrolls exactly what decoding does one step at a time."""
        model = predictor(**options).double()
        window, embeddings = inputs(2, 5, dtype=torch.float64)
        predicted, known = model(window, embeddings), Known(window, [], None, None)
        carried = model.begin(known, embeddings[..., 0, :])
        for n in range(S):
            token = embeddings[..., n if options["token_conditioning"] == "path" else 0, :]
            state, carried = model.advance(known, carried, token, n)
            torch.testing.assert_close(predicted[..., n, :], state)

    def test_size_of_states_does_not_matter(self, options) -> None:
        model = predictor(**options).double()
        window, embeddings = inputs(3, dtype=torch.float64)
        torch.testing.assert_close(
            model(100 * window, embeddings), 100 * model(window, embeddings), rtol=1e-4, atol=1e-2
        )

    def test_autocast(self, options) -> None:
        model = predictor(**options)
        window, embeddings = inputs(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(window, embeddings)
        assert predicted.dtype == torch.float32
        torch.testing.assert_close(predicted, model(window, embeddings), rtol=0.1, atol=1.0)

    def test_unknown_states_only(self, options) -> None:
        """Rows of a batch that count for nothing may hold nothing: no NaN may come out of them."""
        model = predictor(**options)
        predicted = model(torch.zeros(2, W, H), torch.zeros(2, S, H))
        predicted.sum().backward()
        assert predicted.isfinite().all()
        assert all(weight.grad.isfinite().all() for weight in model.parameters())


class TestSteps:
    @every_mode
    def test_differ(self, step_mode: str, token_conditioning: str) -> None:
        predicted = predictor(step_mode=step_mode, token_conditioning=token_conditioning)(*inputs(4))
        for a, b in itertools.combinations(range(S), 2):
            assert not torch.allclose(predicted[:, a], predicted[:, b], atol=1e-2)

    @every_mode
    def test_read_the_tokens_they_are_told_to(self, step_mode: str, token_conditioning: str) -> None:
        """Changing the embedding of x_{t+m} changes exactly the steps that may know it."""
        model = predictor(step_mode=step_mode, token_conditioning=token_conditioning)
        window, embeddings = inputs()
        before = model(window, embeddings)
        for m in range(S):
            changed = embeddings.clone()
            changed[m] += torch.randn(H)
            differs = [not torch.equal(a, b) for a, b in zip(model(window, changed), before, strict=True)]
            reads = token_conditioning == "path" or (token_conditioning == "root" and m == 0)
            assert differs == [reads and n >= m for n in range(S)]

    @pytest.mark.parametrize("token_conditioning", ["root", "path"])
    def test_missing_tokens_are_an_error(self, token_conditioning: str) -> None:
        model = predictor(step_mode="recursive", token_conditioning=token_conditioning)
        with pytest.raises(ValueError, match="needs the embedding of token"):
            model(inputs()[0])

    def test_root_in_recursive_mode_needs_its_token_only_once(self) -> None:
        model = predictor(step_mode="recursive", token_conditioning="root")
        window, embeddings = inputs(2)
        assert torch.equal(model(window, embeddings), model(window, embeddings[:, :1]))
        known = Known(window, [], None, None)
        later = [model.advance(known, (window,), each, 1)[0] for each in (None, embeddings[:, 1])]
        assert torch.equal(*later)

    def test_recursive_predictors_go_on(self) -> None:
        model = predictor(step_mode="recursive")
        window, _ = inputs(2)
        assert torch.equal(model.unroll(Known(window, [], None, None), None, steps=7)[:, :S], model(window))

    def test_no_leading_dimensions_are_needed(self) -> None:
        model = predictor(step_mode="recursive", token_conditioning="path")
        window, embeddings = inputs(2)
        torch.testing.assert_close(model(window[0], embeddings[0]), model(window, embeddings)[0])

    def test_bfloat16_states_into_a_float32_predictor(self) -> None:
        """Targets run in bfloat16 while the predictor trains in float32, without autocast."""
        model = predictor(step_mode="recursive", token_conditioning="path")
        window, embeddings = inputs(2, dtype=torch.bfloat16)
        predicted = model(window, embeddings)
        assert predicted.dtype == torch.float32
        assert torch.equal(predicted, model(window.float(), embeddings.float()))

    def test_inference_uses_no_random_numbers(self) -> None:
        model = predictor(dropout=0.5, refinement="sinkhorn")
        state = torch.get_rng_state()
        assert torch.equal(model(inputs(2)[0]), model(inputs(2)[0]))
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(model.train()(inputs(2)[0]), model(inputs(2)[0]))


class TestRefinement:
    def test_column_order_is_the_iterated_read_out(self) -> None:
        """Without iterations it equals the paper's formula computed in full, at any iteration count."""
        model = predictor(refinement="sinkhorn", refinement_last_update="column").double()
        refinement = model.refinement
        assert isinstance(refinement, SinkhornRefinement)
        raw, current = torch.randn(2, 5, H).double()
        p, q = (refinement._distribution(refinement._reduced(state)) for state in (current, raw))
        size = current.square().mean(-1, keepdim=True).sqrt()
        for iterations in (1, 3, 30):
            plan = sinkhorn(p, q, squared_distances(refinement.expand.weight.T), 0.1, iterations, "column")
            paper = 0.5 * raw + 0.5 * size * refinement.expand(plan.column_marginal())
            torch.testing.assert_close(refinement(raw, current), paper, rtol=1e-12, atol=1e-12)

    def test_barycentric_read_out_moves_what_the_current_state_has(self) -> None:
        """Each point gets the mean of the coordinates that arrive there; in either order the plan matters."""
        raw, current = torch.randn(2, 5, H).double()
        for last_update in ("row", "column"):
            options = {"refinement": "sinkhorn", "refinement_last_update": last_update}
            model = predictor(**options, refinement_readout="barycentric", refinement_iterations=3).double()
            refinement = model.refinement
            assert isinstance(refinement, SinkhornRefinement)
            here, there = refinement._reduced(current), refinement._reduced(raw)
            cost = squared_distances(refinement.expand.weight.T)
            plan = matrix(sinkhorn(here.softmax(-1), there.softmax(-1), cost, 0.1, 3, last_update))
            arriving = torch.einsum("bij,bi->bj", plan, here) / plan.sum(-2)
            size = current.square().mean(-1, keepdim=True).sqrt()
            expected = 0.5 * raw + 0.5 * size * refinement.expand(arriving)
            torch.testing.assert_close(refinement(raw, current), expected, rtol=1e-5, atol=1e-6)

    def test_the_share_can_be_learned(self) -> None:
        model = predictor(refinement="affine", refinement_alpha=0.25, refinement_alpha_learned=True)
        fixed = predictor(refinement="affine", refinement_alpha=0.25)
        refinement = model.refinement
        assert refinement is not None and fixed.refinement is not None
        with torch.no_grad():
            refinement.share.logit.fill_(torch.tensor(0.25).logit())
            fixed.load_state_dict({k: v for k, v in model.state_dict().items() if "share" not in k})
        raw, current = torch.randn(2, 5, H)
        refined = refinement(raw, current)
        torch.testing.assert_close(refined, fixed.refinement(raw, current))
        refined.sum().backward()
        assert refinement.share.logit.grad.abs() > 0

    def test_row_order_depends_on_the_plan(self) -> None:
        column, row = (
            predictor(refinement="sinkhorn", refinement_last_update=order, refinement_iterations=2)
            for order in ("column", "row")
        )
        assert not torch.allclose(column(inputs(2)[0]), row(inputs(2)[0]), atol=1e-3)

    @pytest.mark.parametrize("refinement", ["affine", "sinkhorn"])
    def test_alpha_zero_is_no_refinement(self, refinement: str) -> None:
        with_it = predictor(refinement=refinement, refinement_alpha=0.0)
        without = ShapePredictor(small_config()).eval()
        without.load_state_dict({k: v for k, v in with_it.state_dict().items() if not k.startswith("refinement")})
        torch.testing.assert_close(with_it(inputs(2)[0]), without(inputs(2)[0]))


class TestBeforeTraining:
    @every_mode
    def test_predicts_the_current_state(self, step_mode: str, token_conditioning: str) -> None:
        model = ShapePredictor(small_config(step_mode=step_mode, token_conditioning=token_conditioning))
        window, embeddings = inputs(2)
        assert torch.equal(model(window, embeddings), window[:, -1:].expand(-1, S, -1))

    def test_activations_have_unit_size(self) -> None:
        torch.manual_seed(0)
        model = ShapePredictor(small_config(hidden_size=256, intermediate_size=512, refinement="sinkhorn"))
        states = torch.nn.functional.layer_norm(torch.randn(64, W * 256), [W * 256])
        assert model.window_projection(states).std().item() == pytest.approx(1, rel=0.1)
        assert model.refinement.expand.weight.std().item() == pytest.approx(1, rel=0.1)

    def test_initialisation_follows_the_seed(self) -> None:
        made = []
        for _ in range(2):
            torch.manual_seed(5)
            made.append(ShapePredictor(small_config(refinement="affine")).state_dict())
        assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])

    def test_a_configuration_changed_into_nonsense_is_refused(self) -> None:
        config = small_config()
        config.token_conditioning = "path"
        with pytest.raises(ConfigError, match="recursive"):
            ShapePredictor(config)


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"step_mode": "recursive"}, 0),
        ({"step_mode": "recursive", "token_conditioning": "path"}, 24 * H),
        ({"step_mode": "parallel"}, 2 * S * 24 * 6),
        ({"step_mode": "recursive", "refinement": "affine"}, 2 * 6 * H),
        ({"step_mode": "recursive", "refinement": "sinkhorn"}, 2 * 6 * H),
        ({"step_mode": "recursive", "num_layers": 3}, 2 * 2 * 24**2),
        ({"step_mode": "recursive", "feature_layers": [0, 3, -1]}, 2 * 24 * W * H),
    ],
)
def test_number_of_weights(options: dict, extra: int) -> None:
    """The count that the class documents: M (W F + H) + 2 M^2 layers + 2 H^2 and what options add."""
    weights = sum(p.numel() for p in ShapePredictor(small_config(**options)).parameters() if p.ndim > 1)
    assert weights == 24 * (W * H + H) + 2 * 24**2 + 2 * H**2 + extra


class TestFiles:
    @every_combination
    def test_round_trip(self, tmp_path, options) -> None:
        model = predictor(**options, training={"acceptance_length": 3.4})
        model.save_pretrained(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
        for loaded in (ShapePredictor.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
            assert isinstance(loaded, ShapePredictor)
            assert loaded.config.training == {"acceptance_length": 3.4}
            assert not loaded.training
            assert torch.equal(loaded(*inputs(2)), model(*inputs(2)))

    def test_in_bfloat16(self, tmp_path) -> None:
        model = predictor().bfloat16()
        model.save_pretrained(tmp_path)
        assert ShapePredictor.from_pretrained(tmp_path).dtype == torch.bfloat16
        loaded = ShapePredictor.from_pretrained(tmp_path, dtype=torch.float32)
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded.delta.weight, model.delta.weight.float())


@pytest.mark.parametrize(("step_mode", "token_conditioning"), [("parallel", "none"), ("recursive", "path")])
def test_learns_states_that_follow_a_rule(step_mode: str, token_conditioning: str) -> None:
    """States of size 20 that turn by a fixed rotation, pushed by their tokens where those are told."""
    torch.manual_seed(0)
    model = ShapePredictor(
        small_config(step_mode=step_mode, token_conditioning=token_conditioning, intermediate_size=64)
    )
    rotation = torch.linalg.qr(torch.randn(H, H)).Q
    push = 0.0 if token_conditioning == "none" else 10.0
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    errors = []
    for _ in range(250):
        tokens, states = (
            torch.randn(128, S, H),
            [20 * torch.nn.functional.normalize(torch.randn(128, H), dim=-1)],
        )
        for _ in range(W - 1):
            states.append(states[-1] @ rotation)
        for n in range(S):
            states.append(states[-1] @ rotation + push * tokens[:, n] / H**0.5)
        truth = torch.stack(states, 1)
        error = (model(truth[:, :W], tokens) - truth[:, W:]).square().mean()
        optimiser.zero_grad()
        error.backward()
        optimiser.step()
        errors.append(error.item())
    assert sum(errors[-20:]) < 0.15 * sum(errors[:20])
