"""What is left of THREATS 4.3 to 4.5 in a container: the cell's doing, so once for each engine, in two sandboxes."""

import pytest
from tests.images import small_directory
from tests.security.inside import (  # noqa: F401
    test_f1_f2_f4_f6_files_that_are_none_of_its_own,
    test_f5_odd_names_are_names,
    test_f7_f9_f10_f18_f19_a_reset_undoes_everything,
    test_f8_no_file_can_be_made_to_stay,
    test_o1_o7_o11_o12_bytes_are_what_was_written,
    test_o6_o9_odd_text_is_one_line_of_a_summary_and_a_command_like_any,
    test_p1_p3_p10_p11_an_answer_comes_when_the_command_ends,
    test_p2_p5_p7_p8_p9_p22_p23_nothing_outlives_a_reset,
    test_p12_p13_who_asks_is_answered_by_nobody_and_no_pager_waits,
    test_p14_p16_p17_p20_what_cannot_run_and_how_things_end,
    test_p15_arguments_that_no_kernel_takes_are_refused,
    test_p21_a_session_keeps_its_rules,
)

import untax

SPEC = untax.EnvSpec(image=f"dir:{small_directory()}", isolation="container")


@pytest.fixture(scope="module", name="box")
def shared_box(engine, _runner):
    box = _runner.run(engine.acquire(SPEC))
    yield box
    _runner.run(box.release())


@pytest.fixture(scope="module", name="fresh")
def fresh_box(engine, _runner):
    box = _runner.run(engine.acquire(SPEC))
    yield box
    _runner.run(box.release())
