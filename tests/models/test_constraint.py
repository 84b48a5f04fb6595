"""Answers sampled evenly among the allowed tokens: whatever a model prefers, the result keeps the promise."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from text_models import CHATML, byte_level_model

from tandem.errors import EngineError, InvalidRequestError, UnsupportedError
from tandem.models import constraint as constraint_module
from tandem.models.chat import prepare
from tandem.models.constraint import Constraint, constraint_for
from tandem.models.output import OutputProcessor
from tandem.models.store import LocalModel
from tandem.models.text import TextModel
from tandem.types import (
    ChatPrompt,
    GenerationRequest,
    JsonConstraint,
    Message,
    Prompt,
    TextDelta,
    TextPrompt,
    Tool,
    ToolCallDelta,
    ToolChoice,
)

USER = (Message("user", "Hi"),)
PLAIN = TextPrompt("Hi")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "label": {"type": "string", "maxLength": 6}},
    "required": ["x"],
    "additionalProperties": False,
}


def wants(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


SWITCH = {"properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOLS = (Tool("plot", "", POINT), Tool("switch", "", SWITCH))


@pytest.fixture(scope="module")
def smollm2_text(smollm2: LocalModel) -> TextModel:
    return TextModel.load(smollm2.path, smollm2.card)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    template = CHATML + "{% if opens %}<think>\n{% endif %}"
    return byte_level_model(tmp_path_factory.mktemp("thinker"), tokens=["<think>", "</think>"], template=template)


def constrained(model: TextModel, prompt: Prompt, schema: dict[str, Any] | None = None) -> Constraint:
    request = GenerationRequest(prompt, constraint=JsonConstraint(schema) if schema is not None else None)
    constraint = constraint_for(model, prepare(model, prompt), request)
    assert constraint is not None
    return constraint


def sample(model: TextModel, constraint: Constraint, seed: int, most: int = 3000) -> list[int]:
    """Tokens chosen evenly among the allowed ones until one of them ends the answer."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    for _ in range(most):
        token = int(random.choice(constraint.allowed()))
        constraint.accept(token)
        if constraint.is_finished:
            assert token in model.eos_ids
            return tokens
        tokens.append(token)
    pytest.fail(f"no end after {most} tokens: {model.decode(tokens)[:200]!r}")


def follow(model: TextModel, constraint: Constraint, text: str) -> bool:
    """Whether the constraint lets this text through; it is advanced as far as it does."""
    for token in model.encode(text):
        if token not in constraint.allowed():
            return False
        constraint.accept(token)
    return True


# -- schemas

NAMES = st.sampled_from(["a", "b c", 'q"', "é", "name"])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "integer"}),
    st.just({"type": "number"}),
    st.integers(-50, 50).flatmap(
        lambda low: st.integers(low, low + 99).map(lambda high: {"type": "integer", "minimum": low, "maximum": high})
    ),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.just({"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{2}$"}),
    st.lists(st.sampled_from(["x", 'a"b', 3, 2.5, None, True]), min_size=1, max_size=3, unique_by=str).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["k", 4, False]).map(lambda value: {"const": value}),
)


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties)) if properties else st.nothing()).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )


def unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options})


SCHEMAS = objects(st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner) | unions(inner), max_leaves=5))


@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_answer_is_valid(smollm2_text: TextModel, schema: dict[str, Any], seed: int) -> None:
    tokens = sample(smollm2_text, constrained(smollm2_text, PLAIN, schema), seed)
    value = json.loads(smollm2_text.decode(tokens))
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("schema", [{}, {"type": "object"}])
def test_any_object(smollm2_text: TextModel, schema: dict[str, Any]) -> None:
    for text in ('{"a": [1, {"b": null}], "c": "x"}', "{}", '{\n  "a": 1\n}', '{"a":{"b":{"c":[]}}}'):
        constraint = constrained(smollm2_text, PLAIN, schema)
        assert follow(smollm2_text, constraint, text)
        assert constraint.must_end
    for text in ("[1]", '"a"', "1", " {", "{'a'"):
        assert not follow(smollm2_text, constrained(smollm2_text, PLAIN, schema), text)


def test_definitions_and_recursion(smollm2_text: TextModel) -> None:
    schema = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    constraint = constrained(smollm2_text, PLAIN, schema)
    assert follow(smollm2_text, constraint, '{"v": 1, "next": {"v": 2, "next": null}}')
    assert constraint.must_end


