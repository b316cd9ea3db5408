"""POST /inference/v1/generate: token ids in, token ids out, with the parameters of /v1."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from truespec.core import TokenRecord
from truespec.tokenizer.request_state import Piece

from .logprobs import ChatLogprobs, JSONValue
from .names import new_id
from .native_models import TokenGenerateRequest
from .openai_models import CompletionRequest
from .openai_replies import Chunk, OpenAIReply
from .openai_routes import COMPLETION_STAND_IN, complete
from .responses import body_of, ready_service
from .validation import parse

router = APIRouter()


@router.post("/inference/v1/generate")
async def generate_tokens(request: Request) -> Response:
    """Generate from ids; `sampling_params` has the fields of /v1/completions."""
    service = ready_service(request)
    body = await body_of(request, TokenGenerateRequest)
    fields: dict[str, object] = {
        **(body.sampling_params or {}),
        "prompt": body.token_ids,
        "model": body.model,
        "stream": body.stream,
        "return_token_ids": True,
        "echo": False,
    }
    parsed = parse(CompletionRequest, fields, COMPLETION_STAND_IN)
    reply_id = body.request_id or new_id("tok")
    return await complete(request, service, parsed, reply_id, TokensReply)


class TokensReply(OpenAIReply):
    """Choices with ids and chat-shaped logprobs, without text."""

    object_name = "token_completion"
    chunk_name = "token_completion.chunk"

    def _whole_choice(self, index: int) -> dict[str, JSONValue]:
        state = self.choices[index]
        return {
            "index": index,
            "logprobs": self._entries(state.records),
            **self._finish_fields(index),
        }

    def _chunk_choice(self, index: int, piece: Piece) -> dict[str, JSONValue]:
        return {"index": index, "logprobs": self._entries(piece.records)}

    def _begin(self, index: int) -> Chunk | None:
        return None

    def _prompt_root(self) -> dict[str, JSONValue]:
        return {"request_id": self.options.id, **self._prompt_fields(0)}

    def _entries(self, records: Sequence[TokenRecord]) -> dict[str, JSONValue] | None:
        if self.options.logprobs is None or not records:
            return None
        entries = ChatLogprobs(self.options.logprobs)
        for record in records:
            entries.add(record)
        return entries.as_json()
