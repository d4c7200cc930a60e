"""The cache of the acceptance bench as a recipe reads it, and as the file that other trainers read.

Capture stored more aux streams than any recipe reads, the last layer's among them: its final norm
gives the state that the teacher's head reads, at rows where the cache does not keep it, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from acceptance_data import overrides_of
from acceptance_feed import Ends, Facts, FeedSample, write_feed
from torch import nn

from conf.compose import load_config
from conf.runtime import cache_dir
from conf.schema import RunConfig
from data.capture_job import manifest_of
from data.prepare import find_prepared
from data.reader import ShardReader
from data.records import CachedPack, PreparedData
from models.start import vocabulary_to_train
from models.verifier import Verifier, VerifierFacts, load_facts

CPU = torch.device("cpu")


class SomeStates(ShardReader):
    """A cache read as if it held ``layers`` alone, and only its first ``samples`` to train on."""

    def __init__(self, folder: Path, layers: list[int], samples: int | None):
        super().__init__(folder)
        stored, width = self.manifest.aux_layers, self.manifest.hidden_size
        places = [stored.index(layer) for layer in layers]
        self.columns = torch.cat([torch.arange(width) + place * width for place in places])
        self.whole = places == list(range(len(stored)))
        self.samples = samples
        self.stored = self.manifest
        self.manifest = replace(self.manifest, aux_layers=layers)

    @property
    def train_indices(self) -> list[int]:
        return super().train_indices[: self.samples]

    def read_pack(self, indices) -> CachedPack:
        pack = super().read_pack(indices)
        return pack if self.whole else replace(pack, aux=pack.aux[:, self.columns])


@dataclass(frozen=True)
class Inputs:
    cfg: RunConfig
    prepared: PreparedData
    source: SomeStates


def find_inputs(
    work: Path, kind: str, layers: list[int], samples: int | None, words: list[str]
) -> Inputs:
    """The fixed cache of ``kind`` and the settings of one recipe."""
    stored = load_config([*overrides_of(work, kind), "stages=[prepare,capture]"])
    prepared = find_prepared(stored)
    manifest = manifest_of(stored, prepared, load_facts(stored.verifier, cache_dir(stored)))
    folder = cache_dir(stored) / f"capture-{manifest.fingerprint}"
    own = [word for word in overrides_of(work, kind) if not word.startswith("verifier.aux")]
    chosen = f"verifier.aux_layers={layers}".replace(" ", "")
    cfg = load_config([*own, chosen, "optim.epochs=1000", *words])
    return Inputs(cfg, prepared, SomeStates(folder, layers, samples))


def feed_samples(
    source: SomeStates, verifier: Verifier, indices: list[int]
) -> Iterator[FeedSample]:
    """The training samples with the state after the final norm at all rows."""
    width, read = source.manifest.hidden_size, len(source.manifest.aux_layers) - 1
    norm: nn.Module = verifier.model.get_decoder().norm
    for index in indices:
        pack = source.read_pack([index])
        (sample,) = pack.samples
        aux, stream = pack.aux[:, : read * width], pack.aux[:, read * width :]
        with torch.no_grad():
            last = norm(stream)
        yield FeedSample(sample.input_ids, sample.loss_mask, aux, last)


def make_feed(work: Path, path: Path) -> None:
    """Write the training samples of the whole cache."""
    inputs = find_inputs(work, "whole", [2, 15, 27, 30], None, [])
    cfg, source = inputs.cfg, inputs.source
    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), CPU, torch.bfloat16)
    facts = verifier.facts
    vocab = vocabulary_to_train(cfg.draft, facts, inputs.prepared.token_counts)
    told = facts_of(facts, len(vocab.target_ids), str(work), [2, 15, 27])
    ends = Ends(verifier.ends.head, verifier.ends.embedding, vocab.d2t, vocab.t2d)
    indices = source.train_indices
    lengths = source.lengths[torch.tensor(indices)].tolist()
    write_feed(path, told, ends, lengths, feed_samples(source, verifier, indices))


def facts_of(facts: VerifierFacts, draft_vocab: int, source: str, layers: list[int]) -> Facts:
    layer = facts.layer
    return Facts(
        source, facts.path, facts.num_layers, layers, facts.hidden_size,
        layer.intermediate_size, layer.num_heads, layer.num_kv_heads, layer.head_dim,
        facts.vocab_size, draft_vocab, layer.rms_norm_eps, facts.max_positions, facts.rope,
    )  # fmt: skip
