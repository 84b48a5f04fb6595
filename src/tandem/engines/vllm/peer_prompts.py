"""Prompts of other nodes as requests of vLLM's."""

from __future__ import annotations

from vllm import LLMEngine, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from tandem.engines.vllm.inside import Inside


class PeerPrompts:
    """vLLM as `peer_work.Prompts` has it.

    Args:
        engine: in this process.
    """

    def __init__(self, engine: LLMEngine, inside: Inside) -> None:
        self._engine = engine
        self._inside = inside

    def read(self, request_id: str, tokens: list[int]) -> str:
        """See `Prompts`."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return str(self._engine.add_request(request_id, tokens_input(tokens), params))

    def abort(self, request_id: str) -> None:
        """See `Prompts`."""
        self._engine.abort_request([request_id])

    def progress(self, vllm_id: str) -> tuple[int, int]:
        """See `Prompts`."""
        if not self._inside.has(vllm_id):
            return 0, 0
        return self._inside.computed(vllm_id)