def test_white_space_is_bounded(smollm2_text: TextModel) -> None:
    """A model that would rather write line breaks than the next key has to go on all the same."""
    constraint = constrained(smollm2_text, PLAIN, {})
    constraint.accept(smollm2_text.encode("{")[0])
    written = ""
    while spaces := [token for token in constraint.allowed() if smollm2_text.token_text(token).isspace()]:
        constraint.accept(spaces[0])
        written += smollm2_text.token_text(spaces[0])
        assert len(written) < 50


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "objekt"}, "objekt"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"allOf": [{"anyOf": [wants(f"{i}{j}") for j in range(4)]} for i in range(10)]}, "schema too large"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    smollm2_text: TextModel, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        constrained(smollm2_text, PLAIN, schema)
    assert caught.value.param == "response_format"


def test_schemas_of_bad_faith(smollm2_text: TextModel) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for schema in (deep, {"const": "\ud800"}, {"enum": []}, {"properties": {"\ud800": {}}}):
        with pytest.raises(InvalidRequestError):
            constrained(smollm2_text, PLAIN, schema)
    prompt = ChatPrompt(USER, tools=(Tool("\ud800"),), tool_choice=ToolChoice("required"))
    with pytest.raises(InvalidRequestError):
        constrained(smollm2_text, prompt)


def test_an_unknown_format_is_an_annotation(smollm2_text: TextModel) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "format": "int32"}}, "required": ["n"]}
    assert follow(smollm2_text, constrained(smollm2_text, PLAIN, schema), '{"n": 7')


def test_no_constraint_asked_for(smollm2_text: TextModel) -> None:
    for prompt in (PLAIN, ChatPrompt(USER), ChatPrompt(USER, tools=TOOLS)):
        assert constraint_for(smollm2_text, prepare(smollm2_text, prompt), GenerationRequest(prompt)) is None


# -- the mask and the tokens


