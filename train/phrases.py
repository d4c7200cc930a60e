"""The train stage of the n-gram family: the answers are counted, and nothing is learnt.

No verifier, no states and no DeepSpeed. Every rank counts, and plays its share of what is held out.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conf.runtime import RankInfo, cache_dir, plain, run_dir, say, write_atomically
from conf.schema import Phrases, RunConfig
from data.distributed import barrier, pick_device
from data.records import CachedSample, PreparedData, Samples
from eval.measure import training_answers
from eval.replay import Place
from models.draft_file import save_draft
from models.phrases import PhraseConfig, PhraseTable
from models.verifier import load_facts
from train.held_out import measure_by_replay
from train.spent import Spent


@dataclass(frozen=True)
class Texts:
    """Held-out samples for a drafter that reads no states: theirs are zero wide."""

    samples: Samples

    @property
    def greedy(self) -> Tensor:
        return self.samples.greedy

    @property
    def valid_indices(self) -> list[int]:
        return self.samples.held_out.nonzero().flatten().tolist()

    def read(self, index: int) -> CachedSample:
        rows, asking = int(self.samples.lengths[index]), int(self.samples.asking[index])
        return CachedSample(
            sample=self.samples[index],
            aux=torch.zeros(rows, 0),
            last=torch.zeros(asking, 0),
            argmax=torch.zeros(asking, dtype=torch.int64),
            lse=torch.zeros(asking),
        )


def count_phrases(cfg: RunConfig, prepared: PreparedData, ranks: RankInfo) -> Path:
    """Write the table and its held-out acceptance -> the folder with both."""
    folder, start = run_dir(cfg) / "best", time.perf_counter()
    config = PhraseConfig.of(cfg.draft, load_facts(cfg.verifier, cache_dir(cfg)))
    if cfg.draft.phrases is Phrases.context:
        table = PhraseTable(config)
    else:
        table = PhraseTable.counted(config, training_answers(prepared.samples))
    seconds = time.perf_counter() - start
    place = Place(pick_device(cfg.run.device, ranks.local_rank), torch.float32)
    texts = Texts(prepared.samples)
    report = measure_by_replay(table, texts, cfg.eval.valid_depth, ranks, place)
    Spent(0, 0, 0.0, seconds, 0).save(run_dir(cfg), ranks)
    if ranks.is_main:
        save_draft(folder, table.config, table.state_dict())
        write_atomically(folder / "acceptance.json", json.dumps(plain(report), indent=2))
        contexts, entries = table.config.contexts, table.config.entries
        say(f"counted {entries:,} phrases after {contexts:,} contexts: {folder}")
        say(f"held-out tau {report.tau:.3f}")
    barrier()
    return folder
