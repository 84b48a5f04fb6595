"""A model's text side: tokenizer, special tokens, chat template and output conventions. No weights, no arrays."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import CorruptModelError, ModelError
from tandem.models.call_formats import CallFormat, find_call_format
from tandem.models.token_table import TokenTable, build_token_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tandem.models.cards import ModelCard


# A variable of either name in a statement of the template.
_THINKING_SWITCH = re.compile(r"\{%[^%]*\b(enable_thinking|(?<![.'\"])thinking)\b(?!['\"])")


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The markers around a model's reasoning."""

    start: str
    end: str


class TextModel:
    """Tokens to text and back, and what the model's conventions are. Safe to share between threads: nothing in it
    changes after loading.

    Attributes:
        tokenizer: mlx-lm's `TokenizerWrapper`.
        vocabulary_size: width of the model's logits; at least the number of tokens.
        table: every token's bytes and text.
        eos_ids: tokens that end an answer.
        special_ids: control tokens: those, and all that the tokenizer marks as special.
        thinking: the reasoning markers, if the model reasons.
        template: source of the chat template, or None; a template written in Python has none either.
        has_chat_template: chat prompts can be rendered.
        call_format: how the model's own template asks for tool calls; None when it does not, or in a form that we
            cannot read.
        output_format: the entry of `output.formats.FORMATS` that reads its answers.
        accepts_system: the chat template has a place for a system message.
        hidden_markers: markup around the content that nobody should see.
    """

    hidden_markers: tuple[str, ...] = ()

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocabulary_size: int | None = None,
        eos_ids: Iterable[int] | None = None,
        card: ModelCard | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        # The wrapper adds defaults of its own to templates and decoding; what we pass must be what happens.
        self._plain = tokenizer._tokenizer
        self.card = card
        self.vocabulary_size = max(vocabulary_size or 0, len(self._plain))
        self.table: TokenTable = build_token_table(self._plain, self.vocabulary_size)
        self.eos_ids = frozenset(tokenizer.eos_token_ids if eos_ids is None else eos_ids)
        self.bos_id: int | None = self._plain.bos_token_id
        self.special_ids = self.eos_ids | _special_ids(self._plain)
        self.thinking = ThinkingTags(tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None
        self.has_chat_template = bool(tokenizer.has_chat_template)
        self.renders_in_python = getattr(tokenizer, "_chat_template", None) is not None
        self.template = _template_source(self._plain.chat_template)
        self.call_format: CallFormat | None = find_call_format(tokenizer, self.template)
        self.output_format = "tags"
        self.hidden_markers = tuple(tokenizer.structural_markers)
        self.accepts_system = self.has_chat_template and self._try_system_message()

    @classmethod
    def load(cls, path: Path, card: ModelCard | None = None) -> TextModel:
        """Read the tokenizer and its configuration from a model folder in Hugging Face layout.

        Raises:
            CorruptModelError: a file is missing or is not what its name says.
            ModelError: the tokenizer needs code from its repository, which is not run without the card's consent.
        """
        # Imported late: transformers and mlx-lm take more than a second.
        from mlx_lm.tokenizer_utils import load as load_tokenizer

        config = _read_json(path / "config.json")
        generation = _read_json(path / "generation_config.json")
        text_config = config.get("text_config") or config
        eos = generation.get("eos_token_id") or config.get("eos_token_id") or text_config.get("eos_token_id")
        trusted = card is not None and card.trust_remote_code
        try:
            tokenizer = load_tokenizer(path, {"trust_remote_code": trusted}, eos_token_ids=eos)
        except (OSError, ValueError, KeyError, ImportError) as error:
            if "trust_remote_code" in str(error):
                raise ModelError(
                    f"The tokenizer in {path} needs Python code from its repository. If you trust that code, set "
                    "trust_remote_code = true in the model's card."
                ) from error
            raise CorruptModelError(
                f"The tokenizer in {path} cannot be read: {error}. Pull or import the model again."
            ) from error
        size = text_config.get("vocab_size")
        return cls(tokenizer, vocabulary_size=size if isinstance(size, int) else None, card=card)

    @property
    def token_count(self) -> int:
        """Tokens that the tokenizer knows; ids from here to `vocabulary_size` are padding."""
        return len(self._plain)

    @property
    def knows_tools(self) -> bool:
        """The model's own template describes tools, in a format whose calls we can read."""
        if self.call_format is None:
            return False
        return self.renders_in_python or (self.template is not None and "tools" in self.template)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """`text`, and of `chat`, `tools`, `thinking`, `thinking_toggle` those that hold."""
        found = ["text"]
        if self.has_chat_template:
            found += ["chat", "tools"]
        if self.thinking is not None:
            found.append("thinking")
            if _THINKING_SWITCH.search(self.template or ""):
                found.append("thinking_toggle")
        return tuple(found)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the tokenizer usually adds, such as a leading BOS."""
        ids: list[int] = self._plain.encode(_only_characters(text), add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The exact text of `token_ids`, special tokens included."""
        text: str = self._plain.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; none for padding ids."""
        return self.table.data[token_id] if 0 <= token_id < len(self.table.data) else b""

    def token_text(self, token_id: int) -> str:
        """The token as text, with U+FFFD for bytes that are only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token that reads exactly `token`, if `token` is encoded as one."""
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    def _try_system_message(self) -> bool:
        probe = "system message"
        try:
            text = self.apply_template([{"role": "system", "content": probe}, {"role": "user", "content": "user"}])
        except Exception:  # noqa: BLE001 - a template refuses in whatever way it likes
            return False
        return probe in text

    def apply_template(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The chat template's text. Raises whatever the template raises."""
        renderer = self.tokenizer if self.renders_in_python else self._plain
        text: str = renderer.apply_chat_template(messages, tokenize=False, **variables)
        return text


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added.items() if token.special}


def _only_characters(text: str) -> str:
    """Lone surrogates, which JSON can carry and no tokenizer can read, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _template_source(template: Any) -> str | None:
    if isinstance(template, dict):
        return "\n".join(str(source) for source in template.values())
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CorruptModelError(f"{path} cannot be read: {error}. Pull or import the model again.") from error
    return content if isinstance(content, dict) else {}
