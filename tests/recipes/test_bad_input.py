"""Bad input: one message that names the key or line and the fix, exit status 2, no traceback, nothing written."""

import json

import pytest

from hybridrl.config import load
from hybridrl.protocol.errors import UserError
from recipes.ppo import ROLLOUT, PPOConfig, ppo

from .conftest import arguments, run

LINE = {"prompt": "1+1=", "answer": "2"}


def refused(inputs, tmp_path, **changes):
    """The message with which a run with these keys is refused; nothing may have been written for it."""
    with pytest.raises(UserError) as caught:
        ppo(load(PPOConfig, arguments(inputs, dir=tmp_path / "run", **changes), ROLLOUT))
    assert not (tmp_path / "run").exists()
    return str(caught.value)


def data_file(tmp_path, *lines):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return {"data.path": file}


def reward_file(tmp_path, body):
    file = tmp_path / "reward.py"
    file.write_text(f"def score(completions, **columns):\n    {body}\n")
    return {"reward.function": f"{file}:score"}


def test_an_unknown_key_names_the_nearest(inputs, tmp_path):
    with pytest.raises(UserError, match=r"unknown key 'data\.batchsize' \(did you mean 'data\.batch_size'\?\)"):
        load(PPOConfig, arguments(inputs, **{"data.batchsize": 4}), ROLLOUT)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.batch_size", -4, "data.batch_size must be at least 1, not -4"),
        ("ppo.minibatch_size", 0, "ppo.minibatch_size must be at least 1, not 0"),
        ("ranks", 2, "ranks must be 1 with executor=local, not 2; add executor=ray"),
        ("rollout.temperature", 0, "rollout.temperature must be over 0"),
        ("rollout.max_length", 4, "rollout.max_length must be over max_new_tokens=4, not 4"),
        ("rollout", "vlm", "rollout must be one of 'native', 'vllm', not 'vlm' (did you mean 'vllm'?)"),
        ("data.path", "no/such.jsonl", "no/such.jsonl: no such file; set data.path to a JSON-lines file"),
        ("model.path", "no/model", "no Hugging Face model at 'no/model': it does not exist; give the folder"),
        ("reward.function", "no.module:f", "reward 'no.module:f': no module 'no'"),
        ("reward.function", "", "set one of reward.function and reward.model"),
        ("resume", "no/checkpoint", "resume=no/checkpoint holds no checkpoint"),
    ],
)
def test_a_value_that_cannot_be_used(inputs, tmp_path, key, value, message):
    assert message in refused(inputs, tmp_path, **{key: value})


def test_a_data_line_that_is_not_json_is_named_or_skipped(inputs, tmp_path):
    file = data_file(tmp_path, LINE, "{not json\n", LINE)
    assert "data.jsonl line 2: not JSON" in refused(inputs, tmp_path, **file)
    ppo(load(PPOConfig, arguments(inputs, dir=tmp_path / "run", steps=1, **file, **{"data.bad_lines": "skip"}), ROLLOUT))


def test_a_data_line_without_the_field(inputs, tmp_path):
    message = refused(inputs, tmp_path, **data_file(tmp_path, LINE, {"promt": "1+1="}))
    assert "line 2: no field 'prompt' (did you mean 'promt'?)" in message


def test_a_prompt_over_the_limit(inputs, tmp_path):
    message = refused(inputs, tmp_path, **{"data.max_prompt_tokens": 3})
    assert "line 1: the prompt has 4 tokens, over the limit of 3; raise data.max_prompt_tokens" in message


def test_prompts_that_leave_no_room_for_the_response(inputs, tmp_path):
    message = refused(inputs, tmp_path, **{"rollout.max_length": 7})
    assert "rollout.max_length" in message and "8" in message


def test_a_folder_that_is_taken(inputs, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty: continue the run in it with resume=auto"):
        ppo(load(PPOConfig, arguments(inputs, dir=tmp_path / "run"), ROLLOUT))
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('x')", "raised KeyError: 'x' (at"),
        ("return [float('nan')] * len(completions)", "returned nan for row 0"),
        ("return [1.0]", "returned 1 rewards for"),
        ("return None", "returned a NoneType"),
    ],
)
def test_a_reward_that_fails(inputs, tmp_path, body, message):
    file = reward_file(tmp_path, body)
    with pytest.raises(UserError) as caught:
        ppo(load(PPOConfig, arguments(inputs, dir=tmp_path / "run", **file), ROLLOUT))
    assert message in str(caught.value)


def test_a_reward_that_needs_a_column_the_data_lacks_is_refused_before_the_start(inputs, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def score(completions, anser):\n    return [0.0] * len(completions)\n")
    message = refused(inputs, tmp_path, **{"reward.function": f"{file}:score"})
    assert "needs the column 'anser' (did you mean 'answer'?)" in message


@pytest.mark.processes
@pytest.mark.timeout(100)
def test_from_the_command_line_one_message_and_status_2(inputs, tmp_path):
    done = run("ppo", inputs, dir=tmp_path / "run", **{"data.batch_size": -4})
    assert (done.returncode, done.stderr.strip()) == (2, "error: data.batch_size must be at least 1, not -4")
    done = run("ppo", inputs, dir=tmp_path / "run", **reward_file(tmp_path, "raise KeyError('x')"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: reward")]
