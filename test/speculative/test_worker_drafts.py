"""What every worker drafts, against dense float64 formulas over the whole sequence.

A row or a token off by one still gives correct output, only slowly; these tests would see it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from drafters import Value, drafter_engine, drafter_path
from harness import NUM_LAYERS, VOCAB_SIZE, Engine, target
from test_draft_cache import Drafted, Logger
from torch import Tensor

from dense_drafters import DenseLayer, draft_pool, rms, rows_at, stored
from tiny_drafters import MTP_NAMES, TARGET_LAYERS
from truespec.batch import ForwardBatch
from truespec.layers.sampler import SamplingRows
from truespec.message import Abort, Submit
from truespec.params import SamplingParams
from truespec.speculative.chains import DraftSampler, DraftStep

FAMILY = "qwen3"
PROMPT = [5, 17, 30, 8, 44, 21, 9, 9, 36, 12, 40, 3, 27, 33, 18, 6, 25, 11, 29]
L = len(PROMPT) - 1  # position of the root


def _engine(name: str, **options: Value) -> Engine:
    """With matrices as they are stored, since the formulas read these."""
    return drafter_engine(name, FAMILY, chunk=L, draft_model_quantization="none", **options)


def _first_draft(name: str, temperature: float = 0.0) -> Drafted:
    """What is drafted behind the last token of the prompt."""
    logger = Logger(_engine(name))
    scheduler = logger.engine.scheduler
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=40, ignore_eos=True)
    scheduler.submit(Submit("a", PROMPT, params))
    scheduler.step()
    scheduler.step()
    scheduler.abort(Abort("a"))
    return logger.drafts[tuple(PROMPT)]


@dataclass(frozen=True, slots=True)
class Facts:
    """The drafter's tensors, and what the target computes of positions 0 .. L - 1, in float64."""

    tensors: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    hidden: Tensor
    outputs: Tensor  # [L, NUM_LAYERS + 1, H]: the embedding, then every layer's output


def _facts(name: str) -> Facts:
    path, model = drafter_path(name), target(FAMILY)
    assert path is not None
    kv, table = draft_pool(model, NUM_LAYERS)
    rows = rows_at(torch.arange(L), table)
    batch = ForwardBatch(
        torch.tensor(PROMPT[:L]),
        rows.positions,
        rows.row_to_req,
        rows.out_slots,
        table,
        rows.kv_lens,
    )
    output = model.forward(batch, kv, capture=tuple(range(-1, NUM_LAYERS)))
    assert output.features is not None
    return Facts(
        tensors=stored(path)[0],
        embedding=model.embed_weight.data.double(),
        head=model.head_weight.data.double(),
        hidden=output.hidden.double(),
        outputs=output.features.double().view(L, NUM_LAYERS + 1, -1),
    )


def _expect(drafted: Drafted, logits: list[Tensor], draft_ids: Tensor | None = None) -> None:
    """At T = 0 every draft is the argmax of its logits, and its logprob theirs."""
    ids, _, logprobs = drafted
    assert len(ids) == len(logits)
    for token_id, logprob, row in zip(ids, logprobs, logits, strict=True):
        best = int(row.argmax())
        assert token_id == (best if draft_ids is None else int(draft_ids[best]))
        assert logprob == pytest.approx(float(row.log_softmax(-1)[best]), abs=1e-4)


