"""Answers by servers that speak OpenAI's protocol (vLLM, SGLang, llama.cpp, ...)."""

import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from itertools import count
from typing import Any, NamedTuple, Self, TypeVar

from shape.data.backends import Answer, Request
from shape.data.rows import parse_row
from shape.errors import ConfigError, DataError, ShapeError
from shape.target.chat import Message

_LOG = logging.getLogger(__name__)
# Asked for too, as long as the server does not refuse it; most ignore what they do not know. Ids of prompt and answer
# (vLLM), and the target's own distribution, whatever its generation config prefers (vLLM and SGLang).
_MORE = {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_NOT_THERE = (502, 503, 504)  # of a proxy before a server that is down, or of one that still loads its model
_PATIENCE = 600.0  # seconds in which a server that cannot be reached may come back: large models load for minutes
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds between attempts to reach it; each is twice the one before

T = TypeVar("T")


class EndpointError(ShapeError):
    """An endpoint that cannot be reached, refuses, or answers with something else than a completion."""


class Unreachable(EndpointError):
    """No server takes the request: it is down, or starting."""


class RequestRefused(EndpointError):
    """An endpoint that finds a request wrong (status 400 or 422): this one, or every one.

    Attributes:
        reason: the status, and what the server said.
        url: of the server.
    """

    def __init__(self, message: str, reason: str, url: str) -> None:
        super().__init__(message)
        self.reason, self.url = reason, url


class Reply(NamedTuple):
    """What a server sent, and which one."""

    url: str
    body: bytes


def patiently(ask: Callable[[], T], stopped: threading.Event) -> T:
    """What `ask()` returns, which is called again for some ten minutes while no server can be reached.

    Args:
        stopped: ends the waiting when it is set, by another thread.

    Raises:
        Unreachable: the servers do not come back.
        CancelledError: stopped.
    """
    deadline, pause = time.monotonic() + _PATIENCE, _FIRST_PAUSE
    while not stopped.is_set():
        try:
            return ask()
        except Unreachable:
            if time.monotonic() + pause > deadline:
                raise
        stopped.wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise CancelledError


@dataclass(frozen=True)
class Endpoint:
    """A server, or several that serve the same: each thread asks one of them, and the others where that is down.

    Attributes:
        urls: the base of each, for example http://localhost:8000/v1.
        model: the name under which they serve the target.
        api_key: sent as a bearer token.
        timeout: seconds to wait for one answer.
        retries: further attempts after a lost connection or a status of 429 or 5xx. A server that cannot be reached is
            left at once; ``patiently`` asks again.
        pause: seconds before the first of them; doubled before each next one.
        concurrency: requests at a time to all servers together, which batch them.
        stopped: once it is set, no request is tried again.
    """

    urls: tuple[str, ...]
    model: str
    api_key: str | None = field(default=None, repr=False, kw_only=True)
    timeout: float = field(default=600.0, kw_only=True)
    retries: int = field(default=4, kw_only=True)
    pause: float = field(default=1.0, kw_only=True)
    concurrency: int = field(default=64, kw_only=True)
    stopped: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)
    # Which threads have asked, by number, and what was said of servers.
    _own: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)
    _numbers: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)
    _told: set[tuple[str, str]] = field(default_factory=set, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, given: str | Sequence[str], model: str | None, concurrency: int = 1, **more: Any) -> Self:
        """As commands are given it; the key is read from OPENAI_API_KEY.

        Args:
            given: URLs: a list, or with commas between them.

        Raises:
            ConfigError: no URL, no model, or no request at a time.
        """
        urls = tuple(url.strip() for url in (given.split(",") if isinstance(given, str) else given))
        if model is None:
            raise ConfigError(f"endpoint {', '.join(urls)} may serve several models; name one with model")
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; give the requests that the endpoint takes at a time")
        for url in urls or ("",):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"endpoint {url} is no URL; it looks like http://localhost:8000/v1")
        return cls(urls, model, concurrency=concurrency, api_key=os.environ.get("OPENAI_API_KEY"), **more)

    @classmethod
    def asked_for(cls, given: str | Sequence[str] | None, model: str | None) -> Self | None:
        """As ``of``; None where a target answers here. Raises ConfigError for a model without an endpoint, too."""
        if given is not None:
            return cls.of(given, model)
        if model is not None:
            raise ConfigError("model is the name of the target at an endpoint; give --endpoint, or leave model out")
        return None

    def post(self, path: str, body: Mapping[str, Any], url: str | None = None) -> Reply:
        """The reply to `body`, to which the model is added.

        Args:
            url: the server to ask; default: the thread's own first.

        Raises:
            DataError: the prompt is too long.
            RequestRefused: the server finds the request wrong.
            Unreachable: no server takes the connection.
            EndpointError: it refuses otherwise.
        """
        whole = json.dumps({"model": self.model, **body}).encode()
        failed: Unreachable | None = None
        for each in self._in_turn() if url is None else (url,):
            try:
                return Reply(each, self._post(f"{each.rstrip('/')}/{path}", whole, each))
            except Unreachable as error:
                failed = failed or error
        assert failed is not None
        raise failed

    def _in_turn(self) -> tuple[str, ...]:
        """All servers. A thread always begins with the same one, which so holds the earlier turns of its dialogue."""
        if not hasattr(self._own, "number"):
            self._own.number = next(self._numbers)
        first = self._own.number % len(self.urls)
        return (*self.urls[first:], *self.urls[:first])

    def _post(self, address: str, body: bytes, url: str) -> bytes:
        # The standard library's client: the hub's own has another name in each major version (requests, httpx, httpx2)
        # and refuses to work under HF_HUB_OFFLINE.
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(address, body, headers)
        reason, status = "", 0
        for attempt in range(self.retries + 1):
            if attempt == 1:
                self._say_once(url, f"does not answer ({reason})", f"asking again, {self.retries} times at most")
            if attempt and self.stopped.wait(self.pause * 2 ** (attempt - 1)):
                break
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                said = " ".join(error.read(500).decode(errors="replace").split())
                if error.code in (400, 413, 422) and "context" in said.lower():
                    raise DataError(f"the endpoint finds the prompt too long ({said})") from None
                reason, status = f"status {error.code}: {said}", error.code
                if status != 429 and status < 500:
                    break
            except urllib.error.URLError as error:  # before the request was sent
                reason, status = str(error.reason), _NOT_THERE[0]
                break
            except (OSError, HTTPException) as error:  # timeouts are OSErrors
                reason, status = str(error) or type(error).__name__, 0
        message = (
            f"endpoint {url} does not serve model {self.model} ({reason}); check the address, the name, the key, and "
            "that the server runs, then give the same command again to continue"
        )
        if status in _NOT_THERE:
            self._say_once(
                url, f"cannot be reached ({reason})", "requests go to others, or wait for it for ten minutes"
            )
            raise Unreachable(message)
        raise RequestRefused(message, reason, url) if status in (400, 422) else EndpointError(message)

    def _say_once(self, url: str, what: str, then: str) -> None:
        if (url, then) not in self._told:
            self._told.add((url, then))
            _LOG.warning(f"endpoint {url} {what}; {then}")


