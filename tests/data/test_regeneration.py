"""Every answer the target's own, in fixed batches, through SIGKILL and over HTTP."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from shape.cli.regenerate import main
from shape.data.backends import Answer, Request
from shape.data.conversations import Conversation
from shape.data.encoding import encode
from shape.data.endpoint import EndpointBackend, EndpointError
from shape.data.reading import load_conversations
from shape.data.regeneration import Share, Summary, regenerate
from shape.errors import ConfigError, DataError
from shape.generation.answers import LocalBackend
from shape.generation.decoder import ShapeDecoder
from shape.target.chat import Message, prompt_ids
from shape.target.model import Target


@dataclass
class Echo:
    """A backend whose answers tell what was asked; "cut" is cut and "long" cannot be answered."""

    name: str = "echo"
    batches: list[list[Request]] = field(default_factory=list)
    concurrency: int = 1

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def generate(self, requests: Sequence[Request]) -> list[Answer | DataError]:
        self.batches.append(list(requests))
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer | DataError:
        history = request.prompt if isinstance(request.prompt, tuple) else (Message("user", request.prompt),)
        last = history[-1].content
        if last == "long":
            return DataError("too long")
        return Answer(f"{len(history)}:{last}:{request.sampled}:{request.seed}", last != "cut")


def asking(identity: str, *questions: str) -> Conversation:
    """Questions with answers of somebody else between them."""
    turns = [m for q in questions for m in (Message("user", q), Message("assistant", "somebody else's"))]
    return Conversation(identity, tuple(turns))


def many(count: int) -> list[Conversation]:
    return [asking(f"id-{i}", *(f"question {i} {'x' * (i * 7 % 23)}" for _ in range(1 + i % 3))) for i in range(count)]


def written(path) -> dict[str, list[str]]:
    return {c.id: [m.content for m in c.messages] for c in load_conversations(path)}


def test_answers_replace_turns_in_order_and_feed_the_next(tmp_path):
    conversations = [
        Conversation("s", (Message("system", "S"), *asking("", "one", "two").messages)),
        Conversation("asked only", (Message("user", "one"), Message("user", "two"))),
        Conversation("pair", (Message("user", "prompt"), Message("assistant", "x")), "completion"),
        Conversation("begins with an answer", (Message("assistant", "hi"), Message("user", "one"))),
    ]
    backend = Echo()
    done = regenerate(conversations, backend, tmp_path / "out.jsonl", sampled_share=0.0, progress=False)
    rows = {c.id: c for c in load_conversations(tmp_path / "out.jsonl")}
    assert list(rows) == [c.id for c in conversations]
    assert [m.role for m in rows["s"].messages] == ["system", "user", "assistant", "user", "assistant"]
    assert rows["s"].messages[2].content.startswith("2:one:False:")
    assert rows["s"].messages[4].content.startswith("4:two:False:")
    assert [m.role for m in rows["asked only"].messages] == ["user", "assistant", "user", "assistant"]
    assert rows["pair"].kind == "completion" and rows["pair"].messages[1].content.startswith("1:prompt:")
    assert [m.role for m in rows["begins with an answer"].messages] == ["user", "assistant"]
    assert any(request.prompt == "prompt" for batch in backend.batches for request in batch)
    assert (done.rows, done.questions, done.answers, done.unfinished, done.left_out) == (4, 6, 6, 0, 0)


def test_a_cut_answer_ends_its_conversation_and_is_marked(tmp_path, tiny_tokenizer):
    conversations = [asking("a", "one", "cut", "three"), asking("b", "long"), asking("c", "one", "long")]
    with pytest.warns(UserWarning, match=r"2 conversations end early or are left out \(the first: b: too long"):
        done = regenerate(conversations, Echo(), tmp_path / "out.jsonl", progress=False)
    assert (done.rows, done.left_out, done.questions, done.answers, done.unfinished) == (2, 1, 6, 3, 1)
    a, c = load_conversations(tmp_path / "out.jsonl")
    assert [m.finished for m in a.messages] == [True, True, True, False] and len(c.messages) == 2
    encoded = encode(a, tiny_tokenizer, None)
    kept = tiny_tokenizer.decode(encoded.input_ids[encoded.loss_mask])
    assert kept == f"{a.messages[1].content}<|im_end|>{a.messages[3].content}"  # no made-up end


def test_kind_and_noise_depend_on_seed_and_id_alone(tmp_path):
    def kinds(conversations, name, **options):
        regenerate(conversations, Echo(), tmp_path / name, progress=False, **options)
        return {key: texts[1].split(":")[2:] for key, texts in written(tmp_path / name).items()}

    base = kinds(many(200), "a.jsonl")
    assert kinds(many(200)[::-2], "b.jsonl", batch_size=3).items() <= base.items()
    assert kinds(many(200), "c.jsonl", seed=1) != base
    sampled = sum(kind == "True" for kind, _ in base.values())
    assert 70 < sampled < 130 and len({noise for _, noise in base.values()}) == 200
    assert {kind for kind, _ in kinds(many(50), "d.jsonl", sampled_share=1.0).values()} == {"True"}


def test_batches_are_alike(tmp_path):
    backend = Echo()
    regenerate(many(64), backend, tmp_path / "out.jsonl", batch_size=4, progress=False)
    assert all(len({request.sampled for request in batch}) == 1 and len(batch) <= 4 for batch in backend.batches)
    first = [batch for batch in backend.batches if len(batch[0].prompt) == 1]
    spread = [max(w) - min(w) for w in ([len(r.prompt[0].content) for r in batch] for batch in first)]
    assert sum(spread) / len(spread) < 10  # of a range of 25


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_regeneration import Echo, many
from shape.data.regeneration import regenerate

class Fragile(Echo):
    def generate(self, requests):
        if len(self.batches) == {after}:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(requests)

regenerate(many(60), Fragile(), {output!r}, batch_size=4, progress=False)
"""


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_killed_and_resumed_gives_the_same_bytes(tmp_path, name):
    straight, output = tmp_path / f"straight-{name}", tmp_path / name
    whole = Echo()
    regenerate(many(60), whole, straight, batch_size=4, progress=False)
    tests = os.path.dirname(__file__)
    code = KILLED.format(tests=tests, after=17, output=str(output))
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(tests)}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not output.exists()
    partial = tmp_path / f"{name}.partial"
    with open(partial, "ab") as file:
        file.write(b'[[0, {"id": "half a line')
    rest = Echo()
    regenerate(many(60), rest, output, batch_size=4, progress=False)
    assert output.read_bytes() == straight.read_bytes()
    assert 0 < len(rest.batches) < len(whole.batches)  # it went on where it was
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, f"straight-{name}"])


