"""The mixer of the family in `summing_family.py`, in the engine and in plain PyTorch.

y = W tanh(sum of V x over all positions so far). Beside its sum a sequence's state holds how many
positions are in it: a row that begins elsewhere becomes NaN, so that its request fails.
"""

import torch

from nanoactor.models.layers.linear import ColumnParallel, RowParallel, columns_of_rank
from nanoactor.models.layers.state import SlotArray, SlotState
from nanoactor.models.weights.linear import Part, Projection
from tests.models.checkpoints import SMALL


class RunningSum:
    def __init__(self, spec, context, prefix):
        hidden, name = context.config.hidden_size, f"{prefix}.self_attn"
        mine = context.shard.part(hidden)
        into = Part(f"{name}.in_proj", hidden, (mine,))
        out = Part(f"{name}.out_proj", hidden)
        self._into = ColumnParallel(context, Projection((into,), hidden))
        self._out = RowParallel(
            context, Projection((out,), hidden, columns=columns_of_rank(hidden, mine))
        )
        self.input_operator = self._into.operator
        self.state = SlotState((SlotArray((mine.size,), torch.float32), SlotArray((), torch.int32)))

    def __call__(self, x, state, step):
        sums, counts = state.arrays
        batch, first = step.batch, step.batch.prefill_tokens
        seen = self._into(x).float()
        parts = []
        if first:
            parts.append(self._chunks(seen[:first], batch.prefill_rows, sums, counts))
        parts.append(self._decode(seen[first:], batch, sums, counts))
        y = torch.cat(parts).tanh().to(x.dtype)
        if step.final_rows is not None:
            y = y.index_select(0, step.final_rows.indices)
        return self._out(y)

    @staticmethod
    def _chunks(seen, rows, sums, counts):
        """Nothing is read back: captured steps have rows of no tokens, in the dummy's slot."""
        slots, firsts, lengths, contexts = rows.long()
        token = torch.arange(len(seen), device=seen.device)
        member = (token >= firsts[:, None]) & (token < (firsts + lengths)[:, None])
        of_row = member.to(seen.dtype)
        earlier = (token[None] <= token[:, None]) & ((of_row.T @ of_row) > 0)
        before = _checked(sums[slots], counts[slots], contexts - lengths, slots, len(sums))
        after = before + of_row @ seen
        sums.index_copy_(0, slots, after)
        counts.index_copy_(0, slots, contexts.int())
        return earlier.to(seen.dtype) @ seen + of_row.T @ before

    @staticmethod
    def _decode(seen, batch, sums, counts):
        slots = batch.decode_slots.long()
        kept = torch.zeros_like(slots) if batch.frozen is None else batch.frozen[slots]
        starts = batch.decode_contexts - 1
        before = _checked(sums[slots], counts[slots], starts, slots, len(sums))
        after = torch.where(kept[:, None] > 0, sums[slots], before + seen)
        sums.index_copy_(0, slots, after)
        counts.index_copy_(0, slots, counts[slots] + (kept == 0).int())
        return before + seen


def _checked(sums, counts, starts, slots, size):
    """The sums, NaN where they are not of as many positions as come before the row."""
    wrong = (counts != starts) & (slots < size - 1)
    return sums.masked_fill(wrong[:, None], float("nan"))


class ReferenceSum(torch.nn.Module):
    """The same over whole sequences, in the place of transformers' attention."""

    def __init__(self, hidden):
        super().__init__()
        self.in_proj = torch.nn.Linear(hidden, hidden, bias=False)
        self.out_proj = torch.nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden_states, **_):
        return self.out_proj(self.in_proj(hidden_states).cumsum(1).tanh()), None


def make_summing_checkpoint(directory, seed=0, scale=0.3, **config):
    """Save random weights; returns the model of them in PyTorch, float32."""
    import json

    import transformers

    values = {"tie_word_embeddings": False, "use_cache": False, **SMALL, **config}
    del values["head_dim"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    for layer in model.model.layers[::2]:
        layer.self_attn = ReferenceSum(values["hidden_size"])
    model = model.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.copy_(noise + ("norm" in name))
    model.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "architectures": ["SummingForCausalLM"]})
    )
    return model
