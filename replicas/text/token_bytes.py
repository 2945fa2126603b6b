"""Which bytes a token stands for, read off the decoder of a ``tokenizers`` pipeline.

Owns:  the two families of vocabularies: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), where each character of a token
       is one byte, and SentencePiece (Llama 2, Mistral, Gemma), where U+2581 is a space and ``<0xE2>`` a byte.
Never: loads anything; guesses (an unknown decoder is refused).
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from replicas.errors import InvalidConfig

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[int, str]:
    """Code point of a token's character -> the byte it stands for, as a Latin-1 character.

    Source: Radford et al. 2019 (GPT-2), byte-level BPE: printable Latin-1 stands for itself, the other bytes follow
    from U+0100 on in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {b: chr(b) for b in printable} | {0x100 + n: chr(b) for n, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """How one vocabulary spells bytes."""

    kind: Literal["byte_level", "sentencepiece", "words"]
    replacement: str = ""  # sentencepiece: the character that stands for a space
    byte_fallback: bool = False
    strips_leading_space: bool = False  # the text begins without the first token's space

    @staticmethod
    def of(rust: Any, *, path: str) -> "PieceDecoder":
        """The decoder of ``rust`` (a ``tokenizers.Tokenizer``). Raises InvalidConfig for one that is not known."""
        if rust.decoder is None:
            return PieceDecoder("words", strips_leading_space=True)
        state = json.loads(rust.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        by_type = {step["type"]: step for step in steps}
        if "ByteLevel" in by_type:
            return PieceDecoder("byte_level")
        if "Metaspace" in by_type:
            metaspace = by_type["Metaspace"]
            strips = metaspace.get("prepend_scheme", "always") != "never"
            return PieceDecoder("sentencepiece", metaspace["replacement"], strips_leading_space=strips)
        if "Replace" in by_type and by_type.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            return PieceDecoder(
                "sentencepiece",
                by_type["Replace"]["pattern"]["String"],
                byte_fallback="ByteFallback" in by_type,
                strips_leading_space=bool(by_type.get("Strip", {}).get("start")),
            )
        raise InvalidConfig(
            f"{path}: tokenizer decoder {sorted(by_type)} is not known; known: ByteLevel, Metaspace, "
            "and Replace with ByteFallback, Fuse, Strip"
        )

    def ordinary(self, content: str) -> bytes:
        """Bytes of a token of the model's vocabulary."""
        if self.kind == "byte_level":
            return content.translate(_ALPHABET).encode("latin-1", errors="replace")
        if self.kind == "words":
            return b" " + content.encode()
        byte = _BYTE_TOKEN.fullmatch(content) if self.byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else content.replace(self.replacement, " ").encode()

    def added(self, content: str) -> bytes:
        """Bytes of an added token, whose characters need not belong to the byte alphabet: then they are themselves."""
        if self.kind == "byte_level" and not all(ord(char) in _ALPHABET for char in content):
            return content.encode()
        return self.ordinary(content)
