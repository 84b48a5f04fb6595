"""The one internal request, and the stream of events that answers it.

Every HTTP dialect is translated into a `GenerationRequest`; every engine answers with `Event`s. Both travel between
the server and its runner subprocesses as msgpack (`msgspec`), so all of them are frozen structs of plain data.
"""

from tandem.types.description import EngineLoad, ModelInfo
from tandem.types.events import (
    Accepted,
    Event,
    Failure,
    Finished,
    HandoffStatistics,
    PrefillProgress,
    PromptScored,
    Statistics,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from tandem.types.request import (
    ChatPrompt,
    GenerationRequest,
    JsonConstraint,
    Message,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
    ToolChoice,
)

__all__ = [
    "Accepted",
    "ChatPrompt",
    "EngineLoad",
    "Event",
    "Failure",
    "Finished",
    "GenerationRequest",
    "HandoffStatistics",
    "JsonConstraint",
    "Message",
    "ModelInfo",
    "PrefillProgress",
    "Prompt",
    "PromptScored",
    "Sampling",
    "Statistics",
    "TextDelta",
    "TextPrompt",
    "TokenLogprob",
    "TokenPrompt",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "TopLogprob",
    "Usage",
]
