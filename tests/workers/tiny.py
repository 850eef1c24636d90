"""Models and batches small enough to check exactly, and the same quantities computed by transformers alone."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.protocol.batch import Batch, batch, lengths_of, padded, ragged

ARCHITECTURES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
VOCABULARY = 51
EOS = 1
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
PROMPTS = (3, 1, 5, 2, 4, 6, 1, 2, 3)
RESPONSES = (4, 7, 0, 1, 12, 0, 3, 9, 2)


def save_model(folder: Path, name: str = "qwen2", seed: int = 0, **changes) -> str:
    """Write a random model of this architecture; biases and norms are random too, so that none of them goes unnoticed."""
    torch.manual_seed(seed)
    config = ARCHITECTURES[name](**{**SIZES, **changes})
    return save_config(folder, config)


def save_config(folder: Path, config) -> str:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def make_batch(seed: int = 0, prompts=PROMPTS, responses=RESPONSES, dtype=torch.float32) -> Batch:
    """Rows with these prompt and response lengths, and every column that a loss may read, junk outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [p + r for p, r in zip(prompts, responses, strict=True)]

    def noise(scale: float, shift: float = 0.0):
        return ragged([torch.randn(n, generator=generator, dtype=torch.float64) * scale + shift for n in lengths], dtype)

    tokens = [torch.randint(2, VOCABULARY, (n,), generator=generator) for n in lengths]
    masks = [torch.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)]
    return batch(
        {
            "tokens": ragged(tokens, torch.int64),
            "response_mask": ragged(masks, torch.bool),
            "old_log_probs": noise(0.5, -4.0),
            "ref_log_probs": noise(0.5, -4.0),
            "advantages": noise(1.0),
            "values": noise(1.0),
            "returns": noise(1.0),
        }
    )


def prompt_batch(seeds, seed: int = 0) -> Batch:
    """A random prompt of 1 to 8 tokens for every one of `seeds`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (len(seeds),), generator=generator).tolist()
    prompts = [torch.randint(2, VOCABULARY, (n,), generator=generator) for n in lengths]
    return batch({"prompts": ragged(prompts, torch.int64), "seed": torch.tensor(list(seeds), dtype=torch.int64)})


def rows_of(data: Batch, rows) -> Batch:
    """These rows of a batch, as an executor would give them to a rank."""
    from hybridrl.protocol.batch import columns_of, take

    return batch(
        {name: take(column, torch.as_tensor(rows, dtype=torch.int64).numpy()) for name, column in columns_of(data).items()}
    )


def plain_model(path: str, dtype=torch.float64, values: bool = False):
    loader = AutoModelForTokenClassification if values else AutoModelForCausalLM
    return loader.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()  # eager takes its softmax in float32


def plain_padded_output(model, data: Batch):
    """Right-padded logits (B, T, V) under transformers' own mask, and (B, T) tokens and mask.

    Nothing here knows hybridrl's packing.
    """
    tokens_BT, mask_BT = padded(data["tokens"]), padded(data["response_mask"]).bool()
    there_BT = torch.arange(tokens_BT.shape[1]) < lengths_of(data["tokens"])[:, None]
    logits_BTV = model(tokens_BT, attention_mask=there_BT.long(), use_cache=False).logits
    return logits_BTV, tokens_BT, mask_BT


def plain_log_probs(model, data: Batch, temperature: float = 1.0):
    """(B, T) log-probabilities and entropies of the distributions that the tokens were drawn from, 0 outside the mask; and
    the mask.
    """
    logits_BTV, tokens_BT, mask_BT = plain_padded_output(model, data)
    log_p = torch.log_softmax(logits_BTV[:, :-1] / temperature, -1)
    log_probs = torch.zeros_like(mask_BT, dtype=log_p.dtype)
    entropies = torch.zeros_like(log_probs)
    log_probs[:, 1:] = log_p.gather(-1, tokens_BT[:, 1:, None])[..., 0]
    entropies[:, 1:] = -(log_p.exp() * log_p).sum(-1)
    return torch.where(mask_BT, log_probs, 0), torch.where(mask_BT, entropies, 0), mask_BT


@torch.no_grad()
def relative(ours: dict, theirs: dict) -> float:
    """|ours - theirs| / |theirs|, the L2 norms over all parameters together."""
    assert ours.keys() == theirs.keys()
    gap = sum((ours[n].double() - theirs[n].double()).square().sum() for n in ours)
    return float((gap / sum(t.double().square().sum() for t in theirs.values())).sqrt())


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights_of(trainer) -> dict:
    return {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}


def gradients_of(trainer, update) -> tuple[dict, dict]:
    """(whole gradients that the optimizer saw, metrics) of one call of `update()`."""
    seen = {}

    def look(*_):
        for name, p in trainer.model.named_parameters():
            seen[name] = whole(p.grad).clone()

    handle = trainer.optimizer.register_step_pre_hook(look)
    metrics = update()
    handle.remove()
    return seen, metrics
