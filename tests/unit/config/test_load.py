"""From files, flags and `--set` to one resolved run."""

import json
import math

import pytest

from largetrain.config.autos import complete_schedule
from largetrain.config.load import load
from largetrain.errors import ConfigError

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file in a folder that is the current one, so that messages are short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def writer(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return writer


def mistakes(*arguments, **keywords) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **keywords)
    return list(caught.value.problems)


def test_without_files_the_demo_trains():
    resolved = load(None, None, world_size=2)
    assert resolved.total_steps == 300
    assert resolved.decoder.vocab_size == 257
    assert resolved.batch.global_batch == resolved.engine["train_batch_size"] == 2 * resolved.batch.micro_batch
    assert '"auto"' not in json.dumps(resolved.engine)


def test_the_engine_dict_is_complete_and_plain(write):
    ds = write("ds.json", json.dumps({"optimizer": OPTIMIZER, "train_micro_batch_size_per_gpu": 2}))
    resolved = load(ds, None, world_size=3)
    assert (
        resolved.engine
        == json.loads(json.dumps(resolved.engine))
        == {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "train_batch_size": 6,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }
    )
    assert "gradient_clipping = 1.0 (not given; DeepSpeed clips at 1.0 then. 0 switches clipping off)" in resolved.notes
    saved = json.loads(resolved.to_json())
    assert saved["engine"] == resolved.engine and saved["run"]["runtime"]["threads"] == resolved.run.runtime.threads


def test_precedence_set_over_flag_over_run_file_over_engine_file(write):
    ds = write("ds.json", json.dumps({"gradient_clipping": 0.5, "optimizer": OPTIMIZER}))
    run = write("run.yaml", "steps: 7\nseed: 1\nname: file\n")
    resolved = load(ds, run, ["gradient_clipping=0.1", "name=set"], {"steps": ("--steps", 9)})
    assert (resolved.run.steps, resolved.run.seed, resolved.run.name) == (9, 1, "set")
    assert resolved.engine["gradient_clipping"] == 0.1
    assert "steps = 9 (--steps 9), over 7 in run.yaml:1" in resolved.notes
    assert "gradient_clipping = 0.1 (--set gradient_clipping=0.1), over 0.5 in ds.json:1" in resolved.notes


def test_two_explicit_places_that_disagree_are_refused():
    assert mistakes(None, None, ["steps=6"], {"steps": ("--steps", 5)}) == [
        "--set steps=6: steps is also given by --steps 5. Keep one of them."
    ]
    assert mistakes(None, None, ["seed=1", "seed=2"]) == [
        "--set seed=2: seed is also given by --set seed=1. Keep one of them."
    ]
    assert load(None, None, ["steps=5"], {"steps": ("--steps", 5)}).total_steps == 5


def test_a_flag_for_the_length_replaces_the_files_other_one(write):
    run = write("run.yaml", "epochs: 2\n")
    resolved = load(None, run, flags={"steps": ("--steps", 4)})
    assert (resolved.run.steps, resolved.run.epochs, resolved.total_steps) == (4, None, 4)
    assert "steps = 4 (--steps 4) replaces epochs in run.yaml:1" in resolved.notes
    assert mistakes(None, write("both.yaml", "epochs: 2\nsteps: 3\n")) == [
        "both.yaml:1: epochs: is given beside steps; keep one."
    ]
    assert mistakes(None, None, ["steps=2", "epochs=2"]) == ["--set epochs=2: epochs: is given beside steps; keep one."]


def test_set_finds_its_file():
    resolved = load(None, None, ["fp16.enabled=true", "model.layers=2", "engine.gradient_clipping=0", "run.seed=3"])
    assert resolved.engine["fp16"] == {"enabled": True}
    assert resolved.engine["gradient_clipping"] == 0
    assert (resolved.decoder.layers, resolved.run.seed) == (2, 3)
    assert "scheduler" not in load(None, None, ["scheduler=null"]).engine


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("stps=3", "--set stps=3: stps is a key of neither file. Did you mean steps?"),
        ("lr=3", "--set lr=3: lr is a key of neither file. Did you mean optimizer.params.lr?"),
        ("hidden=3", "--set hidden=3: hidden is a key of neither file. Did you mean model.hidden?"),
        ("steps", "--set steps: write it as KEY=VALUE, for instance optimizer.params.lr=3e-4."),
        ("model..layers=1", "--set model..layers=1: write it as KEY=VALUE"),
        ("steps=[1", "--set steps=[1: the value cannot be read:"),
        (
            "zero_optimization.stage.x=1",
            "--set zero_optimization.stage.x=1: zero_optimization.stage is 2, not a section.",
        ),
        ("amp.enabled=true", "--set amp.enabled=true: amp: NVIDIA Apex AMP integration has been removed."),
        ("model.layers=two", '--set model.layers=two: model.layers: expected a whole number, got "two" (text).'),
        ("name=3", "--set name=3: name: expected text, got 3."),
        ("name=a/b", '--set name=a/b: name: "a/b" does not match'),
        ("steps=0", "--set steps=0: steps: must be greater than 0, got 0."),
    ],
)
def test_a_wrong_set_is_named(written, said):
    (problem,) = mistakes(None, None, [written])
    assert problem.startswith(said)


