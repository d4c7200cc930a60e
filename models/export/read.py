"""Reads a head from a folder that others published or that an export wrote."""

from pathlib import Path

import torch
from torch import nn

from conf.runtime import note_once
from models.drafts import refuse_other_verifier
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.dialect import described
from models.export.stored import completed, read_tensors, vocabulary
from models.verifier import VerifierEnds, VerifierFacts
from models.vocab import DraftVocab


def read_head(folder: Path, facts: VerifierFacts, ends: VerifierEnds) -> Eagle3Draft:
    """The head in ``folder`` for inference, in the precision and on the device of ``ends``.

    The embedding is the verifier's own, as serving engines share it. What the files leave open is
    said once. Raises ConfigError for a head of another verifier, and naming the key or tensor for
    one that cannot be run here.
    """
    found = described(folder, facts)
    refuse_other_verifier(folder, found.draft, facts)
    with torch.device("meta"):  # its shapes alone; the weights are the file's
        draft = Eagle3Draft(found.draft)
    shapes = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    whole = completed(read_tensors(folder), found.draft, ends, shapes)
    for line in [*found.assumed, *whole.assumed]:
        note_once(f"{folder}: {line}")
    draft.load_state_dict(whole.tensors, assign=True)
    draft = draft.to(device=ends.embedding.device, dtype=ends.embedding.dtype)
    draft.embed_tokens.weight = nn.Parameter(ends.embedding)
    return draft.eval().requires_grad_(False)


def read_vocabulary(folder: Path, draft: DraftConfig) -> DraftVocab:
    """The tokens of the head in ``folder``. Raises ConfigError as ``read_head`` does."""
    return DraftVocab.of_ids(
        vocabulary(read_tensors(folder), draft).sort().values, draft.vocab_size
    )
