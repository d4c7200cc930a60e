"""python -m launch.serve_check: a server's counters beside the report's, and each cause by name."""

import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from conf.compose import load_saved, to_yaml
from conf.schema import (
    ConfigError,
    DraftSection,
    EvalSection,
    HeadInit,
    Precision,
    RunConfig,
    VerifierSection,
)
from conf.shapes import chain
from data.eval_prompts import EvalPrompt, read_prompts
from data.records import Turn
from data.template import encode_prompt
from eval.acceptance import Counters, Interval, total
from eval.decode import DecodeSettings, decode
from eval.report import (
    DataOrigin,
    EvalReport,
    EvalSettings,
    Floor,
    Intervals,
    Lossless,
    PromptCounts,
    TrainingEstimate,
    to_json,
)
from eval.report_file import read_report
from eval.speed_report import Baselines, Latency
from launch import export
from launch.serve_check import main
from launch.served import client as served_client
from launch.served import server as vllm_server
from launch.served.cause import undrafted
from launch.served.client import Ends, ServedClient
from launch.served.compare import compare
from launch.served.counters import read_metrics
from launch.served.evidence import other_verifier
from launch.served.run import Asking, Question, Served, Talked
from launch.served.run import ask as ask_one
from models.draft_file import save_draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.generate import end_ids
from models.verifier import Verifier, VerifierEnds, load_facts, load_tokenizer
from models.vocab import DraftVocab

FAKE = Path(__file__).with_name("fake_vllm.py")
fake = runpy.run_path(str(FAKE))
N, NEW, COUNT = 4, 33, 20  # guesses a round, tokens an answer, prompts
GOOD, BAD = [4, 0, 2, 1, 3, 0, 1], [1, 0, 0, 2, 0, 0, 0]
NONE = Interval(0.0, 1.0)


def words_of(number: int) -> str:
    return f"question {number} " + "and so on " * (number % 5)


def counted(prompt: list[int]) -> Counters:
    """What the fake server counts of a prompt when it accepts by GOOD."""
    accepted = fake["rounds_of"](prompt, NEW, GOOD, N)
    return Counters.of_chains(accepted, NEW, N)


def report_of(folder: Path, prompts: Path) -> EvalReport:
    """The report of a run whose loop counted just that."""
    by_prompt = []
    for prompt in read_prompts([str(prompts)]).prompts:
        ids = fake["rendered"]([{"role": "user", "content": prompt.turns[0].content}], "")
        one = counted(ids)
        by_prompt.append(
            PromptCounts(
                *(prompt.id, prompt.task, prompt.digest, False),
                *(one.rounds, one.drafted, one.tested, one.tokens),
                *(one.accepted_by_depth, one.reached_by_depth, 0.0, 0),
            )
        )
    whole = total([one.counters for one in by_prompt])
    section = EvalSection(prompts=[str(prompts)], n_draft=N, max_new_tokens=NEW, bootstrap=200)
    return EvalReport(
        *(whole.tau, whole.alpha, whole.alpha_by_depth, whole.survival_by_depth, 0.5, 2.0),
        ngram_floor=Floor(4, 1.0, Counters()),
        **{"c": 0.1, "speedup_decode": 1.6, "speedup_end_to_end": 1.5},
        **{"speedup_vs_generate": 1.5, "predicted_speedup": 1.6},
        **{"by_n": {}, "by_tree": {}, "by_batch": {}, "costs": []},
        baselines=Baselines(20, 320, 0.02, 50.0, 45.0, 0.1, Latency(2.0, 2.4), "eager"),
        lossless=Lossless(COUNT, COUNT, [], ""),
        counters=whole,
        intervals=Intervals(NONE, NONE, [NONE] * N, [NONE] * N, NONE, NONE, NONE),
        **{"tasks": {}, "position_ranges": [], "absolute_ranges": [], "beyond_training": None},
        **{"rank_hits": None, "by_temperature": []},
        training_estimate=TrainingEstimate(None, None, whole.tau, 2.0, ""),
        **{"prompts": COUNT, "by_prompt": by_prompt, "timings": []},
        settings=EvalSettings(
            *(section, folder.name, "v", "best", [2, 4, 5], "greedy", "float32"),
            *("CPU", 1, "sdpa", N, str(N)),
        ),
        data=DataOrigin([str(prompts)], COUNT, {}, COUNT, 0, ["t"], 90, 10, 512, 1.7),
        **{"provenance": {}, "warnings": []},
    )