def test_run_yaml_mistakes_carry_their_line(write):
    run = write(
        "r.yaml", 'steps: "10"\nmodel:\n  hiden: 3\n  layers: 2.0\ntrain_batch_size: 8\nlogging: {every_steps: 0}\n'
    )
    assert mistakes(None, run) == [
        'r.yaml:1: steps: expected a whole number, got "10" (text). Write 10 without quotes.',
        "r.yaml:3: model.hiden: unknown key. Did you mean hidden?",
        "r.yaml:5: train_batch_size: is a key of the engine JSON; write it in the file of --ds_config.",
        "r.yaml:6: logging.every_steps: must be greater than 0, got 0.",
    ]


def test_whole_floats_and_auto_in_any_case_are_accepted_in_yaml(write):
    resolved = load(
        None, write("r.yaml", "steps: 2e1\nmodel: {vocab_size: Auto, layers: 3.0}\nruntime: {threads: AUTO}\n")
    )
    assert resolved.total_steps == 20 and isinstance(resolved.run.steps, int)
    assert resolved.run.model.vocab_size == 257 and resolved.decoder.layers == 3


def test_mistakes_of_both_files_and_flags_come_together(write):
    ds = write("ds.json", '{"gradient_clipping": -1,\n "fp16": {"enabld": true}}')
    run = write("run.yaml", "stepz: 3\n")
    problems = mistakes(ds, run, ["foo=1"])
    assert [problem.split(": ")[0] for problem in problems] == ["--set foo=1", "ds.json:1", "ds.json:2", "run.yaml:1"]
    assert len(mistakes("no.json", "no.yaml")) == 2


def test_sizes_that_do_not_fit_are_reported_with_the_batch(write):
    run = write("r.yaml", "model:\n  heads: 7\n")
    problems = mistakes(None, run, ["train_batch_size=7", "gradient_accumulation_steps=2"], world_size=2)
    assert problems[0].startswith("r.yaml:2: model.heads: 7 does not divide model.hidden=192")
    assert problems[1].startswith("--set train_batch_size=7: train_batch_size: 7 is not 8")


# --- "auto" ---


def test_every_auto_of_a_transformers_config_is_resolved(write):
    ds = write(
        "ds.json",
        """{
        "optimizer": {"type": "AdamW",
                      "params": {"lr": "auto", "betas": "auto", "eps": "Auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                      "warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                      "stage3_param_persistence_threshold": "auto", "overlap_comm": "auto"},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "AUTO", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto"}""",
    )
    resolved = load(ds, None, ["model.preset=gpt2"], {"steps": ("--steps", 1000)}, world_size=4)
    assert resolved.engine == {
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 6e-4, "warmup_num_steps": 30, "total_num_steps": 1000},
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 768 * 768,
            "stage3_prefetch_bucket_size": 768 * 768 * 9 // 10,
            "stage3_param_persistence_threshold": 7680,
        },
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    for key in (
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.params.total_num_steps",
        "gradient_clipping",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.overlap_comm",
        "train_batch_size",
    ):
        assert any(note.startswith(f"{key} = ") for note in resolved.notes), key


@pytest.mark.parametrize(
    ("preset", "rate"), [("gpt2-xl", 2e-4), ("llama2-7b", 1.2e-4), ("gpt3-175b", 0.6e-4), ("gpt2-large", 2.5e-4)]
)
def test_learning_rate_auto_follows_the_gpt3_table(preset, rate):
    resolved = load(None, None, [f"model.preset={preset}", "optimizer.params.lr=auto"])
    assert resolved.engine["optimizer"]["params"]["lr"] == rate


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ["bf16.enabled=auto"],
            '--set bf16.enabled=auto: bf16.enabled: "auto" leaves the precision open; write true or false.',
        ),
        (
            ["optimizer={type: SGD, params: {lr: auto}}", "zero_optimization.stage=0"],
            '--set optimizer={type: SGD, params: {lr: auto}}: optimizer.params.lr: "auto" is known for Adam and AdamW',
        ),
        (
            ["optimizer.params.lr=auto", "model.target=string:Template", "model.vocab_size=300"],
            '--set optimizer.params.lr=auto: optimizer.params.lr: "auto" is known for Adam and AdamW '
            "on the built-in decoder, not for ",
        ),
    ],
)
def test_autos_that_stay_open_are_refused_by_key(sets, said):
    (problem,) = mistakes(None, None, sets)
    assert problem.startswith(said)


