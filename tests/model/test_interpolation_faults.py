"""The five faults of the published universal interpolation: each shown in a literal version of its
formulae, and its absence in ours. The literal versions are written anew, in float64."""

import pytest
import torch

from skipless.config import ConnectionConfig, UniversalConfig
from skipless.model import Universal
from skipless.model.context import ForwardContext

D, T = 6, 40


def pair(seed=0):
    """A stream and a branch [1, T, D] of different means and full covariances."""
    generator = torch.Generator().manual_seed(seed)
    x, f, mix = (torch.randn(*s, generator=generator).double() for s in ((T, D), (T, D), (D, D)))
    return (x @ mix + 2.0)[None], (f @ mix.T * 0.3 - 1.0)[None]


def ours(**settings) -> Universal:
    join = Universal(ConnectionConfig(kind="universal", universal=UniversalConfig(**settings)), D)
    join = join.double()
    if join.encoder is not None:
        torch.nn.init.normal_(join.encoder.up, generator=torch.Generator().manual_seed(1))
    return join


def published_encoder(x, f):
    z = torch.cat((x, f), dim=1)
    scores = z @ z.mT / D**0.5
    hidden = torch.zeros(2 * T, 2 * T, dtype=torch.bool)
    hidden[T:, :T] = True  # F-queries may not see x-keys
    hidden[:T, T:] = True
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ z
    return mixed[:, T:]  # and only the rows of F are returned


def published_aligner(x, f):
    mean_x, mean_f = x.mean(1, keepdim=True), f.mean(1, keepdim=True)
    factor = torch.linalg.cholesky((x - mean_x).mT @ (x - mean_x) / T)
    white = torch.linalg.solve_triangular(factor, (f - mean_f).mT, upper=False)
    return (factor @ white).mT + mean_x  # whitened and coloured by the same factor


def published_gate(x, entropy, w):
    _ = entropy / torch.log(torch.tensor(float(T)))  # computed, and never used
    return torch.sigmoid((x.mean(1) @ w)[:, None, None])


def covariance(x):
    return torch.cov(x[0].T, correction=0)


class TestAMaskThatHidesTheStream:
    def test_published_output_does_not_depend_on_the_stream(self):
        (x, f), (other, _) = pair(), pair(seed=9)
        assert torch.equal(published_encoder(x, f), published_encoder(other, f))

    def test_ours_does(self):
        (x, f), (other, _) = pair(), pair(seed=9)
        join = ours(aligner="none", gate="constant")
        found = [join(stream, f, None) - 0.5 * stream * 2 for stream in (x, other)]
        assert (found[0] - found[1]).abs().amax(-1).min() > 1e-3  # at every position, the first too


class TestBWhiteningWithTheStreamsOwnFactor:
    def test_published_only_moves_the_mean(self):
        x, f = pair()
        moved = f - f.mean(1, keepdim=True) + x.mean(1, keepdim=True)
        torch.testing.assert_close(published_aligner(x, f), moved)
        torch.testing.assert_close(covariance(published_aligner(x, f)), covariance(f))

    @pytest.mark.parametrize("aligner", ["cholesky", "bures"])
    def test_ours_gives_the_streams_covariance(self, aligner):
        x, f = pair()
        join = ours(aligner=aligner, encoder=False, gate="constant", kappa=2.0, shrinkage=0.0,
                    winsor=None, skip_first_token=False)  # fmt: skip
        aligned = join(x, f, ForwardContext(is_causal=False)) - x
        torch.testing.assert_close(covariance(aligned), covariance(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(aligned.mean(1), x.mean(1))


class TestCPoolingOverTheFuture:
    @pytest.mark.parametrize("published", [published_encoder, published_aligner])
    def test_published_first_token_sees_the_last(self, published):
        x, f = pair()
        before = published(x, f)[:, 0]
        x[:, -1] += 1.0
        f[:, -1] -= 1.0
        assert (published(x, f)[:, 0] - before).abs().max() > 1e-4

    @pytest.mark.parametrize("aligner", ["mean", "diagonal", "cholesky", "bures"])
    @pytest.mark.parametrize("t", [0, 1, 9, 30])
    def test_ours_does_not(self, aligner, t):
        x, f = pair()
        join = ours(aligner=aligner, chunk_size=8)
        torch.nn.init.normal_(join.gate_weight)
        before = join(x, f, None)
        x[:, t + 1 :] = x[:, t + 1 :].flip(-1) * 50
        f[:, t + 1 :] -= 7
        after = join(x, f, None)
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert not torch.equal(after, before)


class TestDAnEntropyThatIsIgnored:
    def test_published_gate_is_the_same_for_any_entropy(self):
        x, w = pair()[0], torch.ones(D).double()
        gates = [published_gate(x, entropy, w) for entropy in (torch.zeros(T), torch.ones(T))]
        assert torch.equal(*gates)

    def test_ours_answers_token_by_token(self):
        x, _ = pair()
        join = ours(gate_feature="entropy")
        join.place(0, "attention", True)
        with torch.no_grad():
            join.gate_weight[-1] = 1.0
        entropy = torch.linspace(0, 1, T).double()[None]
        gate = join.gate(x, ForwardContext(entropy=entropy))
        torch.testing.assert_close(gate[..., 0], torch.sigmoid(entropy))


class TestEFullProjections:
    def test_published_size_is_not_the_published_number(self):
        assert sum(4096 * 4096 for _ in range(4)) == 67_108_864  # claimed: 0.13 million

    def test_ours_is_under_a_six_hundredth_of_a_layer(self):
        with torch.device("meta"):
            join = Universal(ConnectionConfig(kind="universal"), 4096)
        own = sum(p.numel() for p in join.parameters())
        assert own == 2 * 4096 * 16 + 3 * 16 * 16 + 4096 + 1 + 1 + 1
        assert 2 * own / (12 * 4096**2) <= 0.0015
        assert "135,939 parameters" in join.describe() and "0.135%" in join.describe()