def write_report(run: Path, report: EvalReport) -> None:
    (run / "eval" / "report.json").write_text(to_json(report))


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    """A run with a random head, its export in float32 and its report."""
    place = tmp_path_factory.mktemp("runs")
    folder = place / "demo"
    (folder / "eval").mkdir(parents=True)
    cfg = RunConfig()
    cfg.run.root, cfg.run.cache = str(place), str(place / "cache")
    cfg.verifier.path, cfg.verifier.dtype = str(tiny_verifier), Precision.bfloat16
    (folder / "config.yaml").write_text(to_yaml(cfg))
    facts = load_facts(cfg.verifier, place)
    draft = Eagle3Draft(DraftConfig.of(DraftSection(vocab_size=32), facts))
    vocab = DraftVocab.from_counts(torch.arange(facts.vocab_size), 32)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    save_draft(folder / "best", draft.config, draft.state_dict())
    assert export.main([str(folder / "best"), "--dtype", "float32"]) == 0
    prompts = place / "prompts.jsonl"
    rows = [{"id": f"p{i}", "task": "t", "turns": [words_of(i)]} for i in range(COUNT)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(folder, report_of(folder, prompts))
    return folder


@pytest.fixture
def run(made_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return shutil.copytree(made_run, tmp_path / "demo")


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts fake servers in this process; gives their addresses."""
    servers = []

    def start(n: int | None = N, **options: object) -> str:
        server = fake["made"]({"pattern": GOOD} | options, n)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and output of the command on the run."""

    def command(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(run), *words])
        return code, capsys.readouterr().out

    return command


@pytest.fixture
def refused(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one sentence on standard error of a command that ends with exit code 2, or another."""

    def command(*words: str, code: int = 2) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(run), *words])
        assert ended.value.code == code
        said = capsys.readouterr().err.splitlines()
        lines = [line for line in said if line and "|" not in line]  # without progress bars
        assert len(lines) == 1, lines
        return lines[0]

    return command


def edit(path: Path, **keys: object) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (config | keys).items() if v is not None}))


# ---- figures -----------------------------------------------------------------------------------


def test_a_server_that_counts_as_the_report(ask, serve, run, tmp_path):
    file = tmp_path / "out.json"
    words = ["--url", serve() + "/v1/", "--plain-url", serve(None), "--json", str(file)]
    code, out = ask(*words)
    assert code == 0
    report, found = read_report(run), json.loads(file.read_text())
    assert not found["large"] and found["causes"] == []
    assert [one["report"] for one in found["positions"]] == report.survival_by_depth
    assert [one["server"] for one in found["positions"]] == report.survival_by_depth
    assert found["tau"]["server"] == pytest.approx(report.tau)
    assert found["counters"]["server"] == found["counters"]["report"]
    assert found["identical"] == {"checked": COUNT, "parted": []}
    assert f"τ         {report.tau:.3f}" in out
    assert "LARGE" not in out and f"identical answers: {COUNT} of {COUNT}" in out
    assert "x (the report, in our own loop with N=4: 1.500x)" in out
    assert out.splitlines()[-1].startswith("next: python -m eval.tune")


def test_another_acceptance_is_large(ask, serve):
    code, out = ask("--url", serve(pattern=BAD))
    assert code == 1
    assert out.count("LARGE") >= 3
    assert "none found" in out and "not checked" in out
    assert "--dtype float32" in out.splitlines()[-1]
    code, out = ask("--url", serve(pattern=[4, 4, 4, 4, 0]))
    assert code == 1 and "LARGE" in out  # more than was measured is another head, too


def test_a_small_difference_is_not(ask, serve):
    """One guess of some hundred more or less, as rounding makes them."""
    code, out = ask("--url", serve(pattern=GOOD * 20 + [1]))
    assert code == 0 and "+0.000" not in out.splitlines()[2]


def test_some_prompts_and_shorter_answers_are_said(ask, serve):
    code, out = ask("--url", serve(), "--prompts", "5", "--tokens", "12")
    assert "5 prompts of" in out and "12 tokens an answer" in out
    assert "5 prompts are few" in out
    assert f"answers end at 12 tokens, the report's at {NEW}" in out
    assert code in (0, 1)


def test_counters_of_several_engines_add_up():
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    text = "# TYPE vllm:generation_tokens_total counter\n"
    for engine, scale in (("0", 1), ("1", 10)):
        labels = f'engine="{engine}",model_name="a b, c}}"'
        text += f"vllm:generation_tokens_total{{{labels}}} {70.0 * scale}\n"
        text += f"vllm:spec_decode_num_drafts_total{{{labels}}} {20.0 * scale}\n"
        text += f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {60.0 * scale}\n"
        text += f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {17.0 * scale}\n"
        for at, value in enumerate((10, 5, 2)):
            text += f'{name}{{{labels},position="{at}"}} {float(value * scale)}\n'
    found = read_metrics(text)
    assert found.generated == 770 and found.drafts == 220
    assert found.by_position == [110, 55, 22]
    earlier = read_metrics(text.split('vllm:generation_tokens_total{engine="1"')[0])
    one = found.since(earlier, 700)
    assert one == Counters(200, 600, 200 + 100 + 50, [100, 50, 20], [200, 100, 50], 700)
    assert one.tau == pytest.approx(1 + 170 / 200)
    bare = read_metrics("vllm:generation_tokens_total 5.0\n")
    assert bare.drafts == 0 and bare.by_position == []
    with pytest.raises(ConfigError, match="--disable-log-stats"):
        read_metrics("process_cpu_seconds_total 5.0\n")


def test_differences_are_judged_in_pairs():
    """Prompts that vary much, of which the server loses a little of every one."""
    rounds = [40] * 12
    accepted = [4 + 3 * i for i in range(12)]

    def found(lost: list[int]) -> bool:
        pairs = zip(rounds, accepted, strict=True)
        ours = [Counters(r, r, r, [a], [r], r + a + 1) for r, a in pairs]
        theirs = [
            replace(one, accepted_by_depth=[one.accepted - n])
            for one, n in zip(ours, lost, strict=True)
        ]
        questions = [Question(None, one) for one in ours]  # pyright: ignore[reportArgumentType]
        talks = [Talked(str(i), [], one, 0) for i, one in enumerate(theirs)]
        return compare(questions, Served(talks, 1), 500).large

    assert found([3] * 12)  # 0.075 below everywhere: far within the report's own interval
    assert not found([1] * 12)  # 0.025
    assert not found([0] * 11 + [4])  # one prompt alone


def test_later_turns_follow_the_answers_of_the_server(serve, tiny_verifier, tmp_path):
    tokenizer = load_tokenizer(VerifierSection(path=str(tiny_verifier)), tmp_path)
    asking = Asking(tokenizer, {}, Ends(9))
    turns = (Turn("user", "one"), Turn("user", "two"))
    with ServedClient(serve(), 5.0) as client:
        talked = ask_one(client, EvalPrompt("p", "t", None, turns), asking)
    first, second = talked.exchanges
    text = tokenizer.decode(first.reply.ids, skip_special_tokens=True)
    said = [("user", "one"), ("assistant", text), ("user", "two")]
    spoken = [{"role": role, "content": content} for role, content in said]
    assert second.ours == second.reply.prompt_ids == fake["rendered"](spoken, "")
    both = [fake["rounds_of"](one.ours, 9, GOOD, N) for one in talked.exchanges]
    assert talked.counters == Counters.of_chains([n for one in both for n in one], 18, N)
    assert talked.foreign == 0 and talked.length == len(second.ours) + 9


def test_tokens_that_no_round_made():
    """Two answers of 1 + 3 + 1 + 5 tokens; then the first of 2 more."""
    rounds = [2, 0, 4]
    assert undrafted(Counters.of_chains(2 * rounds, 20, N), 2) == 0
    assert undrafted(Counters.of_chains(2 * rounds, 22, N), 2) == 2


# ---- causes ------------------------------------------------------------------------------------


def test_a_head_that_is_not_in_use(ask, serve):
    code, out = ask("--url", serve(None))
    assert code == 1 and "no speculative counters: it runs without the head" in out
    assert "--speculative-config" in out.splitlines()[-1]
    code, out = ask("--url", serve(stuck=True))
    assert code == 1 and "counters did not move" in out


def test_absolute_ids_in_the_served_folder(ask, serve, run):
    path = run / "export" / "vllm" / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    save_file(tensors, path, metadata={"format": "pt"})
    code, out = ask("--url", serve(pattern=[0]))
    assert code == 1
    assert "absolute ids" in out.splitlines()[1]  # before the server is asked: it may not survive
    causes = [line for line in out.splitlines() if line.startswith("- ")]
    assert "d2t" in causes[0] and "absolute ids" in causes[0]
    assert "0.000 is accepted, next to nothing" in causes[-1]
    assert out.splitlines()[-1] == f"next: python -m launch.export {run}/best --to vllm"
    code, out = ask("--url", serve())  # named even where this server has another copy
    assert code == 0 and "All the same:" in out and "absolute ids" in out


def test_a_lost_flag_in_the_served_folder(ask, serve, run):
    edit(run / "export" / "vllm" / "config.json", norm_before_residual=None)
    code, out = ask("--url", serve(pattern=BAD))
    assert code == 1 and "norm_before_residual missing" in out


def test_other_layers(ask, serve, run):
    path = run / "export" / "vllm" / "config.json"
    inner = json.loads(path.read_text())["eagle_config"]
    inner["eagle_aux_hidden_state_layer_ids"] = [0, 2, 3]
    edit(path, eagle_aux_hidden_state_layer_ids=[1, 3, 4], eagle_config=inner)
    code, out = ask("--url", serve(pattern=[0, 0, 1]))
    assert code == 1
    assert "names [1, 3, 4], and the head was trained on the states after [2, 4, 5]" in out


def test_layers_left_to_vllm_are_its_default(ask, serve, run):
    """Which is right for a head trained on the default, so that the finding is the missing key."""
    path = run / "export" / "vllm" / "config.json"
    edit(path, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    _, out = ask("--url", serve())
    assert "eagle_aux_hidden_state_layer_ids missing" in out and "trained on the states" not in out
    edit(run / "best" / "draft.json", aux_layers=[1, 3, 4])
    _, out = ask("--url", serve())
    assert "names no layers, so vLLM takes [2, 4, 5]" in out


def test_the_export_of_an_earlier_training(ask, serve, run):
    path = run / "best" / "draft.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"] += 0.1
    save_file(tensors, path, metadata={"format": "pt"})
    code, out = ask("--url", serve(pattern=BAD))
    assert code == 1 and "holds another head than" in out and "fc.weight differ" in out


def test_a_bfloat16_export_is_the_same_head(ask, serve, run):
    assert export.main([str(run / "best"), "--dtype", "bfloat16"]) == 0
    code, out = ask("--url", serve())
    assert code == 0 and "another head" not in out


def test_thinking_mode(ask, serve, run):
    spoilt = {"thinks": True, "chat_pattern": BAD}
    code, out = ask("--url", serve(**spoilt), "--chat")
    assert code == 1
    assert "renders 4 of 4 chats otherwise" in out and "different from token" in out
    assert "thinking mode" in out and "chat_template_kwargs enable_thinking=False" in out
    assert "--default-chat-template-kwargs" in out.splitlines()[-1]
    code, out = ask("--url", serve(**spoilt))  # of token ids acceptance is the report's
    assert code == 0 and "thinking mode" in out and "--chat" in out.splitlines()[-1]


def test_another_template(ask, serve, run):
    code, out = ask("--url", serve(writes="Sure! ", chat_pattern=BAD), "--chat")
    assert code == 1 and "renders 4 of 4 chats otherwise" in out and "thinking" not in out
    assert "--chat-template" in out.splitlines()[-1]


def test_the_same_template(ask, serve):
    code, out = ask("--url", serve(), "--chat")
    assert code == 0 and "renders" not in out
    code, out = ask("--url", serve(tells_no_ids=True))
    assert code == 0 and "renders" not in out


def test_precision(ask, serve):
    code, out = ask("--url", serve(pattern=BAD), "--dtype", "float16")
    assert code == 1 and "computes in float16, and the head learnt from states of bfloat16" in out
    code, out = ask("--url", serve(pattern=BAD), "--dtype", "bfloat16")
    assert code == 1 and "computes in bfloat16 and the report counts in float32" in out
    assert "--dtype float32" in out.splitlines()[-1]
    code, out = ask("--url", serve(), "--dtype", "float16")  # no fault while figures agree
    assert code == 0 and "learnt from" not in out


def test_another_verifier(ask, serve, tiny_verifier, tmp_path):
    other = shutil.copytree(tiny_verifier, tmp_path / "other")
    code, out = ask("--url", serve(root=str(tiny_verifier), pattern=BAD))
    assert "weights" not in out
    code, out = ask("--url", serve(root=str(other)))  # the same files
    assert code == 0 and "weights" not in out
    edit(other / "config.json", quantization_config={"quant_method": "fp8"})
    code, out = ask("--url", serve(root=str(other), pattern=BAD))
    assert code == 1 and "is quantised (fp8)" in out
    edit(other / "config.json", quantization_config=None)
    path = other / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    code, out = ask("--url", serve(root=str(other), pattern=BAD))
    assert code == 1 and "has other weights or settings (fingerprint" in out
    code, out = ask("--url", serve(root=str(other)))  # a copy with another config.json, say
    assert code == 0 and "fingerprint" not in out
    cfg = RunConfig()
    cfg.verifier.path = "owner/one"
    assert other_verifier(cfg, "owner/one") is None
    assert "serves owner/other" in (other_verifier(cfg, "owner/other") or "")
    cfg.verifier.path = str(tiny_verifier)  # it may well be the folder that was uploaded
    assert other_verifier(cfg, "owner/other") is None


def test_positions_beyond_the_head(ask, serve, run):
    report = read_report(run)
    limit = 80
    write_report(run, replace(report, data=replace(report.data, longest_training_sample=limit)))
    words = "conversations longer than 80 positions, the longest training sample"
    code, out = ask("--url", serve(far=limit, far_pattern=[0]))
    assert code == 1 and words in out and "data.max_length" in out
    code, out = ask("--url", serve(pattern=[0]))  # it falls everywhere: no matter of length
    assert code == 1 and words not in out
    edit(run / "best" / "draft.json", max_positions=70)
    code, out = ask("--url", serve(far=70, far_pattern=[0]))
    assert code == 1 and "longer than 70 positions, the head's max_position_embeddings" in out


def test_speculation_switched_off_at_times(ask, serve):
    _, out = ask("--url", serve(half=True))
    assert "tokens came from steps without guesses" in out
    _, out = ask("--url", serve(guesses=2))
    assert "rounds had 2.00 guesses on average, of 4" in out


def test_another_chain(ask, serve, run):
    code, out = ask("--url", serve(2, pattern=BAD))
    assert code == 1 and "τ to 2" in out
    assert "drafts 2 tokens a round and the report 4" in out
    code, out = ask("--url", serve(6))
    assert code == 0 and "All the same" not in out
    assert any(line.startswith("6         n/a") for line in out.splitlines())


def test_others_at_the_server(ask, serve):
    _, out = ask("--url", serve(foreign=50))
    assert f"made {50 * COUNT} tokens for others" in out


def test_answers_that_the_head_changes(ask, serve, run):
    """At a near tie, and without one; the server tells how near."""
    first = read_prompts(read_report(run).settings.eval.prompts).prompts[0].turns[0].content
    prompt = fake["rendered"]([{"role": "user", "content": first}], "")
    confused = fake["answer_ids"](prompt, NEW)[7]
    before = [*prompt, *fake["answer_ids"](prompt, 7)]
    spoilt = {"changes": 7, "confused": confused, "before": before}
    words = ["--prompts", "1", "--dtype", "float32", "--plain-url", serve(None)]
    code, out = ask("--url", serve(**spoilt, gap=2.0), *words)
    assert code == 1 and "identical answers: 0 of 1" in out
    assert "p0, answer 1: parts at token 7, two tokens 2.000 nats apart" in out
    assert "the head changes answers" in out
    code, out = ask("--url", serve(**spoilt, gap=0.005), *words)
    assert code == 0 and "1 of 1 others looked at part at a near tie" in out
    code, out = ask("--url", serve(**spoilt, gap=0.1), *words)
    assert code == 1  # a tie in bfloat16 alone
    words[3] = "bfloat16"  # more than 0.5 nats is no fault there by itself
    code, out = ask("--url", serve(**spoilt, gap=2.0), *words)
    assert code == 0 and "0 of 1 others looked at" in out


# ---- input that cannot be used -----------------------------------------------------------------


def test_bad_input_is_one_sentence(refused, serve, run):
    assert "invalid count value: '0'" in refused("--prompts", "0")
    assert "--n: has no effect with --url" in refused("--url", "http://h:1", "--n", "3")
    words = refused("--url", "http://127.0.0.1:9", "--api-key-env", "NO_SUCH_KEY")
    assert "NO_SUCH_KEY: there is no such variable" in words
    assert "--plain-url: has no effect without" in refused("--plain-url", "http://h:1")
    assert "write it as http://HOST:PORT" in refused("--url", "localhost:8000")
    assert "no vLLM server answers there" in refused("--url", "http://127.0.0.1:9")
    assert "--disable-log-stats" in refused("--url", serve(uncounted=True))
    assert "need up to" in refused("--url", serve(max_len=64))
    assert "speculates, and must" in refused("--url", serve(), "--plain-url", serve())
    assert "500 Internal Server Error: out of memory" in refused(
        "--url", serve(refuses=True), code=1
    )
    assert "cannot be started" in refused("--vllm-python", "no/such/python")
    assert "holds no exported head" in refused("--head", str(run / "best"))


def test_a_run_that_cannot_be_compared(refused, run, tmp_path):
    report = read_report(run)
    section = report.settings.eval
    settings = replace(report.settings, eval=replace(section, temperature=0.7))
    write_report(run, replace(report, settings=settings))
    assert "counts sampled answers" in refused("--url", "http://127.0.0.1:9")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"id": "p0", "turns": ["something else"]}) + "\n")
    settings = replace(report.settings, eval=replace(section, prompts=[str(other)]))
    write_report(run, replace(report, settings=settings))
    assert f"{COUNT} prompts of the report are no longer there" in refused("--url", "http://h:1")
    (run / "eval" / "report.json").unlink()
    assert "no report there" in refused("--url", "http://h:1")
    (run / "best" / "draft.json").unlink()
    (run / "config.yaml").unlink()
    assert "config.yaml: no such file" in refused("--url", "http://h:1")


def test_counters_that_never_hold_the_answers(serve, refused, monkeypatch):
    """As behind a balancer, where /metrics is another replica's."""
    monkeypatch.setattr(served_client, "SETTLE", 0.1)
    assert "of several behind a balancer" in refused("--url", serve(foreign=-NEW), code=1)


# ---- a server that is started ------------------------------------------------------------------


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """An interpreter whose vLLM is the fake one."""

    def make(**options: object) -> str:
        orders = tmp_path / "orders.json"
        named = {"pattern": GOOD, "started": str(tmp_path / "started"), **options}
        orders.write_text(json.dumps(named))
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "{orders}" "$@"\n')
        path.chmod(0o755)
        return str(path)

    return make


def alive(pids: Path) -> list[int]:
    """Those of the processes that are still there after a moment: a kill takes one."""
    until = time.monotonic() + 5
    while found := [pid for pid in map(int, pids.read_text().split()) if runs(pid)]:
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return found


def runs(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_both_servers_are_started_and_ended(ask, python, run, tmp_path):
    pids = tmp_path / "children"
    more = "--enforce-eager --max-model-len 1024"
    words = ["--vllm-python", python(child=str(pids)), "--server-args", more]
    code, out = ask(*words, "--n", str(N), "--dtype", "float32", "--prompts", "4")
    assert code == 0, out
    plain, guided = map(json.loads, (tmp_path / "started").read_text().splitlines())
    assert plain[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert plain[-3:] == more.split() and "--speculative-config" not in plain
    told = json.loads(guided[guided.index("--speculative-config") + 1])
    folder = str(run / "export" / "vllm")
    assert told == {"method": "eagle3", "model": folder, "num_speculative_tokens": N}
    assert guided[guided.index("--dtype") + 1] == "float32"
    assert int(guided[guided.index("--max-model-len") + 1]) == 256
    assert "identical answers: 4 of 4" in out and "without the head" in out
    assert (run / "serve_check" / "head.log").is_file()
    assert len(pids.read_text().split()) == 2 and alive(pids) == []


def test_a_server_that_dies(refused, python, run):
    words = refused("--vllm-python", python(dies="ValueError: no such --flag"))
    assert "ended with exit status 1 (ValueError: no such --flag)" in words
    words = refused("--vllm-python", python(dies="ModuleNotFoundError: No module named 'vllm'"))
    assert "by --vllm-python (bash launch/vllm_env.sh)" in words


def test_a_server_that_does_not_answer(refused, python, tmp_path):
    pids = tmp_path / "children"
    words = ["--vllm-python", python(silent=True, child=str(pids)), "--start-timeout", "1"]
    assert "did not answer within --start-timeout=1 seconds" in refused(*words)
    assert alive(pids) == []


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own answer to SIGINT: a worker of pytest-xdist ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_server(
    end: signal.Signals, refused, python, tmp_path, monkeypatch
):
    """SIGTERM too, which by itself would leave the server behind; its handler is put back."""
    pids = tmp_path / "children"
    before = signal.getsignal(signal.SIGTERM)

    def interrupted(*_: object) -> Iterator[int]:
        while not pids.exists() or not pids.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), end)
        yield from range(1000)

    monkeypatch.setattr(vllm_server, "progress", interrupted)
    words = ["--vllm-python", python(silent=True, child=str(pids))]
    if end is signal.SIGINT:
        assert refused(*words, code=130).startswith("interrupted")
    else:
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / "demo"), *words])
        assert ended.value.code == 128 + signal.SIGTERM
    assert alive(pids) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_reads_what_vllm_says_of_itself(tmp_path):
    log = tmp_path / "log"
    line = (
        "(EngineCore pid=1) INFO Initializing a V1 LLM engine (v0.32.0) with config: model='m', "
        "speculative_config=None, dtype=torch.bfloat16, max_seq_len=2048, quantization={}, "
        "kv_cache_dtype=fp8, device_config=cpu"
    )
    log.write_text(line.format("None"))
    running = vllm_server.Running("", log)
    assert running.built(vllm_server.BUILT) == "bfloat16"
    assert running.built(vllm_server.QUANTISED) is None
    log.write_text(line.format("fp8"))
    assert running.built(vllm_server.QUANTISED) == "fp8"
    log.write_text("nothing")
    assert running.built(vllm_server.BUILT) is None