def test_mask_layout_and_width(tmp_path: Path) -> None:
    model = byte_level_model(tmp_path, vocabulary_size=300)
    constraint = constrained(model, PLAIN, {"enum": ["k"]})
    row = np.full(20, 0xFFFFFFFF, np.uint32)
    constraint.mask(row)
    allowed = [token for token in range(20 * 32) if row[token // 32] >> (token % 32) & 1]
    assert allowed == list(constraint.allowed()) == model.encode('"')
    with pytest.raises(AssertionError):
        constraint.mask(np.zeros(3, np.uint32))


def test_padding_and_control_tokens_are_never_allowed(tmp_path: Path) -> None:
    model = byte_level_model(tmp_path, vocabulary_size=300)
    constraint = constrained(model, PLAIN, {"type": "object"})
    for token in model.encode('{"a'):
        allowed = set(constraint.allowed().tolist())
        assert not allowed & (set(range(model.token_count, 300)) | model.special_ids)
        constraint.accept(token)


def test_the_end(smollm2_text: TextModel) -> None:
    constraint = constrained(smollm2_text, PLAIN, {"type": "integer"})
    assert not constraint.may_end
    assert not set(constraint.allowed()) & smollm2_text.eos_ids
    assert follow(smollm2_text, constraint, "12")
    assert constraint.may_end
    assert not constraint.must_end
    assert smollm2_text.eos_ids < set(constraint.allowed().tolist())
    constraint.accept(min(smollm2_text.eos_ids))
    assert constraint.is_finished
    assert constraint.must_end
    # An engine that works ahead may be a token further already.
    constraint.accept(smollm2_text.encode("x")[0])
    assert constraint.is_finished


def test_after_a_complete_answer_only_the_end_is_allowed(smollm2_text: TextModel) -> None:
    constraint = constrained(smollm2_text, PLAIN, POINT)
    assert follow(smollm2_text, constraint, '{"x": 1}')
    assert constraint.must_end
    assert not constraint.is_finished
    assert set(constraint.allowed().tolist()) == smollm2_text.eos_ids


def test_a_forbidden_token_is_the_engines_fault(smollm2_text: TextModel) -> None:
    constraint = constrained(smollm2_text, PLAIN, POINT)
    with pytest.raises(EngineError, match="forbids"):
        constraint.accept(smollm2_text.encode("x")[0])


def test_the_vocabulary_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = byte_level_model(tmp_path)
    built = []
    original = constraint_module._Vocabulary
    monkeypatch.setattr(constraint_module, "_Vocabulary", lambda text: built.append(text) or original(text))
    threads = [threading.Thread(target=constrained, args=(model, PLAIN, POINT)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [model]


def test_a_schema_that_turns_out_too_complicated(smollm2_text: TextModel) -> None:
    grammar = LLMatcher.grammar_from_lark('start: %json {"type": "string", "pattern": "^([a-z]+ [0-9]+,?){2,90}$"}')
    tokenizer = constraint_module._guidance_tokenizer(smollm2_text)
    constraint = Constraint(
        smollm2_text, LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(step_lexer_fuel=9))
    )
    with pytest.raises(InvalidRequestError, match="too complicated"):
        sample(smollm2_text, constraint, 0)


# -- forced calls


def calls_of(model: TextModel, prompt: ChatPrompt, tokens: list[int]) -> tuple[list[tuple[str, Any]], str, str]:
    """Calls, content and finish reason as the output side reads them."""
    processor = OutputProcessor(model, prepare(model, prompt))
    events = [event for token in tokens for event in processor.feed(token)]
    events += processor.finish("stop")
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        if isinstance(event, ToolCallDelta):
            if event.name is not None:
                names.append(event.name)
                arguments.append("")
            arguments[event.index] += event.arguments
    content = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    return calls, content, processor.reason


def check(calls: list[tuple[str, Any]]) -> None:
    schemas = {"plot": POINT, "switch": {"type": "object", **SWITCH}}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize("seed", range(12))
def test_a_call_is_required(smollm2_text: TextModel, seed: int) -> None:
    prompt = ChatPrompt(USER, tools=TOOLS, tool_choice=ToolChoice("required"), parallel_tool_calls=seed % 2 == 0)
    calls, content, reason = calls_of(
        smollm2_text, prompt, sample(smollm2_text, constrained(smollm2_text, prompt), seed)
    )
    check(calls)
    assert calls
    assert (content, reason) == ("", "tool_calls")
    if not prompt.parallel_tool_calls:
        assert len(calls) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_call_of_one_tool_is_required(smollm2_text: TextModel, seed: int) -> None:
    prompt = ChatPrompt(USER, tools=TOOLS, tool_choice=ToolChoice("named", "switch"))
    calls, content, reason = calls_of(
        smollm2_text, prompt, sample(smollm2_text, constrained(smollm2_text, prompt), seed)
    )
    check(calls)
    assert [name for name, _ in calls] == ["switch"]
    assert (content, reason) == ("", "tool_calls")


def test_forced_calls_come_to_an_end(smollm2_text: TextModel) -> None:
    prompt = ChatPrompt(USER, tools=TOOLS, tool_choice=ToolChoice("required"))
    constraint = constrained(smollm2_text, prompt)
    call = '<tool_call>\n{"name": "switch", "arguments": {"on": true}}\n</tool_call>'
    assert follow(smollm2_text, constraint, "\n".join([call] * 8))
    assert constraint.must_end


def test_forced_calls_win_over_a_response_format(smollm2_text: TextModel) -> None:
    prompt = ChatPrompt(USER, tools=TOOLS, tool_choice=ToolChoice("required"))
    constraint = constrained(smollm2_text, prompt, {"type": "object"})
    assert follow(smollm2_text, constraint, '<tool_call>\n{"name": "plot", "arguments": {"x": 1}}\n</tool_call>')


def test_an_answer_or_a_call(smollm2_text: TextModel) -> None:
    prompt = ChatPrompt(USER, tools=TOOLS)
    for text in ('{"x": 1}', '<tool_call>\n{"name": "switch", "arguments": {"on": true}}\n</tool_call>'):
        constraint = constrained(smollm2_text, prompt, POINT)
        assert follow(smollm2_text, constraint, text)
        assert constraint.may_end
    assert not follow(smollm2_text, constrained(smollm2_text, prompt, POINT), "Sure")


def test_tool_parameters_are_taken_as_far_as_they_can_be(smollm2_text: TextModel) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    for parameters in (schema, {}):
        prompt = ChatPrompt(USER, tools=(Tool("t", "", parameters),), tool_choice=ToolChoice("required"))
        call = '<tool_call>\n{"name": "t", "arguments": {"a": [1]}}\n</tool_call>'
        assert follow(smollm2_text, constrained(smollm2_text, prompt), call)


FORMATS = {
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        [f"<|tool_{name}|>" for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end")]
        + ["<|tool_call_argument_begin|>"],
    ),
    "mistral": ("[TOOL_CALLS][ARGS]", ["[TOOL_CALLS]", "[ARGS]"]),
    "mistral old": ("[TOOL_CALLS]", ["[TOOL_CALLS]"]),
    "llama": ('ipython "parameters" <|eot_id|>', ["<|eot_id|>"]),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_in_other_models_markup(tmp_path: Path, name: str, seed: int) -> None:
    mention, control = FORMATS[name]
    template = CHATML + "{# " + mention + " #}{% if tools %}{% endif %}"
    model = byte_level_model(tmp_path, template=template, special=["<|im_start|>", "<|im_end|>", *control])
    assert model.call_format is not None
    assert name.startswith(model.call_format.name)
    prompt = ChatPrompt(USER, tools=TOOLS, tool_choice=ToolChoice("required"))
    tokens = sample(model, constrained(model, prompt), seed)
    calls, content, reason = calls_of(model, prompt, tokens)
    check(calls)
    assert calls
    assert (content, reason) == ("", "tool_calls")


def test_markup_without_a_grammar(tmp_path: Path) -> None:
    model = byte_level_model(tmp_path, template=CHATML + "{# <arg_key> #}{% if tools %}{% endif %}")
    prompt = ChatPrompt(USER, tools=TOOLS, tool_choice=ToolChoice("required"))
    with pytest.raises(UnsupportedError, match="glm47"):
        constrained(model, prompt)
    # Where nothing is forced, the answer alone can be constrained.
    constraint = constrained(model, ChatPrompt(USER, tools=TOOLS), POINT)
    assert follow(model, constraint, '{"x": 1}')
    importlib.import_module("mlx_lm.tool_parsers.glm47")


# -- reasoning


@pytest.mark.parametrize("text", ["Hm, <think {x} </thin </think>", "</think>", "é\n</think>\n\n"])
def test_reasoning_is_free(thinker: TextModel, text: str) -> None:
    prompt = ChatPrompt(USER, template_options={"opens": True})
    assert prepare(thinker, prompt).inside_thinking
    constraint = constrained(thinker, prompt, POINT)
    assert not set(constraint.allowed().tolist()) & thinker.eos_ids
    assert follow(thinker, constraint, text)
    assert follow(thinker, constraint, '{"x": 1}')
    assert constraint.must_end


def test_reasoning_that_the_model_opens_itself(thinker: TextModel) -> None:
    prompt = ChatPrompt(USER)
    for text in ('<think>\nHm</think>\n\n{"x": 1}', '{"x": 1}'):
        constraint = constrained(thinker, prompt, POINT)
        assert follow(thinker, constraint, text)
        assert constraint.must_end
    assert not follow(thinker, constrained(thinker, prompt, POINT), "Hm")
    assert not follow(thinker, constrained(thinker, ChatPrompt(USER, thinking=False), POINT), "<think>")


def test_reasoning_between_control_tokens(tmp_path: Path) -> None:
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    model = byte_level_model(tmp_path, special=special, template=CHATML + "<think>")
    constraint = constrained(model, ChatPrompt(USER), POINT)
    assert follow(model, constraint, 'Hm {}</think>\n{"x": 1}')
    assert constraint.must_end


def test_the_end_of_reasoning_inside_a_token(tmp_path: Path) -> None:
    tokens = ["<think>", "</think>", '.</think>\n\n{"']
    model = byte_level_model(tmp_path, tokens=tokens, template=CHATML + "<think>")
    constraint = constrained(model, ChatPrompt(USER), POINT)
    fused = model.token_id(tokens[2])
    assert fused is not None
    assert fused in constraint.allowed()
    constraint.accept(fused)
    assert follow(model, constraint, 'x": 1}')
    assert constraint.must_end


@pytest.mark.parametrize("seed", range(4))
def test_forced_calls_after_reasoning(thinker: TextModel, seed: int) -> None:
    prompt = ChatPrompt(USER, tools=TOOLS, tool_choice=ToolChoice("required"), template_options={"opens": True})
    constraint = constrained(thinker, prompt)
    start = thinker.encode("Hm\n</think>\n")
    for token in start:
        constraint.accept(token)
    calls, content, reason = calls_of(thinker, prompt, [*start, *sample(thinker, constraint, seed)])
    check(calls)
    assert calls
    assert content == "Hm"
    assert reason == "tool_calls"
