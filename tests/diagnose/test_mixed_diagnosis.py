"""A mixed scheme: every tensor is judged at the format that it gets."""

import torch
from torch import nn

from skipless.diagnose import diagnose

RATIOS = ("sqnr", "token_sqnr", "ideal", "gap", "remedies", "remedy")


class Fork(nn.Module):
    """Two layers read one tensor, which an override may have them round differently."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(32, 16), nn.Linear(32, 16)
        self.down, self.plain = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.plain(self.down(self.left(x) * self.right(x)))


def at(result, text):
    return {row["site"]: {ratio: row[ratio].get(text) for ratio in RATIOS} for row in result.sites}


def test_sites_and_weights_at_their_own_formats():
    mixed = "W4A4 right=W8A6-w:channel down=W3Afp plain=fp"
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    found = {
        text: diagnose(Fork().eval(), [x], text, layers=False, scope="linear")
        for text in (mixed, "W4A4", "W8A6-w:channel")
    }
    sites = {text: at(result, text) for text, result in found.items()}
    for ratio in ("sqnr", "token_sqnr", "ideal", "gap"):
        assert sites[mixed]["left:input"][ratio] == sites["W4A4"]["left:input"][ratio]
        assert sites[mixed]["right:input"][ratio] == sites["W8A6-w:channel"]["right:input"][ratio]
    assert sites[mixed]["right:input"]["ideal"] > sites[mixed]["left:input"]["ideal"]
    for site in ("down:input", "plain:input"):
        assert all(value is None for value in sites[mixed][site].values())
    (tensor,) = found[mixed].worst_tensors()  # one tensor, at the worst of its sites
    assert tensor["site"] == "left:input"
    weights = {
        text: {row["site"]: row["channel_sqnr"].get(text) for row in result.weights}
        for text, result in found.items()
    }
    assert weights[mixed]["left"] == weights["W4A4"]["left"]
    assert weights[mixed]["right"] == weights["W8A6-w:channel"]["right"]
    assert weights[mixed]["plain"] is None
    assert weights[mixed]["down"] is not None and weights[mixed]["down"] < weights["W4A4"]["down"]
    assert found[mixed].lines()


def test_remedies_are_tried_on_the_readers_of_that_format():
    """What left's remedies do to outputs is of left alone where right is set apart."""
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))

    class Left(Fork):
        def forward(self, x):
            return self.plain(self.down(self.left(x)))

    mixed = diagnose(Fork().eval(), [x], "W4A4 right=fp", layers=False, scope="linear")
    alone = diagnose(Left().eval(), [x], "W4A4 right=fp", layers=False, scope="linear")
    of_mixed = at(mixed, "W4A4 right=fp")["left:input"]["remedies"]
    assert of_mixed == at(alone, "W4A4 right=fp")["left:input"]["remedies"]
    assert len(of_mixed) > 3