def test_eagle3_chain() -> None:
    drafted, facts = _first_draft("eagle3 chain"), _facts("eagle3 chain")
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in facts.tensors.items()}
    first, second = DenseLayer(tensors, "layers.0."), DenseLayer(tensors, "layers.1.")
    # The outputs of layers -1, 0 and 1, as the config says.
    feature = facts.outputs[:, :3].reshape(L, -1) @ tensors["fc.weight"].T
    ids, logits = PROMPT[1:], []
    for draft in drafted[0]:
        embedded = first.norm("input_layernorm", facts.embedding[torch.tensor(ids)])
        joined = torch.cat([embedded, first.norm("hidden_norm", feature)], dim=1)
        g = first.run_causal(feature, joined)
        g = second.run_causal(g, second.norm("input_layernorm", g))
        logits.append(rms(g[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T)
        feature, ids = torch.cat([feature, g[-1:]]), [*ids, draft]
    draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    _expect(drafted, logits, draft_ids)


def test_eagle1_chain() -> None:
    drafted, facts = _first_draft("eagle chain"), _facts("eagle chain")
    tensors, layer = facts.tensors, DenseLayer(facts.tensors, "layers.0.")
    feature, ids, logits = facts.hidden, PROMPT[1:], []
    for draft in drafted[0]:
        joined = torch.cat([facts.embedding[torch.tensor(ids)], feature], dim=1)
        x = joined @ tensors["fc.weight"].T + tensors["fc.bias"]
        g = layer.run_causal(x, x)
        logits.append(g[-1] @ facts.head.T)
        feature, ids = torch.cat([feature, g[-1:]]), [*ids, draft]
    _expect(drafted, logits)


def _mtp_rows(
    facts: Facts, family: str, index: int, hidden: Tensor, ids: list[int]
) -> tuple[Tensor, Tensor]:
    """Block outputs before and after the final norm of head `index`."""
    prefix, join, norms, final, block = MTP_NAMES[family]
    start = prefix.format(index + (TARGET_LAYERS if family == "step" else 0))
    own = {n.removeprefix(start): t for n, t in facts.tensors.items() if n.startswith(start)}
    if family == "step":
        own = {n: t + 1 if "norm" in n else t for n, t in own.items()}
    if family == "mimo_v2":
        own["post_attention_layernorm.weight"] = own["pre_mlp_layernorm.weight"]
    embedded = facts.embedding[torch.tensor(ids)]
    if family == "mimo":
        embedded = embedded * (torch.arange(len(ids)) > 0)[:, None]
    pair = [rms(embedded, own[f"{norms[0]}.weight"]), rms(hidden, own[f"{norms[1]}.weight"])]
    x = torch.cat(pair[::-1] if family == "mimo" else pair, dim=1) @ own[f"{join}.weight"].T
    layer = DenseLayer(own, block)
    out = layer.run_causal(x, layer.norm("input_layernorm", x))
    return out, rms(out, own[f"{final}.weight"])


def test_one_mtp_head_rolled_on_its_own_output() -> None:
    drafted, facts = _first_draft("nextn"), _facts("nextn")
    hidden, ids, logits = facts.hidden, PROMPT[1:], []
    for draft in drafted[0]:
        _, normed = _mtp_rows(facts, "mimo", 0, hidden, ids)
        logits.append(normed[-1] @ facts.head.T)
        hidden, ids = torch.cat([hidden, normed[-1:]]), [*ids, draft]
    _expect(drafted, logits)


@pytest.mark.parametrize(
    ("name", "family"), [("multi-layer chained", "step"), ("multi-layer not chained", "mimo_v2")]
)
def test_one_mtp_head_per_step(name: str, family: str) -> None:
    """Head j reads tokens shifted by j + 1, and the states before it or the target's."""
    drafted, facts = _first_draft(name), _facts(name)
    hidden = facts.outputs[:, -1] if family == "step" else facts.hidden
    ids, logits = PROMPT[1:], []
    for index, draft in enumerate(drafted[0]):
        out, normed = _mtp_rows(facts, family, index, hidden, ids)
        start = f"model.layers.{index + TARGET_LAYERS}."
        own_head = facts.tensors.get(f"{start}shared_head.output.weight", facts.head)
        logits.append(normed[-1] @ own_head.T)
        ids = [*ids[1:], draft]
        hidden = out if family == "step" else hidden
    _expect(drafted, logits)


@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_block_drafters(name: str) -> None:
    """DSpark's row i drafts the token after its position, DFlash's row i the one at it."""
    drafted, facts = _first_draft(name), _facts(name)
    tensors = facts.tensors
    size = 5 if name == "dspark" else 6
    context = facts.outputs[:, 1:3].reshape(L, -1) @ tensors["fc.weight"].T
    context = rms(context, tensors["hidden_norm.weight"])
    x = facts.embedding[torch.tensor([PROMPT[L]] + [47] * (size - 1))]
    past, block = torch.arange(L), torch.arange(L, L + size)
    for index in range(2):
        layer = DenseLayer(tensors, f"layers.{index}.")
        normed = layer.norm("input_layernorm", x)
        parts = zip(layer.keys_values(context, past), layer.keys_values(normed, block), strict=True)
        keys, values = (torch.cat(pair) for pair in parts)
        sees = torch.ones(size, L + size, dtype=torch.bool)
        x = layer.run(x, normed, block, (keys, values), sees)
    logits = rms(x, tensors["norm.weight"]) @ facts.head.T
    if name == "dflash":
        _expect(drafted, list(logits[1:]))
        return
    w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    before = [PROMPT[L], *drafted[0][:-1]]
    _expect(drafted, [row + w2 @ w1[token] for row, token in zip(logits, before, strict=True)])


class _Forced(DraftSampler):
    """Chooses the tokens of a given path."""

    path: list[int] = []  # noqa: RUF012 (set by the test)

    def choose(self, logits: Tensor, rows: SamplingRows, step: int = 0) -> DraftStep:
        token_ids = torch.tensor([self.path[step] if step < len(self.path) else self.path[-1]])
        assert self.target_ids is not None
        column = (self.target_ids == token_ids).to(torch.int64).argmax()
        scaled = logits / rows.temperature.unsqueeze(1)
        return DraftStep(token_ids, scaled[:, column] - scaled.logsumexp(1), None)


def test_a_tree_node_has_the_logprob_that_a_chain_along_its_path_gives() -> None:
    """So a node sees the past and its own ancestors, in their slots, and nothing else."""
    ids, parents, logprobs = _first_draft("eagle3 tree 4x4", temperature=0.9)
    assert len(ids) == 16
    paths: list[list[int]] = []
    for token_id, parent in zip(ids, parents, strict=True):
        paths.append([*(paths[parent - 1] if parent else []), token_id])
    assert max(map(len, paths)) >= 3
    assert len({tuple(path[:-1]) for path in paths}) > 3, "the tree does not branch"
    engine = _engine("eagle3 tree 4x4", eagle_topk=1, num_draft_tokens=5)
    logger = Logger(engine)
    _Forced.path = []
    worker = engine.worker
    worker.sampler = _Forced(VOCAB_SIZE, worker.sampler.target_ids, False)  # type: ignore[attr-defined]
    for path, logprob in zip(paths, logprobs, strict=True):
        _Forced.path = path
        params = SamplingParams(temperature=0.9, seed=4, max_tokens=40)
        engine.scheduler.submit(Submit("a", PROMPT, replace(params, num_draft_tokens=len(path))))
        engine.scheduler.step()
        engine.scheduler.step()
        engine.scheduler.abort(Abort("a"))
        engine.scheduler.flush_cache()
        chain = logger.drafts[tuple(PROMPT)]
        assert chain[0] == path
        assert chain[2][-1] == pytest.approx(logprob, abs=1e-5)
