"""Train the demo model: a 4.7-million-parameter Qwen3 on the works of Shakespeare.

    python -m nanoactor.models.demo.train --out models/demo

Takes one or two minutes on a data-center GPU, and some hours on a laptop's CPU. The corpus
(`tinyshakespeare`, 1.1 MB, public domain) is stored next to this file. Two kinds of samples
are mixed: windows of running text, for `nanoactor generate`, and speeches formatted as
ChatML turns, for `nanoactor chat`. Needs transformers (test extra).
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\nCall a function with a JSON object within <tool_call></tool_call>.\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message['role'] == 'tool' %}
    {%- if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
  {%- elif not (tools and loop.first and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
    {%- for call in message['tool_calls'] or [] %}
      {%- set function = call['function'] or call %}
      {%- set arguments = function['arguments'] %}
      {%- if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}
{{- '}\\n</tool_call>' }}
    {%- endfor %}
{{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
CONTEXT = 40_960
"""Maximum context length in tokens. It leaves room for an agent's tools and files, although the
model was trained only on windows of `--length` tokens."""
CONFIG = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
HELD_OUT = 0.1


def read_corpus() -> tuple[str, str]:
    """Return (training text, held-out text). The last tenth of the corpus is held out."""
    text = lzma.decompress((Path(__file__).parent / "tinyshakespeare.txt.xz").read_bytes()).decode()
    split = text.index("\n\n", int(len(text) * (1 - HELD_OUT))) + 2
    return text[:split], text[split:]


def train_tokenizer(text: str) -> Tokenizer:
    """Train a byte-level BPE tokenizer. It can encode any text and decodes to exactly the same
    bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    return tokenizer


def chat_stream(text: str, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Return token ids of the plays formatted as conversations, in which each speech answers the
    previous one."""
    speeches = text.split("\n\n")
    ids: list[int] = []
    start = 0
    while start < len(speeches):
        turns = rng.choice((2, 2, 4, 6))
        chat = ""
        for index, speech in enumerate(speeches[start : start + turns]):
            role = "assistant" if index % 2 else "user"
            if role == "user":
                speech = speech.partition("\n")[2] or speech
            chat += f"{TURN_START}{role}\n{speech.strip()}{TURN_END}\n"
        ids += tokenizer.encode(chat + END_OF_TEXT).ids
        start += turns
    return ids


def sample_batch(
    text: torch.Tensor, chat: torch.Tensor, size: int, length: int, rng: torch.Generator
) -> torch.Tensor:
    """Return a batch of token ids, (size, length): two thirds running text, one third
    conversations."""
    rows = []
    for index in range(size):
        stream = chat if index % 3 == 2 else text
        start = int(torch.randint(len(stream) - length, (1,), generator=rng))
        rows.append(stream[start : start + length])
    return torch.stack(rows)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, ids: torch.Tensor, length: int, device: str) -> float:
    """Return the mean cross-entropy of the model on held-out text, in nats per token. `ids`,
    (tokens,), are split into windows of `length` tokens."""
    model.eval()
    windows = ids[: len(ids) // length * length].view(-1, length).to(device)
    total = 0.0
    for rows in windows.split(16):
        logits = model(rows).logits[:, :-1].float()
        total += float(
            F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        )
    model.train()
    return total / (windows.shape[0] * (length - 1))


def add_dropout(model: torch.nn.Module, probability: float) -> None:
    """Add dropout to the embeddings and to the output of each part of a layer. Qwen3 has none, but
    a model trained on one megabyte of text overfits without it."""

    def drop(module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, probability, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    model.model.embed_tokens.register_forward_hook(drop)


def save(model: torch.nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """Write a model directory in Hugging Face format: bfloat16 weights, tokenizer, chat template,
    and generation defaults."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    ids = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.95,
            "max_new_tokens": 512,
            "eos_token_id": ids,
            "pad_token_id": ids[1],
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Train the model and save the weights that had the lowest held-out loss."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    train_text, test_text = read_corpus()
    tokenizer = train_tokenizer(train_text)
    text = torch.tensor(tokenizer.encode(train_text).ids)
    chat = torch.tensor(chat_stream(train_text, tokenizer, random.Random(0)))
    test = torch.tensor(tokenizer.encode(test_text).ids)
    print(f"{len(text)} tokens of text, {len(chat)} of chat, {len(test)} held out")

    turn_end = tokenizer.token_to_id(TURN_END)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG, eos_token_id=turn_end, bos_token_id=None))
    model.to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters")
    add_dropout(model, args.dropout)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.98),
    )
    rng = torch.Generator().manual_seed(0)
    best_loss, best_weights = math.inf, None
    for step in range(args.steps):
        warmup = min(1.0, (step + 1) / 100)
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * warmup * (0.02 + 0.98 * cosine)
        rows = sample_batch(text, chat, args.batch, args.length, rng).to(args.device)
        with torch.autocast(args.device, torch.bfloat16):
            logits = model(rows).logits[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            test_loss = held_out_loss(model, test, args.length, args.device)
            print(
                f"step {step + 1}: training {loss.item():.3f}, held out {test_loss:.3f}", flush=True
            )
            if test_loss < best_loss:
                best_loss = test_loss
                best_weights = {k: v.clone() for k, v in model.state_dict().items()}
    assert best_weights is not None
    model.load_state_dict(best_weights)
    per_byte = best_loss * len(test) / len(test_text.encode()) / math.log(2)
    print(f"held-out loss {best_loss:.3f} nats per token, {per_byte:.3f} bits per byte")
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
