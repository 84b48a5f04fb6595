"""Constrained decoding: which tokens may come next so that the answer keeps to a JSON schema or calls a tool."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from tandem.errors import EngineError, InvalidRequestError
from tandem.models.grammar import calls_rules, json_rule, whole_grammar
from tandem.models.prompt import RenderedPrompt
from tandem.models.text import TextModel
from tandem.types import ChatPrompt, GenerationRequest, Tool, ToolChoice

# An unknown `format` is an annotation by the JSON Schema standard; every other keyword left out would be a promise
# that the answer might break.
_HARMLESS_WARNING = "Unknown format"


class Constraint:
    """What may come next in one answer. Used by one thread at a time.

    Args:
        text_model: whose tokens.
        matcher: llguidance's matcher at the answer's beginning.
    """

    __slots__ = ("_eos_ids", "_matcher", "_saw_eos", "_words")

    def __init__(self, text_model: TextModel, matcher: Any) -> None:
        self._matcher = matcher
        self._words = (text_model.vocabulary_size + 31) // 32
        self._eos_ids = text_model.eos_ids
        self._saw_eos = False

    @property
    def is_finished(self) -> bool:
        """The end of the answer was accepted; there is nothing left to constrain."""
        return self._saw_eos

    @property
    def must_end(self) -> bool:
        """The answer is complete: the mask allows nothing but the token that ends it."""
        return self._saw_eos or bool(self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        """The answer would be valid if it ended here."""
        return self._saw_eos or bool(self._matcher.is_accepting())

    def mask(self, out: npt.NDArray[np.uint32]) -> None:
        """Write the allowed tokens into `out`: bit `i % 32` of word `i // 32` stands for token `i`.

        Args:
            out: a contiguous row with at least (vocabulary size + 31) // 32 words; words beyond those become zero.

        Raises:
            InvalidRequestError: the schema is too complicated to go on.
        """
        assert out.dtype == np.uint32
        assert out.flags.c_contiguous
        assert out.size >= self._words
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, self._words * 4)
        if out.size > self._words:
            out[self._words :] = 0
        if self._matcher.is_error():
            raise InvalidRequestError(
                f"The answer's schema became too complicated to enforce: {_reason(self._matcher.get_error())}. "
                "Simplify the schema.",
                param="response_format",
            )

    def allowed(self) -> npt.NDArray[np.intp]:
        """The ids of the allowed tokens, in order."""
        words = np.zeros(self._words, np.uint32)
        self.mask(words)
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))

    def accept(self, token_id: int) -> None:
        """Go on with a token that was chosen among the allowed ones. Tokens after the answer's end are ignored.

        Raises:
            EngineError: it was not allowed; whoever chose it ignored the mask.
        """
        if self._saw_eos:
            return
        if token_id in self._eos_ids and self.may_end:
            self._saw_eos = True
            return
        if not self._matcher.consume_token(token_id):
            reason = _reason(self._matcher.get_error())
            raise EngineError(f"Token {token_id} was sampled although the answer's constraint forbids it: {reason}.")


def constraint_for(text_model: TextModel, prompt: RenderedPrompt, request: GenerationRequest) -> Constraint | None:
    """The constraint that a request asks for, or None.

    `response_format` constrains the answer to JSON; `tool_choice` required or named to tool calls; with both tools to
    choose from and a `response_format`, the answer is one or the other. Reasoning is free.

    Takes milliseconds to seconds, the longer the first time for a model: not for a thread that decodes.

    Raises:
        InvalidRequestError: the schema cannot be enforced; the message says why.
        UnsupportedError: calls in this model's format cannot be forced.
    """
    try:
        return _compile(text_model, prompt, request)
    except RecursionError as error:
        raise InvalidRequestError("The JSON schema is nested too deeply.", param="response_format") from error
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "The JSON schema or a tool's name holds half a surrogate pair, which is no character.",
            param="response_format",
        ) from error


def _compile(text_model: TextModel, prompt: RenderedPrompt, request: GenerationRequest) -> Constraint | None:
    chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
    choice = chat.tool_choice if chat is not None else ToolChoice()
    forced = chat is not None and choice.mode in ("required", "named")
    if request.constraint is None and not forced:
        return None
    rules: list[str] = []
    start = "calls"
    param = "tool_choice"
    if chat is not None and prompt.call_format is not None and (forced or prompt.call_format.style == "json"):
        tools = _choosable(chat.tools, choice)
        rules = calls_rules(
            text_model, prompt.call_format, tools, prompt.parallel_tool_calls and choice.mode != "named"
        )
    if request.constraint is not None and not forced:
        param = "response_format"
        rules.append(f"document: {json_rule(request.constraint)}")
        start = "calls | document" if len(rules) > 1 else "document"
        # The tools' own schemas are hints unless a call is forced; only the document's is checked for keywords.
        _matcher(text_model, f"start: {json_rule(request.constraint)}", param, strict=True)
    matcher = _matcher(text_model, whole_grammar(text_model, prompt, start, rules), param, strict=False)
    return Constraint(text_model, matcher)


def _choosable(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    if choice.mode == "named":
        return [tool for tool in tools if tool.name == choice.name]
    return list(tools)


def _matcher(text_model: TextModel, grammar: str, param: str, *, strict: bool) -> Any:
    from llguidance import LLMatcher

    matcher = LLMatcher(_guidance_tokenizer(text_model), LLMatcher.grammar_from_lark(grammar), log_level=0)
    if matcher.is_error():
        raise InvalidRequestError(f"The JSON schema cannot be enforced: {_reason(matcher.get_error())}.", param=param)
    if strict:
        refused = [text for text in matcher.get_grammar_warnings() if not text.startswith(_HARMLESS_WARNING)]
        if refused:
            raise InvalidRequestError(
                f"The JSON schema cannot be enforced: {'; '.join(refused)}. Leave these keywords out.", param=param
            )
    return matcher


def _reason(error: str) -> str:
    """llguidance's message without our grammar's source lines and the parser's state."""
    error = re.split(r"\n\s*\d+ \||<state>", error)[0]
    error = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", error)
    return " ".join(error.split()).rstrip(".") or "no reason is given"


_tokenizers: WeakKeyDictionary[TextModel, Any] = WeakKeyDictionary()
_tokenizers_lock = threading.Lock()


class _Vocabulary:
    """A vocabulary in the shape that `llguidance.TokenizerWrapper` reads."""

    def __init__(self, text_model: TextModel) -> None:
        self._text_model = text_model
        self.eos_token_id = min(text_model.eos_ids)
        self.bos_token_id = text_model.bos_id
        self.tokens = text_model.table.data
        self.special_token_ids = sorted(text_model.special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._text_model.encode(text.decode() if isinstance(text, bytes) else text)


def _guidance_tokenizer(text_model: TextModel) -> Any:
    """llguidance's view of the vocabulary, built once for each model."""
    from llguidance import LLTokenizer, TokenizerWrapper

    with _tokenizers_lock:
        found = _tokenizers.get(text_model)
        if found is None:
            if not text_model.eos_ids:
                raise InvalidRequestError(
                    "This model names no token that ends an answer, so its answers cannot be constrained.",
                    param="response_format",
                )
            vocabulary = TokenizerWrapper(_Vocabulary(text_model))
            found = LLTokenizer(vocabulary, eos_token=sorted(text_model.eos_ids), slices=LLTokenizer.json_slices())
            _tokenizers[text_model] = found
        return found
