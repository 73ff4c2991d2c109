"""mmlu on questions of our own: the score is that of transformers, in every layout of data and of processes."""

import csv
import importlib
import json
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import smollm2
import torch
from rig import ROOT, Result, Runner, make_latent, make_latent_conf, session
from test_errors import one_line

from mlmsub.runtime.errors import StageError
from mlmsub.runtime.evaluation import mmlu, mmlu_score
from mlmsub.runtime.stages import mmlu as stages_mmlu

LONG = " ".join(f"On day {day} it rained in the hills, and the river rose by {day} cm." for day in range(1, 12))
# subject: (question, four choices, answer); two subjects are MMLU's, one is not
TEST = {
    "astronomy": [
        ("Which planet is nearest to the Sun?", ["Mercury", "Venus", "Mars", "Jupiter"], "A"),
        ("What does the Moon go round?", ["Mars", "the Earth", "Venus", "Saturn"], "B"),
        ("Our Sun is a", ["planet", "comet", "moon", "star"], "D"),
        ('Which one is called the "red planet"?', ["Neptune", "Earth, our own", "Mars", "Uranus"], "C"),
    ],
    "high_school_geography": [
        ("What is the capital of France?", ["Rome", "Paris", "Madrid", "Lisbon"], "B"),
        (f"{LONG}\nBy how much did it rise on day 3?", ["3 cm", "9 cm", "12 cm", "none"], "A"),
        ("Which ocean lies between Europe and North America?", ["Pacific", "Indian", "Arctic", "Atlantic"], "D"),
        ("The Nile is a", ["lake", "desert", "river", "mountain"], "C"),
    ],
    "kitchen_lore": [
        ("At sea level, water boils at", ["10 degrees", "50 degrees", "70 degrees", "100 degrees Celsius"], "D"),
        ("Bread is made from", ["flour", "sand", "iron", "glass"], "A"),
        ("Which one tastes sweet?", ["salt", "vinegar", "honey", "coffee"], "C"),
        ("A lemon is", ["bitter", "sour", "salty", "hot"], "B"),
    ],
}
DEV = {
    "astronomy": [
        ("The Earth goes round the", ["Moon", "Sun", "Mars", "Milky Way"], "B"),
        ("A year on Earth has about", ["365 days", "30 days", "12 days", "7 days"], "A"),
    ],
    "high_school_geography": [
        ("The capital of Japan is", ["Kyoto", "Osaka", "Nara", "Tokyo"], "D"),
        ("The Sahara is a", ["river", "sea", "desert", "city"], "C"),
    ],
    "kitchen_lore": [
        ("Ice is frozen", ["water", "oil", "milk", "salt"], "A"),
        ("Cheese is made from", ["wood", "milk", "stone", "tea"], "B"),
    ],
}
COUNT = 12


