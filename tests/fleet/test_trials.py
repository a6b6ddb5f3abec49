"""Who is a suspect, who is convicted, and when replicas report."""

from nanoactor.fleet.gauges import TokenPace
from nanoactor.fleet.pacing import Pace
from nanoactor.fleet.trials import Trials


def test_a_third_death_convicts():
    trials = Trials()
    assert trials.note_death({1: 10, 2: 500}, 0.0) is None
    assert trials.next_suspect is None
    trials.note_resumed(1, 0.1)
    assert trials.note_death({1: 12, 3: 40}, 0.5) is None
    assert trials.next_suspect == 1
    trials.begin(1, 12, 1.0)
    assert trials.next_suspect is None
    assert trials.note_death({4: 3}, 1.1) is None  # another replica: it proves nothing
    assert trials.note_death({1: 13, 4: 5}, 1.2) is None  # a part of it that ran alongside others
    assert trials.note_death({1: 13}, 1.3, is_alone=True) == 1
    assert trials.on_trial is None


def test_who_comes_further_is_no_suspect():
    for tokens, seconds in ((32, 0.5), (2, 2.5)):
        trials = Trials()
        trials.note_death({1: 10}, 0.0)
        trials.note_resumed(1, 1.0)
        trials.note_death({1: 10 + tokens}, 1.0 + seconds)
        assert trials.next_suspect is None
    # Waiting for a place is not running.
    trials = Trials()
    trials.note_death({1: 10}, 0.0)
    trials.note_resumed(1, 100.0)
    trials.note_death({1: 12}, 100.5)
    assert trials.next_suspect == 1


def test_a_suspect_is_cleared_by_coming_further():
    trials = Trials()
    for moment in (0.0, 0.1):
        trials.note_death({1: 5, 2: 5}, moment)
    assert list(trials.suspects) == [1, 2]
    trials.begin(1, 5, 1.0)
    assert not trials.is_cleared(60, 2.0)
    assert trials.is_cleared(5 + 64, 2.0)
    assert trials.is_cleared(9, 5.5)
    assert not trials.is_cleared(8, 5.5)
    assert trials.is_cleared(5, 40.0)
    trials.forget(1)
    assert trials.next_suspect == 2
    trials.begin(2, 5, 3.0)
    trials.cancel_trial()
    assert (trials.on_trial, trials.next_suspect) == (None, 2)


def test_reports_are_due_soon_for_what_a_reader_waits_for():
    pace = Pace(interval=0.05, urgent_interval=0.01, heartbeat=1.0)
    assert pace.due < 0
    pace.note_report(10.0)
    assert pace.due == 11.0
    pace.note(urgent=False)
    assert pace.due == 10.05
    pace.note(urgent=True)
    assert pace.due == 10.01
    pace.note_report(10.01)
    assert pace.due == 11.01


def test_a_token_takes_what_steps_with_prompts_take_more():
    pace = TokenPace()
    pace.note(busy=0.5, steps=100, prefilled=0)  # 5 ms a step
    assert pace.seconds == 0.0
    pace.note(busy=0.7, steps=100, prefilled=1000)
    assert abs(pace.seconds - 0.0002) < 1e-9
    pace.note(busy=0.4, steps=100, prefilled=10)  # too few to tell
    assert abs(pace.seconds - 0.0002) < 1e-9
    pace.note(busy=0.0, steps=0, prefilled=0)
    assert abs(pace.seconds - 0.0002) < 1e-9
