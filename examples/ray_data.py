"""Answer two thousand rows of a Parquet file with two engines on Ray Data.

    pip install 'nanoactor[ray-data]'
    python examples/ray_data.py [ROWS]

Writes prompts.parquet and answers.parquet into a temporary directory.
"""

import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from nanoactor import SamplingParams
from nanoactor.ray_data import Columns, generate, row_seeds

SPEAKERS = ("ROMEO", "JULIET", "HAMLET", "OPHELIA", "LEAR", "CORDELIA", "PROSPERO", "ARIEL")


def main() -> None:
    """Write rows, answer them, and say how many a second."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    prompts = [f"{SPEAKERS[at % len(SPEAKERS)]}:\n{at} times" for at in range(count)]
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory() as directory:
        given, written = Path(directory) / "prompts.parquet", Path(directory) / "answers"
        table = {"row": list(range(count)), "prompt": prompts, "seed": row_seeds(1, 0, count)}
        pq.write_table(pa.table(table), given)
        begin = time.monotonic()
        answers = generate(
            ray.data.read_parquet(str(given)),
            "demo",
            SamplingParams(max_tokens=16, temperature=0.8),
            engines=2,
            columns=Columns(seed="seed"),
            device="cpu",
            max_num_seqs=32,
        )
        answers.write_parquet(str(written))
        seconds = time.monotonic() - begin
        found = pq.read_table(written).sort_by("row").to_pylist()
    ray.shutdown()
    wrong = sum(1 for row in found if row["error"])
    assert [row["row"] for row in found] == list(range(count)), "rows are lost, or there twice"
    print(f"{len(found)} rows in {seconds:.1f} s, {wrong} without an answer; the first:")
    print(found[0]["prompt"] + found[0]["generated_text"])


if __name__ == "__main__":
    main()
