"""Requests that are sent again, as far as they were told."""

import numpy as np
import pytest

from nanoactor.admission.admission import Admission
from nanoactor.messages.engine import Terminal
from nanoactor.models.sampling.columns import WORDS
from nanoactor.recovery.journal import Entry
from nanoactor.recovery.prompt_logprobs import PromptLogprobs
from nanoactor.recovery.resuming import resume_submits
from nanoactor.requests.outputs import Logprob, RequestOutputKind
from nanoactor.text.scores import ReportedRun
from tests.api.test_admission import SALT, files, submit  # noqa: F401 - a fixture


def entry(answers=1, **changes):
    rows = b"".join(bytes([number]) * (4 * WORDS) for number in range(answers))
    values = dict(sampling=rows, prompt_logprobs=-1, held=False) | changes
    return Entry("name", submit(**values), RequestOutputKind.DELTA, answers=answers)


def over(uid):
    return Terminal(uid, "stop", None, "", 1, 1, 0, 0, -1)


def test_a_request_of_which_nothing_was_told_is_sent_as_it_was():
    asked = entry(answers=3, text="to be", token_ids=np.empty(0, np.int32))
    assert list(map(str, resume_submits(asked))) == [str(asked.submit)]


def test_each_answer_goes_on_by_itself_behind_what_was_told():
    asked = entry(answers=3)
    asked.accepted.set()
    first, second, _ = asked.answers
    first.token_ids += [7, 8]
    first.text += ["to ", "be"]
    second.token_ids.append(9)
    second.terminal = over(4)
    found = resume_submits(asked)
    assert [one.uid for one in found] == [3, 5]
    assert found[0].output.token_ids.tolist() == [7, 8]
    assert found[1].output is None
    assert [one.spec.sampling[:1] for one in found] == [b"\0", b"\2"]
    assert [one.spec.text_options.delivered for one in found] == [5, 0]
    for one in found:
        assert one.token_ids.tolist() == [5, 6, 7]
        assert (one.text, one.chat, one.keep_last) == (None, None, 0)
        assert one.spec.stopping == asked.submit.spec.stopping


def test_a_prompt_whose_log_probabilities_are_complete_is_not_scored_again():
    asked = entry(prompt_logprobs=1)
    assert resume_submits(asked)[0].spec.prompt_logprobs == 1
    asked._prompt_logprobs.values = [None, {}, {}]
    asked.forget_partial_scores()
    assert resume_submits(asked)[0].spec.prompt_logprobs == -1
    asked._prompt_logprobs.values = [None, {}]
    asked.forget_partial_scores()
    assert asked._prompt_logprobs.values == [None]
    assert resume_submits(asked)[0].spec.prompt_logprobs == 1


def test_only_one_answer_has_the_prompt_scored():
    asked = entry(answers=3, prompt_logprobs=1)
    asked.accepted.set()
    asked.answers[2].token_ids.append(9)
    assert [one.spec.prompt_logprobs for one in resume_submits(asked)] == [1, -1, -1]


@pytest.mark.parametrize("output", [[], [7], [7, 8, 9]])
def test_it_is_admitted_with_its_output_behind_its_prompt(files, output):  # noqa: F811
    asked = entry()
    asked.accepted.set()
    asked.answers[0].token_ids += output
    (found,) = resume_submits(asked)
    admit = Admission(files, SALT, 2).direct(found)
    assert admit.token_ids.tolist() == [5, 6, 7, *output]
    assert admit.prompt_length == 3
    assert len(admit.hashes) == 1
    assert admit.spec.stopping.max_tokens == 8192 - 3


def scored(*values):
    return ReportedRun(0, True, [(Logprob(value), {}) for value in values], [])


def test_a_prompts_log_probabilities_are_told_once_and_only_whole():
    told = PromptLogprobs(is_wanted=True)
    told.add(scored(-1.0), [5, 6, 7])
    assert told.emit(3, is_delta=False) is None
    told.add(scored(-2.0), [5, 6, 7])
    whole = [None, {6: Logprob(-1.0)}, {7: Logprob(-2.0)}]
    assert told.emit(3, is_delta=False) == whole
    assert told.emit(3, is_delta=True) is None
    assert PromptLogprobs(is_wanted=False).emit(1, is_delta=True) is None
