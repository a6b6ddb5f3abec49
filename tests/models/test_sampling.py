"""Sampling: exact random bits, the truncation of transformers, rows that mind their own noise."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nanoactor.models.limits import NO_TOKEN
from nanoactor.models.sampling.philox import gumbel_noise, gumbel_noise_at, philox
from nanoactor.models.sampling.sampler import CANDIDATES, sample, truncation_mask
from tests.models.batches import sampling_batch

VOCABULARY = 211

slow = settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
seeds64 = st.integers(0, 2**64 - 1)


def signed(seed):
    """The bits of an unsigned 64-bit number, as int64 holds them."""
    return seed - 2**64 if seed >= 2**63 else seed


def row(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0, masked=()):
    return dict(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=position,
        masked=list(masked),
    )


def batch(rows):
    """Rows as a runner would lay them out."""
    masked = [(i, token) for i, r in enumerate(rows) for token in r["masked"]]
    return sampling_batch(rows, [r["position"] for r in rows], masked)


def random_logits(rows, seed, spread=3.0, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def choose(logits, rows):
    chosen = sample(logits.clone(), batch(rows))
    assert chosen.dtype == torch.int64
    assert chosen.shape == (len(rows),)
    return chosen


# -- random bits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    def words(text):
        return tuple(torch.tensor([int(word, 16)]) for word in text.split())

    found = philox(words(counter), words(key))
    assert [word.item() for word in found] == [int(word, 16) for word in expected.split()]


@slow
@given(
    seeds=st.lists(seeds64, min_size=1, max_size=4),
    position=st.integers(0, 2**40),
    vocabulary=st.integers(1, 70),
)
def test_noise_of_some_ids_is_exactly_that_of_all(seeds, position, vocabulary):
    seeds = torch.tensor([signed(s) for s in seeds])
    positions = torch.arange(position, position + len(seeds))
    whole = gumbel_noise(seeds, positions, vocabulary)
    assert whole.dtype == torch.float32
    assert whole.shape == (len(seeds), vocabulary)
    assert whole.isfinite().all()
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(position))
    ids = torch.stack([order.roll(i) for i in range(len(seeds))])
    assert torch.equal(gumbel_noise_at(seeds, positions, ids), whole.gather(1, ids))
    # A larger vocabulary or batch changes no token's noise.
    assert torch.equal(gumbel_noise(seeds, positions, vocabulary + 5)[:, :vocabulary], whole)
    for i in range(len(seeds)):
        assert torch.equal(
            gumbel_noise(seeds[i : i + 1], positions[i : i + 1], vocabulary)[0], whole[i]
        )


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 33, 62, 63])
def test_every_bit_of_the_seed_matters(bit):
    seeds = torch.tensor([signed(0x9E3779B97F4A7C15), signed(0x9E3779B97F4A7C15 ^ (1 << bit))])
    noise = gumbel_noise(seeds, torch.tensor([7, 7]), 64)
    assert (noise[0] == noise[1]).sum() < 3


def test_noise_differs_between_positions_beyond_32_bits_too():
    positions = torch.tensor([0, 1, 2, 2**20, 2**32, 2**32 + 1])
    noise = gumbel_noise(torch.zeros(6, dtype=torch.int64), positions, 64)
    for i in range(6):
        for j in range(i):
            assert (noise[i] == noise[j]).sum() < 3


def test_noise_has_the_moments_of_the_gumbel_distribution_and_no_correlation():
    noise = gumbel_noise(torch.arange(512), torch.arange(512) // 2, 512).double()
    assert abs(noise.mean() - 0.57722) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    centred = (noise - noise.mean()) / noise.std()
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(4, 1), centred.T):
        assert abs((centred * other).mean()) < 0.01 + 0.01 * (other is centred.T)


# -- truncation --------------------------------------------------------------------------------

parameters = st.fixed_dictionaries(
    dict(
        temperature=st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.25, 3.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 50, VOCABULARY, VOCABULARY + 7]),
        top_p=st.sampled_from([1.0, 0.999, 0.95, 0.7, 0.3, 0.01]) | st.floats(0.01, 1.0),
        min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]) | st.floats(1e-6, 1.0),
    )
)


def warped(logits, temperature, top_k, top_p, min_p):
    """The scores that the chain of transformers leaves, -inf elsewhere."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    # As in `generate`, what is off has no warper.
    chain = [TemperatureLogitsWarper(temperature)]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [MinPLogitsWarper(min_p)] if min_p else []
    scores = logits
    for warper in chain:
        scores = warper(None, scores)
    return scores


def kept(logits, rows):
    """The set of tokens that our truncation keeps, as a mask over the vocabulary."""
    params = batch(rows).sampling
    scores, ids = (logits / params.temperature[:, None]).sort(dim=-1, descending=True)
    keep = truncation_mask(scores, params.top_k, params.top_p, params.min_p)
    return torch.zeros_like(keep).scatter(1, ids, keep)


