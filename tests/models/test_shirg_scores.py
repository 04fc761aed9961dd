"""Each score on a picture where the answer is plain to see; and where the seed's code answered otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trimtab.models import shirg_scores as scores

SIDE, WIDTH = 6, 16


def alike(seed: int = 0, n: int = 1) -> torch.Tensor:
    """Tokens of one picture that are nearly the same."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n, 1, WIDTH, generator=generator)
    return common + 0.01 * torch.randn(n, SIDE * SIDE, WIDTH, generator=generator)


def grid(values: torch.Tensor) -> torch.Tensor:
    return values.view(SIDE, SIDE)


def test_an_odd_corner_is_not_what_attention_is_measured_by() -> None:
    tokens = alike()
    odd = torch.zeros(WIDTH).index_fill_(0, torch.tensor([0]), 30.0)
    tokens[0, [0, 14]] = odd  # the corner, and one other that is like it
    seed = F.cosine_similarity(tokens, tokens[:, :1], dim=-1)
    assert set(seed[0].topk(2).indices.tolist()) == {0, 14}
    ours = scores.attention_to_mean(tokens)
    assert set((-ours[0]).topk(2).indices.tolist()) == {0, 14}


def test_one_disputed_token_closes_no_other_out() -> None:
    readings = torch.linspace(0, 1, SIDE * SIDE).repeat(1, 4, 1)
    readings[0, ::2, 20] = 0.0
    readings[0, 1::2, 20] = 1.0
    gate = scores.steady(readings, 0.12)
    assert (~gate).nonzero().tolist() == [[0, 20]]
    # The seed's gate is one number for the picture: the spread of attention over its tokens, which is wide here.
    assert readings.mean(1).std(-1).item() > 0.12


def test_what_is_closed_out_comes_last_and_keeps_its_order() -> None:
    part = torch.arange(6.0)[None]
    gate = torch.tensor([[True, True, True, True, False, False]])
    total = scores.total({"edges": part}, {"edges": 1.0}, gate=gate)
    assert total[0].argsort(descending=True).tolist() == [3, 2, 1, 0, 5, 4]
    everything = scores.total({"edges": part}, {"edges": 1.0}, gate=torch.zeros_like(gate))
    assert scores.choose(everything, 2).tolist() == [[4, 5]]


def test_inward_is_the_middle_and_outward_the_border() -> None:
    like = torch.zeros(1)
    inward = grid(scores.radial(SIDE, 0.65, "inward", like))
    outward = grid(scores.radial(SIDE, 0.65, "outward", like))
    assert inward[2:4, 2:4].min() > inward[0].max()
    assert outward[2:4, 2:4].max() < outward[0].min()
    # The words are exp(−(r/0.65)²) with r counted in half sides; the seed's code is one minus it.
    r2 = (0.5 / 3) ** 2 + (2.5 / 3) ** 2
    assert inward[0, 2].item() == pytest.approx(torch.tensor(-r2 / 0.65**2).exp().item())
    assert torch.allclose(inward + outward, torch.ones(SIDE, SIDE))


def test_edges_are_where_the_picture_changes() -> None:
    pixels = torch.zeros(2, 3, SIDE * 8, SIDE * 8)
    pixels[0, :, :, 28:] = 1.0  # a border inside the fourth column of patches
    pixels[1, :, 20:28, 20:28] = 1.0  # a spot across the third and fourth rows and columns
    found = scores.edges(pixels, 8)
    assert set(scores.choose(found[:1], SIDE)[0].tolist()) == {3 + row * SIDE for row in range(SIDE)}
    assert set(scores.choose(found[1:], 4)[0].tolist()) == {14, 15, 20, 21}
    assert (found > 0).sum(-1).tolist() == [SIDE, 4]


def test_the_margin_of_a_picture_is_no_edge() -> None:
    assert not scores.edges(torch.full((1, 3, 48, 48), 0.7), 8).any()


