"""What a head learns from: where the text is from, and how far the verifier agrees with it.

A head learns the verifier's own continuations. Where few supervised tokens are the verifier's
top choice, either the answers are another model's (0.3 to 0.5 is usual, and acceptance suffers),
or mask, template or tokenizer do not fit (below 0.15, as far as has been reported).
"""

from dataclasses import dataclass
from pathlib import Path

from conf.runtime import cache_dir
from conf.schema import ConfigError, JobError, RunConfig
from data.manifest import Manifest, manifest_file, read_manifest
from data.records import PreparedData
from models.export.card import DataFacts


@dataclass(frozen=True)
class Agreement:
    """Of all captured tokens, or of some first ones."""

    tokens: int
    supervised: int
    agreed: int  # supervised ones that are the verifier's top choice

    @property
    def share(self) -> float:
        return self.supervised / max(self.tokens, 1)

    @property
    def top1(self) -> float:
        return self.agreed / max(self.supervised, 1)

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} of {self.tokens:,} tokens supervised; the verifier's top choice "
            f"agrees with {self.top1:.1%} of them"
        )


def agreement_of(manifest: Manifest) -> Agreement:
    return Agreement(
        sum(shard.tokens for shard in manifest.shards),
        sum(shard.supervised for shard in manifest.shards),
        sum(shard.agreed for shard in manifest.shards),
    )


def find_agreement(cfg: RunConfig, prepared: PreparedData) -> Agreement | None:
    """From the newest complete capture of these samples by this verifier; None without one."""
    found: list[Path] = sorted(
        (manifest_file(folder) for folder in cache_dir(cfg).glob("capture-*")),
        key=lambda path: path.stat().st_mtime if path.is_file() else 0.0,
        reverse=True,
    )
    for path in found:
        try:
            manifest = read_manifest(path.parent)
        except ConfigError:  # not complete, or of another version
            continue
        ours = manifest.prepared == prepared.fingerprint
        if ours and manifest.verifier_path == cfg.verifier.path:
            return agreement_of(manifest)
    return None


def require_agreement(cfg: RunConfig, agreement: Agreement) -> None:
    """Of what a training is about to learn from. Raises JobError below capture.min_agreement."""
    paths = ",".join(cfg.data.path)
    if agreement.top1 < cfg.capture.min_agreement:
        raise JobError(
            f"capture.min_agreement={cfg.capture.min_agreement:g}: the verifier's top choice is "
            f"{agreement.top1:.1%} of the supervised tokens of data.path={paths}, "
            "as with a wrong mask or tokenizer; look at them with python -m data.preview, have the "
            "verifier answer the prompts with python -m data.regenerate, or train all the same "
            "with capture.min_agreement=0"
        )


def data_facts(cfg: RunConfig, prepared: PreparedData) -> DataFacts:
    """For the card of a head trained on ``prepared``."""
    agreement = find_agreement(cfg, prepared)
    return DataFacts(
        origin=", ".join(cfg.data.path),
        samples=int((~prepared.samples.held_out).sum()),
        tokens=int(prepared.token_counts.sum()),
        agreement=None if agreement is None else agreement.top1,
    )
