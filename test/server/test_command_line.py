"""Flags from option classes, and values from a file below them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from truespec.__main__ import main
from truespec.config import EngineConfig, ServerConfig, options
from truespec.utils.command_line import add_flags, check_values, read_values

KNOWN = [*options(EngineConfig), *options(ServerConfig)]


def parse(*args: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, KNOWN, {"deterministic": "--enable-deterministic-inference"})
    return vars(parser.parse_args(args))


def test_only_given_flags_are_reported() -> None:
    assert parse() == {}
    assert parse("--port", "5", "--kv-cache-dtype", "bfloat16") == {
        "port": 5,
        "kv_cache_dtype": "bfloat16",
    }


def test_booleans_are_switches_and_what_is_on_can_be_turned_off() -> None:
    assert parse("--disable-radix-cache") == {"disable_radix_cache": True}
    assert parse("--no-speculative-adaptive") == {"speculative_adaptive": False}
    assert parse("--enable-deterministic-inference") == {"deterministic": True}


def test_every_option_has_a_flag_with_its_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, KNOWN)
    text = parser.format_help()
    for option in KNOWN:
        assert f"--{option.name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", 'port = 7\ntp-size = 1\napi_key = "x"\n'), ("a.json", '{"port": 7, "tp-size": 1}')],
)
def test_a_file_gives_values_by_name(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    values = read_values(str(path))
    assert (values["port"], values["tp_size"]) == (7, 1)
    check_values(values, KNOWN, name)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"prot": 7}, "prot"),
        ({"port": "7"}, "port"),
        ({"port": True}, "port"),
        ({"dtype": "int8"}, "dtype"),
        ({"deterministic": 1}, "deterministic"),
        ({"port": None}, "port"),
    ],
)
def test_a_wrong_value_in_a_file_is_named(values: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        check_values(values, KNOWN, "file.toml")


def test_values_of_optional_and_float_options_may_be_null_and_whole() -> None:
    check_values({"context_length": None, "mem_fraction_static": 1}, KNOWN, "file.toml")


def test_the_types_of_a_drafter_are_those_that_can_be_written() -> None:
    flag = "--speculative-draft-model-quantization"
    assert parse(flag, "q8_0") == {"speculative_draft_model_quantization": "q8_0"}
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'q5_k'"):
        parse(flag, "q5_k")


def test_a_broken_file_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "a.toml"
    path.write_text("port =")
    assert main(["serve", "--config", str(path)]) == 2
    assert "neither JSON (.json) nor TOML" in capsys.readouterr().err


def test_two_different_models_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["serve", "a", "--model-path", "b"]) == 2
    assert "--model-path" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--port", "70000"), ("--stream-interval", "0")])
def test_options_out_of_range_are_refused(
    flags: tuple[str, str], capsys: pytest.CaptureFixture
) -> None:
    assert main(["serve", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_an_unknown_compat_name_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["serve", "--metrics-compat", "vllm,tgi"]) == 2
    assert "tgi" in capsys.readouterr().err