@dataclass(frozen=True)
class EndpointBackend(Endpoint):
    """Servers that write answers.

    Attributes:
        max_new_tokens: longest answer, in tokens.
        temperature: of the sampled answers; greedy ones ask for 0.
    """

    max_new_tokens: int = 512
    temperature: float = 1.0
    _refused: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # of what is asked for too

    def describe(self) -> dict[str, Any]:
        return {"model": self.model, "max_new_tokens": self.max_new_tokens, "temperature": self.temperature}

    def generate(self, requests: Sequence[Request]) -> list[Answer | DataError]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer | DataError:
        raw = isinstance(request.prompt, str)
        try:
            url, reply = self._reply(request)
        except DataError as error:
            return error
        except RequestRefused as refused:
            if not self._answers_others(request, refused.url):
                raise
            return DataError(f"the endpoint refuses the conversation ({refused.reason})")
        try:
            said = json.loads(reply)
            choice = said["choices"][0]
            finished = choice["finish_reason"] in ("stop", "tool_calls")
            prompt, ids = choice.get("prompt_token_ids") or said.get("prompt_token_ids"), choice.get("token_ids")
            tokens = (prompt, ids) if prompt and ids else None
            if raw:
                return Answer(choice["text"], finished, tokens=tokens)
            row = {key: value for key, value in choice["message"].items() if value is not None}
            message = parse_row({"messages": [{"content": "", **row}]}, "").messages[0]
            return Answer(message.content, finished, message.more, tokens)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(
                f"endpoint {url} did not answer with a completion ({type(error).__name__}: {error}); "
                "check that it speaks OpenAI's protocol"
            ) from None

    def _answers_others(self, request: Request, url: str) -> bool:
        """Whether the server takes a plain prompt with the same options: one that does not know the model, or one of
        the options, refuses that too, and all that is left to ask.
        """
        plain = "Hello" if isinstance(request.prompt, str) else (Message("user", "Hello"),)
        try:
            self._reply(replace(request, prompt=plain, template={}), url)
        except Unreachable:  # it may have been about to go down
            raise
        except (DataError, EndpointError):
            return False
        return True

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature if request.sampled else 0.0,
            "top_p": 1.0,
            "seed": request.seed,
        }
        if isinstance(request.prompt, str):
            return body | {"prompt": request.prompt}
        given = dict(request.template)
        tools = given.pop("tools", None)
        messages = [_openai_message(message) for message in request.prompt]
        more = {"messages": messages, "tools": tools, "chat_template_kwargs": given}
        return body | {name: value for name, value in more.items() if value}

    def _reply(self, request: Request, url: str | None = None) -> Reply:
        path, body = "completions" if isinstance(request.prompt, str) else "chat/completions", self._body(request)
        more = {name: value for name, value in _MORE.items() if name not in self._refused}
        while True:
            try:
                reply = self.post(path, {**body, **more}, url)
            except RequestRefused as error:
                if not (named := {name for name in more if name in error.reason}):
                    raise
                more = {name: value for name, value in more.items() if name not in named}
            else:
                self._refused.update(_MORE.keys() - more.keys())  # which were to blame, as it takes the rest
                return reply


def _openai_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's protocol, where arguments of tools are text."""

    def as_text(arguments: Any) -> str:  # recorded ones that are no JSON are text already
        return arguments if isinstance(arguments, str) else json.dumps(arguments)

    calls = [
        {**call, "function": {**call["function"], "arguments": as_text(call["function"]["arguments"])}}
        for call in message.more.get("tool_calls", [])
    ]
    fields = {"role": message.role, "content": message.content, **message.more}
    return fields | {"tool_calls": calls} if calls else fields
