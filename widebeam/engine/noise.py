"""Noise without a state: a pure function of a key, so that it is the same whatever else is computed beside it.

A key is a hash of where in a tree the noise belongs: the key of a node, and of which of its children (SplitMix64,
Steele et al. 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor


def child_key(key: Tensor, number: Tensor) -> Tensor:
    """Key of a node's child, int64. The two broadcast."""
    return mix(key + (number + 1) * _GOLDEN)


def gumbel(key: Tensor) -> Tensor:
    """Standard Gumbel noise, float64."""
    uniform = (_shifted(key, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def conditioned(noised: Tensor, most: Tensor, parent: Tensor) -> Tensor:
    """Perturbed log-probabilities of siblings, moved so that the largest of them equals their parent's.

    `noised` are log-probability plus Gumbel noise, of which `most` is the largest among the siblings; all float64. What
    results is distributed as Gumbels given their maximum. Computed in the stable form of Kool, van Hoof and Welling,
    "Stochastic Beams and Where to Find Them" (2019), appendix B. Where `noised` is -inf, so is the result.
    """
    v = parent - noised + (-torch.expm1(noised - most)).log()
    return torch.where(noised > -torch.inf, parent - v.clamp_min(0) - torch.log1p((-v.abs()).exp()), -torch.inf)


def mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64, which wraps around as uint64 does."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