@pytest.mark.parametrize("after", [b"", b'{"data": "half a header'])
def test_killed_before_the_first_line(tmp_path, after):
    (tmp_path / "out.jsonl.partial").write_bytes(after)
    assert regenerate(many(3), Echo(), tmp_path / "out.jsonl", progress=False).rows == 3


class Stopping(Echo):
    def generate(self, requests):
        if len(self.batches) == 2:
            raise KeyboardInterrupt
        return super().generate(requests)


def test_resuming_with_other_options_is_refused(tmp_path):
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(many(30), Stopping(), output, batch_size=4, progress=False)
    with pytest.raises(ConfigError, match=r"begun with other options \(batch_size 4 against 5\)"):
        regenerate(many(30), Echo(), output, batch_size=5, progress=False)
    with pytest.raises(ConfigError, match=r"begun with other options .*data "):
        regenerate(many(29), Echo(), output, batch_size=4, progress=False)
    with pytest.raises(ConfigError, match="name echo against other"):
        regenerate(many(30), Echo("other"), output, batch_size=4, progress=False)
    assert regenerate(many(30), Echo(), output, batch_size=4, progress=False).rows == 30
    with pytest.raises(ConfigError, match="exists already; delete it or name another"):
        regenerate(many(30), Echo(), output, batch_size=4, progress=False)


def test_bad_input(tmp_path):
    text = Conversation("t", (Message("assistant", "text"),), "text")
    with pytest.raises(DataError, match="conversation t is plain text, which has no prompt"):
        regenerate([text], Echo(), tmp_path / "a.jsonl", progress=False)
    with pytest.raises(DataError, match="none of the 1 conversations has a user message that could"):
        regenerate([Conversation("x", (Message("assistant", "a"),))], Echo(), tmp_path / "b.jsonl", progress=False)
    with pytest.raises(ConfigError, match=r"let its name end in \.jsonl or \.jsonl\.gz"):
        regenerate(many(1), Echo(), tmp_path / "c.json", progress=False)
    with pytest.raises(ConfigError, match=r"sampled_share 2\.0 must be within 0 and 1"):
        regenerate(many(1), Echo(), tmp_path / "d.jsonl", sampled_share=2.0, progress=False)


# The target itself -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talkative(tiny_model, tiny_tokenizer) -> Target:
    """A random float64 target that ends a turn with many of its tokens, so that answers do end."""
    model = tiny_model("llama", torch.float64, seed=3, vocab_size=len(tiny_tokenizer))
    model.generation_config.eos_token_id = [2, *range(3, 40)]
    model.generation_config.top_k = 5  # and asks for what must not matter here
    model.generation_config.repetition_penalty = 1.5
    return Target(model, tiny_tokenizer, name="talkative")


