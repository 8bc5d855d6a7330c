import pytest

if pytest.use_correct:
    from correct_python_programs.countdown import countdown
else:
    from python_programs.countdown import countdown


@pytest.mark.parametrize("start,wanted", [(0, []), (3, [3, 2, 1])])
def test_countdown(start, wanted):
    assert list(countdown(start)) == wanted
