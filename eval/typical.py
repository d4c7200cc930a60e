"""Typical acceptance: LOSSY. A guess stands where the verifier finds it likely enough.

Medusa's rule (2401.10774, section 3.3.1): guess x stands with target(x) > min(EPSILON, DELTA *
exp(-H)), H the entropy of the target there. The text is no longer a sample of the verifier, so no
rule chooses this one by itself, and every page that names it says so.
"""

import torch
from torch import Tensor

from eval.propose import Proposal
from eval.verify import Rows, Verdict
from models.sampling import likeliest

EPSILON, DELTA = 0.09, 0.3  # the paper's


def stands_typically(target: Tensor, tokens: Tensor) -> Tensor:
    """target [..., n, V] probabilities, tokens [..., n] -> [..., n] bool."""
    entropy = torch.special.entr(target.double()).sum(-1)
    needed = (DELTA * torch.exp(-entropy)).clamp_max(EPSILON)
    return target.gather(-1, tokens[..., None]).squeeze(-1).double() > needed


def accept_typical(target: Rows, proposal: Proposal, counts: Tensor | None = None) -> Verdict:
    """The longest path whose guesses all stand, the likeliest of equally long ones, and then the
    verifier's argmax, as the paper has it. Rolls nothing. Chains and trees.

    ``target`` has distributions [..., M+1, V]. No more than ``counts`` [...] levels stand.
    """
    rows, parents, depth = target.every(), proposal.parents, proposal.shape.depth
    at = parents[..., None].expand(*parents.shape, rows.shape[-1])
    before = rows.gather(-2, at)  # [..., M, V]: what each guess is judged by
    stands = stands_typically(before, proposal.ids)
    chances = before.gather(-1, proposal.ids[..., None]).squeeze(-1).double().log()
    most = depth if counts is None else counts.clamp_max(depth)[..., None]
    levels = torch.zeros_like(parents[..., :1].expand(*parents.shape[:-1], parents.shape[-1] + 1))
    scores = torch.zeros_like(levels, dtype=torch.float64)  # log-chance of the path to a node
    alive = torch.ones_like(levels, dtype=torch.bool)  # the root is
    for _ in range(depth):  # each pass settles one level more
        levels = with_root(levels.gather(-1, parents) + 1, 0)
        scores = with_root(scores.gather(-1, parents) + chances, 0.0)
        alive = with_root(alive.gather(-1, parents) & stands, 1.0)
    alive = alive & (levels <= most)
    length = torch.where(alive, levels, 0).amax(-1)  # [...]
    longest = alive & (levels == length[..., None])
    node = torch.where(longest, scores, -torch.inf).argmax(-1)
    return Verdict(length, token_after(target, node), path_to(node, parents, length, depth))


def with_root(values: Tensor, root: float) -> Tensor:
    """[..., M] of the guesses -> [..., M+1] of all nodes."""
    return torch.cat([torch.full_like(values[..., :1], root), values], -1)


def token_after(target: Rows, node: Tensor) -> Tensor:
    return likeliest(target.at(node))


def path_to(node: Tensor, parents: Tensor, length: Tensor, depth: int) -> Tensor:
    """[..., depth]: the nodes from the root's child down to ``node``, then 0."""
    above, path = with_root(parents, 0), node.new_zeros(*node.shape, depth)
    for back in range(depth):
        place = length - 1 - back  # of the node at hand; below 0 it is the root
        inside = place >= 0
        slot = place.clamp_min(0)[..., None]
        kept = torch.where(inside[..., None], node[..., None], path.gather(-1, slot))
        path = path.scatter(-1, slot, kept)
        node = above.gather(-1, node[..., None]).squeeze(-1)
    return path
