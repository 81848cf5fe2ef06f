"""ShapeDecoder end to end: equal to transformers when greedy, to the plain loop at the same seed when sampling."""

from itertools import product

import pytest
import torch
from transformers import GenerationConfig, GPTNeoConfig, GPTNeoForCausalLM
from transformers.generation.streamers import BaseStreamer

from shape.config import ShapeConfig
from shape.decoder import ShapeDecoder, TrsLossy
from shape.drafters import AdversaryDrafter, NgramDrafter, OracleDrafter, ShapeDrafter, TreeShape
from shape.errors import CheckpointError, ConfigError, TargetMismatch, UnsupportedGeneration
from shape.predictor import ShapePredictor
from shape.target import Target

FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mistral"]
LENGTHS = [3, 17, 9, 1, 12]


def prompts(lengths=LENGTHS, side: str = "left", vocab_size: int = 64) -> dict[str, torch.Tensor]:
    """A batch of random prompts of unequal length, with its attention mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        at = slice(max(lengths) - length, None) if side == "left" else slice(0, length)
        ids[row, at] = torch.randint(3, vocab_size, (length,), generator=generator)
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def predictor(dtype=torch.float64, **options) -> ShapePredictor:
    torch.manual_seed(0)
    options = {"step_mode": "recursive", "token_conditioning": "path", **options}
    return ShapePredictor(ShapeConfig(hidden_size=32, intermediate_size=48, **options)).to(dtype).eval()


def drafters() -> dict:
    return {
        "shape tree": lambda: ShapeDrafter(predictor(), TreeShape(depth=4, width=3, nodes=7)),
        "shape chain": lambda: ShapeDrafter(predictor(), TreeShape(depth=5, width=1)),
        "shape parallel": lambda: ShapeDrafter(
            predictor(step_mode="parallel", token_conditioning="none", refinement="sinkhorn", refinement_dim=8),
            TreeShape(depth=3, width=2),
        ),
        "ngram": NgramDrafter,
        "adversary": lambda: AdversaryDrafter(seed=1),
        "adversary chain": lambda: AdversaryDrafter(seed=1, chains_only=True, nodes=5),
    }


def new_tokens(sequences: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return sequences[:, batch["input_ids"].shape[1] :]


@pytest.mark.parametrize("arch", FAMILIES)
def test_greedy_equals_transformers_in_float64(tiny_model, arch):
    model = tiny_model(arch)
    batch = prompts()
    expected = model.generate(**batch, max_new_tokens=40, do_sample=False)
    for name, make in {"plain": lambda: None, **drafters()}.items():
        decoder = ShapeDecoder(model, make())
        out = decoder.generate(**batch, max_new_tokens=40, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected), name
        assert out.stats.lossless and out.stats.acceptance_length >= 1.0
        alone = decoder.generate(batch["input_ids"][2:3, -9:], max_new_tokens=40)
        end = alone.shape[1] - 9
        assert torch.equal(alone[0, 9:], new_tokens(expected, batch)[2, :end]), name


@pytest.mark.parametrize("options", [{"temperature": 0.7, "top_k": 0}, {"temperature": 1.3, "top_k": 9, "top_p": 0.8}])
def test_the_same_seed_gives_the_same_tokens_with_every_drafter(tiny_model, options):
    model = tiny_model("llama")
    batch = prompts()
    seeds = [11, 12, 13, 14, 15]
    arguments = {"max_new_tokens": 30, "do_sample": True, "seed": seeds, **options}
    expected = ShapeDecoder(model).generate(**batch, **arguments)
    for name, make in drafters().items():
        decoder = ShapeDecoder(model, make())
        assert torch.equal(decoder.generate(**batch, **arguments), expected), name
        # The same row alone, in a batch of one: independent of who shares the batch.
        alone = decoder.generate(batch["input_ids"][2:3, -9:], **(arguments | {"seed": seeds[2:3]}))
        assert torch.equal(alone[0, 9:], new_tokens(expected, batch)[2, : alone.shape[1] - 9]), name


def test_padding_side_changes_nothing(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), AdversaryDrafter())
    left, right = (decoder.generate(**prompts(side=side), max_new_tokens=12) for side in ("left", "right"))
    assert torch.equal(left[:, max(LENGTHS) :], right[:, max(LENGTHS) :])


def test_padding_is_inferred_from_the_pad_token(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"))
    batch = prompts()
    assert torch.equal(
        decoder.generate(**batch, max_new_tokens=8), decoder.generate(batch["input_ids"], max_new_tokens=8)
    )


def test_seeds_rows_and_samples_differ(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"))
    ids = prompts([4])["input_ids"].repeat(2, 1)
    arguments = {"max_new_tokens": 24, "do_sample": True, "temperature": 2.0, "top_k": 0, "eos_token_id": []}
    seed0, seed1 = (decoder.generate(ids, seed=seed, **arguments) for seed in (0, 1))
    rows = [seed0[0], seed0[1], seed1[0], seed1[1]]
    assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :])
    samples = decoder.generate(ids[:1], seed=0, num_return_sequences=3, **arguments)
    assert samples.shape[0] == 3 and len({tuple(row.tolist()) for row in samples}) == 3
    assert torch.equal(samples[:2], seed0)


def test_an_unset_seed_follows_torchs_global_generator(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"))
    ids = prompts([4])["input_ids"]
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(decoder.generate(ids, max_new_tokens=24, do_sample=True, temperature=2.0, top_k=0))
    assert torch.equal(results[0], results[1])
    assert results[0].shape != results[2].shape or not torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["plain", "shape tree", "adversary"])
def test_three_tokens_follow_the_exact_joint_distribution(tiny_model, name):
    """Chi-square of 12,000 samples over all 216 texts of three tokens; false-alarm rate 1e-6."""
    model = tiny_model("llama", vocab_size=6)
    counts, expected = joint_counts(model, name, acceptance="match")
    assert chi_square(counts, expected) < 330.0  # about the 1 - 1e-6 quantile at 215 degrees of freedom


def test_the_joint_test_catches_the_lossy_rule(tiny_model):
    """Negative control: the same test must fail on tree rejection sampling."""
    model = tiny_model("llama", vocab_size=6)
    counts, expected = joint_counts(model, "shape tree", acceptance=TrsLossy(k=2, depth=2))
    assert chi_square(counts, expected) > 330.0


def joint_counts(model, name: str, acceptance) -> tuple[torch.Tensor, torch.Tensor]:
    samples, temperature = 12_000, 1.5
    root = torch.tensor([[3, 5, 4]])
    texts = torch.tensor(list(product(range(6), repeat=3)))
    with torch.no_grad():
        logits = model(torch.cat([root.expand(216, -1), texts], dim=1)).logits[:, 2:5] / temperature
    log_probs = logits.log_softmax(-1).gather(-1, texts[..., None])[..., 0].sum(-1)
    decoder = ShapeDecoder(model, drafters().get(name, lambda: None)())
    out = decoder.generate(
        root, max_new_tokens=3, do_sample=True, temperature=temperature, top_k=0, eos_token_id=[],
        num_return_sequences=samples, seed=7, acceptance=acceptance,
    )  # fmt: skip
    cells = (out[:, 3:] * torch.tensor([36, 6, 1])).sum(-1)
    return cells.bincount(minlength=216).double(), samples * log_probs.exp()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Cells expected fewer than five times are pooled into one."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())


def test_stop_at_eos_and_length(tiny_model):
    model = tiny_model("llama")
    batch = prompts()
    free = new_tokens(ShapeDecoder(model).generate(**batch, max_new_tokens=30, eos_token_id=[]), batch)
    eos = [int(free[1, 7]), int(free[2, 3])]
    expected = model.generate(**batch, max_new_tokens=30, do_sample=False, eos_token_id=eos)
    oracle_texts = [
        ids[mask.bool()].tolist() + row.tolist()
        for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"], free, strict=True)
    ]
    for drafter in (None, OracleDrafter(oracle_texts, depth=6), AdversaryDrafter()):
        out = ShapeDecoder(model, drafter).generate(**batch, max_new_tokens=30, eos_token_id=eos)
        assert torch.equal(out, expected)
    one = ShapeDecoder(model, OracleDrafter(oracle_texts, depth=6)).generate(**batch, max_new_tokens=1)
    assert one.shape[1] == max(LENGTHS) + 1


@pytest.mark.parametrize("drafter", ["plain", "shape tree", "adversary"])
def test_min_new_tokens_equals_transformers(tiny_model, drafter):
    model = tiny_model("llama")
    batch = prompts()
    free = new_tokens(ShapeDecoder(model).generate(**batch, max_new_tokens=20, eos_token_id=[]), batch)
    eos = sorted(set(free[:, 0].tolist()))[:3]
    arguments = {"max_new_tokens": 20, "min_new_tokens": 4, "eos_token_id": eos}
    expected = model.generate(**batch, do_sample=False, **arguments)
    decoder = ShapeDecoder(model, drafters().get(drafter, lambda: None)())
    assert torch.equal(decoder.generate(**batch, **arguments), expected)


def test_max_length_counts_the_prompt(tiny_model):
    model = tiny_model("llama")
    batch = prompts([5])
    expected = model.generate(**batch, max_length=15, do_sample=False)
    assert torch.equal(ShapeDecoder(model).generate(**batch, max_length=15), expected)
    assert ShapeDecoder(model).generate(**batch, eos_token_id=[]).shape[1] == 5 + 20  # as transformers


def test_generation_config_of_the_target_and_of_the_call(tiny_model):
    model = tiny_model("llama")
    model.generation_config.max_new_tokens = 7
    batch = prompts([5])
    assert ShapeDecoder(model).generate(**batch, eos_token_id=[]).shape[1] == 12
    config = GenerationConfig(max_new_tokens=9, eos_token_id=None)
    assert ShapeDecoder(model).generate(**batch, generation_config=config).shape[1] <= 14
    assert ShapeDecoder(model).generate(**batch, generation_config=config, max_new_tokens=3).shape[1] <= 8


@pytest.mark.parametrize("rate,depth", [(0.0, 4), (0.3, 4), (0.6, 2)])
def test_the_oracle_reaches_the_acceptance_length_of_its_error_rate(tiny_model, rate, depth):
    """Mean within 4.9 standard errors of (1 - a^(D+1)) / (1 - a): a false-alarm rate of 1e-6, fixed seed."""
    model = tiny_model("llama")
    batch = prompts([4] * 16)
    plain = ShapeDecoder(model).generate(**batch, max_new_tokens=150, eos_token_id=[])
    decoder = ShapeDecoder(model, OracleDrafter(plain.tolist(), rate, depth))
    out = decoder.generate(**batch, max_new_tokens=150, eos_token_id=[], return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    accept = 1 - rate
    expected = depth + 1 if rate == 0 else (1 - accept ** (depth + 1)) / (1 - accept)
    # The last step of each row is cut short, hence the extra slack of depth tokens per row.
    slack = 4.9 * depth / 2 / out.stats.forwards**0.5 + 16 * depth / out.stats.forwards
    assert abs(out.stats.acceptance_length - expected) < slack
    assert out.stats.emitted == 16 * 149 == sum(n * times for n, times in out.stats.histogram.items())
    assert sum(out.stats.row_emitted) == out.stats.emitted and sum(out.stats.row_forwards) == out.stats.forwards


def test_plain_decoding_has_acceptance_length_one(tiny_model):
    out = ShapeDecoder(tiny_model("llama")).generate(
        **prompts(), max_new_tokens=10, return_dict_in_generate=True, eos_token_id=[]
    )
    assert out.stats.acceptance_length == 1.0 == out.stats.tokens_per_draft_step
    assert out.stats.to_dict()["forwards"] == 5 * 9 and out.stats.to_dict()["drafter"] == "none"
    assert out.trace is None


def test_trace_names_the_source_of_every_token(tiny_model):
    model = tiny_model("llama")
    batch = prompts([6])
    plain = ShapeDecoder(model).generate(**batch, max_new_tokens=11, eos_token_id=[])
    out = ShapeDecoder(model, OracleDrafter(plain.tolist(), depth=4)).generate(
        **batch, max_new_tokens=11, eos_token_id=[], return_dict_in_generate=True, trace=True
    )
    sources = [source for _, source in out.trace[0]]
    assert sources == ["prefill", *["draft"] * 4, "target", *["draft"] * 4, "target"]
    assert [token for token, _ in out.trace[0]] == plain[0, 6:].tolist()


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streaming_gives_every_token_once(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), AdversaryDrafter())
    batch = prompts([6])
    recorder = Recorder()
    out = decoder.generate(**batch, max_new_tokens=12, streamer=recorder)
    assert recorder.ended and [token for piece in recorder.pieces for token in piece] == out[0].tolist()
    with pytest.raises(UnsupportedGeneration, match="streamer follows one row"):
        decoder.generate(**prompts(), streamer=recorder)


def test_chain_only_targets_decode_row_by_row(tmp_path):
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=5, max_position_embeddings=128,
        attention_types=[[["global", "local"], 1]], initializer_range=0.3, bos_token_id=None, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    model = GPTNeoForCausalLM(config).double().eval()
    rows = [prompts([length])["input_ids"] for length in (5, 9)]
    for name, make in drafters().items():
        decoder = ShapeDecoder(model, make())
        assert decoder.support.mode == "chain"
        for ids in rows:
            expected = model.generate(ids, max_new_tokens=25, do_sample=False)
            assert torch.equal(decoder.generate(ids, max_new_tokens=25), expected), name
        batch = prompts([5, 9])
        together = new_tokens(decoder.generate(**batch, max_new_tokens=25), batch)
        alone = decoder.generate(batch["input_ids"][:1, -5:], max_new_tokens=25)[0, 5:]
        assert torch.equal(together[0, : len(alone)], alone), name


def test_trs_is_lossy_and_says_so(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), drafters()["shape tree"]())
    out = decoder.generate(
        **prompts(), max_new_tokens=20, acceptance=TrsLossy(k=2, depth=3), return_dict_in_generate=True
    )
    assert not out.stats.lossless and "lossy" in out.stats.acceptance
    assert out.stats.acceptance_length >= 1.0
    assert out.stats.drafted / out.stats.forwards == 2 + 4 + 8


def bad_requests() -> dict[str, tuple[dict, str]]:
    ids = prompts([4])["input_ids"]
    return {
        "beams": ({"num_beams": 4}, "option num_beams=4 is not supported"),
        "contrastive": ({"penalty_alpha": 0.6}, "option penalty_alpha=0.6 is not supported"),
        "penalty": ({"repetition_penalty": 1.2}, "option repetition_penalty=1.2 is not supported"),
        "unknown": ({"max_tokens": 5}, "option max_tokens is not one of generate's"),
        "too long": ({"max_new_tokens": 300}, "exceed the 256 positions"),
        "no new": ({"max_new_tokens": 0}, "must be at least 1"),
        "max_length": ({"max_length": 3}, "leaves no room"),
        "rule": ({"acceptance": "typical"}, "acceptance rule 'typical' is unknown"),
        "trs": ({"acceptance": "trs-lossy"}, "needs the k\\^N trees"),
        "cold": ({"do_sample": True, "temperature": 0.0}, "leave do_sample off"),
        "copies": ({"num_return_sequences": 2}, "set do_sample"),
        "seeds": ({"do_sample": True, "seed": [1, 2]}, "2 seeds are given for 1 prompts"),
        "shape": ({"input_ids": ids[0]}, "give int64 ids of shape"),
        "mask shape": ({"attention_mask": torch.ones(1, 9)}, "give one of equal shape"),
        "empty": ({"attention_mask": torch.zeros(1, 4)}, "prompt 0 is empty"),
        "hole": ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "hides tokens in the middle"),
    }


@pytest.mark.parametrize("case", bad_requests())
def test_bad_requests_get_one_sentence(tiny_model, case):
    options, message = bad_requests()[case]
    arguments = {"input_ids": prompts([4])["input_ids"], **options}
    with pytest.raises(UnsupportedGeneration, match=message) as caught:
        ShapeDecoder(tiny_model("llama"), AdversaryDrafter()).generate(**arguments)
    assert "\n" not in str(caught.value)


def test_from_pretrained(tiny_target, tiny_target_folder, tmp_path):
    network = predictor(
        torch.float32, target_identity={**tiny_target.identity.to_dict(), "name": str(tiny_target_folder)}
    )
    network.save_pretrained(tmp_path / "predictor")
    ids = prompts(vocab_size=200)
    expected = ShapeDecoder(tiny_target).generate(**ids, max_new_tokens=10)
    for arguments in (
        {"predictor": tmp_path / "predictor"},
        {
            "predictor": tmp_path / "predictor",
            "target": tiny_target.model,
            "tokenizer": tiny_target.tokenizer,
        },
        {"predictor": None, "target": tiny_target_folder, "drafter": "ngram"},
        {"predictor": tmp_path / "predictor", "drafter": "none", "tree": TreeShape(depth=2)},
    ):
        decoder = ShapeDecoder.from_pretrained(**arguments)
        assert torch.equal(decoder.generate(**ids, max_new_tokens=10), expected)
        assert decoder.tokenizer is not None
    half = ShapeDecoder.from_pretrained(tmp_path / "predictor", dtype="bfloat16")
    assert half.target.dtype == torch.bfloat16 == half.drafter.predictor.dtype


def test_from_pretrained_mistakes(tiny_target, tiny_target_folder, tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="neither a predictor nor a target"):
        ShapeDecoder.from_pretrained(None)
    with pytest.raises(ConfigError, match="needs a predictor"):
        ShapeDecoder.from_pretrained(None, target=tiny_target, drafter="shape")
    with pytest.raises(ConfigError, match="drafter 'medusa' is unknown"):
        ShapeDecoder.from_pretrained(None, target=tiny_target, drafter="medusa")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ShapeDecoder.from_pretrained(tmp_path, target=tiny_target)
    predictor(torch.float32).save_pretrained(tmp_path / "anonymous")
    with pytest.raises(TargetMismatch, match="does not say which target"):
        ShapeDecoder.from_pretrained(tmp_path / "anonymous")
    identity = tiny_target.identity.to_dict()
    predictor(torch.float32, target_identity=identity).save_pretrained(tmp_path / "known")
    with pytest.raises(TargetMismatch, match="was trained for target tiny"):
        ShapeDecoder.from_pretrained(tmp_path / "known", target=Target(tiny_model("llama", torch.float32, seed=9)))


def test_nothing_global_is_touched(tiny_model):
    """Decoding between two draws of the global generator changes neither; no inference-mode tensor stays behind."""
    decoder = ShapeDecoder(tiny_model("llama"), drafters()["shape tree"]())
    torch.manual_seed(3)
    first, second = torch.rand(2), torch.rand(2)
    torch.manual_seed(3)
    again = torch.rand(2)
    decoder.generate(**prompts(), max_new_tokens=5, do_sample=True, seed=1)
    assert torch.equal(first, again) and torch.equal(second, torch.rand(2))
    assert torch.is_grad_enabled() and not torch.is_inference(decoder.drafter._window)
