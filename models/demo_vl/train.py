"""Train the demo vision model: a 2.9-million-parameter Qwen3-VL that reads rendered digits.

    python -m nanoactor.models.demo_vl.train --output models/demo_vl

Takes minutes on a data-center GPU, and about an hour on two CPU cores. Pictures contain one to
three digits and are drawn during training. The curriculum goes from one white digit to three
colored ones and prompts with two pictures. A phase ends when its target loss is reached or its
share of the time is spent. At the end, transformers loads the checkpoint and answers questions
about pictures from another seed. The results are printed as JSON. Needs transformers (test extra).
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import PIL
import torch
import transformers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from nanoactor.models.demo_vl.evaluate import Reader, describe, evaluate
from nanoactor.models.demo_vl.layout import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IMAGE,
    NO_DIGIT,
    PREPROCESSOR_CONFIG,
    SPECIAL_TOKENS,
    TEXT_CONFIG,
    TURN_END,
    VIDEO,
    VIDEO_PREPROCESSOR_CONFIG,
    VISION_CONFIG,
    VISION_END,
    VISION_START,
    Model,
)
from nanoactor.models.demo_vl.network import losses
from nanoactor.models.demo_vl.prompts import Phase, make_tokenizer, sample_batch
from nanoactor.models.demo_vl.render import Renderer

PHASES = (
    Phase("one white digit", max_digits=1, plain=1.0, until=0.15, pass_loss=0.15),
    Phase("white digits in cells", max_digits=3, plain=1.0, until=0.25, pass_loss=0.1),
    Phase("one digit anywhere", max_digits=1, plain=0.1, until=0.35, pass_loss=0.15),
    Phase("two digits anywhere", max_digits=2, plain=0.1, until=0.5, pass_loss=0.15),
    Phase("all", max_digits=3, plain=0.1, until=1.0, pass_loss=0.0, pairs=0.35, chats=0.25),
)


@torch.no_grad()
def initialize(module: torch.nn.Module) -> None:
    """Draw weights with variance 1 / fan-in and set the biases of linear layers to 0.

    With transformers' standard deviation of 0.02, a model of this width never leaves the plateau on
    which all digits are equally likely.
    """
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    for part in module.modules():
        if isinstance(part, torch.nn.Linear) and part.bias is not None:
            part.bias.zero_()


def make_model(device: str) -> tuple[Model, torch.nn.Linear]:
    """Create a model with random weights, and an auxiliary head that classifies patches during
    training."""
    config = Qwen3VLConfig(
        text_config=TEXT_CONFIG,
        vision_config=VISION_CONFIG,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    model: Model = Qwen3VLForConditionalGeneration(config)
    head = torch.nn.Linear(model.model.visual.config.hidden_size, NO_DIGIT + 1)
    initialize(model)
    initialize(head)
    return model.to(device), head.to(device)


def make_optimizer(modules: Sequence[torch.nn.Module], rate: float) -> torch.optim.AdamW:
    """Create an AdamW optimizer that applies weight decay only to matrices, not to biases or
    norms."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


class Trainer:
    """Trains a new model through the phases of the curriculum within a time limit."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.model, self._head = make_model(args.device)
        self._renderer = Renderer(args.seed, args.device)
        self._optimizer = make_optimizer((self.model, self._head), args.rate)
        self._phases = PHASES[: args.phases]
        self._args = args
        self._start_time = time.monotonic()
        self.steps = 0

    @property
    def spent(self) -> float:
        """Elapsed time as a share of the time limit, which may exceed 1 at the end."""
        return (time.monotonic() - self._start_time) / (60 * float(self._args.minutes))

    def run(self) -> None:
        """Train through all phases, in order."""
        for phase in self._phases:
            last = phase is self._phases[-1]
            self._run_phase(phase, 1.0 if last else phase.until, last)

    def _run_phase(self, phase: Phase, until: float, is_last: bool) -> None:
        """Train until the elapsed share of the time limit reaches `until`, or the loss of the
        answers falls below `phase.pass_loss`. The last phase uses all of its time, and its learning
        rate decays."""
        start = self.spent
        parameters = [*self.model.parameters(), *self._head.parameters()]
        window: list[torch.Tensor] = []
        while (spent := self.spent) < until:
            remaining = (until - spent) / max(until - start, 1e-9)
            self._set_rate(min(1.0, 2 * remaining) if is_last else 1.0)
            batch = sample_batch(self._renderer, phase, self._args.batch)
            answer_loss, patch_loss = losses(self.model, self._head, batch)
            self._optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(answer_loss + patch_loss)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            self._optimizer.step()
            self.steps += 1
            window.append(torch.stack((answer_loss.detach(), patch_loss.detach())))
            if self.steps % 50 == 0:
                answer_mean, patch_mean = torch.stack(window).mean(0).tolist()
                window.clear()
                self._show(phase, answer_mean, patch_mean)
                if answer_mean < phase.pass_loss and not is_last:
                    break

    def _set_rate(self, factor: float) -> None:
        rate = self._args.rate * min(1.0, (self.steps + 1) / 100) * factor
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _show(self, phase: Phase, answer_loss: float, patch_loss: float) -> None:
        seconds = time.monotonic() - self._start_time
        figures = f"answers {answer_loss:.3f}, patches {patch_loss:.3f}"
        print(f"{seconds:6.0f} s, step {self.steps}, {phase.name}: {figures}", flush=True)


def save(model: Model, out: Path) -> None:
    """Write a model directory in Hugging Face format: bfloat16 weights, tokenizer, chat template,
    preprocessor settings, and generation defaults."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    make_tokenizer().save(str(out / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[TURN_END - 256],
            "pad_token": SPECIAL_TOKENS[END_OF_TEXT - 256],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": TEXT_CONFIG["max_position_embeddings"],
        },
        "preprocessor_config.json": PREPROCESSOR_CONFIG,
        "video_preprocessor_config.json": VIDEO_PREPROCESSOR_CONFIG,
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": [TURN_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments, with defaults that depend on the device."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--minutes", type=float, help="minutes of training; default: 4 on a GPU, 55 on a CPU"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch", type=int, help="prompts per step; default: 512 on a GPU, 48 on a CPU"
    )
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument(
        "--phases",
        type=int,
        default=len(PHASES),
        help="number of phases to train, starting with the first",
    )
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    args.minutes = args.minutes or (4.0 if on_gpu else 55.0)
    args.batch = args.batch or (512 if on_gpu else 48)
    return args


def main() -> None:
    """Train a model, save it, evaluate the saved checkpoint, and print the report."""
    args = parse_arguments()
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(args)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{count / 1e6:.3f} million parameters")
    trainer.run()
    seconds = trainer.spent * args.minutes * 60
    save(trainer.model, args.output)
    torch.set_float32_matmul_precision("highest")
    report = evaluate(Reader(args.output, args.device), args.device)
    report |= {
        "training_seconds": round(seconds),
        "steps": trainer.steps,
        "prompts": trainer.steps * args.batch,
        "seed": args.seed,
        "device": describe(args.device),
        "bytes": (args.output / "model.safetensors").stat().st_size,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "pillow": PIL.__version__,
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
