"""Answers by a server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, ...)."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import Any, Self

from shape.data.backends import Answer, Request
from shape.data.rows import parse_row
from shape.errors import ConfigError, DataError, ShapeError
from shape.target.chat import Message

# Asked for too, as long as the server does not refuse it; most ignore what they do not know. Ids of prompt and answer
# (vLLM), and the target's own distribution, whatever its generation config prefers (vLLM and SGLang).
_MORE = {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class EndpointError(ShapeError):
    """An endpoint that cannot be reached, refuses, or answers with something else than a completion."""


class RequestRefused(EndpointError):
    """An endpoint that finds a request wrong (status 400 or 422): this one, or every one.

    Attributes:
        reason: the status, and what the server said.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Endpoint:
    """A server.

    Attributes:
        url: its base, for example http://localhost:8000/v1.
        model: the name under which it serves the target.
        api_key: sent as a bearer token.
        timeout: seconds to wait for one answer.
        retries: further attempts after a lost connection or a status of 429 or 5xx.
        pause: seconds before the first of them; doubled before each next one.
        concurrency: requests at a time; the server batches them.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False, kw_only=True)
    timeout: float = field(default=600.0, kw_only=True)
    retries: int = field(default=4, kw_only=True)
    pause: float = field(default=1.0, kw_only=True)
    concurrency: int = field(default=64, kw_only=True)

    @classmethod
    def of(cls, url: str, model: str | None, concurrency: int = 1, **more: Any) -> Self:
        """As commands are given it; the key is read from OPENAI_API_KEY.

        Raises:
            ConfigError: no URL, no model, or no request at a time.
        """
        if model is None:
            raise ConfigError(f"endpoint {url} may serve several models; name one with model")
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; give the requests that the endpoint takes at a time")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint {url} is no URL; it looks like http://localhost:8000/v1")
        return cls(url, model, concurrency=concurrency, api_key=os.environ.get("OPENAI_API_KEY"), **more)

    @classmethod
    def asked_for(cls, url: str | None, model: str | None) -> Self | None:
        """As ``of``; None where a target answers here. Raises ConfigError for a model without an endpoint, too."""
        if url is not None:
            return cls.of(url, model)
        if model is not None:
            raise ConfigError("model is the name of the target at an endpoint; give --endpoint, or leave model out")
        return None

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The reply to `body`, to which the model is added.

        Raises:
            DataError: the prompt is too long.
            RequestRefused: the server finds the request wrong.
            EndpointError: no server there, or it refuses otherwise.
        """
        # The standard library's client: the hub's own has another name in each major version (requests, httpx, httpx2)
        # and refuses to work under HF_HUB_OFFLINE.
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        whole = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", whole, headers)
        wrong = False
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                said = " ".join(error.read(500).decode(errors="replace").split())
                if error.code in (400, 413, 422) and "context" in said.lower():
                    raise DataError(f"the endpoint finds the prompt too long ({said})") from None
                reason, wrong = f"status {error.code}: {said}", error.code in (400, 422)
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
                reason = str(error) or type(error).__name__
        message = (
            f"endpoint {self.url} does not serve model {self.model} ({reason}); check the address, the name, "
            "the key, and that the server runs, then give the same command again to continue"
        )
        raise RequestRefused(message, reason) if wrong else EndpointError(message)


@dataclass(frozen=True)
class EndpointBackend(Endpoint):
    """A server that writes answers.

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
            reply = self._reply(request)
        except DataError as error:
            return error
        except RequestRefused as refused:
            if not self._answers_others(request):
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
                f"endpoint {self.url} did not answer with a completion ({type(error).__name__}: {error}); "
                "check that it speaks OpenAI's protocol"
            ) from None

    def _answers_others(self, request: Request) -> bool:
        """Whether the server takes a plain prompt with the same options: one that does not know the model, or one of
        the options, refuses that too, and all that is left to ask.
        """
        plain = "Hello" if isinstance(request.prompt, str) else (Message("user", "Hello"),)
        try:
            self._reply(replace(request, prompt=plain, template={}))
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

    def _reply(self, request: Request) -> bytes:
        path, body = "completions" if isinstance(request.prompt, str) else "chat/completions", self._body(request)
        more = {name: value for name, value in _MORE.items() if name not in self._refused}
        while True:
            try:
                reply = self.post(path, {**body, **more})
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
