"""The tests of `bench/gpu.py` on vLLM, for a comparison on the same GPU in the same hour.

    python bench/gpu_vllm.py --model 0.6b|8b|30b-a3b[-fp8] [--tests workload,latency,decode,prefill]
                             [--batches 1 8 64 256] [--rounds 3] [--sync] --out FILE

Needs vLLM. Its defaults are kept but for what the tests are about: dummy weights, no tokenizer, the
context length; `--sync` turns asynchronous scheduling off. Experts are read from a table, drawn
uniformly at random (`vllm_routing.py`): dummy weights could send all rows to the same ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import vllm_routing
from bench.gpu import MODELS, TESTS, prompts_of, report, summary, workload_lengths


class Peer:
    """vLLM's offline engine behind the calls of the benchmark."""

    def __init__(self, directory: str, args: argparse.Namespace) -> None:
        from vllm import LLM

        begin = time.perf_counter()
        changes = {"async_scheduling": False} if args.sync else {}
        self.llm = LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=args.max_model_len,
            **changes,
        )
        self.start_s = time.perf_counter() - begin
        self.model = MODELS[args.model]
        self.rounds, self.seed = args.rounds, 1000
        self.large_rounds = args.rounds_256 or args.rounds

    def generate(self, lengths: list[int], outputs: list[int], temperature: float) -> float:
        """Seconds until all are done."""
        from vllm import SamplingParams

        self.seed += 1
        prompts = [{"prompt_token_ids": ids} for ids in prompts_of(lengths, self.seed)]
        params = [
            SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in outputs
        ]
        begin = time.perf_counter()
        found = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert [len(output.outputs[0].token_ids) for output in found] == outputs
        return seconds

    def workload(self) -> dict:
        lengths, outputs = workload_lengths()
        self.generate(lengths, outputs, 0.6)
        times = [self.generate(lengths, outputs, 0.6) for _ in range(self.rounds)]
        rates = [sum(outputs) / seconds for seconds in times]
        return {"output_tokens": sum(outputs), "tokens_per_s": rates}

    def latency(self) -> dict:
        first, step = [], []
        for number in range(self.rounds + 3):
            one = self.generate([512], [1], 0.0)
            many = self.generate([512], [256], 0.0)
            if number:
                first.append(one * 1e3)
                step.append((many - one) / 255 * 1e3)
        return {"ttft_ms": first, "ms_per_token": step}

    def decode(self, batches: list[int]) -> dict:
        results = {}
        for rows in batches:
            few, many = (128, 384) if rows <= 8 else (128, 256)
            for tokens in (8, few, many):  # vLLM compiles kernels at the first use of some sizes
                self.generate([1024] * rows, [tokens] * rows, 0.0)
            times = []
            for _ in range(self.rounds if rows < 256 else self.large_rounds):
                long = self.generate([1024] * rows, [many] * rows, 0.0)
                short = self.generate([1024] * rows, [few] * rows, 0.0)
                times.append((long - short) / (many - few) * 1e3)
            results[str(rows)] = {"ms_per_step": times}
            if "num_experts" in self.model:
                sizes = self.model["num_experts"], self.model["num_experts_per_tok"]
                count = vllm_routing.distinct_experts(*sizes, rows)
                results[str(rows)]["distinct_experts"] = {"mean": count, "min": count, "max": count}
        return results

    def prefill(self) -> dict:
        self.generate([8192] * 8, [1] * 8, 0.0)
        times = [self.generate([8192] * 8, [1] * 8, 0.0) for _ in range(self.rounds)]
        return {"tokens_per_s": [65536 / seconds for seconds in times]}

    def prompts(self) -> dict:
        self.generate([4000] * 16, [1] * 16, 0.0)
        times = [self.generate([4000] * 16, [1] * 16, 0.0) for _ in range(self.rounds)]
        return {"tokens_per_s": [64000 / seconds for seconds in times]}

    def burst(self) -> dict:
        results = {}
        for length in (560, 32):
            self.generate([length] * 256, [1] * 256, 0.0)
            times = [self.generate([length] * 256, [1] * 256, 0.0) for _ in range(3)]
            results[str(length)] = {"tokens_per_s": [256 * length / each for each in times]}
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--tests", default=",".join(TESTS[:3]))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rounds-256", type=int, help="rounds of the largest batch")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as plugins:
        if "num_experts" in MODELS[args.model]:
            vllm_routing.install(Path(plugins))
        (Path(name) / "config.json").write_text(json.dumps(MODELS[args.model]))
        peer = Peer(name, args)
        run = {"start_s": peer.start_s}
        for test in args.tests.split(","):
            run[test] = peer.decode(args.batches) if test == "decode" else getattr(peer, test)()
            print(test, json.dumps(run[test]), flush=True)
        if "num_experts" in MODELS[args.model]:
            vllm_routing.check_use()
    results = report(args.model, [run], ("vllm", "torch"), "vLLM")
    summary(results)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    os._exit(0)  # its processes end with this one


if __name__ == "__main__":
    main()