def undecided(logits, temperature, top_k, top_p, min_p):
    """Tokens so near a limit that rounding decides."""
    scores = logits.double() / temperature
    if 0 < top_k < scores.shape[-1]:
        limit = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < limit, -torch.inf)
    probabilities, ids = scores.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    near = (before - top_p).abs() < 1e-5
    near |= (probabilities / probabilities[:, :1] - min_p).abs() < 1e-4 * min_p
    return torch.zeros_like(near).scatter(1, ids, near)


@slow
@given(parameters, st.integers(0, 10**6), st.sampled_from([0.3, 3.0, 10.0]))
def test_truncation_keeps_what_transformers_keeps(parameters, seed, spread):
    logits = random_logits(8, seed, spread)
    expected = warped(logits, **parameters) > -torch.inf
    assert expected.any(-1).all()
    differ = kept(logits, [row(**parameters)] * 8) != expected
    assert not (differ & ~undecided(logits, **parameters)).any()


@pytest.mark.parametrize("spread", [0.3, 3.0, 20.0])
def test_limits_that_are_off_exclude_nothing(spread):
    logits = random_logits(8, 1, spread, vocabulary=5000)
    assert kept(logits, [row(top_k=0)] * 8).all()
    assert (kept(logits, [row(top_k=4000)] * 8).sum(-1) == 4000).all()


def test_the_likeliest_token_always_stays():
    logits = random_logits(4, 2)
    # In float32, the smallest of them is 0.
    rows = [row(top_k=1), row(min_p=1.0), row(top_p=1e-6), row(top_k=3, top_p=1e-50, min_p=1.0)]
    mask = kept(logits, rows)
    assert mask.sum(-1).tolist() == [1, 1, 1, 1]
    assert torch.equal(mask.int().argmax(-1), logits.argmax(-1))
    assert torch.equal(choose(logits, rows), logits.argmax(-1))


# -- distributions -----------------------------------------------------------------------------


def chi_square_is_plausible(chosen, probabilities):
    """Within five standard deviations of the mean, by the Wilson-Hilferty approximation."""
    counts = torch.bincount(chosen, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(chosen)
    assert not counts[expected == 0].any()
    some = expected > 0
    assert (expected[some] > 5).all()
    statistic = ((counts - expected)[some] ** 2 / expected[some]).sum().item()
    freedom = int(some.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic < limit


@pytest.mark.parametrize("varied", ["position", "seed", "high seed"])
@pytest.mark.parametrize(
    "parameters",
    [
        dict(),
        dict(temperature=0.7),
        dict(temperature=2.5),
        dict(top_k=5),
        dict(top_p=0.8),
        dict(min_p=0.2),
        dict(temperature=1.7, top_k=9, top_p=0.9, min_p=0.1),
    ],
    ids=str,
)
def test_frequencies_are_the_softmax_of_what_is_kept(parameters, varied):
    logits = random_logits(1, 3, spread=0.8, vocabulary=14)
    where = {
        "position": lambda i: dict(seed=17, position=i),
        "seed": lambda i: dict(seed=i, position=17),
        "high seed": lambda i: dict(seed=i << 48, position=17),
    }[varied]
    rows = [row(**parameters, **where(i)) for i in range(6000)]
    values = {k: row(**parameters)[k] for k in ("temperature", "top_k", "top_p", "min_p")}
    expected = warped(logits, **values).softmax(-1)[0]
    chosen = choose(logits.expand(len(rows), -1), rows)
    assert chi_square_is_plausible(chosen, expected)
    # The test can tell: at another temperature the same tokens are not plausible.
    wrong = warped(logits, **{**values, "temperature": values["temperature"] * 1.3})
    if torch.equal(wrong > -torch.inf, expected > 0):
        assert not chi_square_is_plausible(chosen, wrong.softmax(-1)[0])


def test_frequencies_of_masked_rows_are_the_softmax_of_the_rest():
    logits = random_logits(1, 4, spread=0.8, vocabulary=10)
    rows = [row(seed=5, position=i, masked=[2, 7]) for i in range(4000)]
    rest = logits[0].clone()
    rest[[2, 7]] = -torch.inf
    chosen = choose(logits.expand(len(rows), -1), rows)
    assert chi_square_is_plausible(chosen, rest.softmax(-1))


# -- choosing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_rows_are_the_arg_max_and_ties_go_to_the_lower_id(dtype):
    logits = random_logits(6, 5).clamp(max=4).to(dtype)  # several share the maximum
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).all()
    expected = [line.index(max(line)) for line in logits.tolist()]
    assert choose(logits, [row(0.0, position=i) for i in range(6)]).tolist() == expected


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-38])
@pytest.mark.parametrize("limits", [dict(), dict(top_k=5), dict(min_p=0.1)], ids=str)
def test_temperatures_near_zero_choose_the_arg_max(temperature, limits):
    logits = random_logits(32, 6)
    rows = [row(temperature, **limits, seed=i) for i in range(32)]
    assert torch.equal(choose(logits, rows), logits.argmax(-1))


