"""Fifty prompts of all sorts, from one token to some two hundred."""

from __future__ import annotations

from tandem.types import ChatPrompt, Message, Prompt, TextPrompt, Tool

_LONG = (
    "The lighthouse stood at the end of a narrow spit of land. Every evening the keeper climbed its hundred and twelve "
    "steps, trimmed the lamp and wrote the weather into a book. In forty years he had missed one night only, when the "
    "storm of the great flood had taken the bridge. "
)
_CODE = '''def merge(left, right):
    """Merge two sorted lists."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
'''
_TABLE = "name,age,city\nAda,36,London\nAlan,41,Wilmslow\nGrace,85,Arlington\nEdsger,"

RAW: tuple[str, ...] = (
    "A",
    " ",
    "\n",
    "The",
    "Once upon a time",
    "1 2 3 4 5 6 7",
    "1, 1, 2, 3, 5, 8, 13,",
    "The capital of France is",
    "Q: What is 12 * 12?\nA:",
    "To be, or not to be, that is",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at 100 degrees",
    "Roses are red,\nviolets are blue,\n",
    "import numpy as np\n\nx = np.",
    "SELECT name, count(*) FROM users WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    _CODE,
    _TABLE,
    '{"name": "Ada", "born": 1815, "known_for": [',
    "<html>\n<head><title>Test</title></head>\n<body>\n",
    "git commit -m",
    "Zürich ist die größte Stadt der",
    "L'été dernier, nous sommes allés à",
    "¿Dónde está la biblioteca? Está en",
    "東京は日本の",
    "Привет, как",
    "مرحبا",
    "🙂🙃😀 means",
    "e = mc² and a² + b² =",
    "naïve café — “quoted” … ½",
    "\t\tindented\n\t\tby tabs\n",
    "        eight spaces and then",
    "AAAAAAAAAAAAAAAAAAAA",
    "the the the the the the",
    "UPPER CASE AND lower case and MiXeD",
    "https://example.org/path?query=1&other=",
    "Ingredients: flour, sugar, butter, eggs. Step 1:",
    "Translate to German: good morning ->",
    _LONG,
    _LONG * 3 + "One day",
    _CODE * 2,
    "First line.\r\nSecond line.\r\nThird",
)


def _chat(*turns: str, system: str | None = None, tools: tuple[Tool, ...] = ()) -> ChatPrompt:
    messages = [Message("system", system)] if system else []
    for number, turn in enumerate(turns):
        messages.append(Message("assistant" if number % 2 else "user", turn))
    return ChatPrompt(tuple(messages), tools=tools)


CHATS: tuple[ChatPrompt, ...] = (
    _chat("Hi"),
    _chat("What is the capital of Italy?"),
    _chat("Write a haiku about the sea.", system="You are a poet."),
    _chat("Name three fruits.", "Apple, pear and plum.", "And three vegetables?"),
    _chat("Explain recursion to a child.", system="Answer in one sentence."),
    _chat("2 + 2?", "4", "And twice that?", "8", "Minus one?", system="You calculate."),
    _chat("Summarise this:\n" + _LONG),
    _chat("Was heißt „Danke“ auf Französisch? 🇫🇷"),
)

PROMPTS: tuple[Prompt, ...] = (*(TextPrompt(text) for text in RAW), *CHATS)
assert len(PROMPTS) == 50
