"""What the tests of the cache share: samples by hand, and a cache written without a verifier."""

import os
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from conf.schema import RunConfig, VerifierSection
from data.manifest import FORMAT_VERSION, Manifest, shard_folder, write_manifest
from data.records import PreparedData, Samples, SampleStates, Skipped, TokenizedSample
from data.shard_file import describe, write_shard
from data.shard_plan import RowSizes, plan_spans
from data.shards import HiddenStateShard
from models.verifier import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ["<s>", "</s>", "<|end|>", "<|return|>", "<|eot|>", "<|user|>", "<|call|>", "<|start|>"]
LENGTHS = [5, 9, 33, 12, 7, 64, 21, 18, 40, 11, 6, 27, 50, 14, 8, 30, 19, 23, 10, 16]


@pytest.fixture
def some_samples() -> list[TokenizedSample]:
    """Twenty samples of 5 to 64 tokens below id 128; every fifth is held out, half are greedy."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index, length in enumerate(LENGTHS):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[length // 3 :] = True
        ids = torch.randint(3, 128, (length,), generator=generator)
        samples.append(
            TokenizedSample(f"sample-{index}", ids, mask, index % 2 == 0, index % 5 == 4)
        )
    return samples


@pytest.fixture
def prepared(some_samples: list[TokenizedSample], tmp_path: Path) -> PreparedData:
    counts = torch.zeros(128, dtype=torch.int64)
    rows = Skipped(len(some_samples), len(some_samples))
    return PreparedData(tmp_path, "prepared00", flat(some_samples), counts, counts, rows)


@pytest.fixture
def flatten() -> Callable[[list[TokenizedSample]], Samples]:
    return flat


def flat(samples: list[TokenizedSample]) -> Samples:
    """What the prepare stage makes of ``samples``."""
    ids = [torch.tensor(list(sample.id.encode()), dtype=torch.uint8) for sample in samples]
    return Samples(
        tokens=torch.cat([sample.input_ids for sample in samples]).int(),
        mask=torch.cat([sample.loss_mask for sample in samples]).to(torch.uint8),
        offsets=torch.tensor([0, *(len(sample.input_ids) for sample in samples)]).cumsum(0),
        id_text=torch.cat(ids),
        id_offsets=torch.tensor([0, *map(len, ids)]).cumsum(0),
        greedy=torch.tensor([sample.greedy for sample in samples]),
        held_out=torch.tensor([sample.held_out for sample in samples]),
        prompts=torch.arange(len(samples)),
    )


@pytest.fixture
def start_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a script that finds ``cfg`` and ``prepared``; ``python`` is what starts it."""

    def start(
        text: str, cfg: RunConfig, prepared: PreparedData, python: list[str]
    ) -> subprocess.CompletedProcess:
        payload, script = tmp_path / "job.pickle", tmp_path / "job.py"
        payload.write_bytes(pickle.dumps((cfg, prepared)))
        head = f"import pickle\ncfg, prepared = pickle.load(open({str(payload)!r}, 'rb'))\n"
        script.write_text(head + text)
        return subprocess.run(
            [*python, str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return start


@pytest.fixture
def write_cache() -> Callable[[Path, list[TokenizedSample]], Path]:
    return cache_of_random_states


def cache_of_random_states(folder: Path, samples: list[TokenizedSample]) -> Path:
    """A complete cache with width 8 and 3 streams; the states of sample i begin with i."""
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        fingerprint="capture0",
        verifier="weights0",
        verifier_path="some/verifier",
        verifier_dtype="float32",
        prepared="prepared00",
        tokenizer="tokenizer0",
        template="template0",
        dtype="bfloat16",
        hidden_size=8,
        aux_layers=[2, 4, 5],
        backend="transformers",
        dump="",
    )
    shard_folder(folder).mkdir(parents=True)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    asking = torch.tensor([int(sample.loss_mask[1:].sum()) for sample in samples])
    entries = []
    for span in plan_spans(lengths, asking, RowSizes.of(8, 3, torch.bfloat16), 6000):
        chosen = samples[span.first : span.first + span.count]
        shard = HiddenStateShard.empty(chosen, span.first, manifest)
        for place, sample in enumerate(chosen):
            shard.put(place, random_states(span.first + place, sample))
        write_shard(folder, span, shard, manifest.fingerprint)
        entries.append(describe(folder, span.name))
    write_manifest(folder, replace(manifest, shards=entries))
    return folder


def random_states(index: int, sample: TokenizedSample) -> SampleStates:
    generator = torch.Generator().manual_seed(index)
    asking = int(sample.loss_mask[1:].sum())
    aux = torch.randn(len(sample.input_ids), 24, generator=generator).bfloat16()
    aux[:, 0] = index
    last = torch.randn(asking, 8, generator=generator).bfloat16()
    argmax = torch.randint(128, (asking,), generator=generator)
    return SampleStates(aux, last, argmax, torch.rand(asking, generator=generator))


@pytest.fixture
def with_template(
    tiny_verifier: Path, tmp_path: Path
) -> Callable[[str | None], PreTrainedTokenizerFast]:
    """The tiny tokenizer with some special tokens more and another chat template."""

    def make(template: str | None) -> PreTrainedTokenizerFast:
        tokenizer = load_tokenizer(VerifierSection(path=str(tiny_verifier)), tmp_path)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        tokenizer.add_tokens([AddedToken(word, special=True) for word in SPECIAL])
        tokenizer.chat_template = template
        return tokenizer

    return make