def test_local_answers_are_those_of_each_prompt_alone(talkative):
    backend = LocalBackend(ShapeDecoder(talkative), max_new_tokens=6)
    requests = [Request((Message("user", "q" * (5 + 3 * i)),), i % 2 == 0, 100 + i) for i in range(10)]
    together = backend.generate(requests)
    assert together == [backend.generate([request])[0] for request in requests]
    assert {answer.finished for answer in together} == {True, False}
    other = [Request(r.prompt, True, r.seed + 1) for r in requests]
    assert backend.generate(other) != together


def test_greedy_answers_are_those_of_transformers(talkative):
    messages = (Message("user", "hello there"),)
    (answer,) = LocalBackend(ShapeDecoder(talkative), 12).generate([Request(messages, False, 0)])
    ids = torch.tensor([prompt_ids(messages, talkative.tokenizer)])
    out = talkative.model.generate(ids, max_new_tokens=12, do_sample=False, repetition_penalty=1.0, pad_token_id=0)
    new = [t for t in out[0, ids.shape[1] :].tolist() if t not in talkative.eos_token_ids]
    assert answer.text == talkative.tokenizer.decode(new, skip_special_tokens=True).rstrip("\ufffd")


def test_drafter_changes_no_answer_and_long_prompts_are_refused(talkative, tmp_path):
    conversations = [*many(6), asking("long", "x" * 300)]
    for name, drafter in (("plain", None), ("ngram", "ngram")):
        backend = LocalBackend(ShapeDecoder(talkative, drafter), max_new_tokens=8)
        with pytest.warns(UserWarning, match=r"long: a prompt of 3\d\d tokens does not fit the 256 positions"):
            regenerate(conversations, backend, tmp_path / f"{name}.jsonl", batch_size=3, progress=False)
    assert (tmp_path / "plain.jsonl").read_bytes() == (tmp_path / "ngram.jsonl").read_bytes()
    assert "long" not in written(tmp_path / "plain.jsonl")


def test_command(tmp_path, tiny_target_folder, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "turns": [f"ask {i}"]}) + "\n" for i in range(5)))
    output = tmp_path / "new" / "out.jsonl.gz"
    command = ["--target", str(tiny_target_folder), "--data", str(prompts), "--output", str(output)]
    main([*command, "--max_new_tokens", "4", "--batch_size", "2"])
    assert "5 conversations (0 left out), 5 answers to 5 questions" in capsys.readouterr().out
    assert len(gzip.decompress(output.read_bytes()).splitlines()) == 5
    for extra in ([], ["--endpoint", "http://localhost:1/v1"]):
        with pytest.raises(SystemExit) as caught:
            main([*command, *extra])
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give either target, to answer here, or endpoint"),
        (["--endpoint", "http://localhost:1/v1"], "name one with model"),
        (["--endpoint", "localhost", "--model", "m"], "endpoint localhost is no URL"),
        (["--target", "t", "--temperature", "0"], "for greedy answers set sampled_share to 0"),
    ],
)
def test_contradictory_options(tmp_path, capsys, options, sentence):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(SystemExit) as caught:
        main(["--data", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "o.jsonl"), *options])
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


# A server --------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Speaks as much of OpenAI's protocol as is needed; `script` holds statuses to answer with first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[int] = []
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.reply: dict[str, Any] | None = None
        self.strict = False  # about options that OpenAI does not know

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        if self.server.script:
            status = self.server.script.pop(0)
            said = "maximum context length is 8" if status == 400 else "no"
            return self._send(status, {"error": {"message": said}})
        if self.server.reply is not None:
            return self._send(200, self.server.reply)
        if self.server.strict and "return_token_ids" in body:
            return self._send(400, {"error": {"message": "Unrecognized request argument: return_token_ids"}})
        if self.path.endswith("chat/completions"):
            said = f"{len(body['messages'])}:{body['messages'][-1]['content']}:{body['temperature']}"
            content: dict[str, Any] = {"message": {"role": "assistant", "content": said}}
        else:
            said = body["prompt"]
            content = {"text": said}
        self._send(200, {"choices": [{**content, "finish_reason": "length" if "cut" in said else "stop"}]})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server():
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()


