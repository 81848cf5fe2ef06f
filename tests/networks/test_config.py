import json

import pytest
from helpers import MODES
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, PreTrainedConfig

from shape.errors import ConfigError
from shape.networks.config import ShapeConfig

valid_options = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(1, 512),
        "window": st.integers(1, 8),
        "feature_layers": st.lists(st.integers(0, 40), max_size=3, unique=True).map(lambda x: [*x, -1]),
        "intermediate_size": st.none() | st.integers(1, 512),
        "num_layers": st.integers(0, 4),
        "num_steps": st.integers(1, 8),
        "refinement": st.sampled_from(["none", "affine", "sinkhorn"]),
        "refinement_dim": st.integers(1, 256),
        "refinement_epsilon": st.floats(1e-3, 10),
        "refinement_alpha": st.floats(0, 1),
        "refinement_iterations": st.integers(1, 50),
        "refinement_last_update": st.sampled_from(["column", "row"]),
        "dropout": st.floats(0, 0.9),
        "training": st.none() | st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)),
        "draft": st.none() | st.just({"width": 3, "depth": 4, "nodes": 8}),
    }
)
modes = st.sampled_from(MODES)


@given(valid_options, modes)
def test_survives_json_unchanged(options: dict, mode: tuple[str, str]) -> None:
    config = ShapeConfig(**options, step_mode=mode[0], token_conditioning=mode[1])
    stored = json.loads(config.to_json_string())
    assert ShapeConfig.from_dict(stored).to_dict() == config.to_dict()
    for name, value in options.items():
        if value is not None:
            assert getattr(config, name) == value


