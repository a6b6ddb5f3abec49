"""Every rank's part of a model, and what they choose together."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoactor.models.collective import RankGroup
from nanoactor.models.config import parse_config, read_config
from nanoactor.models.decoder import Decoder
from nanoactor.models.devices import open_device
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.parallel import Span, shard_of
from nanoactor.models.sampling.sampler import sample
from nanoactor.models.sampling.sharded import ShardedSampler, gather_logits
from nanoactor.models.weights.checkpoint import CheckpointWeights
from nanoactor.placement.rendezvous import Rendezvous
from tests.models.batches import sampling_batch
from tests.models.checkpoints import make_checkpoint


def config_of(heads=8, kv=2, inner=96, vocabulary=211):
    values = dict(
        architectures=["Qwen3ForCausalLM"],
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=inner,
        vocab_size=vocabulary,
    )
    return parse_config(
        dict(hidden_size=64, num_hidden_layers=1, head_dim=8, max_position_embeddings=64) | values
    )


@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.integers(8, 99), st.integers(1, 99)
)
def test_shards_cover_everything_once_and_heads_keep_their_keys(kv, group, ranks, inner, words):
    config = config_of(kv * group, kv, inner, words)
    try:
        shards = [shard_of(config, rank, ranks) for rank in range(ranks)]
    except UnsupportedModel:
        assert (kv * group) % ranks or (kv % ranks and ranks % kv)
        return

    def numbers(span_of):
        return [n for s in shards for n in range(span_of(s).start, span_of(s).stop)]

    assert numbers(lambda s: s.heads) == list(range(kv * group))
    assert numbers(lambda s: s.part(inner)) == list(range(inner))
    vocabulary = numbers(lambda s: s.vocabulary)
    assert vocabulary[:words] == list(range(words))
    assert len(vocabulary) < words + ranks * ranks
    assert sorted(set(numbers(lambda s: s.kv_heads))) == list(range(kv))
    for shard in shards:
        needed = {head // group for head in range(shard.heads.start, shard.heads.stop)}
        assert needed == set(range(shard.kv_heads.start, shard.kv_heads.stop))


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "possible"),
    [(8, 2, 3, "1, 2, 4, 8"), (6, 3, 2, "1, 3, 6"), (4, 4, 8, "1, 2, 4"), (14, 2, 4, "1, 2, 14")],
)
def test_heads_that_cannot_be_divided_are_refused_by_name(heads, kv, ranks, possible):
    with pytest.raises(
        UnsupportedModel, match=f"size {ranks} cannot .* possible sizes: {possible}"
    ):
        shard_of(config_of(heads, kv), 0, ranks)


class Counted:
    """A safetensors file that counts what is read of it."""

    def __init__(self, file):
        self.file = file
        self.elements = 0

    def get_tensor(self, name):
        tensor = self.file.get_tensor(name)
        self.elements += tensor.numel()
        return tensor

    def get_slice(self, name):
        return CountedSlice(self, self.file.get_slice(name))


class CountedSlice:
    def __init__(self, file, part):
        self.file, self.part = file, part

    def get_shape(self):
        return self.part.get_shape()

    def get_dtype(self):
        return self.part.get_dtype()

    def __getitem__(self, at):
        tensor = self.part[at]
        self.file.elements += tensor.numel()
        return tensor


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_reads_only_its_part_of_the_files(tmp_path, ranks):
    make_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    config = read_config(tmp_path)
    total = sum(t.numel() for t in _tensors(tmp_path).values())
    replicated = sum(t.numel() for name, t in _tensors(tmp_path).items() if "norm" in name)
    for rank in range(ranks):
        weights = CheckpointWeights(tmp_path, torch.float32, torch.device("cpu"))
        with weights:
            opened = weights.files
            files = opened._files = {name: Counted(f) for name, f in opened._files.items()}
            group = SimpleNamespace(rank=rank, size=ranks)
            Decoder(config, weights, open_device("cpu"), 64, group)
            read = sum(file.elements for file in files.values())
        # The vocabulary of 211 is not divisible: the last rank has less.
        padding = ranks * 2 * config.hidden_size
        assert read <= (total - replicated) / ranks + replicated + padding
        assert read >= (total - replicated) / ranks + replicated - padding


def _tensors(directory):
    from safetensors.torch import load_file

    return {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}


def test_a_part_past_the_end_is_padded_with_zeros(tmp_path):
    make_checkpoint(tmp_path)
    name = "model.embed_tokens.weight"
    with CheckpointWeights(tmp_path, torch.float32, torch.device("cpu")) as weights:
        whole = weights.load(name, 211, 64)
        part = weights.load(name, 211, 64, rows=Span(200, 220))
        beyond = weights.load(name, 211, 64, rows=Span(300, 303))
        columns = weights.load(name, 211, 64, columns=Span(10, 20))
    assert torch.equal(part[:11], whole[200:])
    assert not part[11:].any()
    assert beyond.shape == (3, 64)
    assert not beyond.any()
    assert torch.equal(columns, whole[:, 10:20])


class Threads:
    """A group whose ranks are threads of this process."""

    def __init__(self, size):
        self.size = size
        self.parts = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)

    def rank(self, rank):
        def all_gather(x):
            self.parts[rank] = x
            self.barrier.wait()
            gathered = torch.stack(self.parts)
            self.barrier.wait()
            return gathered

        return SimpleNamespace(rank=rank, size=self.size, all_gather=all_gather)

    def run(self, work):
        results = [None] * self.size

        def one(rank):
            try:
                results[rank] = work(rank, self.rank(rank))
            except BaseException as error:
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def batch_of(rows, seed):
    """Rows of every kind, some with masked ids."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return torch.randint(low, high, (rows,), generator=generator)

    temperature = (0.5 + torch.rand(rows, generator=generator)).tolist()
    few, many = draw(1, 40).tolist(), draw(257, 400).tolist()
    seeds, positions = draw(0, 2**62).tolist(), draw(1, 1000).tolist()
    kinds = (
        lambda row: dict(temperature=0.0),
        lambda row: dict(),
        lambda row: dict(top_k=few[row]),
        lambda row: dict(top_k=many[row]),
        lambda row: dict(top_p=0.7, min_p=0.01),
    )
    columns = [
        dict(temperature=temperature[row], seed=seeds[row]) | kinds[row % 5](row)
        for row in range(rows)
    ]
    masked = [(0, 0), (0, 5), (1, 100), (rows - 1, 200)]
    return sampling_batch(columns, positions, masked)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("vocabulary", [211, 1024])
