//! The scenarios, by what they are about. Each is a function of the stage that it is played on.

pub mod copying;
pub mod impostors;
pub mod leases;
pub mod loading;
pub mod memory;
pub mod publishing;
pub mod releasing;
pub mod reloading;
pub mod slow_leases;
pub mod strangers;

use crate::stage::Stage;
use std::thread::Builder;

/// All of them on one stage, each as a test by its own name.
macro_rules! every_scenario {
    ($stage:ty) => {
        $crate::scenarios::tests! { $stage =>
            loading {
                an_engine_maps_what_is_served_and_leases_it
                at_the_limit_of_leases_an_engine_maps_without_one
                several_engines_map_the_same
                a_mismatch_names_every_field_and_is_not_asked_again
                a_draft_with_a_targets_key_is_a_mismatch_before_anybody_is_asked
                where_nobody_is_an_engine_loads_from_disk
                an_engine_that_can_wait_maps_what_comes
                an_engine_that_waited_in_vain_is_told_why
                where_nobody_published_an_engine_loads_from_disk
                what_the_device_lost_is_loaded_from_disk
                on_another_device_nothing_is_mapped
                a_daemon_of_another_user_is_refused
                the_same_bytes_in_other_files_are_found_by_their_digest
                a_digest_that_fails_leads_to_the_disk
                a_digest_that_is_not_ready_is_waited_for
                a_failed_build_leads_to_the_disk_and_nothing_is_reported
                content_that_cannot_be_imported_is_reported
                an_engine_that_connects_while_a_server_is_replaced_is_served_by_the_next
                a_server_may_be_replaced_while_an_engine_builds
            }
            copying {
                what_is_copied_is_let_go_by_the_daemon
                where_releases_are_refused_what_is_copied_stays
                a_failed_build_releases_what_it_got_before_the_disk_load
                a_failed_build_does_not_release_what_came_meanwhile
                a_failed_build_without_a_disk_load_releases_nothing
            }
            reloading {
                what_is_mapped_already_is_not_mapped_again
                a_new_generation_is_mapped_anew
                what_is_gone_leaves_the_engine_what_it_had
                what_another_key_published_is_no_reload
                a_copy_is_overwritten_in_place
                a_copy_that_does_not_fit_is_left_as_it_was
            }
            memory {
                what_is_mapped_counts_and_what_is_copied_does_not
                a_daemon_that_is_not_there_counts_as_none
                an_engine_that_can_wait_waits_for_the_answer
            }
            publishing {
                the_next_engine_maps_what_was_published
                what_is_published_is_known_by_its_digest
                what_is_published_takes_the_place_of_what_there_was
                content_that_the_daemon_has_is_not_published_again
                content_of_another_place_is_not_published
                an_ordinary_daemon_takes_nothing
                on_another_device_nothing_is_published
                to_a_daemon_of_another_user_nothing_is_published
                what_came_meanwhile_is_not_replaced
                of_two_that_publish_at_once_one_does
                a_fill_that_fails_leaves_what_there_was
                a_publisher_that_vanishes_leaves_what_there_was
                without_room_what_there_was_is_kept
                what_would_not_fit_alone_either_drops_nothing
                a_publisher_that_can_wait_publishes_once_the_daemon_is_there
                a_server_may_be_replaced_while_the_memory_is_filled
                what_was_published_is_served_by_the_next_server
            }
            leases {
                a_lease_ends_with_its_engine
                a_server_that_is_replaced_is_leased_from_again
                a_daemon_that_serves_something_else_is_lost
                a_publisher_leases_again_too
            }
            releasing {
                what_was_released_is_not_served
                what_is_mapped_outlives_its_release
                a_stale_generation_releases_nothing
                where_releases_are_refused_the_content_stays
                what_was_released_stays_so_in_the_next_server
            }
            strangers {
                half_a_request_delays_nobody
                garbage_ends_its_sender
                another_version_ends_its_sender
                a_flood_delays_nobody
                who_never_reads_delays_nobody
                descriptors_that_are_not_announced_end_their_sender
                descriptors_that_do_not_come_end_their_sender
                an_unknown_command_is_answered_and_the_connection_stays
                a_request_that_panics_ends_its_sender_alone
            }
            impostors {
                garbage_is_malformed
                half_an_answer_is_waited_for_and_not_for_ever
                a_connection_that_closes_is_tried_again_and_not_for_ever
                silence_is_waited_for_and_not_for_ever
                an_answer_to_something_else_is_malformed
                a_digest_that_is_asked_for_again_and_again_is_malformed
                memory_that_may_change_is_malformed
                descriptors_that_are_not_what_was_stated_are_malformed
                content_that_is_not_what_was_stated_is_malformed
                a_lease_that_is_never_given_fails_no_load
                a_copy_that_is_never_released_is_a_copy
                a_memory_that_is_none_counts_as_none
                nothing_is_published_to_nonsense
                a_lease_is_not_renewed_by_nonsense
            }
        }
    };
}

/// Those that take as long as a daemon may take to come back.
macro_rules! every_slow_scenario {
    ($stage:ty) => {
        $crate::scenarios::tests! { $stage =>
            slow_leases {
                a_daemon_that_is_gone_is_lost
                a_daemon_that_is_back_late_is_leased_from_again
            }
        }
    };
}

/// The same as functions, by their names.
pub fn slow<S: Stage>(stage: &str) -> Vec<(String, fn())> {
    let scenarios: [(&str, fn()); 2] = [
        ("gone", slow_leases::a_daemon_that_is_gone_is_lost::<S>),
        (
            "late",
            slow_leases::a_daemon_that_is_back_late_is_leased_from_again::<S>,
        ),
    ];
    scenarios
        .map(|(name, scenario)| (format!("{stage}::{name}"), scenario))
        .into()
}

/// Plays all of these at once.
pub fn at_once(scenarios: impl Iterator<Item = (String, fn())>) {
    let threads: Vec<_> = scenarios
        .map(|(name, scenario)| Builder::new().name(name).spawn(scenario).expect("a thread"))
        .collect();
    let failed: Vec<String> = threads
        .into_iter()
        .map(|thread| {
            (
                thread.thread().name().unwrap_or_default().to_owned(),
                thread.join(),
            )
        })
        .filter_map(|(name, ended)| ended.is_err().then_some(name))
        .collect();
    assert!(failed.is_empty(), "{failed:?}");
}

macro_rules! tests {
    ($stage:ty => $($about:ident { $($scenario:ident)* })*) => {
        $(mod $about {
            $(#[test]
            fn $scenario() {
                $crate::scenarios::$about::$scenario::<$stage>();
            })*
        })*
    };
}

pub(crate) use {every_scenario, every_slow_scenario, tests};
