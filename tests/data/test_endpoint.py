"""Answers over HTTP."""

import json
import random
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers import ROOT
from regenerated import conversation_of, messages_by_id
from transformers import AutoTokenizer

from shape import bundled
from shape.data.backends import Answer, Request
from shape.data.conversations import Conversation
from shape.data.encoding import encode_all
from shape.data.endpoint import EndpointBackend, EndpointError
from shape.data.options import AnswerOptions
from shape.data.reading import load_conversations
from shape.data.regeneration import regenerate
from shape.errors import DataError
from shape.target.chat import Message, prompt_ids


class Server(ThreadingHTTPServer):
    """Speaks as much of OpenAI's protocol as is needed; `script` holds statuses to answer with first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[int] = []
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.reply: dict[str, Any] | None = None
        self.unknown: list[str] = []  # options that it refuses
        self.refused: tuple[int, str] | None = None  # the status for requests with this text

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
        if self.server.refused is not None and self.server.refused[1] in json.dumps(body):
            return self._send(self.server.refused[0], {"error": {"message": "roles must alternate"}})
        if self.server.reply is not None:
            return self._send(200, self.server.reply)
        if unknown := [name for name in self.server.unknown if name in body]:
            return self._send(400, {"error": {"message": f"Unrecognized request argument: {unknown[0]}"}})
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
    conversations = [conversation_of("a", "one", "two"), conversation_of("b", "cut", "never"), pair]
    done = regenerate(conversations, backend, tmp_path / "out.jsonl", AnswerOptions(sampled_share=1.0), progress=False)
    assert (done.rows, done.answers, done.unfinished) == (3, 4, 1)
    assert messages_by_id(tmp_path / "out.jsonl") == {
        "a": ["one", "1:one:0.7", "two", "3:two:0.7"],
        "b": ["cut", "1:cut:0.7"],
        "pair": ["raw", "raw"],
    }
    paths = {path for path, _, _ in server.asked}
    assert paths == {"/v1/chat/completions", "/v1/completions"}
    assert all(key == "Bearer key" and body["model"] == "name" for _, key, body in server.asked)
    assert all(body["max_tokens"] == 9 and body["seed"] >= 0 for _, _, body in server.asked)
    assert "key" not in repr(backend)


REQUEST = Request((Message("user", "q"),), False, 0)
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
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
    assert body["return_token_ids"] is True and body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["tools"] == [{"name": "f"}] and body["messages"][1]["tool_calls"] == [CALL]


def test_an_endpoint_is_given_a_recorded_calls_arguments_as_they_are(server):
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in ('{"x": ', {"x": 1})]
    history = (Message("user", "q"), Message("assistant", "", more={"tool_calls": calls}), Message("tool", "R"))
    EndpointBackend(server.url, "m").generate([Request(history, False, 0)])
    sent = server.asked[0][2]["messages"][1]["tool_calls"]
    assert [each["function"]["arguments"] for each in sent] == ['{"x": ', '{"x": 1}']


def test_rows_of_an_endpoint_hold_its_token_ids_or_its_reasoning(server, tmp_path):
    backend = EndpointBackend(server.url, "m")
    message = {"role": "assistant", "content": "yes", "reasoning": "so"}
    choice = {"message": message, "finish_reason": "stop", "token_ids": [7, 8]}
    server.reply = {"prompt_token_ids": [5, 6], "choices": [choice]}
    regenerate([conversation_of("a", "one", "two")], backend, tmp_path / "ids.jsonl", progress=False)
    (found,) = load_conversations(tmp_path / "ids.jsonl")
    assert [list(text.input_ids) for text in found.texts] == [[5, 6, 7, 8], [5, 6, 7, 8]]
    assert [m.reasoning for m in found.messages] == ["", "so", "", "so"]
    del server.reply["prompt_token_ids"]
    regenerate([conversation_of("a", "one", "two")], backend, tmp_path / "words.jsonl", progress=False)
    (found,) = load_conversations(tmp_path / "words.jsonl")
    assert found.texts == () and [m.reasoning for m in found.messages] == ["", "so", "", "so"]


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_rows_hold_what_vllm_wrote_token_for_token(server, tmp_path, name):
    """With replies of vLLM itself; the sampled one is written in other tokens than its text is read in."""
    recorded = json.loads((ROOT / "tests" / "fixtures" / "engine" / "replies.json").read_text())[name]
    server.reply = recorded["reply"]
    question = recorded["body"]["messages"][0]["content"]
    asked, backend = conversation_of("a", question), EndpointBackend(server.url, "m")
    regenerate([asked], backend, tmp_path / "out.jsonl", progress=False)
    (found,) = load_conversations(tmp_path / "out.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve("quickstart-target"))
    prompt, ids = prompt_ids([Message("user", question)], tokenizer), recorded["reply"]["choices"][0]["token_ids"]
    (encoded,) = encode_all([found], tokenizer, None).examples
    assert encoded.input_ids.tolist() == [*prompt, *ids]
    assert encoded.loss_mask.tolist() == [False] * len(prompt) + [True] * len(ids)
    (text,) = encode_all([replace(found, texts=())], tokenizer, None).examples
    assert (text.input_ids[text.loss_mask].tolist() == ids) == (name == "greedy")


def test_answers_without_token_ids_are_reported(server, tmp_path):
    asked, backend = conversation_of("a", "q"), EndpointBackend(server.url, "m")
    with pytest.warns(UserWarning, match="1 of 1 conversations hold text alone, for the endpoint gives no token ids"):
        regenerate([asked], backend, tmp_path / "out.jsonl", progress=False)


def test_endpoint_that_refuses_what_it_does_not_know(server):
    """One name after the other, and once for all requests."""
    server.unknown = ["return_token_ids", "top_k"]
    backend = EndpointBackend(server.url, "m")
    for _ in range(2):
        assert backend.generate([REQUEST]) == [Answer("1:q:0.0", True)]
    asked = [[name for name in (*server.unknown, "min_p") if name in body] for _, _, body in server.asked]
    assert asked == [["return_token_ids", "top_k", "min_p"], ["top_k", "min_p"], ["min_p"], ["min_p"]]


@pytest.mark.parametrize("key", [None, "secret"])
def test_the_key_is_read_from_the_environment(server, monkeypatch, key):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    backend = EndpointBackend.of(server.url, "m", max_new_tokens=9)
    assert backend.generate([REQUEST]) == [Answer("1:q:0.0", True)]
    assert [given for _, given, _ in server.asked] == [key and "Bearer secret"]
    assert "secret" not in repr(backend)


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


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("unknown", [[], ["return_token_ids"]], ids=["lenient", "strict"])
def test_a_conversation_that_the_endpoint_refuses_is_left_out(server, tmp_path, status, unknown):
    """The first one, before anything was answered, and a second turn, with what was answered before it kept."""
    server.refused, server.unknown = (status, "bad"), unknown
    asked = [conversation_of("a", "bad"), conversation_of("b", "good"), conversation_of("c", "good", "bad")]
    with pytest.warns(UserWarning, match=rf"2 conversations .* a: the endpoint refuses .*status {status}: .*alternate"):
        done = regenerate(asked, EndpointBackend(server.url, "m"), tmp_path / "out.jsonl", progress=False)
    assert (done.rows, done.left_out) == (2, 1)
    assert messages_by_id(tmp_path / "out.jsonl") == {"b": ["good", "1:good:0.0"], "c": ["good", "1:good:0.0"]}


@pytest.mark.parametrize("everything", ['"model": "m"', '"temperature": 0.0'])
def test_an_endpoint_that_refuses_everything_ends_the_run_at_once(server, tmp_path, everything):
    """Later, too: a server may lose its model."""
    backend = EndpointBackend(server.url, "m", concurrency=1)
    backend.generate([REQUEST])
    server.refused = (400, everything)
    with pytest.raises(EndpointError, match=r"does not serve model m \(status 400: .*alternate"):
        regenerate(dialogues(9), backend, tmp_path / "out.jsonl", progress=False)
    assert len(server.asked) == 3, "it went on asking"


def dialogues(count: int) -> list[Conversation]:
    """Of one to four turns, the first of one turn."""
    return [conversation_of(f"d{i}", *(f"{turn} of {i}" for turn in range(1 + i % 4))) for i in range(count)]


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
