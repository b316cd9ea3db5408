"""X09: what a streamed chunk costs does not grow with the output before it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import orjson
import pytest
from byte_backend import byte_backend
from scripted_engine import make_record

from truespec.message import Output, Submit
from truespec.params import LogprobParams, SamplingParams
from truespec.server.logprobs import LogprobView
from truespec.server.native_replies import NativeOptions, NativeReply
from truespec.server.native_routes import NativeStream
from truespec.server.openai_replies import ChatReply, CompletionReply, ReplyOptions
from truespec.server.openai_routes import OpenAIStream
from truespec.server.streaming import Batcher, Stream
from truespec.tokenizer.request_state import RequestState
from truespec.tokenizer.token_table import TokenTable

ASKED = LogprobParams(top_k=5)
NUM_TOKENS = 2000


def openai_stream(kind: type) -> Callable[[RequestState, TokenTable], Stream]:
    def make(state: RequestState, table: TokenTable) -> Stream:
        view = LogprobView(table, 5, (), ("raw",), details=True, as_ids=False)
        options = ReplyOptions("id", 0, "m", 1, view, table, continuous_usage=True, num_drafts=5)
        return OpenAIStream(kind(options, [state]), Batcher(1, 1, one_per_piece=True))

    return make


def native_stream(state: RequestState, table: TokenTable) -> Stream:
    options = NativeOptions(table, False, True, False, 5, 0.0)
    return NativeStream(NativeReply(options, [state]), Batcher(1, 1, one_per_piece=True))


def count_calls(work: Callable[[], object]) -> int:
    """Python and C functions called by `work`."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "make", [openai_stream(CompletionReply), openai_stream(ChatReply), native_stream]
)
def test_x09_calls_per_chunk_are_flat_over_2000_tokens(make) -> None:
    table = TokenTable(byte_backend())
    params = SamplingParams(max_tokens=NUM_TOKENS, logprobs=ASKED, stop=("never", "here"))
    state = RequestState(Submit("r", [1], params), table)
    stream = make(state, table)
    records = [make_record(i, 5 + i % 50, ASKED, origin="target") for i in range(50)]
    counts = []
    for index in range(NUM_TOKENS):
        output = Output("r", [records[index % 50]])

        def chunk(output: Output = output) -> None:
            for data in stream.render(0, state.feed(output)):
                orjson.dumps(data)

        counts.append(count_calls(chunk))
    assert len(state.records) == NUM_TOKENS
    assert max(counts[-100:]) <= max(counts[100:200])
