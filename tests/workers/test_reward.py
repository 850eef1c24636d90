import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from hybridrl.data.tiny_model import byte_tokenizer, make_tiny_model
from hybridrl.protocol.batch import batch, objects, ragged
from hybridrl.protocol.errors import ConfigError, ModelError, RewardError
from hybridrl.workers import RankContext, Reward, RewardConfig, RewardWorkerConfig

FUNCTION = """
calls = []
def lengths(prompts, completions, answer, hint):
    calls.append((prompts, completions, answer, hint))
    return [len(c) for c in completions]
def broken(completions):
    return [0.0]
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("policy"), 64, 2))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    # A padding token in its configuration that is not the tokenizer's: the tokenizer's counts.
    config = Qwen2Config(vocab_size=260, num_labels=1, pad_token_id=70, eos_token_id=1, initializer_range=0.3, **sizes)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


TEXTS = [("<user>1+1?<assistant>", "two"), ("<user>Why? é<assistant>", "because it is so"), ("x", ""), ("<user>", "z<eos>")]


def make_rows(texts, fields=None):
    tokenizer = byte_tokenizer()
    prompts = [tokenizer(p)["input_ids"] for p, _ in texts]
    answers = [tokenizer(c)["input_ids"] if c else [] for _, c in texts]
    return batch(
        {
            "tokens": ragged([p + a for p, a in zip(prompts, answers, strict=True)], torch.int64),
            "response_mask": ragged(
                [[False] * len(p) + [True] * len(a) for p, a in zip(prompts, answers, strict=True)], torch.bool
            ),
            "fields": objects(fields or [{"answer": i} for i in range(len(texts))]),
        }
    )


def make_reward(tokenizer_path, **reward):
    return Reward(RewardWorkerConfig(RewardConfig(**reward), tokenizer_path), RankContext())


def test_a_function_is_given_texts_and_fields(policy, tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(FUNCTION)
    reward = make_reward(policy, function=f"{file}:lengths")
    fields = [{"answer": "2", "hint": "add"}, {"answer": "so"}, {"hint": None, "answer": 3}, {"answer": []}]
    scores = reward.score(make_rows(TEXTS, fields))["scores"]
    assert scores.dtype is torch.float32 and scores.tolist() == [3, 16, 0, 1]
    ((prompts, completions, answers, hints),) = reward.scorer._function.__globals__["calls"]
    assert prompts == [p for p, _ in TEXTS]
    assert completions == ["two", "because it is so", "", "z"]  # without the end of text
    assert answers == ["2", "so", 3, []] and hints == ["add", None, None, None]


def test_no_rows_have_no_scores_and_call_no_function(policy, judge, tmp_path):
    (tmp_path / "judge.py").write_text(FUNCTION)
    for reward in (make_reward(policy, function=f"{tmp_path / 'judge.py'}:broken"), make_reward(policy, model=judge)):
        scores = reward.score(make_rows([]))["scores"]
        assert scores.shape == (0,) and scores.dtype is torch.float32


def test_a_function_that_returns_too_little_is_refused(policy, tmp_path):
    (tmp_path / "judge.py").write_text(FUNCTION)
    with pytest.raises(RewardError, match="1 rewards for 4 completions"):
        make_reward(policy, function=f"{tmp_path / 'judge.py'}:broken").score(make_rows(TEXTS))


def test_a_model_scores_each_text_as_if_it_were_alone(policy, judge):
    reward = make_reward(policy, model=judge)
    texts = [(f"<user>{'a' * (k % 17)}?<assistant>", "b" * (k % 7)) for k in range(70)]  # more than one batch of the scorer
    scores = reward.score(make_rows(texts))["scores"]
    model = Qwen2ForSequenceClassification.from_pretrained(judge).eval()
    model.config.pad_token_id = None
    for (prompt, completion), score in zip(texts, scores, strict=True):
        alone = model(torch.tensor([byte_tokenizer()(prompt + completion)["input_ids"]])).logits[0, 0]
        assert float(score) == pytest.approx(alone.item(), abs=1e-5)
    assert scores.std() > 0.1


def test_a_text_that_begins_with_the_beginning_token_gets_no_second_one(policy, tmp_path):
    words = {"<s>": 0, "<pad>": 1, "x": 2, "y": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>").save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=4, num_labels=1, pad_token_id=1, initializer_range=0.5, **sizes)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("x y")["input_ids"] == [0, 2, 3]
    scorer = make_reward(policy, model=str(tmp_path)).scorer
    expected = model(torch.tensor([[0, 2, 3]])).logits.item()
    assert scorer.score(["<s> x"], [" y"], [{}]) == pytest.approx([expected], abs=1e-6)
    assert scorer.score(["x"], [" y"], [{}]) == pytest.approx([expected], abs=1e-6)


def test_models_that_cannot_judge_are_refused(policy, tmp_path):
    with pytest.raises(ModelError, match=r"no trained 'score\.weight'"):
        make_reward(policy, model=policy)
    with pytest.raises(ModelError, match="does not exist"):
        make_reward(policy, model=str(tmp_path / "nowhere"))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    Qwen2ForSequenceClassification(Qwen2Config(vocab_size=260, num_labels=3, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        make_reward(policy, model=str(tmp_path))
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="3 outputs"):
        make_reward(policy, model=str(tmp_path))


def test_a_reward_comes_from_one_place():
    for reward in (RewardConfig(), RewardConfig(function="a:b", model="c")):
        with pytest.raises(ConfigError, match=r"one of reward\.function and reward\.model"):
            RewardWorkerConfig(reward, "x")