def test_ranks_together_choose_what_one_would(ranks, vocabulary):
    part = -(-vocabulary // ranks)
    for seed in range(5):
        batch = batch_of(16, seed)
        logits = 3 * torch.randn(16, vocabulary, generator=torch.Generator().manual_seed(seed))
        logits[3, [7, vocabulary - 1]] = 50.0  # a tie between the first rank and the last
        logits[0, [7, vocabulary - 1]] = 50.0
        expected = sample(logits.clone(), batch)
        padded = torch.cat((logits, torch.full((16, ranks * part - vocabulary), 99.0)), 1)

        def work(rank, group, padded=padded, batch=batch):
            mine = padded[:, rank * part : (rank + 1) * part].clone()
            return ShardedSampler(group, rank * part, vocabulary)(mine, batch)

        for chosen in Threads(ranks).run(work):
            assert chosen.tolist() == expected.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("vocabulary", [211, 1024])
def test_ranks_put_whole_logits_together(ranks, vocabulary):
    """What the sampler of a captured step reads is bit for bit what one rank would have."""
    part = -(-vocabulary // ranks)
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(1)).bfloat16()
    padded = torch.cat((logits, torch.full((9, ranks * part - vocabulary), 99.0)), 1).bfloat16()

    def work(rank, group):
        return gather_logits(group, padded[:, rank * part : (rank + 1) * part], vocabulary)

    for found in Threads(ranks).run(work):
        assert torch.equal(found, logits)


@pytest.mark.gpu
def test_gathering_is_part_of_a_captured_step():
    """Over NCCL, with a group of one, for machines with one GPU."""
    rendezvous = Rendezvous(1)
    device = torch.device("cuda", torch.cuda.current_device())
    group = RankGroup(0, 1, "nccl", rendezvous.port, rendezvous.descriptor, device)
    try:
        source = torch.zeros(5, 211, device=device, dtype=torch.bfloat16)
        gather_logits(group, source, 200)  # opens the connections
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gather_logits(group, source, 200)
        for seed in range(3):
            source.copy_(torch.randn(5, 211, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(found, source[:, :200])
    finally:
        torch.distributed.destroy_process_group()
