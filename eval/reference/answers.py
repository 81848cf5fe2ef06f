"""Greedy answers by vLLM to given token ids, timed, with the counts of its drafts; for `eval.parity`.

    python eval/reference/answers.py JOB.json OUTPUT.json     # in vLLM's environment

The job holds `engine` (options of `vllm.LLM`), `max_new_tokens`, and `prompts`, lists of token ids, which are answered
one at a time. The output is a list: of each prompt `tokens`, `seconds` (the shortest of three), `drafts`, and
`accepted`, how often the draft token at each position was.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

WARM_UP = 2  # prompts answered before any is timed
ROUNDS = 3  # over all prompts, of which each one's shortest time counts


def counted(llm: LLM, depth: int) -> dict[str, Any]:
    """Counts since the engine was started."""
    found: dict[str, Any] = {"drafts": 0, "accepted": [0] * depth}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = [a + b for a, b in zip(found["accepted"], metric.values, strict=True)]
    return found


def main(job_file: str, output: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    llm = LLM(**job["engine"], disable_log_stats=False)
    depth = (job["engine"].get("speculative_config") or {}).get("num_speculative_tokens", 0)
    options = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], detokenize=False)

    def answer(ids: list[int]) -> dict[str, Any]:
        before, start = counted(llm, depth), time.perf_counter()
        (reply,) = llm.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)
        seconds, after = time.perf_counter() - start, counted(llm, depth)
        accepted = [b - a for a, b in zip(before["accepted"], after["accepted"], strict=True)]
        tokens, drafts = list(reply.outputs[0].token_ids), after["drafts"] - before["drafts"]
        return {"tokens": tokens, "seconds": seconds, "drafts": drafts, "accepted": accepted}

    for ids in job["prompts"][:WARM_UP]:
        answer(ids)
    rounds = [[answer(ids) for ids in job["prompts"]] for _ in range(ROUNDS)]
    fastest = [min(each["seconds"] for each in same) for same in zip(*rounds, strict=True)]
    found = [{**each, "seconds": seconds} for each, seconds in zip(rounds[0], fastest, strict=True)]
    Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
