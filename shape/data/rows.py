"""Rows of data in any known format, parsed into conversations and prompts."""

import json
from array import array
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shape.data.conversations import Checks, Conversation, Prompt, Tokens
from shape.errors import DataError
from shape.target.chat import Message, Role, require_unicode

_SPEAKERS: dict[Role, str] = {
    "system": "system developer",
    "user": "human user prompter",
    "assistant": "gpt assistant chatgpt model bing bard function_call",
    "tool": "tool function function_response observation ipython",
}
ROLES: dict[str, Role] = {name: role for role, names in _SPEAKERS.items() for name in names.split()}
FORMATS = (
    "conversations, messages, turns, instruction + output, prompt + completion, prompt, text, or input_ids + loss_mask"
)
_IDS = ("question_id", "prompt_id", "task_id", "unique_id", "uid")  # of benchmarks
# What a message may have beside role and text, as chat templates and OpenAI's protocol call it.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MORE = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}


def parse_row(row: object, default_id: str) -> Conversation:
    """One row of any known format; a row without `id` gets `default_id`. Raises DataError without a file name."""
    if isinstance(row, DataError):
        raise row
    row = _filled(row)
    if not isinstance(row, dict):
        raise DataError(f"expected an object with {FORMATS}, found {_shown(row)}")
    identity = str(row.get("id", default_id))
    found = _conversation(row, identity)
    texts = _texts(row) if "loss_mask" in row or (found is None and "input_ids" in row) else ()
    if found is None and texts:
        found = Conversation(identity, (), "tokens")
    if found is None:
        keys = ", ".join(map(str, row)) or "no values"
        raise DataError(f"unknown format (it has {keys}); expected {FORMATS}")
    return replace(found, template=_template(row) if found.asks else {}, texts=texts)


def parse_prompt(row: object, default_id: str) -> Prompt:
    """A row as a benchmark prompt. The turns to answer are the last user message or, where no message is an answer, all
    of them. Raises DataError without a file name.
    """
    row = _renamed(_filled(row), default_id.rpartition("-")[0])
    conversation = parse_row(row, default_id)
    assert isinstance(row, dict)
    messages = conversation.messages
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    if not users:
        raise DataError("no user message to answer; expected turns, messages or prompt")
    answered = any(message.role == "assistant" for message in messages)
    first = users[-1] if answered else users[0]
    known, test, entry_point = (row.get(name) for name in ("reference", "test", "entry_point"))
    known = known if isinstance(known, list) else [] if known is None else [known]
    return Prompt(
        conversation.id,
        str(row.get("category", "")),
        tuple(messages[index].content for index in users if index >= first),
        messages[: first + 1],
        conversation.template,
        references=tuple("" if one is None else str(one) for one in known),  # numbers, and turns without any
        checks=Checks(test, entry_point) if isinstance(test, str) and isinstance(entry_point, str) else None,
    )


def _filled(given: object) -> object:
    """Without what is null: tables, of the hub or parquet, give every row the columns of all."""
    return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def _renamed(row: object, stem: str) -> object:
    """A row of a known benchmark under our names: Spec-Bench and SPEED-Bench (`question_id`), MT-Bench (`prompt` is a
    list of turns), GSM8K (`question`, `answer`), MATH-500 and AIME (`problem`, `answer`), HumanEval and
    sanitized MBPP (`task_id`), Arena-Hard (`uid`). Their ids are numbers in part, and get the name of their file.
    """
    if not isinstance(row, dict):
        return row
    if (own := next((row[name] for name in _IDS if name in row), None)) is not None:
        row = {"id": f"{stem}-{own}", **row}
    if "turns" in row or "messages" in row:
        return row
    asked = row.get("prompt")
    if isinstance(asked, list) and all(isinstance(turn, str) for turn in asked):
        return {**{name: value for name, value in row.items() if name != "prompt"}, "turns": asked}
    if asked is None and (question := row.get("question", row.get("problem"))) is not None:
        return {"prompt": question, "reference": row.get("answer"), **row}
    return row


def _conversation(row: dict[str, Any], identity: str) -> Conversation | None:
    """The messages of a row; None for no known format."""
    system = (Message("system", _text(row["system"], "system")),) if row.get("system") else ()
    for key in ("conversations", "conversation", "messages"):
        if key in row:
            return Conversation(identity, _with_system(system, _messages(row[key], key)))
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise DataError(f"'turns' is {_shown(turns)}; expected a list of user strings")
        return Conversation(identity, (*system, *(Message("user", _text(turn, "turns")) for turn in turns)))
    if "instruction" in row and "output" in row:
        parts = _text(row["instruction"], "instruction"), _text(row.get("input") or "", "input")
        question = Message("user", "\n\n".join(filter(None, parts)))
        return Conversation(identity, (*system, question, Message("assistant", _text(row["output"], "output"))))
    finished = row.get("finished", True) is not False
    if "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            both = _messages(row["prompt"], "prompt") + _messages(row["completion"], "completion")
            return Conversation(identity, _with_system(system, both))
        # A completion has no place for a third message, so what leads the conversation leads the prompt's text.
        leading = [message.content for message in system]
        prompt = Message("user", "\n\n".join([*leading, _text(row["prompt"], "prompt")]))
        completion = Message("assistant", _text(row["completion"], "completion"), finished)
        return Conversation(identity, (prompt, completion), "completion")
    if "prompt" in row:
        asked = row["prompt"]
        listed = isinstance(asked, list)
        messages = _messages(asked, "prompt") if listed else (Message("user", _text(asked, "prompt")),)
        return Conversation(identity, _with_system(system, messages))
    if "text" in row:
        return Conversation(identity, (Message("assistant", _text(row["text"], "text"), finished),), "text")
    return None


