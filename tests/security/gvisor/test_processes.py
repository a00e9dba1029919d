"""THREATS 4.3 and 4.4 in gVisor: what depends on who reaps and who carries the bytes."""

from tests.security.test_output import (  # noqa: F401
    test_o2_random_bytes_arrive_unchanged,
    test_o3_a_gibibyte_of_output_costs_the_engine_little,
    test_o4_two_streams_in_turn_do_not_lock_up,
    test_o5_shapes_of_output,
    test_o8_late_output_is_nobody_s,
)
from tests.security.test_processes import (  # noqa: F401
    test_a_destroyed_sandbox_leaves_no_process,
    test_a_tree_is_dead_within_a_second_of_its_deadline,
    test_p2_a_detached_child_is_gone_after_a_reset,
    test_p3_a_child_with_the_pipe_does_not_hold_the_answer,
    test_p4_a_deadline_takes_the_grandchildren,
    test_p5_a_daemon_that_ignores_signals_is_dead_after_a_reset,
    test_p6_a_trap_does_not_outlast_the_deadline,
    test_p7_orphans_are_reaped,
    test_p8_killing_everything_leaves_an_agent_and_keeps_the_outcome,
    test_p8_python_killing_every_pid_one_by_one,
    test_p9_the_agent_cannot_be_signalled,
    test_p10_closed_streams_do_not_end_the_wait,
    test_p14_what_cannot_run_is_told_like_a_shell_does,
    test_p17_an_unknown_user_is_refused,
    test_p18_a_stopped_command_ends_at_its_deadline,
    test_p22_a_reaper_of_its_own_hides_nothing,
)
