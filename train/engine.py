"""The DeepSpeed engine around what is trained: the one file that knows DeepSpeed."""

import re
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.serialization import safe_globals

from conf.runtime import RankInfo
from conf.schema import ConfigError, Precision, RunConfig
from data.records import TTTBatch
from train.average import Average
from train.families.choose import Trainee
from train.optimizer import optimizer_of
from train.reshard import fill_stage_2, fill_stage_3, part_files, with_moments
from train.ttt import TrainingTimeTest, TTTOutput

STATE = "optimizer_state_dict"  # in the files of ZeRO's parts
TAG = "engine"  # name of DeepSpeed's folder inside a checkpoint
AVERAGE = "average.pt"  # beside it, where optim.average is given
WAY_OUT = "delete its checkpoint folder, and the run goes on from the one before"


def skip_cpu_build() -> None:
    """DeepSpeed compiles a shared-memory kernel (150 s) at start on a CPU; gloo serves as well."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed_config(cfg: RunConfig) -> dict[str, Any]:
    """DeepSpeed's own document; Eyrie's knobs fill it so that no number is written twice.

    Windows differ in their number of micro-batches, so Engine.backward says which one is the
    last, and the two batch sizes here are ones that scale nothing.
    """
    filled = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.optim.clip,
        "bf16": {"enabled": cfg.engine.precision is Precision.bfloat16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    given = dict(cfg.engine.deepspeed)
    zero = {"stage": cfg.engine.zero_stage, **given.pop("zero_optimization", {})}
    return {**given, **filled, "zero_optimization": zero}


class Whole(nn.Module):
    """A family's training as DeepSpeed wraps it: what it returns are plain tensors.

    Stage 3 brings weights back for the backward through hooks on a module's outputs, and looks for
    tensors in tuples alone. The weights that the training-time test takes without calling their
    module (slices of projections, the head) hang on this one, so its own hooks are passed by.
    """

    def __init__(self, test: Trainee):
        super().__init__()
        self.test = test

    def forward(self, batch: TTTBatch, row_weights: Tensor | None, own: int = 0):
        if own:
            assert isinstance(self.test, TrainingTimeTest), "others are replayed"
            return self.test.forward(batch, None, own)
        assert row_weights is not None
        return tuple(vars(self.test.forward(batch, row_weights)).values())


class Engine:
    """Forward, backward and step on windows of micro-batches, with exact normalisation."""

    def __init__(self, cfg: RunConfig, module: Trainee, ranks: RankInfo):
        self.world_size, self.rank, self.is_main = ranks.world_size, ranks.rank, ranks.is_main
        self.stage = cfg.engine.zero_stage
        if not torch.cuda.is_available():
            skip_cpu_build()
        self.module = module
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.trainable = sum(p.numel() for p in trainable)  # now: stage 3 empties parameters
        self.frozen = sum(p.numel() for p in module.parameters()) - self.trainable
        optimizer = optimizer_of(cfg.optim, module)
        initialize: Any = deepspeed.initialize  # its annotations are narrower than what it takes
        self.engine, self.optimizer, _, _ = initialize(
            model=Whole(module),
            model_parameters=trainable,
            optimizer=optimizer,
            config=deepspeed_config(cfg),
            dist_init_required=False,
        )
        self.engine.checkpoint_engine.load = read_weights
        self.window, self.first = ExitStack(), True  # of the micro-batches of one step
        # At stage 0 in bf16 DeepSpeed makes a step without gradients to allocate the moments; Adam
        # would count it, and its first real update would be a quarter too small.
        if self.stage == 0 and self.dtype is torch.bfloat16:
            optimizer.state.clear()
        # DeepSpeed clips plain fp32 gradients without keeping their norm.
        decay = cfg.optim.average
        self.average = None if decay is None else Average(trainable, decay)
        self.normless = trainable if self.stage == 0 and self.dtype is torch.float32 else []

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.module.parameters() if p.requires_grad)

    def __call__(self, batch: TTTBatch, row_weights: Tensor) -> TTTOutput:
        return TTTOutput(*self.engine(batch, row_weights))

    @torch.no_grad()
    def propose(self, batch: TTTBatch, depth: int) -> Tensor:
        """[depth, T] target ids an EAGLE-3 head proposes when it feeds itself, -1 where no chain
        is."""
        return self.engine(batch, None, depth)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate; ``last`` marks the window's last micro-batch.

        The loss is already divided by the window's global count. DeepSpeed averages over ranks;
        that is multiplied back here.
        Stages 2 and 3 reduce gradients in the order in which they arrive, which depends on a
        batch's rows: stage 2 then adds up those of different weights. Reduced once, after the
        last micro-batch, they go in the order of the weights; it costs one gradient on each rank.
        """
        if self.stage < 2:
            self.engine.set_gradient_accumulation_boundary(last)
        elif self.first:
            self.window.enter_context(self.engine.coalesce_grad_reduction())
        self.engine.backward(loss * self.world_size)
        self.first = last
        if last:
            self.window.close()

    def step(self, lr: float, supervised: Tensor) -> float:
        """Update the weights at learning rate ``lr`` -> the gradient norm before clipping.

        Where nothing was ``supervised`` ([], over all ranks), the weights stay as they are: Adam's
        momentum would move them all the same.
        The norm is not finite when a gradient is not: DeepSpeed then skips the update, except at
        stage 0 in fp32.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr if supervised else 0.0
        gradients = [p.grad for p in self.normless if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else None
        self.engine.step()
        if self.average is not None and supervised:
            self.average.add()
        return float(self.engine.get_global_grad_norm() if norm is None else norm)

    def averaged(self) -> AbstractContextManager[None]:
        """While it is open, the draft has its average weights, if optim.average keeps them."""
        return nullcontext() if self.average is None else self.average.in_place()

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
        if self.is_main:
            if self.average is not None:
                torch.save(self.average.state(), folder / AVERAGE)
            for script in folder.glob("*.py"):  # DeepSpeed's converters; best/ is converted
                script.unlink()

    def load(self, folder: Path, world_size: int) -> None:
        """Take the state that ``world_size`` ranks wrote, whatever their number is now.

        Raises ConfigError when ``folder`` holds no whole state, or one that would run code.
        """
        if self.stage and world_size != self.world_size:
            self.load_parts_of(folder / TAG, world_size)
        else:
            path, _ = self.engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=False)
            if path is None:
                raise ConfigError(f"{folder}: holds no whole engine state; {WAY_OUT}")
        if self.average is not None:
            self.average.load(read_weights(str(folder / AVERAGE), self.device))

    def load_parts_of(self, folder: Path, world_size: int) -> None:
        """Join the parts of ``world_size`` ranks and take this rank's own. Costs each rank a look
        at all files; they are mapped, so memory holds one parameter (stage 3: one part kind)."""
        files = part_files(folder, world_size)
        states = [read_weights(str(path), "cpu", mapped=True)[STATE] for path in files]
        fresh = self.optimizer.state_dict()
        if self.stage < 3:
            own = with_moments(fresh, self.optimizer.single_partition_of_fp32_groups, states)
            fill_stage_2(own, states, self.rank)
            self.optimizer.load_state_dict([own] * self.world_size, load_from_fp32_weights=True)
            self.optimizer.update_lp_params()  # the weights that compute are copies of masters
        else:
            own = with_moments(fresh, self.optimizer.fp32_partitioned_groups_flat, states)
            groups = self.optimizer.fp16_groups
            fill_stage_3(own, states, [p.ds_numel for group in groups for p in group], self.rank)
            self.optimizer.checkpoint_event_prologue()  # as DeepSpeed does around its own loading
            self.optimizer.load_state_dict([own] * self.world_size)
            self.optimizer.checkpoint_event_epilogue()


def enum_member(kind: type, name: str) -> ZeroStageEnum:
    """How Python before 3.11.4 pickles an enum's member: as getattr(class, name)."""
    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise UnpicklingError("GLOBAL getattr of something else than a ZeRO stage")
    return ZeroStageEnum[name]


# What is in DeepSpeed's files beside plain values.
STATE_CLASSES = [LossScaler, ZeroStageEnum, fragment_address, (enum_member, "builtins.getattr")]


def read_weights(path: str, map_location: Any = None, mapped: bool = False) -> Any:
    """Tensors and plain values of one of DeepSpeed's files; nothing that it names is run.

    DeepSpeed's own reader unpickles anything. ``mapped``: bytes are read when they are used.
    Raises ConfigError when torch cannot take the file.
    """
    try:
        with safe_globals(STATE_CLASSES):
            return torch.load(path, map_location, weights_only=True, mmap=mapped)
    except (UnpicklingError, RuntimeError, OSError, EOFError) as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        wrong = f"asks to run {asked[1]}, which was refused" if asked else "cannot be read"
        raise ConfigError(f"{path}: {wrong}; {WAY_OUT}") from error