@pytest.mark.parametrize(
    "parameters", [dict(temperature=0.0), dict(), dict(top_k=3), dict(top_p=0.9, min_p=0.01)]
)
def test_masked_ids_are_never_chosen(parameters):
    logits = random_logits(300, 7)
    masks = [logits[i].topk(1 + i % 40).indices.tolist() for i in range(300)]
    rows = [row(**parameters, seed=1, position=i, masked=mask) for i, mask in enumerate(masks)]
    chosen = choose(logits, rows).tolist()
    assert not any(token in mask for token, mask in zip(chosen, masks, strict=True))
    if parameters.get("temperature") == 0:
        assert chosen == [logits[i].sort(descending=True).indices[1 + i % 40] for i in range(300)]
    # The other rows are not masked.
    free = choose(logits[:2], [rows[0], row(**parameters, seed=1, position=1)])
    assert free[1] == choose(logits[1:2], [row(**parameters, seed=1, position=1)])[0]


rows_of_all_kinds = st.lists(
    st.builds(
        row,
        temperature=st.sampled_from([0.0, 0.0, 0.6, 1.0, 1.9]),
        top_k=st.sampled_from([0, 0, 1, 7, 40, CANDIDATES, CANDIDATES + 1]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
        min_p=st.sampled_from([0.0, 0.0, 0.1]),
        seed=seeds64,
        position=st.integers(0, 2**31),
        masked=st.lists(st.integers(0, VOCABULARY - 1), max_size=3, unique=True),
    ),
    min_size=1,
    max_size=12,
)


@slow
@given(rows_of_all_kinds, st.integers(0, 10**6), st.sampled_from([VOCABULARY, 2 * CANDIDATES]))
def test_mixed_batches_give_each_row_what_it_gets_alone(rows, seed, vocabulary):
    logits = random_logits(len(rows), seed, vocabulary=vocabulary)
    together = choose(logits, rows).tolist()
    alone = [choose(logits[i : i + 1], [one])[0].item() for i, one in enumerate(rows)]
    assert together == alone
    backwards = choose(logits.flip(0), rows[::-1]).tolist()
    assert backwards[::-1] == together


@pytest.mark.parametrize(
    "limits", [dict(top_k=7), dict(top_k=40, top_p=0.6), dict(top_k=300), dict(top_p=0.5)], ids=str
)
def test_equal_logits_at_a_limit_give_the_same_token_in_every_batch(limits):
    # bfloat16 logits of a real vocabulary have many equal values, at the limit of top-k too.
    logits = (random_logits(4, 9, vocabulary=4 * CANDIDATES) / 2).round().bfloat16()
    beside = [row(top_k=90, seed=5), row(top_p=0.9, seed=6), row(top_k=400, min_p=0.01, seed=7)]
    for position in range(64):
        one = row(**limits, seed=4, position=position)
        alone = choose(logits[:1], [one])[0]
        assert choose(logits, [one, *beside])[0] == alone


def test_truncation_does_not_change_the_noise_of_the_tokens_it_keeps():
    logits = random_logits(200, 8, spread=1.0)
    plain = choose(logits, [row(seed=3, position=i) for i in range(200)])
    most = dict(top_k=VOCABULARY - 1)
    cut = choose(logits, [row(**most, seed=3, position=i) for i in range(200)])
    likely = plain != logits.argmin(-1)
    assert torch.equal(cut[likely], plain[likely])


def test_no_rows_give_no_ids():
    assert choose(torch.empty(0, VOCABULARY), []).tolist() == []


def test_rows_whose_logits_are_not_finite_get_no_token_and_harm_no_other():
    kinds = [row(temperature=0), row(seed=3), row(top_k=5), row(top_k=300), row(top_p=0.5)]
    generator = torch.Generator().manual_seed(1)
    good = torch.randn(len(kinds), VOCABULARY, generator=generator)
    expected = sample(good.clone(), batch(kinds)).tolist()
    for value in (math.nan, math.inf, -math.inf):
        for broken in range(len(kinds)):
            logits = good.clone()
            if value == -math.inf:
                logits[broken] = value
            else:
                logits[broken, 7] = value
            chosen = sample(logits, batch(kinds)).tolist()
            assert chosen == [NO_TOKEN if i == broken else e for i, e in enumerate(expected)]
    assert sample(torch.full((2, 9), math.nan), batch([kinds[0]] * 2)).tolist() == [NO_TOKEN] * 2
