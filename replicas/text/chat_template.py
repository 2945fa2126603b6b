"""A model's chat template: tries once which contents it takes, and keeps a client's text from becoming control tokens.

Owns:      which template is used where a model names several; in which shape each role's content is given to it, and
           whether it takes system messages; what it writes between the last message and the answer. Which tokens are
           control tokens, and how a chat is encoded that holds the text of one.
Never:     reads from the template's words what a trial can tell.
Invariant: a text that a user writes is in the prompt: a template that shows it in no shape is refused at the start.
           A control token in the ids was written by the chat template. A chat of which no string holds the text of a
           control token, whole or as a part at an end, is encoded as one text, without `ControlTokens`.
Thread:    any; nothing changes after the constructors.

    client's strings -- hide --> chat template --> rendered -- name --> show --> ids with names --> ids

Before the template runs, the text of a control token in a client's string is replaced by a mark. The control tokens
that the rendered text then holds are the template's: they get names that no client knows. Then the marks become text
again, and the whole is encoded by a tokenizer of the same model, normalizer and pre-tokenizer that knows the control
tokens by their names only. So clean text has the same ids with and without names.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jinja2
import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from replicas.errors import InvalidConfig, InvalidRequest
from replicas.types import TokenIds

Messages = Sequence[Mapping[str, Any]]
Shape = Literal["text", "parts", "either"]  # a string, a list of text parts, or as the client has it
_MARK = "zq4017"
_SHOWN_AS_DATA = re.compile(rf"""text['"]\s*:\s*['"]{_MARK}""")  # a list that was written as what it is
_CALL_ID = "a1b2c3d4e"  # as Mistral's templates want them
# Code points that Unicode sets aside for a program's own use. A client's own do no harm: a mark never becomes a token.
_OPEN, _CLOSE, _EDGE = "\ufdd0", "\ufdd1", "\ufdd2"
_HIDDEN = re.compile(f"{_OPEN}([0-9]{{1,9}}){_CLOSE}")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Render = Callable[[Messages], str]


