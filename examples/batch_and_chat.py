"""Answer a batch of prompts, then hold a conversation that streams and reuses its KV cache from turn to turn."""

import argparse

from shape import ShapeDecoder

PROMPTS = (
    "Book a table for two.",
    "Make a packing list for a camping weekend. We leave from Helsinki and stay 2 days.",
    'Write a Python loop that counts from 11 up to 59 in steps of 8 and prints "driver" and the number.',
)
TURNS = ("Book a table for two at seven, please.", "Make it three people.")


def answer_batch(decoder: ShapeDecoder, max_new_tokens: int) -> list[str]:
    """Answers to prompts of unequal length, decoded together; each sequence advances by what it accepts."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = [decoder.target.render(chat, add_generation_prompt=True) for chat in chats]
    # Without special tokens: the chat template has written the BOS already.
    batch = decoder.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    sequences = decoder.generate(**batch.to(decoder.target.device), max_new_tokens=max_new_tokens)
    return decoder.tokenizer.batch_decode(sequences[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def chat(decoder: ShapeDecoder, max_new_tokens: int) -> None:
    """One conversation; a session does not compute again what a prompt shares with the text so far."""
    say, messages = decoder.session(), []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        ids = decoder.target.encode(messages)
        out = say(ids, max_new_tokens=max_new_tokens, return_dict_in_generate=True)
        answer = decoder.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        print(f"user:      {turn}\nassistant: {answer}\n({out.stats.reused_tokens} prompt tokens from the cache)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predictor", default="quickstart-shape", help="folder or hub id of a predictor, or a target")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    options = parser.parse_args()

    decoder = ShapeDecoder.from_pretrained(options.predictor)
    for prompt, answer in zip(PROMPTS, answer_batch(decoder, options.max_new_tokens), strict=True):
        print(f"> {prompt}\n{answer}\n")
    chat(decoder, options.max_new_tokens)

    print("streamed: ", end="")
    for text in decoder.stream([{"role": "user", "content": TURNS[0]}], max_new_tokens=options.max_new_tokens):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