def test_schedule_autos_wait_for_the_data_with_epochs():
    resolved = load(None, None, ["epochs=2"])
    params = resolved.engine["scheduler"]["params"]
    assert resolved.total_steps is None
    assert (params["total_num_steps"], params["warmup_num_steps"]) == ("auto", "auto")
    done = resolved.with_steps(250)
    params = done.engine["scheduler"]["params"]
    assert (done.total_steps, params["total_num_steps"], params["warmup_num_steps"]) == (250, 250, 8)
    assert resolved.engine["scheduler"]["params"]["total_num_steps"] == "auto"
    assert "scheduler.params.warmup_num_steps = 8 (auto: 3 % of 250)" in done.notes
    assert done.with_steps(250) is done


@pytest.mark.parametrize("total", [1, 2, 33, 34, 100, 12345])
def test_warm_up_auto_is_three_percent_and_at_least_one(total):
    engine = {"scheduler": {"params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}}
    complete_schedule(engine, total)
    assert engine["scheduler"]["params"] == {
        "warmup_num_steps": max(1, math.ceil(0.03 * total)),
        "total_num_steps": total,
    }


def test_a_schedule_of_another_length_is_pointed_out(write):
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 20}}
    ds = write("ds.json", json.dumps({"optimizer": OPTIMIZER, "scheduler": scheduler}))
    notes = load(ds, None, ["steps=10"]).notes
    assert "the schedule is laid out for 50 updates, the run makes 10" in notes
    assert "the warm-up of 20 updates is longer than the run of 10" in notes


# --- the peak of the schedule ---


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_the_schedules_peak_is_the_optimizers_rate(write, kind):
    """DeepSpeed's WarmupDecayLR would peak at its own default of 0.001."""
    params = {"warmup_num_steps": 1} | ({"total_num_steps": 10} if kind == "WarmupDecayLR" else {})
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    ds = write("ds.json", json.dumps({"optimizer": optimizer, "scheduler": {"type": kind, "params": params}}))
    resolved = load(ds, None)
    assert resolved.engine["scheduler"]["params"]["warmup_max_lr"] == 1e-5
    assert "scheduler.params.warmup_max_lr = 1e-05 (the optimizer's lr)" in resolved.notes


def test_a_written_peak_stays_and_is_pointed_out(write):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}
    ds = write("ds.json", json.dumps({"optimizer": OPTIMIZER, "scheduler": scheduler}))
    resolved = load(ds, None)
    assert resolved.engine["scheduler"]["params"]["warmup_max_lr"] == 0.5
    assert any("not optimizer lr = 0.001" in note for note in resolved.notes)


def test_absent_optimizer_and_rate_are_filled_in_visibly(write):
    resolved = load(write("ds.json", "{}"), None)
    assert resolved.engine["optimizer"] == {"type": "AdamW", "params": {"lr": 6e-4}}
    assert "optimizer = AdamW (not given)" in resolved.notes
    resolved = load(write("ds.json", '{"optimizer": {"type": "AdamW"}}'), None)
    assert resolved.engine["optimizer"]["params"]["lr"] == 1e-3
    assert "optimizer.params.lr = 0.001 (not given; the default of AdamW)" in resolved.notes


def test_an_optimizer_without_a_default_rate_needs_one():
    assert mistakes(None, None, ["optimizer={type: Muon}"]) == [
        "--set optimizer={type: Muon}: optimizer.params: the key lr is missing, and Muon has no default for it; "
        "write a number."
    ]


# --- vocabulary and threads ---


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    assert mistakes(None, None, ["model.vocab_size=100"]) == [
        "--set model.vocab_size=100: model.vocab_size: 100 is less than the 257 token ids of data.tokenizer=bytes; "
        'write at least 257, or "auto".'
    ]
    assert load(None, None, ["model.vocab_size=320"]).decoder.vocab_size == 320


def test_torchrun_s_own_single_thread_is_not_the_user_s_wish(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert load(None, None, world_size=2, local_world_size=2).run.runtime.threads == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert load(None, None, world_size=2, local_world_size=2).run.runtime.threads == 3


@pytest.mark.parametrize(
    ("omp", "local_ranks", "threads"), [("5", 2, 5), (None, 1, 6), (None, 4, 1), (None, 100, 1), ("x", 2, 3)]
)
def test_threads_are_shared_among_the_ranks_of_a_host(monkeypatch, omp, local_ranks, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    resolved = load(None, None, world_size=local_ranks, local_world_size=local_ranks)
    assert resolved.run.runtime.threads == threads
    assert any(note.startswith(f"runtime.threads = {threads} (auto: ") for note in resolved.notes)


def test_args_without_target_are_refused():
    (problem,) = mistakes(None, None, ["model.args={a: 1}"])
    assert problem == "--set model.args={a: 1}: model.args: has no effect without model.target."
