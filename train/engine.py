"""The DeepSpeed engine around the training-time test: the one file that knows DeepSpeed."""

import math
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from conf.runtime import RankInfo
from conf.schema import ConfigError, OptimSection, Precision, RunConfig
from data.records import TTTBatch
from train.ttt import TrainingTimeTest, TTTOutput

TAG = "engine"  # name of DeepSpeed's folder inside a checkpoint


def skip_cpu_build() -> None:
    """DeepSpeed compiles a shared-memory kernel (150 s) at start on a CPU; gloo serves as well."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def micro_batches(optim: OptimSection, world_size: int) -> int:
    """Forward passes a rank makes for one optimizer step: the accumulation that follows."""
    return math.ceil(math.ceil(optim.batch_size / world_size) / optim.micro_batch_size)


def deepspeed_config(cfg: RunConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's own document; Eyrie's knobs fill it so that no number is written twice."""
    accumulation = micro_batches(cfg.optim, world_size)
    filled = {
        "train_micro_batch_size_per_gpu": cfg.optim.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": cfg.optim.clip,
        "bf16": {"enabled": cfg.engine.precision is Precision.bfloat16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    given = dict(cfg.engine.deepspeed)
    zero = {"stage": cfg.engine.zero_stage, **given.pop("zero_optimization", {})}
    return {**given, **filled, "zero_optimization": zero}


class Engine:
    """Forward, backward and step on windows of micro-batches, with exact normalisation."""

    def __init__(self, cfg: RunConfig, module: TrainingTimeTest, ranks: RankInfo):
        self.world_size = ranks.world_size
        self.accumulation = micro_batches(cfg.optim, ranks.world_size)
        self.stage = cfg.engine.zero_stage
        if not torch.cuda.is_available():
            skip_cpu_build()
        self.module = module
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trainable,
            lr=cfg.optim.lr,
            betas=(cfg.optim.betas[0], cfg.optim.betas[1]),
            eps=cfg.optim.eps,
            weight_decay=cfg.optim.weight_decay,
            fused=True,  # 5 ms in place of 49 on the demo's head; on CUDA, too
        )
        initialize: Any = deepspeed.initialize  # its annotations are narrower than what it takes
        self.engine, self.optimizer, _, _ = initialize(
            model=module,
            model_parameters=trainable,
            optimizer=optimizer,
            config=deepspeed_config(cfg, ranks.world_size),
            dist_init_required=False,
        )
        # DeepSpeed clips plain fp32 gradients without keeping their norm.
        self.normless = trainable if self.stage == 0 and self.dtype is torch.float32 else []

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.draft.midlayer.parameters()).dtype

    def __call__(self, batch: TTTBatch, row_weights: Tensor) -> TTTOutput:
        return self.engine(batch, row_weights)

    @torch.no_grad()
    def propose(self, batch: TTTBatch, depth: int) -> Tensor:
        """[depth, T] target ids the draft proposes when it feeds itself, -1 where no chain is."""
        return self.engine(batch, None, depth)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate; ``last`` marks the window's last micro-batch.

        The loss is already divided by the window's global count. DeepSpeed divides by the
        accumulation and averages over ranks; both are multiplied back here.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * (self.accumulation * self.world_size))

    def step(self, lr: float) -> float:
        """Update the weights at learning rate ``lr`` -> the gradient norm before clipping.

        The norm is not finite when a gradient is not: DeepSpeed then skips the update, except at
        stage 0 in fp32.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        gradients = [p.grad for p in self.normless if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else None
        self.engine.step()
        return float(self.engine.get_global_grad_norm() if norm is None else norm)

    def draft_state(self) -> dict[str, Tensor]:
        """The draft's tensors, whole on every rank, in the training precision."""
        parameters = list(self.module.draft.parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=self.stage == 3):
            state = self.module.draft.state_dict()
            return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def save(self, folder: Path) -> None:
        """Write the engine's state; called on every rank. Frozen weights stay out."""
        self.engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=True
        )

    def load(self, folder: Path) -> None:
        """Raises ConfigError when DeepSpeed finds no whole state of its own in ``folder``."""
        path, _ = self.engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=False)
        if path is None:
            raise ConfigError(
                f"{folder}: holds no whole engine state; delete it, and the run goes on from the "
                "checkpoint before"
            )
