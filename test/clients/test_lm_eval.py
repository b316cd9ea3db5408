"""lm-eval, unmodified: loglikelihoods and greedy text do not change when speculation is on."""

from __future__ import annotations

import json

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.gguf import GGUFLM
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from workers import MODEL_NAME, Servers

from api_client import ApiClient
from tiny import tiny_model, tiny_tokenizer

PAIRS = [
    ("The sky is", " blue"),
    ("The sky is", " in the sea"),
    ("One and two make", " three"),
    ("é is a", " letter, and € a sign"),
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[ConfigurableTask]:
    """A multiple choice and a free text task on a local file."""
    directory = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"{a} and {b} make", "options": [f" {a + b}", f" {a * b}", " no"], "gold": 0}
        for a, b in ((1, 2), (3, 4), (5, 6), (2, 2))
    ]
    path = directory / "sums.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(directory)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "num_fewshot": 0,
    }
    choice = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    text = {
        "task": "text",
        "output_type": "generate_until",
        "doc_to_target": "{{options[gold]}}",
        "generation_kwargs": {"until": ["a", "\n"], "max_gen_toks": 12, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [ConfigurableTask(config=common | own) for own in (choice, text)]


def completions(client: ApiClient, **options: object) -> LocalCompletionsAPI:
    url = f"{client.url}/v1/completions"
    return LocalCompletionsAPI(base_url=url, model=MODEL_NAME, max_length=256, **options)


def evaluated(lm: object, tasks: list[ConfigurableTask], **options: bool) -> tuple[dict, dict]:
    """Scores, and what the server answered to every question."""
    named = {task.config.task: task for task in tasks}
    found = lm_eval.evaluate(lm=lm, task_dict=named, bootstrap_iters=0, **options)
    answers = {
        name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()
    }
    return found["results"], answers


def test_scores_and_answers_are_the_same_with_speculation_on_and_off(
    servers: Servers, tasks: list[ConfigurableTask]
) -> None:
    on, off = (
        evaluated(completions(servers[name], batch_size=3), tasks) for name in ("dspark", "plain")
    )
    assert on == off
    assert len(on[1]["choice"]) == len(on[1]["text"]) == 4


def test_the_servers_own_tokenizer_is_found_and_gives_the_same_ids(
    dspark: ApiClient,
) -> None:
    lm = completions(dspark)
    assert lm.tokenizer_backend == "remote"
    local = tiny_tokenizer()
    for context, continuation in PAIRS:
        assert lm.tok_encode(context + continuation) == local.encode(context + continuation).ids
    assert lm.eot_token_id == 2
    assert lm.tokenizer.decode(local.encode("é €").ids) == "é €"
    messages = [{"role": "user", "content": "Hi"}]
    rendered = lm.tokenizer.apply_chat_template(messages)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def loglikelihoods(lm: object) -> list[tuple[float, bool]]:
    """(sum of logprobs, is greedy) of every continuation."""
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    return lm.loglikelihood(asked)


def by_hand(pair: tuple[str, str]) -> tuple[float, bool]:
    """The same by a pass of transformers."""
    context, whole = (tiny_tokenizer().encode(text).ids for text in (pair[0], pair[0] + pair[1]))
    with torch.no_grad():
        rows = tiny_model("llama")(torch.tensor([whole])).logits[0].log_softmax(-1)
    places = range(len(context), len(whole))
    total = sum(rows[place - 1, whole[place]].item() for place in places)
    return total, all(rows[place - 1].argmax().item() == whole[place] for place in places)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_of_token_ids_are_those_of_the_model(
    dspark: ApiClient, batch_size: int
) -> None:
    found = loglikelihoods(completions(dspark, batch_size=batch_size))
    wanted = [by_hand(pair) for pair in PAIRS]
    assert [one[0] for one in found] == pytest.approx([one[0] for one in wanted], abs=1e-3)
    assert [one[1] for one in found] == [one[1] for one in wanted]


def test_a_greedy_continuation_is_called_greedy(dspark: ApiClient) -> None:
    body = {"prompt": "The sky is", "temperature": 0, "max_tokens": 1, "ignore_eos": True}
    body |= {"return_token_ids": True}
    ids = dspark.ok("/v1/completions", body)["choices"][0]["token_ids"]
    context = tiny_tokenizer().encode("The sky is").ids
    lm = completions(dspark)
    requests = [(("", ""), context, ids), (("", ""), context, [ids[0] - 1])]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(requests)] == [True, False]


def test_text_offsets_split_context_and_continuation_for_the_gguf_client(
    dspark: ApiClient, plain: ApiClient
) -> None:
    on, off = (loglikelihoods(GGUFLM(base_url=client.url)) for client in (dspark, plain))
    assert on == off
    wanted = [by_hand(pair)[0] for pair in PAIRS]
    assert [one[0] for one in on] == pytest.approx(wanted, abs=1e-3)


def test_chat_completions_answer_the_text_task(
    servers: Servers, tasks: list[ConfigurableTask]
) -> None:
    answers = []
    for name in ("dspark", "plain"):
        url = f"{servers[name].url}/v1/chat/completions"
        lm = LocalChatCompletion(base_url=url, model=MODEL_NAME)
        answers.append(evaluated(lm, tasks[1:], apply_chat_template=True))
    assert answers[0] == answers[1]
    assert len(answers[0][1]["text"]) == 4