def test_pretrained_round_trip_and_auto_class(tmp_path) -> None:
    import shape.networks.shape  # noqa: F401  registers the Auto classes

    config = ShapeConfig(
        hidden_size=48,
        feature_layers=(2, 5, -1),
        step_mode="recursive",
        token_conditioning="path",
        target_identity={"name": "somebody/model", "hidden_size": 48},
        training={"command": "python -m shape.train", "acceptance_length": 3.4},
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    for loaded in (ShapeConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert isinstance(loaded, ShapeConfig)
        assert loaded.to_diff_dict() == config.to_diff_dict()
        assert loaded.feature_layers == [2, 5, -1]


def test_works_without_arguments() -> None:
    """transformers makes a default object to find out what to write."""
    config = ShapeConfig()
    assert config.intermediate_size == 2 * config.hidden_size
    assert config.feature_size == config.hidden_size
    assert config.model_type == "shape"


def test_defaults_are_not_shared() -> None:
    ShapeConfig().feature_layers.insert(0, 3)
    assert ShapeConfig().feature_layers == [-1]


def test_feature_size_counts_layers() -> None:
    assert ShapeConfig(hidden_size=8, feature_layers=[0, 3, -1]).feature_size == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step_mode": "sequential"}, "step_mode is 'sequential'.*parallel, recursive"),
        ({"token_conditioning": "all"}, "token_conditioning is 'all'.*none, root, path"),
        ({"refinement": "ot"}, "refinement is 'ot'.*none, affine, sinkhorn"),
        ({"refinement_last_update": "both"}, "refinement_last_update is 'both'.*column, row"),
        ({"token_conditioning": "path"}, "needs step_mode .recursive"),
        ({"refinement_dim": 0}, "refinement_dim is 0.*at least 1"),
        ({"refinement_epsilon": 0.0}, "refinement_epsilon is 0.0.*greater than 0"),
        ({"refinement_epsilon": float("nan")}, "refinement_epsilon is nan"),
        ({"refinement_epsilon": "0.1"}, "refinement_epsilon is '0.1'.*a number"),
        ({"refinement_alpha": 1.5}, "refinement_alpha is 1.5.*from 0 to 1"),
        ({"refinement_alpha": -0.1}, "refinement_alpha is -0.1"),
        ({"refinement_iterations": 0}, "refinement_iterations is 0"),
        ({"dropout": 1.0}, "dropout is 1.0.*less than 1"),
        ({"window": 0}, "window is 0"),
        ({"window": 2.5}, "window is 2.5.*an integer"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": 0}, "vocab_size is 0.*at least 1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"kind": "block", "mask_token_id": -1}, "mask_token_id is -1.*at least 0"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"num_layers": -1}, "num_layers is -1.*at least 0"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"feature_layers": []}, r"feature_layers is \[\].*ends in -1"),
        ({"feature_layers": [-1, 3]}, "ends in -1"),
        ({"feature_layers": ["3", -1]}, "list of layer indices"),
        ({"windows": 3}, "no option windows"),
        ({"steps": 3, "lookahead": 2}, "no option lookahead, steps"),
        ({"kind": "lookahead"}, "kind is 'lookahead'"),
        ({"kind": "eagle", "num_layers": 0}, "kind 'eagle' has at least 1 decoder layer"),
        (
            {"kind": "mtp", "transformer_layer_config": {"layer_types": ["sliding_attention"]}},
            "layers of kind 'mtp' can be full_attention",
        ),
        ({"kind": "block", "transformer_layer_config": {"layer_types": ["full_attention"] * 2}}, "has 2 layer_types"),
        ({"kind": "peagle", "norm_output": True}, "norm_output is for kind eagle"),
        ({"kind": "eagle", "dropout": 0.1}, "dropout is for kind shape"),
        ({"own_heads": True, "vocab_size": 9}, "own_heads and own_embeddings are for the other kinds"),
        ({"kind": "eagle", "fc_norm": True, "norm_before_fc": True}, "both given"),
        ({"kind": "medusa", "norm_output": True}, "norm_output is for kind eagle"),
        ({"kind": "eagle", "transformer_layer_config": {"model_type": "bert"}}, "of model_type 'bert'"),
        ({"kind": "eagle", "transformer_layer_config": {"hidden_size": 64}}, "give the same"),
        ({"kind": "eagle", "own_embeddings": True}, "give vocab_size"),
        ({"attention": True, "num_heads": 3}, "num_heads is 3"),
        ({"markov_rank": 4, "step_mode": "recursive", "token_conditioning": "path"}, "markov_rank is 4"),
        ({"coupling": 4}, "give a markov_rank"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_rank": 4, "markov_head_type": "gated"}, "markov_head_type gated is for kind block"),
        ({"target_hidden_size": 48}, "kind 'shape' has the target's width"),
        ({"kind": "eagle", "target_hidden_size": 48, "own_heads": True}, "give own_heads and own_embeddings"),
        ({"refinement_readout": "mean"}, "refinement_readout is 'mean'"),
        ({"kind": "block", "markov_rank": 4}, "give vocab_size"),
        ({"kind": "block", "markov_rank": 4, "vocab_size": 9, "coupling": 2}, "coupling is 2"),
        (
            {"kind": "block", "markov_rank": 4, "vocab_size": 9, "markov_head_type": "rnn"},
            "give sample_from_anchor with it",
        ),
        ({"kind": "block", "markov_rank": 4, "markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
        ({"kind": "medusa", "mask_token_id": 3}, "is for kind peagle or block"),
        ({"kind": "peagle", "sample_from_anchor": True}, "is for kind block"),
        (
            {
                "kind": "block",
                "transformer_layer_config": {"model_type": "qwen3", "layer_types": ["sliding_attention"]},
            },
            "give their sliding_window",
        ),
    ],
)
def test_wrong_options_get_one_sentence(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ShapeConfig(**{"hidden_size": 32, **options})
    assert "\n" not in str(caught.value)


def test_every_key_that_transformers_writes_is_known() -> None:
    """A config.json of any transformers version in range may carry them."""
    ShapeConfig.from_dict({**PreTrainedConfig(dtype="float32").to_dict(), "model_type": "shape"})