# ---- real vLLM ---------------------------------------------------------------------------------


REAL = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def speaking_verifier(tiny_verifier: Path, tmp_path: Path) -> Path:
    """Heads of 32, the narrowest that vLLM takes on a CPU; it says more than one thing."""
    folder = shutil.copytree(tiny_verifier, tmp_path / "verifier")
    config = LlamaConfig.from_pretrained(tiny_verifier)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 32
    config.initializer_range = 0.1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def constant_draft(verifier: Verifier, answers: list[list[int]]) -> Eagle3Draft:
    """Always guesses the verifier's favourite token: all logits are 0, and the first one is taken.

    Accepted in part, and by reckoning that no state or rounding can shift.
    """
    tokens = torch.tensor([token for ids in answers for token in ids])
    said = torch.bincount(tokens, minlength=verifier.facts.vocab_size)
    favourite = int(said.argmax())
    counts = torch.zeros_like(said)
    counts[favourite : favourite + 32] = 1  # so that it is the first
    section = DraftSection(vocab_size=min(32, len(counts) - favourite))
    draft = Eagle3Draft(DraftConfig.of(section, verifier.facts))
    vocab = DraftVocab.from_counts(counts, draft.config.draft_vocab_size)
    ends = VerifierEnds(
        verifier.backbone.embed_tokens.weight, verifier.head.weight, verifier.model.config
    )
    with torch.no_grad():
        draft.initialise(ends, vocab, HeadInit.verifier)
        draft.lm_head.weight.zero_()
    return draft.eval().requires_grad_(False)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_vllm_counts_as_our_loop(
    speaking_verifier, made_run, vllm_python, tmp_path, capsys, monkeypatch
):
    run = shutil.copytree(made_run, tmp_path / "demo")
    cfg = load_saved(run / "config.yaml")
    cfg.verifier.path, cfg.verifier.dtype = str(speaking_verifier), Precision.float32
    (run / "config.yaml").write_text(to_yaml(cfg))
    verifier = Verifier.load(cfg.verifier, tmp_path, torch.device("cpu"), torch.float32)
    report = read_report(run)
    settings = DecodeSettings(NEW, end_ids(verifier), chain(N))
    asked = [
        encode_prompt([Turn("user", words_of(i))], verifier.tokenizer, {}) for i in range(COUNT)
    ]
    plain = [decode(verifier, None, [ids], settings).generations[0].tokens for ids in asked]
    draft = constant_draft(verifier, plain)
    made = [decode(verifier, draft, [ids], settings).generations[0] for ids in asked]
    ours = [Counters.of(one.rounds, len(one.tokens), N) for one in made]
    assert 0.05 < total(ours).survival_by_depth[0] < 0.95
    by_prompt = [replace(one, **vars(c)) for one, c in zip(report.by_prompt, ours, strict=True)]
    write_report(run, replace(report, counters=total(ours), by_prompt=by_prompt))
    save_draft(run / "best", draft.config, draft.state_dict())
    assert export.main([str(run / "best"), "--dtype", "float32"]) == 0
    for name, value in REAL.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "out.json"
    words = ["--vllm-python", str(vllm_python), "--json", str(file)]
    code = main([str(run), *words, "--server-args", "--enforce-eager --max-num-seqs 4"])
    out = capsys.readouterr().out
    assert code == 0, out
    found = json.loads(file.read_text())
    theirs = found["counters"]["server"]
    pairs = zip(total(ours).accepted_by_depth, theirs["accepted_by_depth"], strict=True)
    assert all(abs(a - b) <= 1 for a, b in pairs), out
    assert abs(theirs["rounds"] - total(ours).rounds) <= 1, out
    assert found["identical"] == {"checked": COUNT, "parted": []}
    assert found["dtype"] == "float32" and found["causes"] == []
    assert "renders" not in out  # vLLM's /tokenize makes our ids