def test_endpoint(server, tmp_path):
    backend = EndpointBackend(server.url, "name", max_new_tokens=9, temperature=0.7, api_key="key")
    pair = Conversation("pair", (Message("user", "raw"), Message("assistant", "x")), "completion")
    conversations = [asking("a", "one", "two"), asking("b", "cut", "never"), pair]
    done = regenerate(conversations, backend, tmp_path / "out.jsonl", sampled_share=1.0, progress=False)
    assert (done.rows, done.answers, done.unfinished) == (3, 4, 1)
    assert written(tmp_path / "out.jsonl") == {
        "a": ["one", "1:one:0.7", "two", "3:two:0.7"],
        "b": ["cut", "1:cut:0.7"],
        "pair": ["raw", "raw"],
    }
    paths = {path for path, _, _ in server.asked}
    assert paths == {"/v1/chat/completions", "/v1/completions"}
    assert all(key == "Bearer key" and body["model"] == "name" for _, key, body in server.asked)
    assert all(body["max_tokens"] == 9 and body["seed"] >= 0 for _, _, body in server.asked)
    assert "key" not in repr(backend)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_endpoint_keeps_reasoning_calls_and_token_ids(server, name):
    message = {"role": "assistant", "content": None, name: "so", "tool_calls": [CALL], "refusal": None}
    choice = {"message": message, "finish_reason": "tool_calls", "token_ids": [7, 8]}
    server.reply = {"prompt_token_ids": [5, 6], "choices": [choice]}
    call = {**CALL, "function": {"name": "f", "arguments": {"x": 1}}}
    history = (Message("user", "q"), Message("assistant", "", more={"tool_calls": [call]}), Message("tool", "R"))
    request = Request(history, False, 0, {"tools": [{"name": "f"}], "enable_thinking": False})
    (answer,) = EndpointBackend(server.url, "m").generate([request])
    assert answer == Answer("", True, {"tool_calls": [call], "reasoning_content": "so"}, ([5, 6], [7, 8]))
    body = server.asked[0][2]
    assert body["return_token_ids"] is True and body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["tools"] == [{"name": "f"}] and body["messages"][1]["tool_calls"] == [CALL]


def test_rows_of_an_endpoint_hold_its_token_ids_or_its_reasoning(server, tmp_path):
    backend = EndpointBackend(server.url, "m")
    message = {"role": "assistant", "content": "yes", "reasoning": "so"}
    choice = {"message": message, "finish_reason": "stop", "token_ids": [7, 8]}
    server.reply = {"prompt_token_ids": [5, 6], "choices": [choice]}
    regenerate([asking("a", "one", "two")], backend, tmp_path / "ids.jsonl", progress=False)
    (found,) = load_conversations(tmp_path / "ids.jsonl")
    assert [list(text.input_ids) for text in found.texts] == [[5, 6, 7, 8], [5, 6, 7, 8]]
    assert [m.reasoning for m in found.messages] == ["", "so", "", "so"]
    del server.reply["prompt_token_ids"]
    regenerate([asking("a", "one", "two")], backend, tmp_path / "words.jsonl", progress=False)
    (found,) = load_conversations(tmp_path / "words.jsonl")
    assert found.texts == () and [m.reasoning for m in found.messages] == ["", "so", "", "so"]


def test_endpoint_that_refuses_to_be_asked_for_token_ids(server):
    server.strict = True
    assert EndpointBackend(server.url, "m").generate([REQUEST]) == [Answer("1:q:0.0", True)]
    assert ["return_token_ids" in body for _, _, body in server.asked] == [True, False]


def test_endpoint_asks_greedy_answers_at_temperature_0(server):
    (answer,) = EndpointBackend(server.url, "m").generate([Request((Message("user", "q"),), False, 0)])
    assert answer == Answer("1:q:0.0", True)


REQUEST = Request((Message("user", "q"),), False, 0)


def test_endpoint_tries_again(server):
    server.script = [503, 429, 500]
    backend = EndpointBackend(server.url, "m", pause=0.01)
    assert backend.generate([REQUEST]) == [Answer("1:q:0.0", True)]
    assert len(server.asked) == 4


def test_endpoint_failures(server):
    backend = EndpointBackend(server.url, "m", retries=1, pause=0.01)
    server.script = [400]
    (problem,) = backend.generate([REQUEST])
    assert isinstance(problem, DataError) and "maximum context length" in str(problem)
    server.script = [401, 500]
    with pytest.raises(EndpointError, match=r"does not serve model m \(status 401: .*no.*\); check the address"):
        backend.generate([REQUEST])
    assert server.script == [500]  # a refusal is not repeated
    server.script = [500, 500, 500]
    with pytest.raises(EndpointError, match="status 500"):
        backend.generate([REQUEST])
    server.script, server.reply = [], {"choices": []}
    with pytest.raises(EndpointError, match="did not answer with a completion"):
        backend.generate([REQUEST])
    with pytest.raises(EndpointError, match=r"Connection refused"):
        EndpointBackend("http://127.0.0.1:9/v1", "m", retries=1, pause=0.01).generate([REQUEST])


