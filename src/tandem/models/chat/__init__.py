"""Chat prompts to token ids: what a conversation looks like to the model."""

from tandem.models.chat.render import prepare, render

__all__ = ["prepare", "render"]