class ChatTemplate:
    """The chat templates of one tokenizer.

    Raises: InvalidConfig from the constructor for one that cannot be read, that leaves out what a user writes, or for
            several of which none is the default.
    """

    def __init__(self, hf: Any, *, path: str) -> None:
        self._hf = hf
        given = hf.chat_template
        self.sources: Mapping[str, str] = given if isinstance(given, dict) else {"default": given} if given else {}
        self._shapes: dict[str, Shape] = {}  # by role
        self._leaves_out_system = False
        self.before_answers: tuple[str, ...] = ()  # what may stand between the last message and the answer
        if self.sources:
            self._learn(path)

    def source(self, *, with_tools: bool = False) -> str | None:
        """Return the Jinja source of the template that a chat, or one with tools, is rendered in; None without one."""
        return (self.sources.get("tool_use") if with_tools else None) or self.sources.get("default")

    @property
    def takes_system(self) -> bool:
        """Whether it shows a system message."""
        return "system" in self._shapes

    def names(self, role: str) -> bool:
        """Whether a template treats ``role`` as one of its own."""
        return any(f"'{role}'" in source or f'"{role}"' in source for source in self.sources.values())

    def render(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """Render messages that are `shaped`. Raises: InvalidRequest if the template fails on them."""
        try:
            text = self._hf.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(options or {}),
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        return str(text)

    def shaped(self, messages: Messages) -> list[dict[str, Any]]:
        """Return ``messages`` in roles that the template has, each content in the shape that it takes.

        Raises: InvalidRequest for a malformed message, and for one that the template would leave out.
        """
        return [self._shaped(i, message) for i, message in enumerate(messages)]

    def _shaped(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        at = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{at}: must be an object with a role", param="messages")
        plain = dict(message)
        role, content = message["role"], message.get("content")
        if role not in ROLES and not self.names(role):
            known = ", ".join(ROLES)
            raise InvalidRequest(f"{at}.role: {role[:64]!r} is not one of {known}", param="messages")
        if role == "developer" and not self.names(role):
            role = plain["role"] = "system"  # what it was called before
        if role == "system" and self._leaves_out_system:
            raise InvalidRequest(f"{at}: this model's chat template leaves out system messages", param="messages")
        if content is None:
            refusal = message.get("refusal")
            content = refusal if isinstance(refusal, str) else ""  # tool calls come without content
        if isinstance(content, list):
            texts = [text for part in content if (text := _part_text(part)) is not None]
            if len(texts) < len(content):
                raise InvalidRequest(f"{at}.content: only text parts are supported", param="messages")
        elif isinstance(content, str):
            texts = [content]
        else:
            raise InvalidRequest(f"{at}.content: must be a string or a list of text parts", param="messages")
        shape = self._shapes.get(role, self._shapes.get("user", "text"))
        as_parts = shape == "parts" or (shape == "either" and isinstance(content, list))
        plain["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
        return plain

    def _learn(self, path: str) -> None:
        if "default" not in self.sources:
            raise InvalidConfig(f"{path}: has chat templates named {', '.join(self.sources)}, and none named default")
        user = {"role": "user", "content": "u"}
        if self._try("user", [], [], path) is False:
            raise InvalidConfig(f"{path}: its chat template leaves out what a user writes, as a text and as text parts")
        self._leaves_out_system = self._try("system", [], [user], path) is False
        self._try("assistant", [user], [user], path)
        behind = [self._behind([{"role": "user", "content": _MARK}])]
        for arguments in ({"a": 1}, '{"a": 1}'):
            function = {"name": "f", "arguments": arguments}
            calls = [{"id": _CALL_ID, "type": "function", "function": function}]
            before: Messages = [user, {"role": "assistant", "content": "", "tool_calls": calls}]
            tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
            if self._try("tool", before, [], path, tools=[tool]):
                behind.append(self._behind([*before, self._result(_MARK)], tools=[tool]))
                break
        self.before_answers = tuple(each for each in behind if each.strip())

    def _try(
        self, role: str, before: Messages, after: Messages, path: str, tools: list[dict[str, Any]] | None = None
    ) -> bool | None:
        """Try the shapes of ``role``'s content, and note what it takes. Returns: whether one shows it; None where the
        template refuses all."""
        found: list[bool | None] = []
        for content in (_MARK, [{"type": "text", "text": _MARK}]):
            tried = {**self._result(content), "role": role} if role == "tool" else {"role": role, "content": content}
            try:
                chat = [*self.shaped(before), tried, *self.shaped(after)]
                text = self.render(chat, tools=tools)
            except InvalidRequest as error:
                if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                    where = f"{error.__cause__} (line {error.__cause__.lineno})"
                    raise InvalidConfig(f"{path}: its chat template cannot be read: {where}") from error
                found.append(None)
            else:
                found.append(_MARK in text and not _SHOWN_AS_DATA.search(text))
        as_text, as_parts = found
        if as_text or as_parts:
            self._shapes[role] = "either" if as_text and as_parts else "text" if as_text else "parts"
            return True
        return None if as_text is None and as_parts is None else False

    def _behind(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> str:
        try:
            text = self.render(self.shaped(messages), tools=tools, add_generation_prompt=True)
        except InvalidRequest:
            return ""
        return text.rpartition(_MARK)[2]

    @staticmethod
    def _result(content: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": _CALL_ID, "name": "f", "content": content}


def _part_text(part: Any) -> str | None:
    """Return the text of one part of a content; None if it is no text."""
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else None
    text = part.get("refusal" if part.get("type") == "refusal" else "text")
    return text if isinstance(text, str) else None


def encoded(rust: RustTokenizer, text: str, *, add_special_tokens: bool) -> TokenIds:
    """Encode ``text`` to ids [L], as a batch of one, since a batch releases the GIL."""
    [found] = rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return np.asarray(found.ids, dtype=np.int32)


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, and those that frame the turns of a chat."""

    def __init__(self, rust: RustTokenizer, *, render: Render | None) -> None:
        """``render``: the text of messages in the chat template; None without a template."""
        added: dict[int, AddedToken] = rust.get_added_tokens_decoder()
        texts = {i: token.content for i, token in added.items() if token.special and token.content}
        if render is not None:
            texts |= _frame({i: token.content for i, token in added.items() if i not in texts}, render)
        self.ids = frozenset(texts)
        self._texts = texts
        self._ids = {text: i for i, text in texts.items()}
        self._whole = _any_of(texts.values())
        self._heads = {text[:k] for text in texts.values() for k in range(1, len(text))}
        self._tails = {text[k:] for text in texts.values() for k in range(1, len(text))}
        self._near_tails = {tail[:2] for tail in self._tails}  # two look-ups tell most texts apart
        self._near_heads = {head[-2:] for head in self._heads}
        self._longest = max(map(len, texts.values()), default=0)
        normalized = rust.normalizer is not None and any(added[i].normalized for i in texts)
        self._normalize: Callable[[str], str] | None = rust.normalizer.normalize_str if normalized else None
        secret = secrets.token_hex(8)
        self._names = {text: f"{_OPEN}{secret}-{i}{_CLOSE}" for text, i in self._ids.items()}
        self._named = _renamed(rust, [added[i] for i in sorted(added)], self._names)
        self._name_ids = frozenset(self._named.token_to_id(name) for name in self._names.values())
        self._known_ids = self._ids_without_names(added)

    def hide(self, value: Any, *, inside: bool = False) -> Any:
        """Hide control tokens in the strings of ``value`` (JSON), so that none becomes one, alone or with neighbours.

        It equals ``value`` if nothing had to be hidden.

        Args: inside: also hide a string that a control token has in its middle. For contents; some templates put a
                      role between the halves of a token, and mean it.
        """
        if isinstance(value, str):
            return self._hide(value, inside=inside)
        if isinstance(value, Mapping):
            return {
                self._hide_whole(key): self.hide(
                    each, inside=key in ("content", "text") or (key == "role" and each not in ROLES)
                )
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(each, inside=inside) for each in value]
        return value

    def is_one(self, text: str) -> bool:
        """Whether ``text`` is a control token, and nothing more."""
        return text in self._ids

    def before(self, rendered: str, at: int) -> int:
        """Return where the control token begins inside which ``at`` is, or ``at``."""
        near = self._whole.finditer(rendered, max(0, at - self._longest), at + self._longest)
        return next((found.start() for found in near if found.start() < at < found.end()), at)

    def show(self, text: str) -> str:
        """Undo `hide` in ``text``."""
        text = _HIDDEN.sub(lambda found: self._texts.get(int(found[1]), found[0]), text)
        return text.replace(_EDGE, "")

    def encode(self, rendered: str) -> TokenIds:
        """Encode a chat that was rendered from hidden strings to ids [L].

        Raises: InvalidRequest when the tokenizer's model makes a control token of plain text.
        """
        named = self._whole.sub(lambda found: self._names[found[0]], rendered)
        ids = encoded(self._named, self.show(named), add_special_tokens=False)
        known = self._known_ids[ids]
        for i, by_name in zip(known.tolist(), ids.tolist(), strict=True):
            if i in self.ids and by_name not in self._name_ids:
                raise InvalidRequest(
                    f"messages: this model's tokenizer cannot write {self._texts[i]!r} as text; leave it out",
                    param="messages",
                )
        return known

    def _hide_whole(self, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        return self._whole.sub(lambda found: f"{_OPEN}{self._ids[found[0]]}{_CLOSE}", text)

    def _hide(self, text: str, *, inside: bool) -> str:
        hidden: str = self._hide_whole(text)
        core = hidden.strip()  # templates trim
        if not core:
            return text
        if (
            self._begins_in_token(core)
            or self._ends_in_token(core)
            or (inside and len(core) < self._longest and any(core in token for token in self._ids))
            or (hidden == text and self._normalize is not None and self._whole.search(self._normalize(text)))
        ):
            before, _, after = hidden.partition(core)
            return f"{before}{_EDGE}{core}{_EDGE}{after}"
        return hidden

    def _begins_in_token(self, core: str) -> bool:
        near = core[:1] in self._near_tails or core[:2] in self._near_tails
        return near and any(core[:k] in self._tails for k in range(1, self._longest))

    def _ends_in_token(self, core: str) -> bool:
        near = core[-1:] in self._near_heads or core[-2:] in self._near_heads
        return near and any(core[-k:] in self._heads for k in range(1, self._longest))

    def _ids_without_names(self, added: Mapping[int, AddedToken]) -> TokenIds:
        """[ids of the renaming tokenizer] the id that each of them has in the tokenizer itself."""
        of_text = {self._names.get(token.content, token.content): i for i, token in added.items()}
        known = np.arange(max(self._named.get_vocab(with_added_tokens=True).values(), default=-1) + 1, dtype=np.int32)
        for i, token in self._named.get_added_tokens_decoder().items():
            known[i] = of_text[token.content]
        return known


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that matches the longest of ``texts`` at a place, as tokenizers do."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


def _renamed(rust: RustTokenizer, added: Sequence[AddedToken], names: Mapping[str, str]) -> RustTokenizer:
    """Make a tokenizer that differs from ``rust`` in the names of some added tokens; both share the model."""
    renamed = RustTokenizer(rust.model)
    if rust.normalizer is not None:
        renamed.normalizer = rust.normalizer
    if rust.pre_tokenizer is not None:
        renamed.pre_tokenizer = rust.pre_tokenizer
    tokens = [
        AddedToken(
            names.get(token.content, token.content),
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        for token in added
    ]
    renamed.add_tokens(tokens)
    return renamed


def _frame(others: Mapping[int, str], render: Render) -> dict[int, str]:
    """Select those of ``others`` (added tokens, not special) that the template writes around the turns of a chat.

    DeepSeek's ``<｜User｜>`` is one. Not among them: white space, which is text, and what the template looks for in
    contents (``</think>`` of an earlier answer), which clients must be able to send.
    """

    def chat_of(content: str) -> str:
        return render([{"role": role, "content": content} for role in ("user", "assistant", "user")])

    try:
        plain = chat_of("a")
        written = {i: text for i, text in others.items() if text.strip() and text in plain}
        return {
            i: text for i, text in written.items() if chat_of(f"a{text}b") == chat_of(f"a{_EDGE}b").replace(_EDGE, text)
        }
    except InvalidRequest:  # the template does not take such a chat
        return {}
