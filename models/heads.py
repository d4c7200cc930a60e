"""A head on disk, whoever wrote it: training (draft.json) or others (config.json)."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from conf.schema import ConfigError
from models.draft_file import CONFIG, WEIGHTS, load_draft, read_config
from models.drafts import AnyConfig, Draft, refuse_other_verifier
from models.eagle1 import Eagle1Draft
from models.eagle3 import DraftConfig
from models.export.dialect import described
from models.export.layout import CONFIG as PUBLISHED
from models.export.layout import WEIGHTS as PUBLISHED_WEIGHTS
from models.export.medusa import is_medusa, medusa_config_of, read_medusa
from models.export.read import read_head, read_vocabulary
from models.export.read_eagle1 import eagle1_config_of, is_eagle1_folder, read_eagle1
from models.export.stored import PICKLED
from models.model_folder import is_model_folder, published_config, read_model
from models.verifier import VerifierEnds, VerifierFacts, digest_of
from models.vocab import DraftVocab


def is_own(folder: Path) -> bool:
    """Whether training wrote it."""
    return (folder / CONFIG).is_file()


def config_of(folder: Path, facts: VerifierFacts) -> AnyConfig:
    """Sizes and switches, without the weights. Raises ConfigError when they cannot be had."""
    if is_own(folder):
        return read_config(folder)
    if is_eagle1_folder(folder):
        return eagle1_config_of(folder)
    if is_medusa(folder):
        return medusa_config_of(folder)
    if is_model_folder(folder):
        return published_config(folder, facts)
    return described(folder, facts).draft


def load_head(folder: Path, facts: VerifierFacts, ends: VerifierEnds) -> Draft:
    """For inference, in the precision and on the device of ``ends``, with its embedding; an
    EAGLE-1 head also with its own head and final norm.

    Raises ConfigError for a head of another verifier or of other layers of it.
    """
    if not is_own(folder) and is_medusa(folder):
        return read_medusa(folder, facts, ends)
    device, dtype = ends.embedding.device, ends.embedding.dtype
    if not is_own(folder) and is_model_folder(folder):
        draft = read_model(folder, published_config(folder, facts), dtype)
        return draft.to(device).eval().requires_grad_(False)
    published_eagle1 = not is_own(folder) and is_eagle1_folder(folder)
    if not is_own(folder) and not published_eagle1:
        return read_head(folder, facts, ends)
    refuse_other_verifier(folder, config_of(folder, facts), facts)
    if published_eagle1:
        return read_eagle1(folder, ends)
    draft = load_draft(folder, device, dtype, ends.embedding)
    if isinstance(draft, Eagle1Draft):
        draft.share(ends)
    return draft


def vocabulary_of(folder: Path, draft: DraftConfig) -> DraftVocab:
    """The tokens that the head in ``folder`` can propose."""
    if not is_own(folder):
        return read_vocabulary(folder, draft)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return DraftVocab(file.get_tensor("d2t"), file.get_tensor("t2d"))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{folder / WEIGHTS}: not the weights of its {CONFIG} ({error}); give a best/ folder "
            "written by training"
        ) from error


def digest_of_head(folder: Path) -> str:
    """Sixteen hex digits that change when its configuration or any weights do."""
    config = folder / (CONFIG if is_own(folder) else PUBLISHED)
    names = (WEIGHTS, PUBLISHED_WEIGHTS) if is_own(folder) else (PUBLISHED_WEIGHTS, PICKLED)
    weights = [folder / name for name in names if (folder / name).is_file()][:1]
    if is_model_folder(folder):
        weights = sorted(folder.glob("*.safetensors"))  # a large model has several files
    if not config.is_file() or not weights:
        raise ConfigError(
            f"draft.init={folder}: holds no head, and the run begins with it; put it back, or "
            "choose another run.name"
        )
    return digest_of(config.read_bytes(), weights)
