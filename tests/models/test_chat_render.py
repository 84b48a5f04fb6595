from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_models import CHATML, byte_level_model, sentencepiece_model

from tandem.errors import InvalidRequestError
from tandem.models.call_formats import HERMES, LLAMA
from tandem.models.chat import prepare, render
from tandem.models.store import LocalModel
from tandem.models.text import TextModel
from tandem.types import ChatPrompt, Message, TextPrompt, TokenPrompt, Tool, ToolCall, ToolChoice

USER = Message("user", "Hi")
WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})

# Knows tools, reasoning in earlier turns, and a switch for reasoning.
CAPABLE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for tool_call in message.tool_calls or [] %}
<tool_call>{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson -}}
}</tool_call>
{%- endfor %}
{%- if message.tool_call_id %}({{ message.name }} {{ message.tool_call_id }}){% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif opens %}<think>
{% endif %}{% endif %}{# tool_call.name #}"""
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}[{{ message.content }}]{% endfor %}"
)
MISTRAL = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}{% if call.id|length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_CALLS]{{ call.function.name }} {{ call.id }}"
    "{% endfor %}{{ message.content }}{% if message.role == 'tool' %}={{ message.tool_call_id }}{% endif %}|"
    "{% endfor %}{% if tools %}T{% endif %}"
)
TAGS = ("<think>", "</think>")