def write_csv(folder: Path) -> Path:
    for split, subjects in (("test", TEST), ("dev", DEV)):
        (folder / split).mkdir(parents=True)
        for name, rows in subjects.items():
            with (folder / split / f"{name}_{split}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([text, *choices, answer] for text, choices, answer in rows)
    return folder


def write_parquet(folder: Path, whole: bool) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    for split, subjects in (("test", TEST), ("dev", DEV)):
        rows = [
            {"question": text, "subject": name, "choices": choices, "answer": "ABCD".index(answer)}
            for name, questions in subjects.items()
            for text, choices, answer in questions
        ]
        for name in ["all"] if whole else list(subjects):
            (folder / name).mkdir(parents=True, exist_ok=True)
            part = [row for row in rows if whole or row["subject"] == name]
            write_table(pyarrow.Table.from_pylist(part), folder / name / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_csv(tmp_path_factory.mktemp("mmlu") / "csv")


def told(result: Result, out: Path) -> tuple[dict, list[dict]]:
    assert result.code == 0, result.out
    lines = (out / "answers.jsonl").read_text().splitlines()
    return json.loads((out / "mmlu.json").read_text()), [json.loads(line) for line in lines]


def reference(source: Path, shots: int, limit: int = 10**6) -> torch.Tensor:
    """A second implementation, with transformers, one prompt at a time: logits of the letters [questions, 4]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()

    def shown(row: tuple) -> str:
        text, (a, b, c, d), _ = row
        return f"{text}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"

    made = []
    for subject in sorted(TEST):
        for row in TEST[subject]:
            for count in range(shots, -1, -1):
                text = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
                text += "\n\n" + "".join(f"{shown(row)} {row[2]}\n\n" for row in DEV[subject][:count]) + shown(row)
                ends = [tokenizer(f"{text} {letter}")["input_ids"] for letter in "ABCD"]
                if len(ends[0]) - 1 <= limit:
                    break
            assert len({tuple(ids[:-1]) for ids in ends}) == 1, "the letters are one token each"
            with torch.no_grad():
                logits = model(torch.tensor([ends[0][:-1]])).logits[0, -1]
            made.append(logits[[ids[-1] for ids in ends]].float())
    return torch.stack(made)


def assert_scored_as(want: torch.Tensor, score: dict, answers: list[dict], close: float) -> None:
    got = torch.tensor([answer["logits"] for answer in answers])
    assert (got - want).abs().max() < close * want.std()
    right = ["ABCD".index(row[2]) for subject in sorted(TEST) for row in TEST[subject]]
    correct = sum(int(index) == answer for index, answer in zip(want.argmax(1), right, strict=True))
    assert score["correct"] == correct and score["questions"] == COUNT
    assert score["accuracy"] == pytest.approx(correct / COUNT)


def teach_letters(folder: Path) -> Path:
    """Give a tiny model a tokenizer that has " A" to " D" as tokens, as a language model's has."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = made.get_vocab_size()
    file = ROOT / "mlmsub/runtime/quantization/calibration.txt"
    texts = file.read_text().split("\n\n") + [" A B C D"] * 1000
    kept = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    kept.train_new_from_iterator(texts, size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lettered(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of all stage tests, with letters."""
    folder = tmp_path_factory.mktemp("lettered") / "hf"
    shutil.copytree(source, folder)
    return teach_letters(folder)


@pytest.fixture(scope="module")
def scored(stage: Runner, lettered: Path, data: Path, folder: Path) -> tuple[Result, dict, list[dict]]:
    out = folder / "mmlu"
    result = stage("mmlu", HF_MODEL_CKPT=lettered, MMLU_DATA=data, MMLU_OUT=out, MLM_EXTRA_ARGS="--few-shots 2")
    return result, *told(result, out)


def test_the_score_is_that_of_transformers(scored: tuple, lettered: Path, folder: Path) -> None:
    result, score, answers = scored
    assert (score["shortened_prompts"], score["dropped_examples"]) == (1, 1), "of two examples one fits into 512"
    assert_scored_as(reference(lettered, 2, 512), score, answers, close=0.1)
    assert result.done["outputs"] == {"MMLU_OUT": str(folder / "mmlu")}


def test_table_json_and_event_say_what_was_asked(scored: tuple) -> None:
    result, score, _answers = scored
    assert set(score["categories"]) == {"STEM", "social sciences", "not in MMLU"}
    assert sum(row["correct"] for row in score["subjects"].values()) == score["correct"]
    assert score["macro_accuracy"] == pytest.approx(score["accuracy"])  # subjects of equal size
    assert not score["all_of_mmlu"] and score["few_shots"] == 2
    lines = result.out.splitlines()
    assert "12 of 12 questions in 2 of MMLU's 57 subjects: a part, which is not an MMLU score" in lines
    table = [line for line in lines if "%" in line and " of " in line]
    assert len({line.index("%") for line in table}) == 1, "the columns are aligned"
    row = score["subjects"]["astronomy"]
    assert any(
        line.split()[:5] == ["astronomy", f"{row['accuracy']:.2%}", str(row["correct"]), "of", "4"] for line in table
    )
    events = [json.loads(line) for line in (result.run_dir / "state" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "mmlu"]
    assert event["accuracy"] == score["accuracy"] and event["questions"] == COUNT and event["all_of_mmlu"] is False


@pytest.mark.parametrize("layout", ["subjects", "all", "hub"])
def test_parquet_is_read_as_csv_is(
    layout: str, scored: tuple, stage: Runner, lettered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"HF_MODEL_CKPT": lettered, "MMLU_OUT": tmp_path / "out", "MLM_EXTRA_ARGS": "--few-shots 2"}
    if layout == "hub":
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        place = tmp_path / "datasets--cais--mmlu"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("c0ffee")
        write_parquet(place / "snapshots" / "c0ffee", whole=True)
    else:
        variables["MMLU_DATA"] = write_parquet(tmp_path / "data", whole=layout == "all")
    score, answers = told(stage("mmlu", **variables), tmp_path / "out")
    assert answers == scored[2]
    assert {**score, "source": ""} == {**scored[1], "source": ""}


def test_subjects_and_fraction(scored: tuple, stage: Runner, lettered: Path, data: Path, tmp_path: Path) -> None:
    result = stage(
        "mmlu",
        HF_MODEL_CKPT=lettered,
        MLM_WORK_DIR=tmp_path,
        MLM_EXTRA_ARGS=f"--few-shots 2 --mmlu-data {data} --subjects kitchen_lore,astronomy --fraction 0.3",
    )
    score, answers = told(result, tmp_path / "test/tiny-llama_mmlu")
    assert (score["questions"], score["available"]) == (4, 8)
    assert "4 of 8 questions in 1 of MMLU's 57 subjects" in result.out and "(2 of 4 questions)" in result.out
    want = {(answer["subject"], answer["question"]): answer["chosen"] for answer in scored[2]}
    assert [(answer["subject"], answer["question"]) for answer in answers] == [
        ("astronomy", 0), ("astronomy", 1), ("kitchen_lore", 0), ("kitchen_lore", 1)
    ]  # fmt: skip
    assert all(answer["chosen"] == want[answer["subject"], answer["question"]] for answer in answers)


@pytest.mark.parametrize(
    ("layout", "extra"), [({"PP": 2}, ""), ({"TP": 2}, "--sequence-parallel")], ids=["pipeline", "tensor"]
)
def test_two_processes_score_as_one_does(
    layout: dict, extra: str, scored: tuple, stage: Runner, lettered: Path, data: Path, tmp_path: Path
) -> None:
    result = stage.ranks(
        "mmlu", HF_MODEL_CKPT=lettered, MMLU_DATA=data, MMLU_OUT=tmp_path, MLM_EXTRA_ARGS=f"--few-shots 2 {extra}",
        **layout,
    )  # fmt: skip
    assert_same(told(result, tmp_path)[1], scored[2])


def assert_same(got: list[dict], want: list[dict]) -> None:
    values, wanted = (torch.tensor([answer["logits"] for answer in answers]) for answers in (got, want))
    assert (values - wanted).abs().max() < 0.05 * wanted.std()
    assert [answer["chosen"] for answer in got] == [answer["chosen"] for answer in want]


def test_experts_on_two_ranks_and_padding(data: Path, tmp_path: Path) -> None:
    """Tokens of padding are routed too, and change nothing; EP=2 shares the questions out to two ranks."""
    source = teach_letters(make_latent(tmp_path / "hf"))
    stage = Runner(tmp_path / "runs", make_latent_conf(tmp_path / "model.yaml"))
    variables = {"HF_MODEL_CKPT": source, "MMLU_DATA": data}
    alone = stage("mmlu", **variables, MMLU_OUT=tmp_path / "1", MLM_EXTRA_ARGS="--mmlu-batch-size 1")
    score, answers = told(alone, tmp_path / "1")
    assert_scored_as(reference(source, 0), score, answers, close=0.15)
    batched = stage("mmlu", **variables, MMLU_OUT=tmp_path / "12", MLM_EXTRA_ARGS="--mmlu-tokens-per-batch 9999")
    assert_same(told(batched, tmp_path / "12")[1], answers)
    both = stage.ranks("mmlu", **variables, MMLU_OUT=tmp_path / "ep", MLM_EXTRA_ARGS="", EP=2)
    assert "EP 2 ETP 1 DP 2" in both.out
    assert_same(told(both, tmp_path / "ep")[1], answers)


def test_a_quantized_checkpoint_is_scored(
    scored: tuple, stage: Runner, fp8: Result, lettered: Path, folder: Path, data: Path, tmp_path: Path
) -> None:
    result = stage(
        "mmlu", HF_MODEL_CKPT=lettered, MLM_MODEL_CKPT=folder / "fp8", MMLU_DATA=data, MMLU_OUT=tmp_path,
        MLM_EXTRA_ARGS="--few-shots 2",
    )  # fmt: skip
    score, answers = told(result, tmp_path)
    assert score["source"] == str(folder / "fp8" / "release")
    got, plain = (torch.tensor([answer["logits"] for answer in some]) for some in (answers, scored[2]))
    assert not torch.equal(got, plain)
    assert torch.nn.functional.cosine_similarity(got.flatten(), plain.flatten(), dim=0) > 0.9


def test_a_missed_lower_bound_fails_and_keeps_the_score(
    scored: tuple, stage: Runner, lettered: Path, data: Path, tmp_path: Path
) -> None:
    variables = {"HF_MODEL_CKPT": lettered, "MMLU_DATA": data, "MLM_EXTRA_ARGS": "--few-shots 2"}
    result = stage("mmlu", **variables, MMLU_OUT=tmp_path / "a", MLM_LOWER_BOUND=1)
    one_line(result, "MLM_LOWER_BOUND", f"{scored[1]['accuracy']:.4f} is below 1.0", code=1)
    assert json.loads((tmp_path / "a" / "mmlu.json").read_text())["accuracy"] == scored[1]["accuracy"]
    met = stage("mmlu", **variables, MMLU_OUT=tmp_path / "b", MLM_LOWER_BOUND=scored[1]["accuracy"])
    assert met.code == 0, met.out


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MMLU_DATA": "/nowhere/mmlu"}, ("--mmlu-data: /nowhere/mmlu is not a folder",)),
        ({"MLM_EXTRA_ARGS": "--mmlu-data ./nothing"}, ("--mmlu-data: ./nothing is not a folder",)),
        ({"MLM_EXTRA_ARGS": "--subjects astronomie"}, ("--subjects", "'astronomie'", "nearest: astronomy")),
        ({"MLM_EXTRA_ARGS": "--fraction 1.5"}, ("--fraction", "'1.5' is not a number from 0 to 1")),
        ({"MLM_EXTRA_ARGS": "--fraction 0"}, ("--fraction", "no question")),
        ({"MLM_EXTRA_ARGS": "--few-shots 6"}, ("--few-shots", "6")),
        ({"MLM_EXTRA_ARGS": "--few-shots 3"}, ("--few-shots", "2 examples (dev split) of astronomy")),
        ({"MLM_EXTRA_ARGS": "--format lm-eval"}, ("--format", "hendrycks", "modelopt")),
        ({"MLM_LOWER_BOUND": "40%"}, ("MLM_LOWER_BOUND", "'40%'")),
        ({"MMLU_OUT": "/tmp/score.json"}, ("MMLU_OUT", "give a folder")),
        ({"MLM_EXTRA_ARGS": "--moe-expert-capacity-factor 1"}, ("--moe-expert-capacity-factor", "leave it out")),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_wrong_input(variables: dict, words: tuple, stage: Runner, lettered: Path, data: Path, tmp_path: Path) -> None:
    defaults = {"HF_MODEL_CKPT": lettered, "MMLU_DATA": data, "MMLU_OUT": tmp_path / "out", "MLM_EXTRA_ARGS": ""}
    one_line(stage("mmlu", **{**defaults, **variables}), *words)
    assert not (tmp_path / "out" / "mmlu.json").exists()


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(StageError, match="CP: mmlu needs CP=1"):
        stages_mmlu._refuse(Namespace(context_parallel_size=2, moe_expert_capacity_factor=None))


def test_a_question_longer_than_the_model(stage: Runner, lettered: Path, data: Path, tmp_path: Path) -> None:
    run_dir = stage.run_dir()
    file = run_dir / "conf" / "model.yaml"
    file.write_text(file.read_text().replace(": 512", ": 256"))
    variables = {"HF_MODEL_CKPT": lettered, "MMLU_DATA": data, "MMLU_OUT": tmp_path / "out", "MLM_EXTRA_ARGS": ""}
    one_line(stage("mmlu", run_dir=run_dir, **variables), "high_school_geography", "takes 256", "On day 1")


def test_a_wrong_row_is_named(data: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    folder = write_csv(tmp_path / "csv")
    file = folder / "test" / "kitchen_lore_test.csv"
    good = file.read_text()
    file.write_text(good + '"two\nlines",one,two,three,A\n')
    with pytest.raises(StageError, match=r"kitchen_lore_test.csv, line 6: 5 columns"):
        mmlu.load(folder, [], 0, 1.0)
    assert len(mmlu.load(folder, ["astronomy"], 0, 1.0)["astronomy"].questions) == 4
    file.write_text(good + "q,1,2,3,4,E\n\n")
    with pytest.raises(StageError, match=r"line 5: answer 'E'"):
        mmlu.load(folder, [], 0, 1.0)
    file.write_text(good + "q,None,NA,3,4,D\n\n")  # a choice is text, also where a table reader sees a missing value
    assert mmlu.load(folder, [], 0, 1.0)["kitchen_lore"].questions[4].choices[:2] == ("None", "NA")
    file = write_parquet(tmp_path / "parquet", whole=False) / "astronomy" / "test-00000-of-00001.parquet"
    row = {"question": "q", "choices": ["a", "b", "c"], "answer": 1}
    write_table(pyarrow.Table.from_pylist([row]), file)
    with pytest.raises(StageError, match=r"parquet, row 1: not a question with four choices"):
        mmlu.load(tmp_path / "parquet", [], 0, 1.0)
    file.write_text("not parquet")
    with pytest.raises(StageError, match=r"astronomy/test-00000-of-00001.parquet cannot be read"):
        mmlu.load(tmp_path / "parquet", [], 0, 1.0)
    (tmp_path / "tar" / "data").mkdir(parents=True)
    with pytest.raises(StageError, match="did you mean"):
        mmlu.check_folder(str(tmp_path / "tar"))


def test_letters_of_tokenizers() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    one = AutoTokenizer.from_pretrained(smollm2.checkpoint())
    lead, letters = mmlu.letter_tokens(one, "hendrycks")
    assert lead == [] and one.convert_ids_to_tokens(letters) == ["ĠA", "ĠB", "ĠC", "ĠD"]

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    blank = PreTrainedTokenizerFast(tokenizer_object=plain)
    lead, letters = mmlu.letter_tokens(blank, "hendrycks")
    assert blank.convert_ids_to_tokens(lead + letters) == ["Ġ", "A", "B", "C", "D"]

    words = Tokenizer(models.WordLevel({"Answer:": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(StageError, match="tokenizer: does not end"):
        mmlu.letter_tokens(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"), "hendrycks")


def test_special_tokens_stand_before_a_prompt_only(data: Path) -> None:
    from tokenizers import processors
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.checkpoint())
    subjects = mmlu.load(data, [], 0, 1.0)
    bare = mmlu.encode(subjects, tokenizer, "hendrycks", 10**6).prompts
    ends = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=ends
    )
    assert mmlu.encode(subjects, tokenizer, "hendrycks", 10**6).prompts == [[1, *ids] for ids in bare]


def test_batches_share_all_prompts_out() -> None:
    lengths = [30, 100, 99, 31, 88, 28, 512, 27, 90]
    made = mmlu_score.buckets(lengths, ranks=2, tokens=200, rows=None, multiple=8)
    assert sorted({index for bucket in made for index in bucket.index}) == list(range(9))
    for bucket in made:
        assert len(bucket.index) % (2 * bucket.rows) == 0, "every rank has equally many rows"
        assert bucket.length % 8 == 0
        assert bucket.rows == 1 or bucket.rows * bucket.length <= 200
        shortest, longest = (pick(lengths[index] for index in bucket.index) for pick in (min, max))
        assert shortest >= longest * mmlu_score.CLOSE and longest <= bucket.length
    assert all(bucket.rows == 1 for bucket in mmlu_score.buckets(lengths, 1, 10**6, 1, 1))


def test_every_subject_has_one_category() -> None:
    assert {name: len(subjects) for name, subjects in mmlu.CATEGORIES.items()} == {
        "humanities": 13, "social sciences": 12, "STEM": 18, "other": 14
    }  # fmt: skip
    assert len(mmlu.CATEGORY_OF) == 57


def test_modelopt_format_is_modelopts(
    stage: Runner, lettered: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own evaluation, run on the same questions: the same tokens and the same score."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library = importlib.import_module("modelopt.torch.utils.plugins.megatron_mmlu")
    result = stage(
        "mmlu", HF_MODEL_CKPT=lettered, MMLU_DATA=data, MMLU_OUT=tmp_path,
        MLM_EXTRA_ARGS="--format modelopt --few-shots 1",
    )  # fmt: skip
    score, _answers = told(result, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(lettered)
    model = AutoModelForCausalLM.from_pretrained(lettered, dtype=torch.bfloat16).eval()
    seen: set[tuple[int, ...]] = set()

    def rows(_name: str, _config: str, split: str) -> list[dict]:
        return [
            {"question": text, "choices": choices, "answer": "ABCD".index(answer), "subject": subject}
            for subject, questions in {"test": TEST, "dev": DEV}[split].items()
            for text, choices, answer in questions
        ]

    def prefill(_model: object, ids: torch.Tensor) -> torch.Tensor:
        seen.add(tuple(ids[0].tolist()))
        with torch.no_grad():
            return model(ids).logits

    monkeypatch.setattr(library, "load_dataset", rows)
    monkeypatch.setattr(library, "megatron_prefill", prefill)
    with session(stage, lettered):
        average = library.megatron_mmlu(SimpleNamespace(), tokenizer, few_shots=1, fraction=1.0)
    ours = mmlu.encode(mmlu.load(data, [], 1, 1.0), tokenizer, "modelopt", 10**6)
    assert {tuple(ids) for ids in ours.prompts} == seen
    assert score["accuracy"] == pytest.approx(average)


def test_smollm2_answers_as_in_transformers(data: Path, tmp_path: Path) -> None:
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    stage = Runner(tmp_path / "runs", ROOT / "conf" / f"{name}.yaml", name)
    source, out = smollm2.checkpoint(), tmp_path / "out"
    result = stage("mmlu", HF_MODEL_CKPT=source, MMLU_DATA=data, MMLU_OUT=out, MLM_EXTRA_ARGS="--few-shots 2")
    score, answers = told(result, out)
    want = reference(source, 2)
    got = torch.tensor([answer["logits"] for answer in answers])
    assert (got - want).abs().max() < 0.5
    # bf16 logits of about 20 have steps of 0.125, and the letters of so small a model often lie closer than two
    clear = want.sort(dim=1).values.diff(dim=1)[:, -1] >= 0.25
    assert clear.sum() >= 5 and torch.equal(got.argmax(1)[clear], want.argmax(1)[clear])
    right = torch.tensor(["ABCD".index(row[2]) for subject in sorted(TEST) for row in TEST[subject]])
    assert abs(score["correct"] - int((want.argmax(1) == right).sum())) <= 1 and score["questions"] == COUNT