def dialogues(count: int) -> list[Conversation]:
    """Of one to four turns, the first of one turn."""
    return [asking(f"d{i}", *(f"{turn} of {i}" for turn in range(1 + i % 4))) for i in range(count)]


def test_an_endpoint_is_asked_by_many_dialogues_and_none_waits_for_another(server, tmp_path, monkeypatch):
    """The answer to the first comes when all others have all of theirs, after random delays; five at a time."""
    conversations = dialogues(24)
    others = sum(1 + i % 4 for i in range(1, 24))
    send, lock, served, at_work, most = Handler._send, threading.Lock(), threading.Semaphore(0), set(), []

    def slow(self, status, body):
        with lock:
            at_work.add(self)
            most.append(len(at_work))
        if ":0 of 0:" in body["choices"][0]["message"]["content"]:
            assert all(served.acquire(timeout=30) for _ in range(others)), "the others wait for this one"
        else:
            time.sleep(random.uniform(0.002, 0.02))
        with lock:
            at_work.remove(self)
        send(self, status, body)
        served.release()

    monkeypatch.setattr(Handler, "_send", slow)
    backend = EndpointBackend(server.url, "m", concurrency=5)
    done = regenerate(conversations, backend, tmp_path / "many.jsonl", progress=False)
    assert done.answers == len(server.asked) == others + 1 and max(most) == 5
    monkeypatch.setattr(Handler, "_send", send)
    regenerate(conversations, replace(backend, concurrency=1), tmp_path / "one.jsonl", progress=False)
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_what_an_endpoint_answered_is_kept_when_it_fails(server, tmp_path, monkeypatch):
    backend, send = EndpointBackend(server.url, "m", concurrency=4, retries=1, pause=0.01), Handler._send
    regenerate(dialogues(40), backend, tmp_path / "straight.jsonl", progress=False)
    asked = len(server.asked)

    def failing(self, status, body):
        broken = len(server.asked) > asked + 60
        send(self, 503 if broken else status, {"error": "out of order"} if broken else body)

    monkeypatch.setattr(Handler, "_send", failing)
    with pytest.raises(EndpointError, match=r"status 503: .*out of order.*give the same command again to continue"):
        regenerate(dialogues(40), backend, tmp_path / "out.jsonl", progress=False)
    assert len(server.asked) < asked + 80, "it went on asking"
    monkeypatch.setattr(Handler, "_send", send)
    before = len(server.asked)
    regenerate(dialogues(40), backend, tmp_path / "out.jsonl", progress=False)
    assert len(server.asked) - before <= asked - 60 + 4 * 3, "what was finished was asked again"
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


# Several processes -----------------------------------------------------------------------------------


def test_processes_share_the_batches(tmp_path):
    straight, output, barrier = tmp_path / "straight.jsonl", tmp_path / "out.jsonl", threading.Barrier(3)
    whole, parts = Echo(), [Echo() for _ in range(3)]
    expected = regenerate(many(60), whole, straight, batch_size=4, progress=False)

    def work(rank: int) -> Summary | None:
        share = Share(rank, 3, barrier.wait)
        return regenerate(many(60), parts[rank], output, batch_size=4, progress=False, share=share)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [expected, None, None]
    assert output.read_bytes() == straight.read_bytes()
    asked = [len(part.batches) for part in parts]
    assert sum(asked) == len(whole.batches) and max(asked) - min(asked) <= 6  # batches have up to three turns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "straight.jsonl"]


def test_another_number_of_processes_goes_on(tmp_path):
    straight, output, whole, rest = tmp_path / "straight.jsonl", tmp_path / "out.jsonl", Echo(), Echo()
    regenerate(many(60), whole, straight, batch_size=4, progress=False)
    for rank in (1, 2):  # and the first is lost at once
        part = Echo()
        assert regenerate(many(60), part, output, batch_size=4, progress=False, share=Share(rank, 3)) is None
    with open(tmp_path / "out.jsonl.partial.2", "ab") as file:
        file.write(b'[[0, {"id": "half a line')
    assert regenerate(many(60), Echo(), output, batch_size=4, progress=False, share=Share(1, 2)) is None
    regenerate(many(60), rest, output, batch_size=4, progress=False)
    assert output.read_bytes() == straight.read_bytes() and 0 < len(rest.batches) < len(whole.batches) / 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "straight.jsonl"]
