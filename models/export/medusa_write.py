"""Writes Medusa heads as the folder that vLLM serves, with their card: whole, checked, or not."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from conf.schema import ConfigError, ExportFormat, Precision
from models.drafts import refuse_other_verifier
from models.export.card import LIMITS, CardFacts, figures_part, front_matter, training_part
from models.export.folder import origin_of, put
from models.export.layout import CARD, CONFIG, ORIGIN, WEIGHTS
from models.export.medusa import medusa_config, medusa_tensors, serve_medusa
from models.export.medusa_check import check_medusa
from models.facts import VerifierFacts
from models.medusa import MedusaConfig, MedusaDraft
from models.token_strings import FILE as TOKENS


def export_medusa(
    draft: MedusaDraft,
    facts: VerifierFacts,
    folder: Path,
    card: CardFacts,
    dtype: Precision = Precision.bfloat16,
    kind: ExportFormat = ExportFormat.vllm,
) -> Path:
    """config.json, model.safetensors and README.md; an older export there is replaced.

    Raises ConfigError for another engine, for another verifier, and when the written files do not
    pass the check.
    """
    if kind is not ExportFormat.vllm:
        raise ConfigError(
            f"--to {kind.value}: Medusa heads are written for vLLM alone, no other engine of these "
            "serves them; take --to vllm"
        )
    refuse_other_verifier(folder, draft.config, facts)

    def fill(place: Path) -> list[str]:
        save_file(medusa_tensors(draft, dtype), place / WEIGHTS, metadata={"format": "pt"})
        (place / WEIGHTS).chmod(0o644)  # safetensors writes 0600; a server is another user
        config = json.dumps(medusa_config(draft.config, dtype), indent=2) + "\n"
        (place / CONFIG).write_text(config, encoding="utf-8")
        (place / ORIGIN).write_text(origin_of(card), encoding="utf-8")
        if card.tokens is not None:
            shutil.copyfile(card.tokens, place / TOKENS)
        commands = serve_medusa(card, draft.config, folder)
        (place / CARD).write_text(card_text(draft.config, card, commands), encoding="utf-8")
        return check_medusa(place)

    return put(folder, fill)


def card_text(draft: MedusaConfig, card: CardFacts, commands: list[str]) -> str:
    """README.md of the folder."""
    return "\n".join(
        [
            *front_matter(card, "medusa"),
            f"# Medusa heads for {card.verifier.rstrip('/').rpartition('/')[2]}",
            "",
            f"Heads for speculative decoding: each guesses a token that `{card.verifier}` then",
            "verifies, so that several tokens come out of one verifier step and the text stays the",
            "verifier's own. Made with Eyrie.",
            "",
            "## Serve",
            "",
            "```bash",
            *commands,
            "```",
            "",
            "## Heads",
            "",
            *heads_part(draft, card),
            "",
            "## Training",
            "",
            *training_part(card),
            "",
            "## Figures",
            "",
            *figures_part(card.figures),
            "",
            "## What it is not",
            "",
            *LIMITS,
            "",
        ]
    )


def heads_part(draft: MedusaConfig, card: CardFacts) -> list[str]:
    rows = "the verifier's own rows, frozen" if draft.shared_rows else "rows of their own"
    return [
        f"- {draft.heads} heads, head k guesses the token k places after the one emitted last; "
        f"{draft.layers} residual blocks of width {draft.hidden_size} each, {rows}",
        f"- draft vocabulary {draft.draft_vocab_size:,} of {draft.vocab_size:,} tokens",
        f"- for `{card.verifier}`, revision {card.revision or 'not recorded'}, weights "
        f"fingerprint {card.verifier_fingerprint or 'not recorded'}; states captured in "
        f"{card.verifier_dtype}, after the final norm",
    ]
