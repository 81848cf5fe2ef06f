"""Chats as the target reads and writes them: messages, its chat template, and their token ids."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any, Literal, cast

from transformers import PreTrainedTokenizerBase

from shape.errors import DataError

THOUGHT, THOUGHT_END = "<think>", "</think>"
# Between what targets reason; the others are gpt-oss's and Magistral's.
_TAGS = {THOUGHT: THOUGHT_END, "<|channel|>analysis<|message|>": "<|end|>", "[THINK]": "[/THINK]"}
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Message:
    """One message of a chat.

    Attributes:
        finished: False for an answer that was cut before its end-of-turn token.
        more: what else chat templates read: `reasoning_content` (str), `tool_calls` (as in OpenAI's protocol, with
            their arguments as objects), `tool_call_id` and `name`.
        learned: False for an answer that is context alone, with no loss on it (`"weight": 0`).
    """

    role: Role
    content: str
    finished: bool = True
    more: Mapping[str, Any] = field(default_factory=dict, repr=False)
    learned: bool = field(default=True, repr=False)

    @property
    def reasoning(self) -> str:
        return self.more.get("reasoning_content", "")

    @property
    def chat(self) -> dict[str, Any]:
        """The message as chat templates take it; reasoning under both names in use."""
        thinking = {"thinking": self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **self.more, **thinking}


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message | Mapping[str, Any]],
    add_generation_prompt: bool = False,
    template: Mapping[str, Any] | None = None,
) -> str:
    """The messages in the target's chat template.

    Args:
        template: what it is given beside the messages: `tools`, `enable_thinking`, ...

    Raises:
        DataError: there is no template, or it refuses the messages.
    """
    given = template or {}
    if not isinstance(given, Mapping):
        raise DataError(f"chat_template_kwargs is {given!r}; give a dictionary")
    _warn_of_unread(template_of(tokenizer, given), name_of(tokenizer), frozenset(given))
    _require_objects(messages)
    chat = [dict(message.chat if isinstance(message, Message) else message) for message in messages]
    if strange := [message for message in chat if "role" not in message]:
        raise DataError(f"a message has the keys {', '.join(map(str, strange[0]))}; give role and content")
    try:
        return cast(
            str,
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt, **given),
        )
    except Exception as error:  # a template is a program and may raise anything
        roles = ", ".join(str(message.get("role")) for message in chat) or "no message"
        raise DataError(f"the chat template of {name_of(tokenizer)} refuses the turns {roles}: {error}") from None


def _require_objects(messages: Sequence[Message | Mapping[str, Any]]) -> None:
    if not isinstance(messages, Iterable):
        raise DataError(f"the messages are {messages!r}; give a text, or objects with role and content")
    if strange := [message for message in messages if not isinstance(message, Message | Mapping)]:
        raise DataError(f"a message is {strange[0]!r}; give objects with role and content, or token ids as a tensor")


def plain_text(name: str, messages: Sequence[Message | Mapping[str, Any]]) -> str:
    """What a target without a chat template continues; raises DataError where that is no text."""
    _require_objects(messages)
    parts = [message.content if isinstance(message, Message) else message.get("content") for message in messages]
    if strange := [part for part in parts if not isinstance(part, str)]:
        raise DataError(
            f"target {name} has no chat template, and continues texts, not {strange[0]!r}; give such contents"
        )
    return "\n".join(map(str, parts))


def prompt_ids(
    prompt: Sequence[Message | Mapping[str, Any]] | str,
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids that an answer follows: messages in the chat template, or raw text behind the tokenizer's first tokens,
    which are not added again where the text begins with them.

    Decoding, regeneration and training all use these ids. Raises DataError as `render` does.
    """
    if isinstance(prompt, str):
        require_unicode(prompt, "the prompt")
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        first = first_tokens(tokenizer)
        return ids if ids[: len(first)] == first else [*first, *ids]
    text = render(tokenizer, prompt, add_generation_prompt=True, template=template)
    require_unicode(text, "the conversation")
    return tokenizer(text, add_special_tokens=False).input_ids


