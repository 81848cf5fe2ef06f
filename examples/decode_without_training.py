"""Decode with drafters that need no training: the tokens are the same with each, the forward passes fewer."""

import argparse
from time import perf_counter

from shape import ShapeDecoder

PROMPT = (
    "Copy this text word for word:\n\nThe quiet crow lost two pink stickers by the river before sunrise. "
    "The happy cat saw four brown candles near the bridge early in the morning."
)
DRAFTERS = (None, "ngram", "suffix", "lookahead", "suffix+lookahead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="quickstart-target", help="folder or hub id of a decoder-only model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    options = parser.parse_args()

    # In float32 greedy tokens are equal one by one; in bfloat16 near-ties may fall otherwise.
    decoder = ShapeDecoder.from_pretrained(options.target, dtype="float32")
    target = decoder.target
    ids = target.encode([{"role": "user", "content": options.prompt}])  # (1, L) int64

    expected = None
    for drafter in DRAFTERS:
        decoder = ShapeDecoder.from_pretrained(target, drafter=drafter or "none")
        decoder.warm_up()
        start = perf_counter()
        out = decoder.generate(ids, max_new_tokens=options.max_new_tokens, return_dict_in_generate=True)
        seconds = perf_counter() - start
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        if expected is None:
            expected = tokens
            print(decoder.tokenizer.decode(tokens, skip_special_tokens=True), end="\n\n")
        assert tokens == expected
        name = drafter or "autoregressive"
        print(f"{name:18} {out.stats.acceptance_length:5.2f} tokens per forward, {len(tokens) / seconds:6.0f} tokens/s")


if __name__ == "__main__":
    main()
