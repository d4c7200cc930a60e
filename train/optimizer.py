"""The optimizer of a draft: AdamW, or Muon for the matrices that it suits."""

from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import OptimKind, OptimSection

BY_TOKEN = {"lm_head", "embed_tokens"}  # a row a token: no map from one space to another


def optimizer_of(optim: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """For the trainable parameters of ``module``; the learning rate is set at every step."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if optim.kind is OptimKind.adamw:
        return adamw(optim, [p for _, p in named])
    return MuonAndAdamW(optim, named)


def adamw(optim: OptimSection, parameters: list[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=0.0,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,  # 5 ms in place of 49 on the demo's head; on CUDA, too
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon on the matrices inside a draft, AdamW on its head and its vectors, under one state.

    Muon (K. Jordan, 2024) makes a matrix's momentum orthogonal. Its update is scaled by
    0.2 sqrt(max(rows, columns)), as large as AdamW's is, so that rate and decay carry over from
    there (2502.16982, section 2.2). It needs whole matrices.
    """

    def __init__(self, optim: OptimSection, named: list[tuple[str, nn.Parameter]]):
        inside = [p for name, p in named if p.dim() == 2 and name.split(".")[-2] not in BY_TOKEN]
        chosen = {id(p) for p in inside}
        muon = torch.optim.Muon(
            inside, lr=0.0, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.parts = [muon, adamw(optim, [p for _, p in named if id(p) not in chosen])]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Both, on the groups and the state of this one: who loads them replaces them."""
        assert closure is None
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