@pytest.fixture(scope="module")
def capable(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_level_model(tmp_path_factory.mktemp("capable"), tokens=TAGS, template=CAPABLE)


@pytest.fixture(scope="module")
def simple(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_level_model(tmp_path_factory.mktemp("simple"))


def text_of(model: TextModel, *messages: Message, **options: object) -> str:
    rendered = render(model, ChatPrompt(messages, **options))  # type: ignore[arg-type]
    assert rendered.text is not None
    assert model.decode(rendered.token_ids) == rendered.text
    return rendered.text


def test_markup_becomes_control_tokens_and_nothing_is_added(simple: TextModel) -> None:
    rendered = render(simple, ChatPrompt((USER,)))
    assert rendered.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    start, end = simple.token_id("<|im_start|>"), simple.token_id("<|im_end|>")
    assert [token for token in rendered.token_ids if token in simple.special_ids] == [start, end, start]
    assert rendered.is_chat
    assert not rendered.continues
    assert rendered.call_format is None


def test_system_messages_become_one_at_the_beginning(simple: TextModel) -> None:
    text = text_of(simple, Message("system", "A"), USER, Message("system", "B"), Message("assistant", "x"), USER)
    assert text.startswith("<|im_start|>system\nA\nB<|im_end|>\n<|im_start|>user\n")
    assert text.count("system") == 1


def test_a_template_without_system_role_gets_it_in_the_first_user_message(tmp_path: Path) -> None:
    model = byte_level_model(tmp_path, template=STRICT)
    assert not model.accepts_system
    assert text_of(model, Message("system", "Be brief."), USER) == "[Be brief.\n\nHi]"
    assert text_of(model, Message("system", "Be brief.")) == "[Be brief.]"


def test_a_template_that_drops_system_messages_counts_as_one_without(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert text_of(byte_level_model(tmp_path, template=template), Message("system", "S"), USER) == "S\n\nHi"


def test_the_templates_own_words_reach_the_client(tmp_path: Path) -> None:
    model = byte_level_model(tmp_path, template=STRICT)
    with pytest.raises(InvalidRequestError, match="roles must alternate user/assistant"):
        render(model, ChatPrompt((USER, USER)))


@pytest.mark.parametrize("template", ["{{ messages[0].nothing.more }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_any_failure_of_a_template_is_the_requests(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(byte_level_model(tmp_path, template=template), ChatPrompt((USER,)))


def test_no_template(tmp_path: Path) -> None:
    model = byte_level_model(tmp_path, template=None)
    assert model.capabilities == ("text",)
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        render(model, ChatPrompt((USER,)))


def test_no_messages(simple: TextModel) -> None:
    with pytest.raises(InvalidRequestError, match="at least one message"):
        render(simple, ChatPrompt(()))


# -- partial assistant messages


def test_the_answer_continues_a_partial_assistant_message(simple: TextModel) -> None:
    rendered = render(simple, ChatPrompt((USER, Message("assistant", "Well, "))))
    assert rendered.text is not None
    assert rendered.text.endswith("<|im_start|>assistant\nWell, ")
    assert rendered.continues


def test_an_empty_assistant_message_at_the_end_is_nothing(simple: TextModel) -> None:
    rendered = render(simple, ChatPrompt((USER, Message("assistant", ""))))
    assert rendered == render(simple, ChatPrompt((USER,)))


def test_a_call_at_the_end_is_no_partial_message(simple: TextModel) -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("1", "weather", "{}"),))
    text = text_of(simple, USER, call)
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("message", "opens", "end", "inside"),
    [
        (Message("assistant", "So"), False, "So", False),
        (Message("assistant", "So"), True, "<think>\n\n</think>\n\nSo", False),
        (Message("assistant", "", reasoning="Hm"), True, "<think>\nHm", True),
        (Message("assistant", "", reasoning="Hm"), False, "<think>\nHm", True),
        (Message("assistant", "So", reasoning="Hm"), False, "<think>\nHm\n</think>\n\nSo", False),
        (Message("assistant", "<think>Hm"), False, "<think>Hm", True),
    ],
)
def test_partial_messages_of_reasoning_models(
    capable: TextModel, message: Message, opens: bool, end: str, inside: bool
) -> None:
    rendered = render(capable, ChatPrompt((USER, message), template_options={"opens": opens}))
    assert rendered.text is not None
    assert rendered.text.split("<|im_start|>assistant\n")[1] == end
    assert rendered.inside_thinking is inside
    assert not rendered.may_think


# -- reasoning


def test_where_the_answer_begins(capable: TextModel) -> None:
    states = {}
    for name, options in {
        "free": {},
        "opened": {"template_options": {"opens": True}},
        "off": {"thinking": False},
        "no effort": {"reasoning_effort": "none"},
        "effort": {"reasoning_effort": "high"},
    }.items():
        rendered = render(capable, ChatPrompt((USER,), **options))  # type: ignore[arg-type]
        states[name] = (rendered.inside_thinking, rendered.may_think)
    assert states == {
        "free": (False, True),
        "opened": (True, False),
        "off": (False, False),
        "no effort": (False, False),
        "effort": (False, True),
    }


def test_a_marker_in_the_conversation_does_not_open_the_answer(capable: TextModel) -> None:
    assert not render(capable, ChatPrompt((Message("user", "What is <think>"),))).inside_thinking


def test_reasoning_goes_back_to_the_model(capable: TextModel) -> None:
    text = text_of(capable, USER, Message("assistant", "So", reasoning="Hm"), USER)
    assert "assistant\n<think>Hm</think>So<|im_end|>" in text


@pytest.mark.parametrize("key", ["thinking", "reasoning"])
def test_reasoning_goes_where_the_template_looks(tmp_path: Path, key: str) -> None:
    template = f"{{% for message in messages %}}{{{{ message.{key} or message.content }}}};{{% endfor %}}"
    model = byte_level_model(tmp_path, template=template)
    assert text_of(model, USER, Message("assistant", "So", reasoning="Hm"), USER) == "Hi;Hm;Hi;"


def test_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }} {{ mood }}{{ messages[0].content }}"
    model = byte_level_model(tmp_path, template=template)
    text = text_of(model, USER, thinking=True, reasoning_effort="low", template_options={"mood": "good"})
    assert text == "True True low goodHi"
    assert text_of(model, USER) == "   Hi"
    assert text_of(model, USER, thinking=True, template_options={"thinking": "x"}) == "True x  Hi"


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "add_generation_prompt", "tokenize"])
def test_the_renderers_own_variables_are_not_the_clients(simple: TextModel, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        render(simple, ChatPrompt((USER,), template_options={name: "x"}))


# -- tools


def test_tools_in_the_models_own_way(capable: TextModel) -> None:
    rendered = render(capable, ChatPrompt((USER,), tools=(WEATHER,), parallel_tool_calls=False))
    assert rendered.text is not None
    line = rendered.text.splitlines()[1]
    assert json.loads(line) == {
        "type": "function",
        "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER.parameters},
    }
    assert rendered.call_format is not None
    assert (rendered.call_format.name, rendered.call_format.style) == ("json_tools", "json")
    assert rendered.tools == [json.loads(line)]
    assert not rendered.parallel_tool_calls


def test_calls_and_results_in_the_models_own_way(capable: TextModel) -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("c1", "weather", '{"city": "Łódź", "n": 1}'),))
    text = text_of(capable, USER, call, Message("tool", "sunny", tool_call_id="c1"), tools=(WEATHER,))
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Łódź", "n": 1}}</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\nsunny(weather c1)<|im_end|>" in text


