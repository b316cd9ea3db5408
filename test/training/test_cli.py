"""The commands of docs/training.md, on a tiny random model, until the engine serves the drafter."""

import gzip
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from truespec.config import EngineConfig
from truespec.llm import LLM
from truespec.params import SamplingParams
from truespec.training.__main__ import main
from truespec.training.answers import Answer, append_answers, read_answers, recover_answers

SMALL = (
    "--max-tokens 24 --num-dev 6 --num-steps 4 --measure-every 2 --num-sequences 2 "
    "--anchors-per-sequence 6 --markov-rank 4 --num-layers 1"
)
TOPICS = ("the sea", "an owl", "rain", "a stone", "fire", "tin", "snow")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"Say more of {topic}.", "category": "qa"}) for topic in TOPICS]
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines.append(json.dumps({"messages": conversation}))
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(command: str, **paths: Path) -> None:
    main(shlex.split(command.format(**paths)))


def greedy(config: EngineConfig) -> tuple[list[list[int]], int]:
    """Tokens, and how many drafts were verified on the way."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    done = LLM(config).generate(["Say more of glass.", "Say more of a fox."], params)
    return [d.token_ids for d in done], sum(d.acceptance.num_drafts for d in done)


def test_one_command_makes_a_drafter_that_the_engine_serves(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = "dspark --model {model} --prompts {prompts} --out {out} " + SMALL
    run(command, model=tiny_llama, prompts=prompts, out=out)
    answers = read_answers(out / "answers.jsonl.gz")
    assert sorted({a.temperature for a in answers}) == [0.0, 0.6, 1.0]
    assert len(answers) == 3 * 8
    assert "GB in all" in capfd.readouterr().err
    config = json.loads((out / "export" / "config.json").read_text())
    assert len(config["confidence_temperatures"]) == config["block_size"] == 5
    assert [json.loads(x)["step"] for x in (out / "history.jsonl").open()] == [2, 4]
    plain = EngineConfig(model_path=str(tiny_llama), max_total_tokens=1024)
    drafting = replace(
        plain,
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=str(out / "export"),
        speculative_adaptive=False,
    )
    tokens, num_drafts = greedy(drafting)
    assert num_drafts > 0
    assert tokens == greedy(plain)[0]
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    run(command, model=tiny_llama, prompts=prompts, out=out)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    with prompts.open("a") as file:
        file.write('{"prompt": "One more."}\n')
    with pytest.raises(SystemExit, match="use another --out"):
        run(command, model=tiny_llama, prompts=prompts, out=out)


def test_the_stages_run_one_by_one(tiny_llama: Path, prompts: Path, tmp_path: Path) -> None:
    paths = {"model": tiny_llama, "prompts": prompts, "out": tmp_path}
    run("answers --model {model} --prompts {prompts} --out {out}/a.gz --max-tokens 24", **paths)
    run("collect --model {model} --answers {out}/a.gz --cache {out}/cache --num-dev 6", **paths)
    trained = "--answers {out}/a.gz --target {model} --cache {out}/cache --run-dir {out}/run"
    small = SMALL.partition("--num-dev 6")[2]
    run(f"dspark {trained} {small}", **paths)
    run(
        "calibrate --checkpoint {out}/run/export --target {model} --cache {out}/cache",
        **paths,
    )
    assert "confidence_temperatures" in (tmp_path / "run/export/config.json").read_text()
    with pytest.raises(SystemExit, match="--max-tokens has no effect"):
        run(f"dspark {trained} --max-tokens 9", **paths)


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
