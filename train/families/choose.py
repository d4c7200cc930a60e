"""What DeepSpeed trains of each family: a module with a draft, whose forward is its loss."""

import shutil

import torch

from conf.runtime import cache_dir
from conf.schema import ConfigError, LayerInit, RunConfig
from models.drafts import Draft
from models.eagle1 import Eagle1Draft
from models.eagle3 import Eagle3Draft
from models.kernels import choose_kernel
from models.last_layer import take_last_layer
from models.medusa import MedusaDraft
from models.phrases import PhraseTable
from models.small_model import SmallModel
from models.verifier import VerifierEnds
from train.families.eagle1 import FeatureRegression
from train.families.medusa import MedusaTraining
from train.families.small_model import SmallModelTest
from train.loss import Distillation
from train.ttt import TrainingTimeTest

Trainee = TrainingTimeTest | FeatureRegression | MedusaTraining | SmallModelTest


def trainee_for(
    cfg: RunConfig, draft: Draft, ends: VerifierEnds, device: torch.device, dtype: torch.dtype
) -> Trainee:
    """On ``device``, its weights still in float32; ``dtype`` is what it is going to compute in."""
    match draft:
        case Eagle3Draft():
            return training_time_test(cfg, draft, ends, device, dtype).to(device)
        case Eagle1Draft():
            return feature_regression(cfg, draft, device, dtype).to(device)
        case MedusaDraft():
            teacher = teacher_for(cfg, draft, ends, device, dtype)
            module = MedusaTraining(draft, teacher, cfg.ttt)
            if cfg.engine.compile:
                refuse_missing_compiler(device)
                module.compile_parts()
            return module.to(device)
        case SmallModel():
            module = SmallModelTest(draft, teacher_for(cfg, draft, ends, device, dtype))
            if cfg.engine.compile:
                refuse_missing_compiler(device)
                module.compile_parts()
            return module.to(device)
        case PhraseTable():
            raise AssertionError("phrases are counted, not trained")


def training_time_test(
    cfg: RunConfig, draft: Eagle3Draft, ends: VerifierEnds, device: torch.device, dtype: torch.dtype
) -> TrainingTimeTest:
    if cfg.draft.layer_init is LayerInit.verifier:
        take_last_layer(draft, cfg.verifier, cache_dir(cfg))
    kernel = choose_kernel(cfg.engine.attention, device, dtype, draft.config.head_dim)
    teacher = teacher_for(cfg, draft, ends, device, dtype)
    module = TrainingTimeTest(draft, teacher, cfg.ttt, kernel, cfg.engine.recompute)
    if cfg.engine.compile:
        refuse_missing_compiler(device)
        module.compile_parts()
    return module


def feature_regression(
    cfg: RunConfig, draft: Eagle1Draft, device: torch.device, dtype: torch.dtype
) -> FeatureRegression:
    kernel = choose_kernel(cfg.engine.attention, device, dtype, draft.config.head_dim)
    if cfg.engine.compile:
        refuse_missing_compiler(device)
        draft.layer.mlp.compile(dynamic=True)  # rows vary without a limit
    return FeatureRegression(draft, kernel)


def teacher_for(
    cfg: RunConfig,
    draft: Eagle3Draft | MedusaDraft | SmallModel,
    ends: VerifierEnds,
    device: torch.device,
    dtype: torch.dtype,
) -> Distillation:
    """The loss, with the verifier's rows of the draft vocabulary."""
    own_ids = torch.arange(draft.config.draft_vocab_size)
    head = ends.head[draft.to_target_ids(own_ids)].to(device=device, dtype=dtype)
    return Distillation(cfg.loss.kind, head, ends.config)


def refuse_missing_compiler(device: torch.device) -> None:
    """torch.compile writes C++ for a CPU; without a compiler the first step would fail."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        raise ConfigError(
            "engine.compile=true: needs a C++ compiler on a CPU, and none is installed; install "
            "g++, or take engine.compile=false"
        )
