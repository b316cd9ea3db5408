"""The commands of docs/training.md, on a tiny random model, until the engine serves the drafter."""

import gzip
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tiny import tiny_checkpoint
from truespec.config import EngineConfig
from truespec.llm import LLM
from truespec.params import SamplingParams
from truespec.training.__main__ import main
from truespec.training.algorithms import ALGORITHMS
from truespec.training.answers import Answer, append_answers, read_answers, recover_answers

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
ANSWERS, SPLIT = "--max-tokens 24", "--num-dev 6"
LOOP = "--num-steps 4 --measure-every 2 --num-sequences 2 --anchors-per-sequence 6"
SHAPES = {
    "dspark": "--markov-rank 4 --num-layers 1",
    "dflash": "--num-layers 1 --block-size 4",
    "eagle3": "--num-drafts 3",
    "mtp": "--num-heads 2",
}
SERVED: dict[str, dict[str, object]] = {
    "dspark": {"speculative_algorithm": "DSPARK"},
    "dflash": {"speculative_algorithm": "DFLASH"},
    "eagle3": {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3},
    "mtp": {"speculative_algorithm": "NEXTN", "enable_multi_layer_eagle": True},
}
TOPICS = ("the sea", "an owl", "rain", "a stone", "fire", "tin", "snow")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"Say more of {topic}.", "category": "qa"}) for topic in TOPICS]
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines.append(json.dumps({"messages": conversation}))
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def workplace(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the page: its model, here a tiny one, and its prompts."""
    tiny_checkpoint(prompts.parent / "Qwen3-0.6B", "qwen3")
    monkeypatch.chdir(prompts.parent)
    return prompts.parent


def run(command: str, **paths: Path) -> None:
    main(shlex.split(command.format(**paths)))


def commands_of_the_page() -> list[str]:
    """What follows `truespec train` on each line of the page that begins so, in order."""
    start = "truespec train "
    return [x.removeprefix(start) for x in PAGE.read_text().splitlines() if x.startswith(start)]


def assert_drafts_change_no_token(model: Path, drafter: Path, algorithm: str) -> None:
    plain = EngineConfig(model_path=str(model), max_total_tokens=1024)
    drafting = replace(
        plain,
        speculative_draft_model_path=str(drafter),
        speculative_adaptive=False,
        **SERVED[algorithm],  # type: ignore[arg-type]  # names and types are the table's
    )
    tokens, num_drafts = greedy(drafting)
    assert num_drafts > 0
    assert tokens == greedy(plain)[0]


def greedy(config: EngineConfig) -> tuple[list[list[int]], int]:
    """Tokens, and how many drafts were verified on the way."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    done = LLM(config).generate(["Say more of glass.", "Say more of a fox."], params)
    return [d.token_ids for d in done], sum(d.acceptance.num_drafts for d in done)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_one_command_makes_a_drafter_that_the_engine_serves(
    algorithm: str, workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = commands_of_the_page()[0].split()
    command = " ".join(
        [algorithm, *page[1:], ANSWERS, SPLIT, LOOP, SHAPES[algorithm]],
    )
    run(command)
    out = workplace / "drafter"
    answers = read_answers(out / "answers.jsonl.gz")
    assert sorted({a.temperature for a in answers}) == [0.0, 0.6, 1.0]
    assert len(answers) == 3 * 8
    assert "GB in all" in capfd.readouterr().err
    assert [json.loads(x)["step"] for x in (out / "history.jsonl").open()] == [2, 4]
    assert_card_tells(out, command)
    assert_drafts_change_no_token(workplace / "Qwen3-0.6B", out / "export", algorithm)


def assert_card_tells(out: Path, command: str) -> None:
    card = (out / "export" / "README.md").read_text()
    last = json.loads((out / "history.jsonl").read_text().splitlines()[-1])
    assert f"truespec train {command}\n" in card
    assert f"| all | {last['dev/greedy']:.2f} |" in card
    assert f"| qa | {last['dev/greedy/qa']:.2f} |" in card
    assert f"| 1 | {last['dev/row0']:.2f} |" in card
    assert "seed 0" in card


def test_a_finished_training_is_left_as_it_is(workplace: Path) -> None:
    command = f"{commands_of_the_page()[0]} {ANSWERS} {SPLIT} {LOOP} {SHAPES['dspark']}"
    run(command)
    out = workplace / "drafter"
    config = json.loads((out / "export" / "config.json").read_text())
    assert len(config["confidence_temperatures"]) == config["block_size"]
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    run(command)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    with pytest.raises(SystemExit, match="holds a training with shape"):
        run(f"{command} --block-size 3")
    with (workplace / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "One more."}\n')
    with pytest.raises(SystemExit, match="use another --out"):
        run(command)


def test_the_stages_of_the_page_run_one_by_one(workplace: Path) -> None:
    training = {name: f"{LOOP} {shape}" for name, shape in SHAPES.items()}
    small = {"answers": ANSWERS, "collect": SPLIT, **training}
    _, *commands = commands_of_the_page()
    stages = [command.split()[0] for command in commands]
    assert stages == [
        "answers",
        "collect",
        "dspark",
        "calibrate",
        "card",
        "dflash",
        "eagle3",
        "mtp",
    ]
    for stage, command in zip(stages, commands, strict=True):
        run(f"{command} {small.get(stage, '')}")
    assert "confidence_temperatures" in (workplace / "run/export/config.json").read_text()
    for algorithm, run_dir in (("dspark", "run"), ("dflash", "dflash")):
        drafter = workplace / run_dir / "export"
        assert_drafts_change_no_token(workplace / "Qwen3-0.6B", drafter, algorithm)
    with pytest.raises(SystemExit, match="--max-tokens has no effect"):
        run(f"{commands[2]} --max-tokens 9")


def test_bad_prompt_lines_are_reported_and_skipped(
    tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = ["not json", "7", '{"text": "x"}', json.dumps({"prompt": "w " * 600}), ""]
    (tmp_path / "p").write_text("\n".join([*lines, '{"prompt": "Hi"}', '{"prompt": "Hi"}']))
    command = "answers --model {model} --prompts {out}/p --out {out}/a.gz --max-tokens 4"
    run(command + " --temperatures 0,1", model=tiny_llama, out=tmp_path)
    assert [a.temperature for a in read_answers(tmp_path / "a.gz")] == [0.0, 1.0]
    reported = [x for x in capfd.readouterr().err.splitlines() if "skipped" in x]
    assert [x.split(":")[1] for x in reported] == ["1", "2", "3", "4"]


def test_a_killed_run_continues_with_the_answers_it_would_have_made(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    command = "answers --model {model} --prompts {prompts} --out {out} --max-tokens 8 "
    command += "--group-size 5"
    paths = {"model": tiny_llama, "prompts": prompts}
    run(command, out=tmp_path / "whole", **paths)
    whole = read_answers(tmp_path / "whole")
    packed = (tmp_path / "whole").read_bytes()
    (tmp_path / "parts").write_bytes(packed[: len(packed) * 2 // 3])
    kept = recover_answers(tmp_path / "parts")
    assert 5 <= len(kept) < len(whole)
    run(command, out=tmp_path / "parts", **paths)
    assert read_answers(tmp_path / "parts") == whole


def test_recovering_keeps_whole_lines_of_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    answers = [Answer("qa", 1.0, [i], list(range(40 * i)), seed=i) for i in range(6)]
    append_answers(path, answers[:2])
    append_answers(path, answers[2:])
    assert recover_answers(path) == answers
    path.write_bytes(path.read_bytes()[:-12])  # the end of the text and the checksum
    kept = recover_answers(path)
    assert answers[: len(kept)] == kept
    assert 2 <= len(kept) < 6
    with gzip.open(path, "rt") as lines:
        assert len(lines.readlines()) == len(kept)
