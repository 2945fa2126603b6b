"""Keeps what a client writes from becoming a control token of a chat.

Owns:      which tokens are control tokens, and how a chat is encoded that holds the text of one.
Invariant: a control token in the ids was written by the chat template. A chat of which no string holds the text of a
           control token, whole or as a part at an end, does not come here: it is encoded as one text.
Thread:    any; nothing changes after the constructor.

    client's strings -- hide --> chat template --> rendered -- name --> show --> ids with names --> ids

Before the template runs, the text of a control token in a client's string is replaced by a mark. The control tokens
that the rendered text then holds are the template's: they get names that no client knows. Then the marks become text
again, and the whole is encoded by a tokenizer of the same model, normalizer and pre-tokenizer that knows the control
tokens by their names only. So clean text has the same ids with and without names.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from replicas.errors import InvalidRequest
from replicas.types import TokenIds

# Code points that Unicode sets aside for a program's own use. A client's own do no harm: a mark never becomes a token.
_OPEN, _CLOSE, _EDGE = "\ufdd0", "\ufdd1", "\ufdd2"
_HIDDEN = re.compile(f"{_OPEN}([0-9]{{1,9}}){_CLOSE}")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Render = Callable[[Sequence[Mapping[str, Any]]], str]


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
                self._hide_whole(key): self.hide(each, inside=key == "content" or (key == "role" and each not in ROLES))
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
