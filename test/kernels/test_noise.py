"""The noise: the same bits everywhere, the right law, and no relation between streams."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from truespec.kernels import noise
from truespec.kernels.rows import has_numba

SEEDS = (0, 1, -1, 2**53 - 1, -(2**63), 2**63 - 1)
POSITIONS = (0, 1, 4095, 2**31, 131071, 7)
DOMAINS = (
    noise.DOMAIN_TARGET,
    noise.DOMAIN_DRAFT,
    noise.DOMAIN_ACCEPT,
    noise.DOMAIN_RESIDUAL,
)
MANY = 2**20


def _hashes(seed: int, position: int, ids: torch.Tensor, domain: int = 0) -> torch.Tensor:
    return noise.hash24(torch.tensor([seed]), torch.tensor([position]), ids, domain)[0]


def _splitmix(z: int) -> int:
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _hash_of_integers(seed: int, position: int, token_id: int, domain: int) -> int:
    """The hash in unbounded Python integers."""
    mask64, mask32 = 2**64 - 1, 2**32 - 1
    z = _splitmix((seed + 0x9E3779B97F4A7C15 + domain) & mask64)
    z = _splitmix(z ^ ((position * 0xD1342543DE82EF95) & mask64))
    x = (token_id * 0x9E3779B1 + (z & mask32)) & mask32
    for key in (0, z >> 32):
        x = (x + key) & mask32
        x ^= x >> 16
        x = (x * 0x7FEB352D) & mask32
        x ^= x >> 15
        x = (x * 0x846CA68B) & mask32
        x ^= x >> 16
    return min(x >> 8, 2**24 - 2)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_numba_noise_has_the_bits_of_torch_over_millions_of_values() -> None:
    from numba import njit

    from truespec.kernels import noise_numba

    @njit
    def fill(seed, position, domain, out):  # type: ignore[no-untyped-def]
        low, high = noise_numba.row_keys(seed, position, domain)
        for j in range(out.shape[0]):
            out[j] = noise_numba.gumbel(low, high, np.uint32(j))

    ours = np.empty(MANY, np.float32)
    ids = torch.arange(MANY)
    for seed, position, domain in zip(SEEDS, POSITIONS, DOMAINS * 2, strict=False):
        fill(seed, position, np.uint64(domain), ours)
        expected = noise.gumbel(torch.tensor([seed]), torch.tensor([position]), ids, domain)[0]
        assert np.array_equal(ours.view(np.int32), expected.numpy().view(np.int32))


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_numba_exp_and_masses_have_the_bits_of_torch() -> None:
    from numba import njit

    from truespec.kernels import noise_numba

    @njit
    def fill(x, exps, masses):  # type: ignore[no-untyped-def]
        for j in range(x.shape[0]):
            exps[j] = noise_numba.exp_fixed(x[j])
            masses[j] = noise_numba.mass_fixed(x[j])

    x = -torch.rand(MANY, generator=torch.Generator().manual_seed(0)) * 100
    x[:3] = torch.tensor([0.0, -math.inf, -1e-30])
    exps, masses = np.empty(MANY, np.float32), np.empty(MANY, np.int64)
    fill(x.numpy(), exps, masses)
    assert np.array_equal(exps.view(np.int32), noise.exp_fixed(x).numpy().view(np.int32))
    assert np.array_equal(masses, noise.mass_fixed(x).numpy())


@pytest.mark.parametrize(
    ("seed", "position", "domain"), list(zip(SEEDS, POSITIONS, DOMAINS * 2, strict=False))
)
def test_hash_equals_its_definition_in_integers(seed: int, position: int, domain: int) -> None:
    ids = torch.tensor([0, 1, 2, 49151, 151935, 2**31 - 1])
    expected = [_hash_of_integers(seed, position, int(i), domain) for i in ids]
    assert _hashes(seed, position, ids, domain).tolist() == expected


def test_noise_is_finite_in_its_stated_range_at_every_hash() -> None:
    u = torch.arange(1, 2**24, dtype=torch.int64).to(torch.float32) * 2.0**-24
    exact = -(-u.to(torch.float64).log()).log()
    values = -noise.log_fixed(-noise.log_fixed(u))
    assert -2.82 < values.min().item() < -2.81
    assert 16.63 < values.max().item() < 16.64
    assert (values - exact).abs().max().item() < 1e-6


def test_exp_is_within_two_ulp() -> None:
    x = -torch.linspace(0, 87, MANY)
    exact = x.to(torch.float64).exp()
    assert (noise.exp_fixed(x) / exact - 1).abs().max().item() < 2**-22


def test_hashes_are_uniform_to_chi_square() -> None:
    num_bins = 1024
    for seed, position in ((3, 5), (4, 5), (3, 6)):
        bins = _hashes(seed, position, torch.arange(MANY)) >> 14
        counts = torch.bincount(bins, minlength=num_bins).to(torch.float64)
        chi2 = ((counts - MANY / num_bins) ** 2 / (MANY / num_bins)).sum().item()
        assert abs(chi2 - (num_bins - 1)) < 5 * math.sqrt(2 * num_bins)


@pytest.mark.parametrize("what", ["seed", "position", "id"])
def test_one_flipped_input_bit_flips_every_hash_bit_half_of_the_time(what: str) -> None:
    num_rows = 4096
    base = torch.arange(num_rows) * 7919
    bits = {"seed": range(0, 64, 7), "position": range(0, 31, 5), "id": range(0, 18, 3)}[what]
    for bit in bits:
        flip = noise.signed64(1 << bit)
        inputs = {"seed": base, "position": base % 8191, "id": base % 151936}
        flipped = {**inputs, what: inputs[what] ^ flip}
        one, two = (
            noise.hash24(i["seed"], i["position"], i["id"][:, None])[:, 0]
            for i in (inputs, flipped)
        )
        changed = one ^ two
        rates = torch.stack([((changed >> b) & 1).to(torch.float64).mean() for b in range(24)])
        assert (rates - 0.5).abs().max().item() < 5 * 0.5 / math.sqrt(num_rows)


@pytest.mark.parametrize("what", ["seed", "position", "id", "domain"])
def test_neighbouring_streams_are_uncorrelated(what: str) -> None:
    ids = torch.arange(MANY // 4)
    one = _hashes(11, 100, ids)
    two = {
        "seed": lambda: _hashes(12, 100, ids),
        "position": lambda: _hashes(11, 101, ids),
        "id": lambda: _hashes(11, 100, ids + 1),
        "domain": lambda: _hashes(11, 100, ids, noise.DOMAIN_DRAFT),
    }[what]()
    correlation = torch.corrcoef(torch.stack((one, two)).to(torch.float64))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(len(ids))
    # Joint uniformity in 32 x 32 cells: a linear relation may hide from a correlation.
    cells = (one >> 19) * 32 + (two >> 19)
    counts = torch.bincount(cells, minlength=1024).to(torch.float64)
    chi2 = ((counts - len(ids) / 1024) ** 2 / (len(ids) / 1024)).sum().item()
    assert abs(chi2 - 1023) < 5 * math.sqrt(2 * 1023)


def test_triton_noise_has_the_bits_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernels are defined
    pytest.importorskip("triton")
    from truespec.kernels.gpu.noise import gumbel_rows

    seed, position = torch.tensor([1, -5, 2**62]), torch.tensor([0, 77, 2**31])
    ids = torch.arange(5000)
    for domain in DOMAINS:
        ours = gumbel_rows(seed, position, ids, domain)
        expected = noise.gumbel(seed, position, ids, domain)
        assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))
