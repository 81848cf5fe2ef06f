"""Answers over HTTP."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers import ROOT, write_rows
from regenerated import conversation_of, messages_by_id
from transformers import AutoTokenizer

from shape import bundled
from shape.cli.extract import parser as extract_parser
from shape.cli.regenerate import parser as regenerate_parser
from shape.data import endpoint as program
from shape.data.backends import Answer, Request
from shape.data.conversations import Conversation
from shape.data.encoding import encode_all
from shape.data.endpoint import Endpoint, EndpointBackend, EndpointError, Unreachable, patiently
from shape.data.options import AnswerOptions
from shape.data.reading import load_conversations
from shape.data.regeneration import regenerate
from shape.errors import DataError
from shape.features.options import ExtractOptions
from shape.generation.options import RegenerationOptions
from shape.target.chat import Message, prompt_ids

NO = '{"error": {"message": "no"}}'


class Server(ThreadingHTTPServer):
    """Speaks as much of OpenAI's protocol as is needed; `script` holds statuses to answer with first."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
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


@contextmanager
def serving(port: int = 0) -> Iterator[Server]:
    with Server(port) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()


@pytest.fixture
def server():
    with serving() as found:
        yield found


@pytest.fixture
def port() -> int:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_endpoint(server, tmp_path):
    backend = EndpointBackend((server.url,), "name", max_new_tokens=9, temperature=0.7, api_key="key")
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
    (answer,) = EndpointBackend((server.url,), "m").generate([request])
    assert answer == Answer("", True, {"tool_calls": [call], "reasoning_content": "so"}, ([5, 6], [7, 8]))
    body = server.asked[0][2]
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
    assert body["return_token_ids"] is True and body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["tools"] == [{"name": "f"}] and body["messages"][1]["tool_calls"] == [CALL]


def test_an_endpoint_is_given_a_recorded_calls_arguments_as_they_are(server):
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in ('{"x": ', {"x": 1})]
    history = (Message("user", "q"), Message("assistant", "", more={"tool_calls": calls}), Message("tool", "R"))
    EndpointBackend((server.url,), "m").generate([Request(history, False, 0)])
    sent = server.asked[0][2]["messages"][1]["tool_calls"]
    assert [each["function"]["arguments"] for each in sent] == ['{"x": ', '{"x": 1}']


def test_rows_of_an_endpoint_hold_its_token_ids_or_its_reasoning(server, tmp_path):
    backend = EndpointBackend((server.url,), "m")
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
    asked, backend = conversation_of("a", question), EndpointBackend((server.url,), "m")
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
    asked, backend = conversation_of("a", "q"), EndpointBackend((server.url,), "m")
    with pytest.warns(UserWarning, match="1 of 1 conversations hold text alone, for the endpoint gives no token ids"):
        regenerate([asked], backend, tmp_path / "out.jsonl", progress=False)


def test_endpoint_that_refuses_what_it_does_not_know(server):
    """One name after the other, and once for all requests."""
    server.unknown = ["return_token_ids", "top_k"]
    backend = EndpointBackend((server.url,), "m")
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
    backend = EndpointBackend((server.url,), "m", pause=0.01)
    assert backend.generate([REQUEST]) == [Answer("1:q:0.0", True)]
    assert len(server.asked) == 4


def test_it_is_told_once_that_requests_are_tried_again_and_none_is_once_stopped(server, caplog):
    backend = EndpointBackend((server.url,), "m", pause=0.01)
    server.script = [503, 503]
    with caplog.at_level("INFO", "shape"):
        backend.generate([REQUEST])
    (told,) = [record.message for record in caplog.records]
    assert told == f"endpoint {server.url} does not answer (status 503: {NO}); asking again, 4 times at most"
    backend.stopped.set()
    server.script = [503, 503]
    with pytest.raises(EndpointError, match="status 503"):
        backend.generate([REQUEST])
    assert server.script == [503]


