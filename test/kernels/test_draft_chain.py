"""A chain chosen in one call is the chain that one choice after the other gives."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import Model, causal_rows, kernels, make_weight, normal, page_table
from torch import Tensor

from truespec.kernels.api import DecoderStack, KernelSet
from truespec.kernels.draft_chain import ChainRule, Chains, Confidence, Transition, tiled
from truespec.kernels.reference import ReferenceKernels
from truespec.layers.sampler import sample_draft

VOCAB = 1823
NUM_CHAINS, NUM_STEPS, BLOCK = 3, 4, 6
MODEL = Model(hidden=64, layers=1, inner=2048)  # enough work for two threads
NORM = torch.ones(64)
SETS = {"torch": lambda threads: ReferenceKernels(), "numba": lambda threads: kernels(threads)}


class Setting:
    """A stack with a head on one kernel set, and the rule of its chains."""

    def __init__(self, kernel_set: KernelSet, num_drafts: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.w2 = torch.randn(num_drafts, rank, generator=generator).to(torch.bfloat16)
        self.head = kernel_set.linear(make_weight("F32", num_drafts, 64))
        self.stack = kernel_set.decoder_stack(MODEL.weights(), MODEL.shape())
        same = num_drafts == VOCAB
        ids = torch.arange(num_drafts) * (1 if same else 2) + (0 if same else 1)
        self.rule = ChainRule(
            previous=torch.tensor([7, 8, 9]),
            transition=Transition(torch.randn(VOCAB, rank, generator=generator), tiled(self.w2)),
            temperature=torch.tensor([0.0, 1.0, 0.7]),
            seed=torch.tensor([1, -2, 3]),
            position=torch.tensor([5, 0, 9]),
            target_ids=ids.to(torch.int32),
            keeps_logits=True,
        )

    def base(self) -> tuple[Tensor, Tensor]:
        """States [n, BLOCK, H] and logits [n, BLOCK, DV] without transitions."""
        parts = self.stack.forward_to_logits(*self._rows(), final_norm=NORM, head=self.head)
        hidden, logits = (part.view(NUM_CHAINS, BLOCK, -1) for part in parts)
        return hidden, logits

    def chains(self, rule: ChainRule, first_row: int = 1, num_steps: int = NUM_STEPS) -> Chains:
        return self.stack.draft_chains(
            *self._rows(),
            final_norm=NORM,
            head=self.head,
            rule=rule,
            first_row=first_row,
            num_steps=num_steps,
        )

    def _rows(self) -> tuple[Tensor, object, object]:
        table = page_table(NUM_CHAINS, 1)
        rows = causal_rows(table, [(i, 0, BLOCK) for i in range(NUM_CHAINS)], 16)
        return 4 * normal(NUM_CHAINS * BLOCK, 64), rows, MODEL.pool(NUM_CHAINS)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("num_drafts", "rank"), [(VOCAB, 8), (700, 7), (5, 1)])
@pytest.mark.parametrize("domain", [0, 1])
def test_a_chain_equals_choices_on_biased_logits(
    name: str, threads: int, num_drafts: int, rank: int, domain: int
) -> None:
    setting = Setting(SETS[name](threads), num_drafts, rank)
    rule = setting.rule._replace(domain=domain)
    _, base = setting.base()
    biased, token_ids, logprobs, confidences = setting.chains(rule)
    assert confidences is None
    assert token_ids.shape == logprobs.shape == (NUM_CHAINS, NUM_STEPS)
    previous = rule.previous
    for step in range(NUM_STEPS):
        bias = rule.transition.w1[previous].double() @ setting.w2.T.double()
        exact = base[:, 1 + step].double() + bias
        torch.testing.assert_close(biased[:, step].double(), exact, rtol=1e-5, atol=1e-4)
        expected = sample_draft(
            exact.float(),
            temperature=rule.temperature,
            seed=rule.seed,
            position=rule.position + step,
            target_ids=rule.target_ids.long(),
            domain=domain,
        )
        previous = token_ids[:, step]
        assert torch.equal(previous, expected[0])
        torch.testing.assert_close(logprobs[:, step], expected[1], rtol=1e-5, atol=1e-4)
    assert len({tuple(ids) for ids in token_ids.tolist()}) == NUM_CHAINS
    assert torch.equal(rule.previous, torch.tensor([7, 8, 9]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("sees_previous", [True, False])
def test_confidences_are_those_of_the_states_and_the_tokens_before(
    name: str, threads: int, sees_previous: bool
) -> None:
    rank, width = 7, 64
    setting = Setting(SETS[name](threads), VOCAB, rank)
    generator = torch.Generator().manual_seed(1)
    size = width + rank if sees_previous else width
    confidence = Confidence(
        weight=torch.randn(size, generator=generator) / 8,
        bias=torch.tensor([0.3]),
        temperatures=torch.tensor([1.0, 0.5, 2.0, 1.5, 9.0]),
    )
    hidden, _ = setting.base()
    rule = setting.rule._replace(confidence=confidence)
    found = setting.chains(rule)
    before = torch.cat([rule.previous.unsqueeze(1), found.token_ids[:, :-1]], dim=1)
    states = hidden[:, 1 : 1 + NUM_STEPS]
    z = torch.cat([states, rule.transition.w1[before]], dim=2)[..., :size]
    score = z.double() @ confidence.weight.double() + confidence.bias
    expected = torch.sigmoid(score / confidence.temperatures[:NUM_STEPS])
    assert found.confidences is not None
    torch.testing.assert_close(found.confidences.double(), expected, rtol=1e-5, atol=1e-6)
    assert found.confidences.std() > 0.1


@pytest.mark.parametrize("name", SETS)
def test_a_chain_goes_on_behind_a_row_with_nan(name: str) -> None:
    setting = Setting(SETS[name](2), VOCAB, 4)
    rule = setting.rule
    rule.transition.w1[rule.previous[1]] = torch.nan
    _, token_ids, logprobs, _ = setting.chains(rule)
    assert token_ids[1, 0] == 0
    assert logprobs[1, 0] == -torch.inf
    assert logprobs[1, 1].isfinite()
    assert logprobs[[0, 2]].isfinite().all()


@pytest.mark.parametrize("first_row", [0, 2])
def test_the_same_bits_on_one_thread_and_on_two(first_row: int) -> None:
    one, two = (
        Setting(kernels(threads), 900, 8).chains(Setting(kernels(1), 900, 8).rule, first_row)
        for threads in (1, 2)
    )
    for a, b in zip(one[:3], two[:3], strict=True):
        assert torch.equal(a, b)


def test_the_compiled_call_is_its_parts() -> None:
    setting = Setting(kernels(2), 900, 8)
    ours = setting.chains(setting.rule)
    composed = DecoderStack.draft_chains(
        setting.stack,
        *setting._rows(),
        final_norm=NORM,
        head=setting.head,
        rule=setting.rule,
        first_row=1,
        num_steps=NUM_STEPS,
    )
    assert torch.equal(ours.token_ids, composed.token_ids)
    torch.testing.assert_close(ours.logits, composed.logits, rtol=1e-5, atol=1e-4)