def test_tools_for_a_template_that_knows_none(simple: TextModel) -> None:
    rendered = render(simple, ChatPrompt((Message("system", "Be nice."), USER), tools=(WEATHER,)))
    assert rendered.text is not None
    system = rendered.text.split("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe nice.\n# Tools")
    described = [json.loads(line) for line in system.splitlines() if line.startswith('{"name": "weather"')]
    assert described == [{"name": "weather", "description": "Tells the weather.", "parameters": WEATHER.parameters}]
    assert rendered.call_format is HERMES
    assert HERMES.start in system
    assert HERMES.end in system


def test_conversation_with_tools_for_a_template_that_knows_none(tmp_path: Path) -> None:
    """Even one that insists on alternating roles gets through a conversation with several calls at once."""
    model = byte_level_model(tmp_path, template=STRICT)
    calls = (ToolCall("1", "weather", '{"city": "Rome"}'), ToolCall("2", "weather", '{"city": '))
    text = text_of(
        model,
        Message("user", "Weather?"),
        Message("assistant", "Let me see.", tool_calls=calls),
        Message("tool", "sunny", tool_call_id="1"),
        Message("tool", "no such city", tool_call_id="2"),
        Message("user", "And?"),
        tools=(WEATHER,),
    )
    turns = text[1:-1].split("][")
    assert turns[0].endswith("\n\nWeather?")
    assert turns[1] == (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": "}\n</tool_call>'
    )
    assert turns[2] == (
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nno such city\n</tool_response>\nAnd?"
    )


@pytest.mark.parametrize(
    ("choice", "parallel", "words"),
    [
        (ToolChoice("required"), True, ["Call a function now", "Several calls"]),
        (ToolChoice("named", "weather"), True, ["Call the function weather now"]),
        (ToolChoice("auto"), False, ["one call at most"]),
    ],
)
def test_the_choice_is_said(simple: TextModel, choice: ToolChoice, parallel: bool, words: list[str]) -> None:
    text = text_of(simple, USER, tools=(WEATHER,), tool_choice=choice, parallel_tool_calls=parallel)
    assert all(word in text for word in words)


