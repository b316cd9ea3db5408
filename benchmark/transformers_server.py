"""transformers' own generate behind a completion route, for benchmark/peers.py.

Requests that arrive within a few milliseconds are run as one left-padded batch.
"""

from __future__ import annotations

import asyncio
import sys

import torch
import uvicorn
from fastapi import FastAPI, Request
from transformers import AutoModelForCausalLM

WINDOW_SECONDS = 0.01


def generate(model: torch.nn.Module, bodies: list[dict]) -> int:
    """Run requests as one batch of exactly `max_tokens` new tokens; tokens per request."""
    count = int(bodies[0]["max_tokens"])
    width = max(len(body["prompt"]) for body in bodies)
    ids = torch.zeros(len(bodies), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, body in enumerate(bodies):
        prompt = body["prompt"]
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    wants = any(body.get("logprobs") is not None for body in bodies)
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        output_logits=wants,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    if wants:
        k = max(1, *(int(body.get("logprobs") or 0) for body in bodies))
        for logits in output.logits:
            logits.float().log_softmax(-1).topk(k)
    return count


def main() -> None:
    """Serve `sys.argv[1]` on port `sys.argv[2]`."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    app = FastAPI()
    waiting: list[tuple[dict, asyncio.Future[int]]] = []

    async def run_soon() -> None:
        await asyncio.sleep(WINDOW_SECONDS)
        batch, waiting[:] = list(waiting), []
        if batch:
            with torch.inference_mode():
                count = generate(model, [body for body, _ in batch])
            for _, future in batch:
                future.set_result(count)

    @app.get("/health")
    async def health() -> dict:
        return {}

    @app.post("/v1/completions")
    async def completions(request: Request) -> dict:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting.append((await request.json(), future))
        if len(waiting) == 1:
            asyncio.get_running_loop().create_task(run_soon())
        return {"usage": {"completion_tokens": await future}}

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")


if __name__ == "__main__":
    main()
