"""Schedules under which every feature gives the same: chunks, depths, leads, tight caches."""

import dataclasses

import pytest

# Six sequences run, and two or three of them fit.
TIGHT = dict(num_kv_blocks=25, block_size=4, max_model_len=100, max_num_seqs=6)
NO_CACHE = dict(enable_prefix_caching=False)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An engine's options, and what they must lead to."""

    changes: dict
    preempts: bool = False

    @property
    def marks(self):
        """Processes of their own are for `make test-long`, GPUs for those who have one."""
        if "device" in self.changes:
            return pytest.mark.gpu
        several = self.changes.keys() & {"placement", "tensor_parallel_size"}
        return pytest.mark.long if several else ()

    def check(self, figures):
        """An engine's figures show that it ran like this."""
        scheduler = figures["scheduler"]["actor"]
        assert (scheduler["preemptions"] > 0) == self.preempts
        assert scheduler["failed"] == 0


SCHEDULES = {
    "token by token": Schedule(
        dict(max_num_seqs=1, max_num_batched_tokens=1, pipeline_depth=1),
    ),
    "small chunks": Schedule(
        dict(max_num_seqs=6, max_num_batched_tokens=7, pipeline_depth=2, block_size=4),
    ),
    "deep": Schedule(dict(pipeline_depth=3, block_size=4, num_kv_blocks=1024)),
    "late": Schedule(dict(pipeline_depth=3, plan_lead="late", max_num_batched_tokens=500)),
    "no cache": Schedule(dict(NO_CACHE, pipeline_depth=2)),
    "preempted": Schedule(dict(TIGHT, max_num_batched_tokens=24, pipeline_depth=3), True),
    "preempted, no cache": Schedule(dict(TIGHT, **NO_CACHE, max_num_batched_tokens=9), True),
    "processes": Schedule(dict(placement="default", pipeline_depth=2, max_num_seqs=8)),
    "late processes": Schedule(dict(placement="default", pipeline_depth=3, plan_lead="late")),
    "ranks": Schedule(dict(tensor_parallel_size=2, pipeline_depth=2)),
    "preempted ranks": Schedule(dict(TIGHT, tensor_parallel_size=2, pipeline_depth=3), True),
    "GPU": Schedule(dict(device="cuda", pipeline_depth=2, block_size=16)),
    "deep GPU": Schedule(dict(device="cuda", pipeline_depth=3, max_num_seqs=40)),
    "preempted GPU": Schedule(dict(TIGHT, device="cuda", pipeline_depth=3), True),
}


def schedules(*names, usual=tuple(SCHEDULES)):
    """Parametrize a test by `schedule`: by those that are named, or by all; what is not usual is
    for `make test-long`."""
    found = []
    for name in names or SCHEDULES:
        one = SCHEDULES[name]
        later = () if name in usual else pytest.mark.long
        found.append(pytest.param(one, id=name, marks=one.marks or later))
    return pytest.mark.parametrize("schedule", found)
