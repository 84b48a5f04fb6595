"""Each of mlx-lm's call formats, through its own parser."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from answers import Channels, every_cut, offered

from tandem.models.call_formats import CallFormat

WEATHER = offered("get_weather", city={"type": "string"}, days={"type": "integer"})
TIME = offered("get_time", zone={"type": "string"})
WANTED = {"city": "Paris, France", "days": 3}

ONE_CALL = {
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis, France\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris, France</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris, France", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris, France</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris, France", "days": 3}',
    "pythonic": '<|tool_call_start|>[get_weather(city="Paris, France", days=3)]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris, France<|"|>,days:3}<tool_call|>',
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Paris, France<escape>,days:3}"
    "<end_function_call>",
    "longcat": "<longcat_tool_call>get_weather<longcat_arg_key>city</longcat_arg_key>"
    "<longcat_arg_value>Paris, France</longcat_arg_value><longcat_arg_key>days</longcat_arg_key>"
    "<longcat_arg_value>3</longcat_arg_value></longcat_tool_call>",
    "minicpm5": '<function name="get_weather"><param name="city">Paris, France</param>'
    '<param name="days">3</param></function>',
}

TWO_CALLS = {
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>'
    '{"zone": "CET"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Rome</parameter></invoke>'
    '<invoke name="get_time"><parameter name="zone">CET</parameter></invoke></minimax:tool_call>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]get_time[ARGS]{"zone": "CET"}',
    "pythonic": "<|tool_call_start|>[get_weather(city='Rome'), get_time(zone='CET')]<|tool_call_end|>",
    "qwen3_coder": "<tool_call><function=get_weather><parameter=city>Rome</parameter></function></tool_call>\n"
    "<tool_call><function=get_time><parameter=zone>CET</parameter></function></tool_call>",
}


def format_of(name: str) -> CallFormat:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return CallFormat(name, module.tool_call_start, module.tool_call_end, "whole", module.parse_tool_call)


def channels_for(name: str, **options: Any) -> Channels:
    return Channels(format_of(name), [WEATHER, TIME], **options)


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call_however_it_is_cut(name: str) -> None:
    channels = channels_for(name)
    text = f"I'll look.\n{ONE_CALL[name]}"
    for chunks in every_cut(text, most=1):
        answer, complete = channels.read(chunks)
        assert answer.content == "I'll look."
        assert [(called, json.loads(arguments)) for called, arguments in answer.named] == [("get_weather", WANTED)]
        assert complete == 1


@pytest.mark.parametrize("name", TWO_CALLS)
def test_two_calls(name: str) -> None:
    for chunks in every_cut(TWO_CALLS[name], most=1):
        answer, complete = channels_for(name).read(chunks)
        assert answer.content == ""
        assert [(called, json.loads(arguments)) for called, arguments in answer.named] == [
            ("get_weather", {"city": "Rome"}),
            ("get_time", {"zone": "CET"}),
        ]
        assert complete == 2
    answer, complete = channels_for(name, parallel=False).read(TWO_CALLS[name])
    assert ([called for called, _ in answer.named], complete) == (["get_weather"], 1)


@pytest.mark.parametrize("name", ONE_CALL)
@pytest.mark.parametrize("body", ["", "I think {not", "unknown<arg_key>", "1.5", "get_weather("])
def test_what_is_no_call_is_text(name: str, body: str, caplog: pytest.LogCaptureFixture) -> None:
    call_format = format_of(name)
    text = f"a {call_format.start}{body}{call_format.end}"
    answer, complete = channels_for(name).read(list(text))
    assert (answer.content, answer.calls, complete) == (text, [], 0)
    assert "malformed" in caplog.text


@pytest.mark.parametrize("name", ONE_CALL)
def test_cut_anywhere_nothing_is_lost_and_nothing_raises(name: str) -> None:
    text = ONE_CALL[name]
    for end in range(len(text)):
        answer, complete = channels_for(name).read([text[:end]], cut=True)
        # Either as far as the call got, or all of the text.
        assert complete == 0 or answer.named
        if answer.calls:
            assert answer.content == ""
            assert answer.named[0][0] == "get_weather"
            json.loads(answer.named[0][1])
        else:
            assert answer.content == text[:end]


def test_the_models_own_id_is_kept() -> None:
    """Kimi's template writes ids back into the conversation; the model expects the ones it made."""
    answer, _ = channels_for("kimi_k2").read([TWO_CALLS["kimi_k2"]])
    assert [call_id for call_id, _, _ in answer.calls] == ["functions.get_weather:0", "functions.get_time:1"]


@pytest.mark.parametrize("value", ["{1, 2}", "b'x'", "{(1, 2): 3}", "1j", "1e999"])
def test_values_that_json_cannot_hold(value: str) -> None:
    """The pythonic parser reads Python; not everything in it has a place in JSON."""
    text = f"<|tool_call_start|>[get_weather(city={value})]<|tool_call_end|>"
    answer, complete = channels_for("pythonic").read([text])
    assert (answer.content, answer.calls, complete) == (text, [], 0)
