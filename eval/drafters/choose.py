"""Which drafter plays a draft, and with which verifiers."""

from collections.abc import Sequence

import torch

from conf.schema import ConfigError
from conf.shapes import Shape
from eval.drafters.eagle3 import Eagle3Drafter
from eval.drafters.medusa import MedusaDrafter
from eval.drafters.phrases import PhraseDrafter
from eval.drafters.small_model import SmallModelDrafter
from eval.propose import Drafter
from models.drafts import Draft, facts_read
from models.eagle1 import Eagle1Draft
from models.eagle3 import Eagle3Draft
from models.medusa import MedusaDraft
from models.phrases import PhraseTable
from models.small_model import SmallModel
from models.verifier import Verifier


def drafter_for(draft: Draft, batch: int, capacity: int, device: torch.device) -> Drafter:
    """The side of ``batch`` sequences, of at most ``capacity`` rows each, guesses included."""
    match draft:
        case Eagle3Draft() | Eagle1Draft():
            return Eagle3Drafter(draft, batch, capacity, device)
        case PhraseTable():
            return PhraseDrafter(draft, batch, device)
        case MedusaDraft():
            return MedusaDrafter(draft, device)
        case SmallModel():
            return SmallModelDrafter(draft, batch, capacity, device)


def refuse_shapes(draft: Draft, shapes: Sequence[Shape], device: torch.device) -> None:
    """Raise ConfigError for the first shape that the draft cannot propose."""
    drafter = drafter_for(draft, 1, 1, device)
    for shape in shapes:
        drafter.refuse(shape)


def check_pair(verifier: Verifier, draft: Draft) -> None:
    """Raise ConfigError when the draft reads other states than this verifier gives.

    A wrong layer id changes no shape: it would only lower the acceptance.
    """
    for name in facts_read(draft.config):
        of_draft, of_verifier = getattr(draft.config, name), getattr(verifier.facts, name)
        if of_draft != of_verifier:
            raise ConfigError(
                f"draft {name}={of_draft}: the verifier {verifier.facts.path} has {of_verifier}; "
                "evaluate the head with the verifier and verifier.aux_layers it was trained on"
            )