def test_the_token_that_the_question_means_is_the_most_similar() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(2, SIDE * SIDE, WIDTH, generator=generator)
    question = torch.randn(2, WIDTH, generator=generator)
    tokens[0, 7], tokens[1, 30] = 5 * question[0], 0.1 * question[1]  # length does not count
    assert scores.similarity(tokens, question).argmax(-1).tolist() == [7, 30]
    norms = tokens.norm(dim=-1)  # what the seed's code measured in its place
    assert norms.argmax(-1).tolist()[1] != 30


def test_one_odd_token_among_equal_ones_is_the_farthest() -> None:
    tokens = alike(seed=1)
    tokens[0, 17] = -tokens[0, 17]
    far = scores.distance(tokens)
    assert far.argmax().item() == 17
    unit = F.normalize(tokens[0], dim=-1)
    whole = unit @ unit.T
    direct = 1 - (whole.sum(-1) - whole.diagonal()) / (len(whole) - 1)
    assert torch.allclose(far[0], direct, atol=1e-5)


def test_a_part_that_says_nothing_does_not_decide() -> None:
    flat = torch.full((1, 36), 0.3) + 1e-8 * torch.rand(1, 36)
    assert not scores.unit_range(flat).any()
    rising = torch.arange(36.0)[None]
    total = scores.total({"attention": flat, "edges": rising}, {"attention": 0.9, "edges": 0.1})
    assert total.argmax().item() == 35


def test_parts_count_by_their_weights_whatever_their_units() -> None:
    parts = {"attention": torch.tensor([[0.001, 0.0, 0.0]]), "edges": torch.tensor([[0.0, 900.0, 0.0]])}
    assert scores.total(parts, {"attention": 0.4, "edges": 0.25}).argmax().item() == 0
    assert scores.total(parts, {"attention": 0.2, "edges": 0.25}).argmax().item() == 1


def test_distance_weighs_as_the_full_formula_does() -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randn(3, 36, WIDTH, generator=generator)
    a, s, e = (torch.rand(3, 36, generator=generator) for _ in range(3))
    d = 1 - scores.distance(tokens)  # mean cosine to the others
    names = dict(zip(("attention", "similarity", "edges", "distance"), (0.4, 0.25, 0.25, 0.1), strict=True))
    ours = scores.total({"attention": a, "similarity": s, "edges": e, "distance": 1 - d}, names)
    norm = scores.unit_range
    full = 0.4 * norm(a) + 0.25 * norm(s) - 0.1 * norm(d) + 0.25 * norm(e)
    assert torch.equal(scores.choose(ours, 12), scores.choose(full, 12))


def test_chosen_tokens_stay_in_raster_order() -> None:
    score = torch.tensor([[0.1, 0.9, 0.3, 0.8, 0.2]])
    assert scores.choose(score, 3).tolist() == [[1, 2, 3]]
    assert score.topk(3).indices.tolist() == [[1, 3, 2]]  # the order of scores, as the seed's tokens had it


def test_of_equal_tokens_the_first_are_chosen() -> None:
    assert scores.choose(torch.zeros(1, 100), 7).tolist() == [list(range(7))]


def test_twins_are_merged_and_the_next_best_take_their_places() -> None:
    tokens = torch.eye(6)[None].clone()
    tokens[0, 2] = tokens[0, 0] * 3  # a twin of the best
    score = torch.tensor([[0.9, 0.1, 0.8, 0.7, 0.2, 0.3]])
    kept, members = scores.choose_merged(score, tokens, 3, 0.9)
    assert kept.tolist() == [[0, 3, 5]]
    assert (members @ tokens)[0, 0].tolist() == [2.0, 0, 0, 0, 0, 0]  # the mean of both
    assert members.sum(-1).tolist() == [[1.0, 1.0, 1.0]]
    plain = scores.choose(score, 3)
    assert plain.tolist() == [[0, 2, 3]]


def test_where_all_are_twins_the_number_of_tokens_still_holds() -> None:
    tokens = torch.ones(1, 5, 4)
    score = torch.tensor([[0.1, 0.5, 0.4, 0.3, 0.2]])
    kept, members = scores.choose_merged(score, tokens, 3, 0.9)
    assert kept.tolist() == [[1, 2, 3]]
    assert torch.allclose(members @ tokens, torch.ones(1, 3, 4))