def _with_system(system: tuple[Message, ...], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages behind a row's own system message, unless they begin with one."""
    return messages if messages[0].role == "system" else (*system, *messages)


def _texts(row: dict[str, Any]) -> tuple[Tokens, ...]:
    """`input_ids` and `loss_mask` of a row, of one text or of several."""
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or not ids or len(ids) != len(mask):
        raise DataError("'input_ids' and 'loss_mask' belong together; give two lists of the same length")
    if not isinstance(ids[0], list):
        ids, mask = [ids], [mask]
    return tuple(_tokens(*both) for both in zip(ids, mask, strict=True))


def _tokens(ids: Any, mask: Any) -> Tokens:
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise DataError("'loss_mask' is not as long as 'input_ids'; give one mark for each token")
    if wrong := [token for token in ids if type(token) is not int or not 0 <= token < 2**31]:
        raise DataError(f"'input_ids' holds {_shown(wrong[0])}; expected token ids, integers of at least 0")
    if wrong := [mark for mark in mask if mark not in (0, 1)]:
        raise DataError(f"'loss_mask' holds {_shown(wrong[0])}; expected 1 for tokens to learn from and 0 for others")
    return Tokens(array("i", ids), bytes(map(int, mask)))


def _template(row: dict[str, Any]) -> dict[str, Any]:
    """A row's options of its chat template."""
    given, tools = _filled(row.get("chat_template_kwargs") or {}), row.get("tools") or []
    if isinstance(tools, str):
        tools = _json(tools, "tools")
    if not isinstance(given, dict):
        raise DataError(f"'chat_template_kwargs' is {_shown(given)}; expected an object")
    if not isinstance(tools, list):
        raise DataError(f"'tools' is {_shown(tools)}; expected a list of descriptions")
    return {**given, **({"tools": tools} if tools else {})}


def _messages(turns: object, key: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"'{key}' is {_shown(turns)}; expected a list of messages")
    return tuple(_message(turn, f"message {number} of '{key}'") for number, turn in enumerate(turns, 1))


def _message(turn: object, name: str) -> Message:
    turn = _filled(turn)
    if not isinstance(turn, dict):
        raise DataError(f"{name} is {_shown(turn)}; expected an object with role and content")
    speaker, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = ROLES.get(str(speaker).lower())
    more = _more(turn, role, name)
    if content is None and more:
        content = ""  # beside a call of tools
    if speaker is None or content is None:
        raise DataError(f"{name} lacks its {'role' if speaker is None else 'text'} (from + value, or role + content)")
    if role is None:
        raise DataError(f"{name} has the unknown role {_shown(speaker)}; expected one of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        other = [part.get("type") for part in content if part.get("text") is None]
        if other and role != "tool":
            raise DataError(f"{name} has a part without text, of type {_shown(other[0])}: leave the row out")
        content = content if other else "".join(_text(part["text"], name) for part in content)
    if role == "tool" and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)  # some collections keep a tool's result as an object
    if str(speaker).lower() == "function_call":
        more, content = {**more, "tool_calls": _calls(_json(content, name), name)}, ""
    finished, learned = turn.get("finished", True) is not False, turn.get("weight") != 0
    return Message(role, _text(content, name), finished, more, learned)


def _more(turn: dict[str, Any], role: Role | None, name: str) -> dict[str, Any]:
    """What a message has beside role and text; empty values, of which tables of the hub are full, are left out."""
    more = {key: turn[key] for key in _MORE.get(role or "", ()) if turn.get(key)}
    if "tool_calls" in more:
        more["tool_calls"] = _calls(more["tool_calls"], name)
    reasoning = next((turn[key] for key in _REASONING if turn.get(key)), None)
    if reasoning is not None and role == "assistant":
        more["reasoning_content"] = _text(reasoning, f"the reasoning of {name}")
    return more


def _calls(given: Any, name: str) -> list[dict[str, Any]]:
    """Calls of tools in OpenAI's form, with their arguments as objects, which is what chat templates expect."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{name} has a call of a tool without a name, {_shown(call)}; expected name and arguments")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            with suppress(json.JSONDecodeError):  # a model may have written them wrongly
                arguments = json.loads(arguments or "{}")
        own = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        identity = {"id": call["id"]} if call.get("id") else {}
        calls.append({**identity, "type": "function", "function": own})
    return calls


def _json(text: Any, name: str) -> Any:
    try:
        return json.loads(_text(text, name))
    except json.JSONDecodeError:
        raise DataError(f"{name} has {_shown(text)} where JSON is expected") from None


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} is {_shown(value)}; expected a string")
    require_unicode(value, name)
    return value


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