def require_unicode(text: str, name: str) -> None:
    """Raises DataError for half a surrogate pair: a character cut in two, or a byte that was no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} has half a surrogate pair, {text[error.start]!r}, which is no valid text") from None


def answer_message(ids: list[int], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None) -> Message:
    """An answer, (T,) token ids up to its end token, as the message that a chat continues from.

    Reasoning becomes `reasoning_content` where the template has a place for it; otherwise it stays in the content, as
    templates that cut it out themselves expect.
    """
    given = dict(template or {})
    if tokenizer.chat_template:
        source = template_of(tokenizer, given)
        written = {name: value for name, value in given.items() if name not in ("tools", "documents")}
        whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for form in _answer_forms(tokenizer, source, json.dumps(written, sort_keys=True, default=str)):
            if found := form.fullmatch(cast(str, whole)):
                *reasoning, content = found.groups()
                return Message("assistant", content, more={"reasoning_content": reasoning[0]} if any(reasoning) else {})
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Message("assistant", cast(str, text))


def spoken(
    ids: list[int], prompt: list[int], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None
) -> str:
    """What an answer says without its reasoning: nothing, with a warning, if it ends within that.

    Args:
        ids: (T,), up to its end token.
        prompt: (L,), which may have opened the reasoning already.
    """
    asked, said = (
        cast(str, tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for part in (prompt, ids)
    )
    message = answer_message(ids, tokenizer, template)
    for tag, end in _TAGS.items():
        if message.reasoning or not (asked.rstrip().endswith(tag) or said.lstrip().startswith(tag)):
            continue
        if end not in said:
            warnings.warn(
                f"the answer ends within its reasoning, after {len(ids)} tokens; give a larger max_new_tokens",
                stacklevel=3,
            )
            return ""
        left_in = asked.rstrip().endswith(tag) or message.content.lstrip().startswith(tag)
        if left_in and end in message.content:
            return message.content.partition(end)[2].lstrip()
        # The template may have left it in without its tags, where these are special tokens.
        thought = said.lstrip().removeprefix(tag).partition(end)[0].strip()
        whole = message.content.lstrip().removeprefix(tag).lstrip()
        if whole.startswith(thought):
            return whole.removeprefix(thought).lstrip().removeprefix(end).lstrip()
    return message.content


def thinks(prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the answer to a prompt (L,) may begin with reasoning: the chat template knows its tags, and the prompt
    has not closed them.
    """
    source, asked = str(tokenizer.chat_template), cast(str, tokenizer.decode(prompt, skip_special_tokens=False))
    return any(tag in source for tag in _TAGS) and not asked.rstrip().endswith(THOUGHT_END)


@lru_cache(maxsize=8)
def _answer_forms(tokenizer: PreTrainedTokenizerBase, source: str, template: str) -> list[re.Pattern[str]]:
    """Match answers as the template itself writes them: the reasoning and the content behind it, where it writes
    reasoning, and the content alone behind what it puts before that, such as the name of a channel.
    """
    del source  # part of the cache's key: tokenizers are compared by identity, and their template may be replaced
    question, given, forms = Message("user", "question"), json.loads(template), []
    for more in ({"reasoning_content": "slotreasoning"}, {}):
        messages = [question, Message("assistant", "slotcontent", more=more)]
        try:
            prompt = render(tokenizer, messages[:1], add_generation_prompt=True, template=given)
            whole = render(tokenizer, messages, template=given)
        except DataError:
            continue
        shown = whole[len(prompt) :] if whole.startswith(prompt) else ""
        found = re.fullmatch(f"(.*){'slotreasoning(.*)' if more else ''}slotcontent.*", shown, re.DOTALL)
        *before, last = (part.strip() for part in found.groups()) if found else ("",)
        if last:  # what separates the content from the rest
            known = [rf"\s*{re.escape(part)}\s*(.*?)" for part in before]
            forms.append(re.compile(rf"{''.join(known)}\s*{re.escape(last)}\s*(.*)", re.DOTALL))
    return forms


def template_of(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> str:
    """The source of the chat template that is used with these options. Raises DataError if there is none."""
    try:
        template = tokenizer.get_chat_template(tools=given.get("tools"))
    except (ValueError, NotImplementedError):  # the latter of tokenizers that are not transformers'
        template = None
    if not template:
        raise DataError(
            f"the tokenizer of {name_of(tokenizer)} has no chat template; use an instruction-tuned target, put "
            "a chat_template.jinja into its folder, or give plain text or prompt + completion rows"
        )
    return template


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before raw text (a beginning-of-text token, or several), without what it puts behind."""
    bare, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])


# What transformers reads itself beside the template.
_OWN = signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"tools", "documents"}


@lru_cache(maxsize=32)
def _warn_of_unread(source: str, name: str, given: frozenset[str]) -> None:
    """Says once which options a chat template does not read: a mistyped one would have no effect without a word."""
    if unread := sorted(each for each in given - _OWN if not re.search(rf"\b{re.escape(each)}\b", source)):
        warnings.warn(
            f"the chat template of {name} reads no {', '.join(unread)}, so giving it has no effect", stacklevel=3
        )


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or type(tokenizer).__name__
