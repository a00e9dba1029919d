"""THREATS 4.5 and 4.6 in gVisor."""

from tests.security.test_files import (  # noqa: F401
    test_f1_a_write_lands_inside_or_is_refused,
    test_f2_a_link_shows_the_sandbox_s_own_file,
    test_f3_a_link_that_changes_under_a_read_never_leads_out,
    test_f15_mount_options_cannot_be_injected_by_a_name,
)
from tests.security.test_network import (  # noqa: F401
    peer,
    test_n1_a_routable_address_is_unreachable_at_once,
    test_n1_without_network_nothing_outside_is_reached,
    test_n2_the_metadata_address_is_unreachable,
    test_n3_no_address_of_the_host_is_reached,
    test_n4_names_do_not_resolve,
    test_n5_a_reverse_shell_fails,
    test_n6_raw_and_packet_sockets_are_refused,
    test_n7_with_a_list_neighbours_and_private_ranges_stay_closed,
    test_n8_what_is_named_works_and_nothing_else,
    test_n9_a_tunnel_fails_and_is_on_record,
    test_n10_nothing_secret_is_in_the_proxy_variables,
    test_n11_the_sandbox_s_own_loopback_works,
    test_n12_every_attempt_is_on_record_with_its_rollout,
)
