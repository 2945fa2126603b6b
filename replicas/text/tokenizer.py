"""Text to token ids and back: encode, chat template, and the exact bytes of every token.

Owns:      the model folder's tokenizer and the table of bytes per token id.
Never:     imports torch (``AutoTokenizer`` does, so it is asked only where the folder names a class of its own);
           sees a request's state (replicas/text/detokenizer.py holds that).
Invariant: ``decode(ids)`` is the UTF-8 text of the tokens' bytes in order, malformed parts as U+FFFD. That is what
           Transformers gives for byte-level BPE, and for byte-fallback vocabularies (SentencePiece) where the text is
           well formed; in a malformed run of byte tokens it discards good characters too, which no stream could take
           back. ``clean_up_tokenization_spaces`` is not applied, for the same reason.
Thread:    any; nothing changes after the constructor.
"""

import functools
import inspect
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from replicas.errors import InvalidConfig, InvalidRequest
from replicas.hf_config import read_generation_config
from replicas.text.chat_template import ChatTemplate, ControlTokens, encoded
from replicas.text.detokenizer import PieceDecoder
from replicas.types import TokenIds

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # tokenizer.json says everything
_NO_LIMIT = 10**9  # Transformers writes 1e30 for "not known"
_SECRET = secrets.token_hex(8)  # clients cannot know a mark
MARK = f"mark-{_SECRET}-{{}}."  # with a number: a text that `Tokenizer.chat` replaces, alone or as such an object
_MARKS = re.compile(rf'mark-{_SECRET}-[0-9]+\.|\{{"mark-{_SECRET}-[0-9]+\.": ""\}}')


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the text that is encoded."""

    text: str
    hides: bool  # it has marks for what is text though it spells a control token (chat_template.py)


class Tokenizer:
    """The tokenizer of one model folder (or hub id).

    Raises: InvalidConfig from the constructor when there is none, or its decoder is of an unknown kind.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._hf = _load(path)
        self._rust = self._hf.backend_tokenizer
        self._rust.no_padding()
        self._rust.no_truncation()
        decoder = PieceDecoder.of(self._rust, path=path)
        vocab: dict[str, int] = self._rust.get_vocab(with_added_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        pieces = [b""] * (max(vocab.values(), default=-1) + 1)
        for content, token_id in vocab.items():
            pieces[token_id] = decoder.added(content) if token_id in added else decoder.ordinary(content)
        self._token_len = _token_len(pieces, decoder, self._rust.normalizer)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces = pieces
        self._visible = [b"" if i in self.special_ids else piece for i, piece in enumerate(pieces)]
        self.strips_leading_space = decoder.strips_leading_space
        self.eos_ids = _eos_ids(path, self._hf.eos_token_id)
        limit = self._hf.model_max_length
        self.context_len: int | None = int(limit) if limit and limit < _NO_LIMIT else None
        self._reserved = frozenset(inspect.signature(self._hf.apply_chat_template).parameters) - {"documents", "kwargs"}
        self.template = ChatTemplate(self._hf, path=path)
        render = (
            (lambda messages: self.template.render(self.template.shaped(messages))) if self.template.sources else None
        )
        self._control = ControlTokens(self._rust, render=render)

    @property
    def vocab_size(self) -> int:
        """Largest token id that has a text, plus one; the model's logits may be padded to more."""
        return len(self._pieces)

    @functools.cached_property
    def digest(self) -> str:
        """The XXH3-128 of what every id stands for: equal exactly where ids mean the same text."""
        special = json.dumps(sorted(self.special_ids))
        return xxhash.xxh3_128_hexdigest((special + "".join(f"|{piece.hex()}" for piece in self._pieces)).encode())

    @functools.cached_property
    def template_digest(self) -> str:
        """The XXH3-128 of the chat template, or of all where it names several."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self._hf.chat_template, sort_keys=True).encode())

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids that only the template may write in a chat."""
        return self._control.ids

    def named_token(self, name: Literal["bos", "eos", "pad", "unk"]) -> str | None:
        """The token that the tokenizer's configuration gives this name; None where it gives none."""
        token = getattr(self._hf, f"{name}_token")
        return None if token is None else str(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Encode ``text`` to ids [L]. Raises InvalidRequest for text that has no UTF-8 form (a lone surrogate)."""
        _check_unicode(text)
        return encoded(self._rust, text, add_special_tokens=add_special_tokens)

    def least_tokens(self, num_characters: int) -> int:
        """Return how many tokens a text of ``num_characters`` has at least; 0 if a token may stand for any number."""
        return 0 if self._token_len is None else num_characters // self._token_len

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> TokenIds:
        """Encode a conversation in the model's chat template to ids [L]. Takes and raises what `render_chat` does."""
        return self._encode_rendered(self.render_chat(messages, **options))

    def num_before(self, prompt: Rendered, end: int, *, num_tokens: int) -> int:
        """Count the tokens of the first ``end`` characters of ``prompt``, which has ``num_tokens``: exact behind a
        control token (that takes no white space along), else within a token or two: the shorter part is encoded alone.
        """
        end = self._control.before(prompt.text, end)
        head, tail = prompt.text[:end], prompt.text[end:]
        part = head if len(head) < len(tail) else tail
        length = len(self._encode_rendered(Rendered(part, prompt.hides))) if part else 0
        return length if part is head else max(0, num_tokens - length)

    def _encode_rendered(self, prompt: Rendered) -> TokenIds:
        if not prompt.hides:
            return self.encode(prompt.text, add_special_tokens=False)  # the template writes them
        _check_unicode(prompt.text)
        return self._control.encode(prompt.text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        check: Callable[[str], None] | None = None,
        marks: Mapping[str, str] | None = None,
        **template_kwargs: Any,
    ) -> Rendered:
        """Write a conversation in the model's chat template.

        What stands in ``messages``, ``tools`` and ``template_kwargs`` is text and never a control token, whatever it
        spells (chat_template.py). A content has the shape that the template wants.

        Args:   continue_final_message: leave the last message open, for the model to go on (no generation prompt then).
                check: called with the text, to raise where it is not worth encoding.
                marks: what stands in the rendered text for each `MARK`, or JSON object with that one key: a control
                       token, or a client's text as it is, where the template would write it anew.
                template_kwargs: variables for the template (``chat_template_kwargs`` of the wire).
        Raises: InvalidRequest when there is no template, a message is malformed, or the template refuses; what
                ``check`` raises.
        """
        text, hides = self._rendered(messages, tools, add_generation_prompt, continue_final_message, template_kwargs)
        if marks:
            hide, is_one = self._control.hide, self._control.is_one
            shown = {mark: meant if is_one(meant) else hide(meant) for mark, meant in marks.items()}
            hides = hides or shown != marks
            text = _MARKS.sub(lambda found: shown.get(found[0], found[0]), text)
        if check is not None:
            check(text)
        return Rendered(text, hides)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return the text that ``chat`` encodes. Raises as ``chat``."""
        text, hides = self._rendered(messages, tools, add_generation_prompt, continue_final_message, template_kwargs)
        return self._control.show(text) if hides else text

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> tuple[str, bool]:
        """Render a conversation. Returns: its text, and whether some of it is hidden."""
        if not self.template.sources:
            raise InvalidRequest(f"{self.path} has no chat template; use /v1/completions, or add chat_template.jinja")
        reserved = sorted(self._reserved & template_kwargs.keys())
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs may not set {reserved}", param="chat_template_kwargs")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                param="continue_final_message",
            )
        if not messages:
            raise InvalidRequest("messages: is empty; give at least one message", param="messages")
        given: dict[str, Any] = {
            "messages": self.template.shaped(messages),
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "options": template_kwargs,
        }
        try:
            hidden = self._control.hide(given)
            hides = hidden != given
        except RecursionError as error:
            raise InvalidRequest("messages: nested too deeply", param="messages") from error
        render = functools.partial(
            self.template.render,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if not hides:
            return render(**given), False
        try:
            return render(**hidden), True
        except InvalidRequest as error:
            raise InvalidRequest(self._control.show(str(error)), param=error.param) from error

    def decode(self, ids: Sequence[int] | TokenIds, skip_special_tokens: bool = True) -> str:
        """Decode ``ids``; ids without a text (padding of the vocabulary) give none."""
        pieces, size = self.pieces(skip_special_tokens), self.vocab_size
        text = b"".join([pieces[i] for i in ids if 0 <= i < size]).decode(errors="replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def pieces(self, skip_special_tokens: bool) -> Sequence[bytes]:
        """Return the bytes that each token adds to the text: [vocab_size]; do not change them."""
        return self._visible if skip_special_tokens else self._pieces

    def serialized(self) -> str:
        """Return the tokenizer in the form of ``tokenizer.json``."""
        return str(self._rust.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not; may be a part of a character. Empty for an id without text."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def id_of(self, text: str) -> int:
        """Return the id of a token by its text, as the vocabulary spells it. Raises: KeyError."""
        token_id = self._rust.token_to_id(text)
        if token_id is None:
            raise KeyError(text)
        return int(token_id)

    def token_text(self, token_id: int) -> str:
        """Decode ``token_bytes``; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")


def _token_len(pieces: Sequence[bytes], decoder: PieceDecoder, normalizer: Any) -> int | None:
    """Characters that one token stands for at most; None: any number, as of an unknown word, or of what a normalizer
    leaves out."""
    if decoder.kind == "words" or (decoder.kind == "sentencepiece" and not decoder.byte_fallback):
        return None
    longest = max(map(len, pieces), default=1)
    state: Any = {} if normalizer is None else json.loads(normalizer.__getstate__())
    for step in state.get("normalizers", [state] if state else []):
        kind, pattern = step["type"], step.get("pattern", {}).get("String")
        if kind in ("NFC", "NFKC"):
            longest *= 4  # the longest composition: a letter and three marks
        elif kind == "Replace" and pattern is not None and len(pattern) <= len(step["content"]):
            pass
        elif kind not in ("Prepend", "NFD", "NFKD"):
            return None
    return longest


def _load(path: str) -> Any:
    """The fast tokenizer at ``path``."""
    folder = Path(path)
    try:
        if (folder / "tokenizer.json").is_file() and _declared_class(folder) in _PLAIN_CLASSES:
            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer  # imports torch: 1.5 s more, and 200 MB

        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InvalidConfig(f"no tokenizer can be loaded from {path!r}: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InvalidConfig(
            f"{path}: its tokenizer {type(tokenizer).__name__} is not a fast one; a tokenizer.json is needed"
        )
    return tokenizer


def _declared_class(folder: Path) -> str | None:
    config = folder / "tokenizer_config.json"
    return json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else None


def _eos_ids(path: str, tokenizer_eos: int | None) -> frozenset[int]:
    """Ids that end a text: the tokenizer's and generation_config.json's, else config.json's."""
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        eos = None if file is None else read_generation_config(Path(file)).get("eos_token_id")
        if eos is not None:
            return frozenset(found | (set(eos) if isinstance(eos, list) else {eos}))
    return frozenset(found)


def _check_unicode(text: str) -> None:
    """Raise InvalidRequest for text that has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}; send well-formed UTF-8"
        ) from error