def test_no_choice_no_tools(simple: TextModel, capable: TextModel) -> None:
    for model in (simple, capable):
        prompt = ChatPrompt((USER,), tools=(WEATHER,), tool_choice=ToolChoice("none"))
        assert render(model, prompt) == render(model, ChatPrompt((USER,)))


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        (ToolChoice("required"), (), "`tools` is empty"),
        (ToolChoice("named", "nope"), (WEATHER,), "'nope'"),
    ],
)
def test_impossible_choices(simple: TextModel, choice: ToolChoice, tools: tuple[Tool, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render(simple, ChatPrompt((USER,), tools=tools, tool_choice=choice))


def test_mistrals_ids(tmp_path: Path) -> None:
    model = byte_level_model(tmp_path, template=MISTRAL)
    ids = ("call_0123456789abcdef01234567", "abcdef123")
    calls = tuple(ToolCall(call_id, "weather", "{}") for call_id in ids)
    results = [Message("tool", "sun", tool_call_id=call_id) for call_id in ids]
    text = text_of(model, USER, Message("assistant", "", tool_calls=calls), *results, tools=(WEATHER,))
    first = text.split("weather ")[1][:9]
    assert first.isalnum()
    assert text == f"Hi|[TOOL_CALLS]weather {first}[TOOL_CALLS]weather abcdef123|sun={first}|sun=abcdef123|T"


def test_llamas_format_is_recognised(tmp_path: Path) -> None:
    template = (
        '{% if tools %}ipython "parameters"{% endif %}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}'
    )
    model = byte_level_model(tmp_path, template=template)
    assert render(model, ChatPrompt((USER,), tools=(WEATHER,))).call_format is LLAMA


def test_a_format_that_nobody_reads_is_replaced_by_ours(tmp_path: Path) -> None:
    template = CHATML + "{% if tools %}call as you like{% endif %}"
    rendered = render(byte_level_model(tmp_path, template=template), ChatPrompt((USER,), tools=(WEATHER,)))
    assert rendered.call_format is HERMES
    assert rendered.text is not None
    assert "call as you like" not in rendered.text


# -- other prompts


def test_text_prompts_get_the_usual_special_tokens(tmp_path: Path, simple: TextModel) -> None:
    rendered = prepare(simple, TextPrompt("a <|im_end|>"))
    assert rendered.token_ids == simple.encode("a <|im_end|>")
    assert rendered.continues
    assert not rendered.is_chat
    model = sentencepiece_model(tmp_path, ["▁hello"])
    assert prepare(model, TextPrompt("hello")).token_ids == model.encode("hello", add_special_tokens=True)


def test_token_prompts_are_used_as_they_are(simple: TextModel) -> None:
    assert prepare(simple, TokenPrompt((5, 5, 6))).token_ids == [5, 5, 6]
    for wrong in (-1, simple.vocabulary_size):
        with pytest.raises(InvalidRequestError, match=f"Token id {wrong} "):
            prepare(simple, TokenPrompt((5, wrong)))


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokenPrompt(())])
def test_an_empty_prompt_starts_from_the_beginning_of_a_text(
    tmp_path: Path, simple: TextModel, prompt: TextPrompt | TokenPrompt
) -> None:
    assert prepare(simple, prompt).token_ids == [simple.token_id("<|im_end|>")]
    model = byte_level_model(tmp_path, bos_token="<|im_start|>")
    assert prepare(model, prompt).token_ids == [model.token_id("<|im_start|>")]


@pytest.mark.real_model
def test_the_packaged_model(smollm2: LocalModel) -> None:
    model = TextModel.load(smollm2.path, smollm2.card)
    assert model.capabilities == ("text", "chat", "tools")
    assert model.token_id("<|im_end|>") in model.eos_ids
    text = text_of(model, USER)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_in_python(tmp_path: Path) -> None:
    """mlx-lm has some; they are functions and take only the variables they know."""
    special = [f"<\uff5c{name}\uff5c>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")]
    begin, end, user, assistant = special
    model = byte_level_model(
        tmp_path,
        tokens=TAGS,
        special=special,
        eos=end,
        template=None,
        chat_template_type="deepseek_v32",
    )
    assert model.has_chat_template
    rendered = render(model, ChatPrompt((Message("system", "S"), USER), reasoning_effort="high", tools=(WEATHER,)))
    assert rendered.text is not None
    assert rendered.text.startswith(f"{begin}S\n# Tools")
    assert rendered.text.endswith(f"{user}Hi{assistant}<think>")
    assert rendered.inside_thinking
    assert rendered.call_format is HERMES
    assert text_of(model, USER, thinking=False).endswith(f"{assistant}</think>")


# -- what clients may send


def test_lone_surrogates_are_no_characters(simple: TextModel) -> None:
    rendered = render(simple, ChatPrompt((Message("user", "a\ud800b"),)))
    assert "a\ufffdb" in simple.decode(rendered.token_ids)
    assert simple.decode(prepare(simple, TextPrompt("\ud83d\ude00 \udc00")).token_ids) == "😀 \ufffd"


def test_nesting_without_end(simple: TextModel, capable: TextModel) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    call = Message("assistant", "", tool_calls=(ToolCall("1", "weather", deep),))
    assert deep in text_of(simple, USER, call, USER).replace(" ", "")
    schema: dict[str, object] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    for model in (simple, capable):
        with pytest.raises(InvalidRequestError):
            render(model, ChatPrompt((USER,), tools=(Tool("t", "", schema),)))