def test_a_second_interrupt_does_not_wait_for_the_endpoint(tmp_path):
    data = write_rows(tmp_path / "asked.jsonl", {"id": "a", "prompt": "Hi"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        given = ["--endpoint", url, "--model", "m", "--data", str(data), "--output", str(tmp_path / "out.jsonl")]
        command = [sys.executable, "-m", "shape", "regenerate", *given]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()
        with connection:  # open, or else the request fails, and the process ends by itself
            time.sleep(0.5)  # until the thread that asks is known to the pool that waits for it
            process.send_signal(signal.SIGTERM)  # processes of a test runner's workers may ignore SIGINT
            told = next(line for line in process.stderr if "interrupted" in line)
            assert "answers on their way are waited for and kept" in told and process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 130


def test_endpoint_failures(server):
    backend = EndpointBackend((server.url,), "m", retries=1, pause=0.01)
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
        EndpointBackend(("http://127.0.0.1:9/v1",), "m", retries=1, pause=0.01).generate([REQUEST])


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("unknown", [[], ["return_token_ids"]], ids=["lenient", "strict"])
def test_a_conversation_that_the_endpoint_refuses_is_left_out(server, tmp_path, status, unknown):
    """The first one, before anything was answered, and a second turn, with what was answered before it kept."""
    server.refused, server.unknown = (status, "bad"), unknown
    asked = [conversation_of("a", "bad"), conversation_of("b", "good"), conversation_of("c", "good", "bad")]
    with pytest.warns(UserWarning, match=rf"2 conversations .* a: the endpoint refuses .*status {status}: .*alternate"):
        done = regenerate(asked, EndpointBackend((server.url,), "m"), tmp_path / "out.jsonl", progress=False)
    assert (done.rows, done.left_out) == (2, 1)
    assert messages_by_id(tmp_path / "out.jsonl") == {"b": ["good", "1:good:0.0"], "c": ["good", "1:good:0.0"]}


@pytest.mark.parametrize("everything", ['"model": "m"', '"temperature": 0.0'])
def test_an_endpoint_that_refuses_everything_ends_the_run_at_once(server, tmp_path, everything):
    """Later, too: a server may lose its model."""
    backend = EndpointBackend((server.url,), "m", concurrency=1)
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
    backend = EndpointBackend((server.url,), "m", concurrency=5)
    done = regenerate(conversations, backend, tmp_path / "many.jsonl", progress=False)
    assert done.answers == len(server.asked) == others + 1 and max(most) == 5
    monkeypatch.setattr(Handler, "_send", send)
    regenerate(conversations, replace(backend, concurrency=1), tmp_path / "one.jsonl", progress=False)
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_what_an_endpoint_answered_is_kept_when_it_fails(server, tmp_path, monkeypatch):
    backend, send = EndpointBackend((server.url,), "m", concurrency=4, retries=1, pause=0.01), Handler._send
    regenerate(dialogues(40), backend, tmp_path / "straight.jsonl", progress=False)
    asked = len(server.asked)

    def failing(self, status, body):
        broken = len(server.asked) > asked + 60
        send(self, 500 if broken else status, {"error": "out of order"} if broken else body)

    monkeypatch.setattr(Handler, "_send", failing)
    with pytest.raises(EndpointError, match=r"status 500: .*out of order.*give the same command again to continue"):
        regenerate(dialogues(40), backend, tmp_path / "out.jsonl", progress=False)
    assert len(server.asked) < asked + 80, "it went on asking"
    monkeypatch.setattr(Handler, "_send", send)
    before = len(server.asked)
    regenerate(dialogues(40), backend, tmp_path / "out.jsonl", progress=False)
    assert len(server.asked) - before <= asked - 60 + 4 * 3, "what was finished was asked again"
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


# Servers that come back, and several ------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Pauses that a test can wait for."""
    monkeypatch.setattr(program, "_FIRST_PAUSE", 0.02)
    monkeypatch.setattr(program, "_LONGEST_PAUSE", 0.1)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_server_that_starts_later_is_waited_for(port, tmp_path, quick, caplog, concurrency):
    url, done = f"http://127.0.0.1:{port}/v1", []
    backend = EndpointBackend((url,), "m", concurrency=concurrency)
    output = tmp_path / "out.jsonl"
    asking = threading.Thread(target=lambda: done.append(regenerate(dialogues(9), backend, output, progress=False)))
    asking.start()
    time.sleep(0.5)
    assert asking.is_alive()
    with serving(port):
        asking.join(30)
    assert done and done[0].rows == 9
    said = [record.getMessage() for record in caplog.records if "cannot be reached" in record.getMessage()]
    assert len(said) == 1 and url in said[0] and "Connection refused" in said[0]


def test_a_server_that_does_not_come_back_ends_the_run(port, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(program, "_PATIENCE", 0.5)
    backend, began = EndpointBackend((f"http://127.0.0.1:{port}/v1",), "m", concurrency=4), time.monotonic()
    with pytest.raises(EndpointError, match=rf"endpoint http://127.0.0.1:{port}/v1 does not serve .*refused"):
        regenerate(dialogues(9), backend, tmp_path / "out.jsonl", progress=False)
    assert 0.3 < time.monotonic() - began < 10


def test_pauses_grow_up_to_half_a_minute_for_ten_minutes(monkeypatch):
    now, pauses = [0.0], []

    class Clock(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            now[0] += timeout
            return False

    def down():
        raise Unreachable("down")

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with pytest.raises(Unreachable):
        patiently(down, Clock())
    assert pauses[:6] == [1, 2, 4, 8, 16, 30] and max(pauses) == 30 and 570 <= sum(pauses) <= 600


def test_waiting_ends_when_the_run_does(server, port, tmp_path):
    """One server is down and the other refuses: nobody waits for the former once the latter has ended the run."""
    server.script = [401]

    class Halved(EndpointBackend):
        def generate(self, requests):
            url = server.url if requests[0].prompt[0].content == "0 of 0" else f"http://127.0.0.1:{port}/v1"
            return EndpointBackend((url,), "m").generate(requests)

    began = time.monotonic()
    with pytest.raises(EndpointError, match="status 401"):
        regenerate(dialogues(3), Halved((server.url,), "m", concurrency=3), tmp_path / "out.jsonl", progress=False)
    assert time.monotonic() - began < 20
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(CancelledError):
        patiently(lambda: 1, stopped)


def test_requests_are_spread_over_servers_and_answers_do_not_tell(server, tmp_path):
    """A dialogue stays with its server, and a run goes on with others."""
    backend = EndpointBackend((server.url,), "m", concurrency=4)
    regenerate(dialogues(24), backend, tmp_path / "one.jsonl", progress=False)
    answered = sorted(body["messages"][0]["content"] for _, _, body in server.asked)
    with serving() as first, serving() as second:
        several = replace(backend, urls=(first.url, second.url))
        assert several.describe() == backend.describe()
        regenerate(dialogues(24), several, tmp_path / "two.jsonl", progress=False)
        asked = [[body["messages"][0]["content"] for _, _, body in each.asked] for each in (first, second)]
    assert sorted([*asked[0], *asked[1]]) == answered and all(asked) and not set(asked[0]) & set(asked[1])
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_threads_take_the_servers_in_turn():
    backend = EndpointBackend(("a", "b", "c"), "m")
    first = []
    for _ in range(6):
        thread = threading.Thread(target=lambda: first.append([backend._in_turn()[0] for _ in range(2)]))
        thread.start()
        thread.join()
    assert first == [[url, url] for url in "abcabc"]


def test_a_server_that_is_down_leaves_its_requests_to_the_others(server, port, tmp_path, caplog):
    down = f"http://127.0.0.1:{port}/v1"
    backend = EndpointBackend((down, server.url), "m", concurrency=4)
    assert regenerate(dialogues(9), backend, tmp_path / "out.jsonl", progress=False).rows == 9
    assert [down in record.getMessage() for record in caplog.records] == [True]


def test_a_server_that_loads_its_model_leaves_its_requests_to_the_others(server, tmp_path, caplog):
    """As some answer until then, and proxies before a server that is down."""
    with serving() as other:
        other.script = [503] * 100
        backend = EndpointBackend((other.url, server.url), "m", concurrency=4, retries=1, pause=0.01)
        assert regenerate(dialogues(9), backend, tmp_path / "out.jsonl", progress=False).rows == 9
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(other.url in each for each in said) and "requests go to others" in said[1]


def test_of_several_servers_the_one_that_refuses_is_named(server, tmp_path):
    """Its requests are not taken for wrong ones because the other answers."""
    with serving() as other:
        other.refused = (422, '"model": "m"')
        backend = EndpointBackend((server.url, other.url), "m", concurrency=2)
        with pytest.raises(EndpointError, match=rf"endpoint {other.url} does not serve model m \(status 422"):
            regenerate(dialogues(24), backend, tmp_path / "out.jsonl", progress=False)


@pytest.mark.parametrize(
    "given", [["--endpoint", "http://a/v1,http://b/v1"], ["--endpoint=[http://a/v1, http://b/v1]"], ["--config"]]
)
@pytest.mark.parametrize(
    ("command", "kind"), [(regenerate_parser, RegenerationOptions), (extract_parser, ExtractOptions)]
)
def test_several_servers_are_given_with_commas_or_as_a_list(given, command, kind, tmp_path):
    (tmp_path / "c.yaml").write_text("endpoint: [http://a/v1, http://b/v1]\n")
    given = [*given, str(tmp_path / "c.yaml")] if given == ["--config"] else given
    options = command().options(kind, [*given, "--model=m", "--target=t", "--data=d", "--output=o"])
    assert Endpoint.asked_for(options.endpoint, options.model).urls == ("http://a/v1", "http://b/v1")
